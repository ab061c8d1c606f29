// Package inet has what packets and prefixes need and the standard library has not: the Internet checksum (RFC 1071),
// and the last address of a prefix. It is pure.
package inet

import "net/netip"

// Last is the last address of a prefix.
func Last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
