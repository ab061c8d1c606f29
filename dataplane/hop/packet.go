package hop

import (
	"encoding/binary"
	"net/netip"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/inet"
)

const (
	overhead = dataplane.HopOverhead
	header6  = 40 // bytes of an IPv6 header

	inIPv4 = 4  // protocol number of IPv4 in IP
	inIPv6 = 41 // and of IPv6

	dontFragment = 0x4000
	fragment     = 0xbfff // of the IPv4 header's 16 bits with flags and offset: what only a fragment has set
	ttl          = 64

	ecnMask            = 3
	notECT, ect1, ect0 = 0, 1, 2
	congested          = 3
)

// verdict is what becomes of a packet.
type verdict int

const (
	pass      verdict = iota // it is not a packet of ours
	inside                   // it was unwrapped
	refused                  // no guard allows it
	malformed                // it is not what its headers say
	marked                   // the way was congested, and what is inside cannot be told so (RFC 6040)
	verdicts
)

// wrap puts the outer header in front of a packet that lies in b[overhead:].
func (t *Table) wrap(b []byte, via [4]byte) {
	inner := b[overhead:]
	protocol, class := byte(inIPv4), inner[1]
	if inner[0]>>4 == 6 {
		protocol, class = inIPv6, inner[0]<<4|inner[1]>>4
	}
	h := b[:overhead]
	h[0], h[1] = 0x45, class
	binary.BigEndian.PutUint16(h[2:], uint16(len(b)))
	h[4], h[5] = 0, 0 // what is never cut needs no identification (RFC 6864)
	binary.BigEndian.PutUint16(h[6:], dontFragment)
	h[8], h[9], h[10], h[11] = ttl, protocol, 0, 0
	copy(h[12:16], t.self[:])
	copy(h[16:20], via[:])
	binary.BigEndian.PutUint16(h[10:], inet.Checksum(h))
}

// redirects tells whether a packet is an ICMP redirect. Links without link-local addresses send none in IPv6.
func redirects(p []byte) bool {
	const icmp, redirect = 1, 5
	return len(p) > overhead && p[0] == 0x45 && p[9] == icmp && p[overhead] == redirect &&
		binary.BigEndian.Uint16(p[6:])&^dontFragment == 0
}

// next is the node that a packet goes to inside another one; false: it goes as it is.
func (t *Table) next(p []byte) ([4]byte, bool) {
	dst, ok := address(p, 16, 24)
	if !ok {
		return [4]byte{}, false
	}
	w := t.routes.of(dst)
	if w.last {
		source, _ := address(p, 12, 8)
		return w.via, !t.own.of(source)
	}
	return w.via, w != way{}
}

// unwrap checks a packet that came by the tunnel. The one inside it is p[overhead:overhead+n], with the outer one's
// mark of congestion.
func (t *Table) unwrap(p []byte) (n int, v verdict) {
	if len(p) < overhead || p[0]>>4 != 4 || [4]byte(p[16:20]) != t.self || p[9] != inIPv4 && p[9] != inIPv6 {
		return 0, pass
	}
	total := int(binary.BigEndian.Uint16(p[2:]))
	if p[0] != 0x45 || total > len(p) || total < overhead || binary.BigEndian.Uint16(p[6:])&fragment != 0 {
		return 0, malformed
	}
	inner := p[overhead:total]
	if n, v = length(inner, p[9]), malformed; n < 0 {
		return 0, v
	}
	source, _ := address(inner, 12, 8)
	if !t.allows([4]byte(p[12:16]), source) {
		return 0, refused
	}
	if !combine(inner, p[1]&ecnMask) {
		return 0, marked
	}
	return n, inside
}

// length is how long a packet of that protocol is by its own header; -1 if that cannot be.
func length(p []byte, protocol byte) int {
	n := -1
	switch {
	case protocol == inIPv4 && len(p) >= overhead && p[0]>>4 == 4:
		header := int(p[0]&0xf) * 4
		if n = int(binary.BigEndian.Uint16(p[2:])); header < overhead || n < header {
			return -1
		}
	case protocol == inIPv6 && len(p) >= header6 && p[0]>>4 == 6:
		n = header6 + int(binary.BigEndian.Uint16(p[4:]))
	}
	if n > len(p) {
		return -1
	}
	return n
}

// address reads an address from a header of either family; false: it is none.
func address(p []byte, at4, at6 int) (netip.Addr, bool) {
	switch {
	case len(p) >= overhead && p[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(p[at4 : at4+4])), true
	case len(p) >= header6 && p[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(p[at6 : at6+16])), true
	}
	return netip.Addr{}, false
}

// combine gives the outer header's ECN field to a packet, as RFC 6040 says (figure 4). False: it is to be dropped.
func combine(p []byte, outer byte) bool {
	six := p[0]>>4 == 6
	inner := p[1] & ecnMask
	if six {
		inner = p[1] >> 4 & ecnMask
	}
	switch {
	case inner == notECT:
		return outer != congested
	case outer == congested || outer == ect1 && inner == ect0:
	default:
		return true
	}
	if inner == outer {
		return true
	}
	if six {
		p[1] = p[1]&^(ecnMask<<4) | outer<<4
		return true
	}
	before := binary.BigEndian.Uint16(p)
	p[1] = p[1]&^ecnMask | outer
	inet.Adjust(p[10:], before, binary.BigEndian.Uint16(p))
	return true
}
