package podnet

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/skeinmesh/skein/dataplane"
)

// Sentinel errors.
var (
	// ErrExists: the pod already has an interface of this name, or the host a link for it.
	ErrExists = errors.New("exists already")
	// ErrAddressInUse: the host has a route through another link to one of the addresses.
	ErrAddressInUse = errors.New("address is in use on this host")
	// ErrNoNetNS: there is no network namespace at the path, which is missing or another file.
	ErrNoNetNS = errors.New("no network namespace")
	// ErrNoIPv6: the pod has only an IPv6 address, and the host or the pod's namespace has IPv6 disabled.
	ErrNoIPv6 = errors.New("IPv6 is disabled")
	// ErrInvalid: the Attachment itself is invalid.
	ErrInvalid = errors.New("invalid")
)

// gateway6 is the address of every host end; it is link-local, so all links can share it.
var (
	gateway4 = netip.MustParseAddr(dataplane.PodGateway)
	gateway6 = netip.MustParseAddr("fe80::1")
)

// Key names an attachment: one interface of one container.
type Key struct {
	ContainerID string `json:"containerID"` // the container runtime's, 1 to 64 characters
	Interface   string `json:"interface"`   // its name in the pod, usually eth0
}

// Attachment is one interface of one pod: what Add makes, Check expects, and the alias of the host's end records,
// except for the path NetNS and the MTU.
type Attachment struct {
	Key
	NetNS string // path of the pod's network namespace
	// IPv4 and IPv6 are the pod's addresses; one of the two may be invalid.
	IPv4, IPv6 netip.Addr
	MTU        int    // bytes
	Namespace  string // of the pod; may be empty
	Pod        string // its name; may be empty
	Table      int    // of the host's routes to the pod, 1 to 252; 0: the default (dataplane.Numbers.PodTable)
}

// Link is the result of Add.
type Link struct {
	Host    string // name of the end on the host
	HostMAC net.HardwareAddr
	MAC     net.HardwareAddr // of the pod's end
	// Gateway6 is the link-local address of the end on the host, the pod's IPv6 next hop; invalid without IPv6.
	Gateway6 netip.Addr
}

// Found is a pod's address in the kernel: from a host route in the table of pods, or if that is missing, from the
// alias of a link of this package.
type Found struct {
	Addr netip.Addr
	Link string // the route's interface
	// From the alias of a link of this package; all empty for another program's link. Pod ends in ~ if it was too long
	// for the alias.
	Key
	Namespace, Pod string
	// OfCoil is set if the alias is Coil's, which has container and interface.
	OfCoil bool
}

var defaultTable = dataplane.DefaultNumbers().PodTable()

// tableOr replaces 0 by the default table.
func tableOr(table int) int {
	if table == 0 {
		return defaultTable
	}
	return table
}

// HostLink is the name of the host's end. It is derived from the attachment, so that the link can be found without a
// record.
func HostLink(k Key) string {
	sum := sha256.Sum256([]byte(k.ContainerID + "/" + k.Interface))
	return dataplane.PodLinkPrefix + hex.EncodeToString(sum[:6])
}

// who names the attachment in errors.
func (k Key) who() string { return fmt.Sprintf("container %s, %s", k.ContainerID, k.Interface) }

func (a Attachment) who() string {
	if a.Pod == "" {
		return a.Key.who()
	}
	return fmt.Sprintf("pod %s/%s, %s", a.Namespace, a.Pod, a.Interface)
}

// Limits of an Attachment.
const (
	maxID        = 64
	maxNamespace = 63
	maxPod       = 253
	minMTU       = 68   // IPv4's
	minMTU6      = 1280 // IPv6's; the kernel disables IPv6 on a link with less
	maxMTU       = 65535
	maxTable     = 252 // the kernel's own tables follow
)

// validate checks the attachment before the kernel is used.
func (a Attachment) validate() error {
	if err := validateKey(a.Key); err != nil {
		return err
	}
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
	}
	switch {
	case !a.IPv4.IsValid() && !a.IPv6.IsValid():
		return bad("no address")
	case a.IPv4.IsValid() && (!a.IPv4.Is4() || !usable(a.IPv4)):
		return bad("%s is not an address of a pod: want unicast IPv4", a.IPv4)
	case a.IPv6.IsValid() && (!a.IPv6.Is6() || a.IPv6.Is4In6() || a.IPv6.Zone() != "" || !usable(a.IPv6)):
		return bad("%s is not an address of a pod: want unicast IPv6", a.IPv6)
	case a.MTU < minMTU || a.MTU > maxMTU:
		return bad("MTU %d: want %d to %d", a.MTU, minMTU, maxMTU)
	case a.IPv6.IsValid() && a.MTU < minMTU6:
		return bad("MTU %d: IPv6 needs at least %d", a.MTU, minMTU6)
	case a.Table < 0 || a.Table > maxTable:
		return bad("table %d of the host's routes: want 1 to %d", a.Table, maxTable)
	case len(a.Namespace) > maxNamespace || !plain(a.Namespace):
		return bad("name of the pod's namespace %.80q: want at most %d characters without spaces", a.Namespace,
			maxNamespace)
	case len(a.Pod) > maxPod || !plain(a.Pod):
		return bad("name of the pod %.80q: want at most %d characters without spaces", a.Pod, maxPod)
	}
	return nil
}

func usable(a netip.Addr) bool {
	return a.IsGlobalUnicast() && !a.IsLinkLocalUnicast()
}

func validateKey(k Key) error {
	containerID, ifname := k.ContainerID, k.Interface
	const ifnamsiz = 16 // bytes, with the closing zero
	if len(containerID) < 1 || len(containerID) > maxID || !plain(containerID) || strings.Contains(containerID, "/") {
		return fmt.Errorf("%w: container ID %.80q: want 1 to %d characters without spaces and slashes", ErrInvalid,
			containerID, maxID)
	}
	if ifname == "" || len(ifname) >= ifnamsiz || ifname == "." || ifname == ".." || ifname == "lo" ||
		strings.ContainsAny(ifname, "/:%") || !plain(ifname) {
		return fmt.Errorf("%w: interface name %.80q: want 1 to %d characters without spaces, slashes, colons and percent "+
			"signs, and not lo", ErrInvalid, ifname, ifnamsiz-1)
	}
	return nil
}

// plain reports whether s has no spaces and only printable ASCII, so that it can be a word of an alias.
func plain(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f })
}
