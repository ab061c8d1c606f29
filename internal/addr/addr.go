// Package addr tells what kind of network an address or prefix belongs to. It imports none of ours.
package addr

import "net/netip"

// carrier is what carriers use inside their own networks (RFC 6598).
var carrier = netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64}), 10)

// private are RFC 1918, RFC 6598 and RFC 4193.
var private = [...]netip.Prefix{
	netip.PrefixFrom(netip.AddrFrom4([4]byte{10}), 8),
	netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16}), 12),
	netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168}), 16),
	carrier,
	netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfc}), 7),
}

// PrivateText lists the private ranges for messages.
const PrivateText = "10/8, 172.16/12, 192.168/16, 100.64/10, fc00::/7"

// Public reports whether the internet routes an address, as far as its number tells. Documentation ranges
// count, since laboratories use them.
func Public(a netip.Addr) bool {
	return a.IsGlobalUnicast() && !a.IsPrivate() && !carrier.Contains(a)
}

// Private reports whether a prefix lies in a private range whole.
func Private(p netip.Prefix) bool {
	for _, r := range private {
		if r.Bits() <= p.Bits() && r.Contains(p.Addr()) {
			return true
		}
	}
	return false
}
