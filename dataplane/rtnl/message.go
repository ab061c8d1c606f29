package rtnl

import (
	"encoding/binary"
	"net/netip"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nfnl"
)

// The functions here read a notification without allocating. Of one that is too short they read nothing.

// IsLink reports whether a notification is about a link.
func IsLink(m netlink.Message) bool {
	return m.Header.Type == unix.RTM_NEWLINK || m.Header.Type == unix.RTM_DELLINK
}

// IsAddress reports whether a notification is about an address of a link.
func IsAddress(m netlink.Message) bool {
	return m.Header.Type == unix.RTM_NEWADDR || m.Header.Type == unix.RTM_DELADDR
}

// IsRoute reports whether a notification is about a route.
func IsRoute(m netlink.Message) bool {
	return m.Header.Type == unix.RTM_NEWROUTE || m.Header.Type == unix.RTM_DELROUTE
}

// IsRule reports whether a notification is about a policy rule.
func IsRule(m netlink.Message) bool {
	return m.Header.Type == unix.RTM_NEWRULE || m.Header.Type == unix.RTM_DELRULE
}

// IsSetting reports whether a notification is about a link's forwarding or reverse path filter.
func IsSetting(m netlink.Message) bool { return m.Header.Type == unix.RTM_NEWNETCONF }

// header is the size of the fixed part, in bytes; 0 for what this package does not know.
func header(m netlink.Message) int {
	switch {
	case IsLink(m):
		return unix.SizeofIfInfomsg
	case IsAddress(m):
		return unix.SizeofIfAddrmsg
	case IsRoute(m), IsRule(m): // struct fib_rule_hdr has the size of struct rtmsg
		return unix.SizeofRtMsg
	case IsSetting(m):
		return unix.NLMSG_ALIGNTO // struct netconfmsg is one byte
	}
	return 0
}

// fixed is the fixed part, nil when the message is too short for it.
func fixed(m netlink.Message) []byte {
	if n := header(m); n > 0 && len(m.Data) >= n {
		return m.Data[:n]
	}
	return nil
}

// Index is the index of the link that a notification about a link, an address or a setting is about; 0: of none.
func Index(m netlink.Message) int {
	if IsSetting(m) {
		const netconfIfindex = 1 // NETCONFA_IFINDEX of linux/netconf.h
		n, _ := Number(m, netconfIfindex)
		return n
	}
	b := fixed(m)
	if b == nil || !IsLink(m) && !IsAddress(m) {
		return 0
	}
	return int(int32(binary.NativeEndian.Uint32(b[4:])))
}

// LinkName is the name in a notification about a link; empty: it has none.
func LinkName(m netlink.Message) string {
	if !IsLink(m) {
		return ""
	}
	return strings.TrimRight(string(Attribute(m, unix.IFLA_IFNAME)), "\x00")
}

// LinkFlags are the flags of a link and which of them have changed; 0 for other notifications.
func LinkFlags(m netlink.Message) (flags, changed uint32) {
	b := fixed(m)
	if b == nil || !IsLink(m) {
		return 0, 0
	}
	return binary.NativeEndian.Uint32(b[8:]), binary.NativeEndian.Uint32(b[12:])
}

// Table is the table of a route or a rule; 0 for other notifications.
func Table(m netlink.Message) int {
	b := fixed(m)
	if b == nil || !IsRoute(m) && !IsRule(m) {
		return 0
	}
	const fraTable = unix.RTA_TABLE // a rule's attribute has the same number
	if n, ok := Number(m, fraTable); ok {
		return n
	}
	return int(b[4])
}

// Destination is where a route leads; not valid for other notifications.
func Destination(m netlink.Message) netip.Prefix {
	b := fixed(m)
	if b == nil || !IsRoute(m) {
		return netip.Prefix{}
	}
	if b[1] == 0 { // a default route has no attribute
		if b[0] == unix.AF_INET6 {
			return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(Address(m, unix.RTA_DST), int(b[1]))
}

// Priority is that of a rule; 0 for other notifications.
func Priority(m netlink.Message) int {
	if !IsRule(m) {
		return 0
	}
	const fraPriority = 6 // of linux/fib_rules.h
	n, _ := Number(m, fraPriority)
	return n
}

// Address is an attribute that is an address; not valid without it.
func Address(m netlink.Message, kind uint16) netip.Addr {
	a, _ := netip.AddrFromSlice(Attribute(m, kind))
	return a
}

// Number is an attribute of four bytes.
func Number(m netlink.Message, kind uint16) (n int, ok bool) {
	b := Attribute(m, kind)
	if len(b) != 4 {
		return 0, false
	}
	return int(int32(binary.NativeEndian.Uint32(b))), true
}

// Attribute is the first attribute of a type; nil when there is none, or what follows the fixed part is not made of
// attributes.
func Attribute(m netlink.Message, kind uint16) []byte {
	n := header(m)
	if n == 0 || len(m.Data) < n {
		return nil
	}
	for typ, v := range nfnl.Attributes(m.Data[n:]) {
		if typ == kind {
			return v
		}
	}
	return nil
}
