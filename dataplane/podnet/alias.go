package podnet

import (
	"net/netip"
	"strconv"
	"strings"
)

// The alias identifies a link's pod: version (followed by @ and the table of the host's routes to the pod, unless
// that is the default, so that agents sharing a namespace can distinguish their pods), container ID, interface, IPv4,
// IPv6, namespace, pod, with - for missing values. It includes the addresses, so that none is assigned again because
// its route was lost.
const (
	aliasVersion = "skein/1"
	aliasMax     = 255 // bytes, the kernel's
	aliasNone    = "-"
	aliasCut     = "~" // marks a truncated pod name
	aliasTable   = "@"
)

// Has reports whether addr is one of the pod's.
func (a Attachment) Has(addr netip.Addr) bool {
	return addr.IsValid() && (addr == a.IPv4 || addr == a.IPv6)
}

// Alias is the alias of the attachment's link, at most 255 bytes.
func (a Attachment) Alias() string {
	version := aliasVersion
	if a.Table != 0 && a.Table != defaultTable {
		version += aliasTable + strconv.Itoa(a.Table)
	}
	words := []string{version, a.ContainerID, a.Interface, aliasNone, aliasNone, a.Namespace, a.Pod}
	if a.IPv4.IsValid() {
		words[3] = a.IPv4.String()
	}
	if a.IPv6.IsValid() {
		words[4] = a.IPv6.String()
	}
	for i, w := range words {
		if w == "" {
			words[i] = aliasNone
		}
	}
	s := strings.Join(words, " ")
	if len(s) > aliasMax {
		s = s[:aliasMax-len(aliasCut)] + aliasCut
	}
	return s
}

// ParseAlias parses the alias of a link of this package; ok is false for any other.
func ParseAlias(s string) (a Attachment, ok bool) {
	words := strings.Split(s, " ")
	table, ok := parseVersion(words[0])
	if len(words) != 7 || !ok {
		return Attachment{}, false
	}
	for i, w := range words {
		if w == aliasNone {
			words[i] = ""
		}
	}
	a = Attachment{Key: Key{words[1], words[2]}, Namespace: words[5], Pod: words[6], Table: table}
	if validateKey(a.Key) != nil {
		return Attachment{}, false
	}
	for i, to := range []*netip.Addr{&a.IPv4, &a.IPv6} {
		w := words[3+i]
		if w == "" {
			continue
		}
		addr, err := netip.ParseAddr(w)
		if err != nil || addr.Is4() != (i == 0) {
			return Attachment{}, false
		}
		*to = addr
	}
	return a, true
}

// parseVersion parses the first word of an alias; table is 0 for the default.
func parseVersion(s string) (table int, ok bool) {
	version, number, other := strings.Cut(s, aliasTable)
	if !other {
		return 0, version == aliasVersion
	}
	table, err := strconv.Atoi(number)
	return table, version == aliasVersion && err == nil && table > 0 && table != defaultTable &&
		strconv.Itoa(table) == number
}

// of reports whether the pod's routes are in a table; 0 is the default one.
func (a Attachment) of(table int) bool { return tableOr(a.Table) == tableOr(table) }

// ParseCoilAlias parses the alias of the host's end of a pod's link made by Coil v2: pool, container ID and
// interface. The addresses are only in its routes.
func ParseCoilAlias(s string) (a Attachment, ok bool) {
	words := strings.Split(s, ":")
	if len(words) != 4 || words[0] != "COIL" {
		return Attachment{}, false
	}
	a = Attachment{Key: Key{words[2], words[3]}}
	return a, validateKey(a.Key) == nil
}
