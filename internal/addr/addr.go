// Package addr tells what kind of network an address or prefix belongs to. It imports none of ours.
package addr

import (
	"fmt"
	"net/netip"
)

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

// Internal reads a host's address inside of its site: 10.0.0.7, or with its network's length, 10.0.0.7/24, as Kilo
// writes it. "" and "-" are none, the zero Addr. The error says what is wrong with the text and what is wanted.
func Internal(text string) (netip.Addr, error) {
	if text == "" || text == "-" {
		return netip.Addr{}, nil
	}
	a, err := netip.ParseAddr(text)
	if err != nil {
		p, perr := netip.ParsePrefix(text)
		if perr == nil && p.Masked() == p && p.Addr().BitLen()-p.Bits() > 1 {
			return netip.Addr{}, fmt.Errorf("%q is a network: want the host's own address in it, such as %s/%d", text,
				p.Addr().Next(), p.Bits())
		}
		a, err = p.Addr(), perr
	}
	switch a = a.Unmap(); {
	case err != nil:
		return netip.Addr{}, fmt.Errorf("%.80q is not an IP address: want one of the host, such as 10.0.0.7 or 10.0.0.7/24",
			text)
	case a.Zone() != "" || !a.IsGlobalUnicast():
		return netip.Addr{}, fmt.Errorf("%q is not an address that other hosts can send to: want one such as 10.0.0.7 or "+
			"10.0.0.7/24", text)
	}
	return a, nil
}
