package fou

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/inet"
)

// Header lengths in bytes.
const (
	ipv4Bytes = 20
	ipv6Bytes = 40
	tcpBytes  = 20
	udpBytes  = 8
	icmpBytes = 8
)

// Values of the two ECN bits (RFC 3168).
const (
	ecnMask   = 3
	ecnNone   = 0
	ecnECT1   = 1
	ecnECT0   = 2
	ecnCE     = 3
	fragment  = 0x3fff // more fragments, and the offset
	dontSplit = 0x4000
)

// trim returns the IP packet of a family (0: IPv4, 1: IPv6) that b begins with, without what follows it. ok is false
// when it is none: what the kernel would refuse to receive.
func trim(b []byte, family int) (packet []byte, ok bool) {
	if family == 0 {
		if len(b) < ipv4Bytes || b[0]>>4 != 4 {
			return nil, false
		}
		header, total := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
		if header < ipv4Bytes || total < header || total > len(b) || inet.Fold(inet.Sum(b[:header], 0)) != 0xffff {
			return nil, false
		}
		return b[:total], true
	}
	if len(b) < ipv6Bytes || b[0]>>4 != 6 {
		return nil, false
	}
	total := ipv6Bytes + int(binary.BigEndian.Uint16(b[4:]))
	if total > len(b) {
		return nil, false
	}
	return b[:total], true
}

// addresses are the source and the destination of a packet that trim has returned.
func addresses(p []byte) (src, dst netip.Addr) {
	if p[0]>>4 == 4 {
		return netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20]))
	}
	return netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
}

// ends are the bytes of both.
func ends(p []byte) []byte {
	if p[0]>>4 == 4 {
		return p[12:20]
	}
	return p[8:40]
}

func class(p []byte) uint8 {
	if p[0]>>4 == 4 {
		return p[1]
	}
	return p[0]<<4 | p[1]>>4
}

// setECN changes a packet's ECN bits.
func setECN(p []byte, ecn uint8) {
	if p[0]>>4 == 4 {
		old := binary.BigEndian.Uint16(p)
		p[1] = p[1]&^ecnMask | ecn
		inet.Adjust(p[10:], old, binary.BigEndian.Uint16(p))
		return
	}
	p[1] = p[1]&^(ecnMask<<4) | ecn<<4
}

// outerClass is what the packet outside gets, as the kernel's tunnels have it: no DSCP, and the ECN of the packet
// inside, but that congestion is not told twice (RFC 3168 section 9.1.1, full functionality).
func outerClass(inner uint8) uint8 {
	if inner&ecnMask == ecnCE {
		return ecnECT0
	}
	return inner & ecnMask
}

// decapsulate brings the outer ECN into the packet (RFC 6040 section 4.2). A packet that was marked as congested, and
// whose sender would not understand the mark, must be dropped: false.
func decapsulate(p []byte, outer uint8) bool {
	inner := class(p) & ecnMask
	switch outer & ecnMask {
	case ecnCE:
		if inner == ecnNone {
			return false
		}
		if inner != ecnCE {
			setECN(p, ecnCE)
		}
	case ecnECT1:
		if inner == ecnECT0 {
			setECN(p, ecnECT1)
		}
	}
	return true
}

// transport finds the transport protocol of a packet and where its header is. Of a fragment, and of one with IPv6
// extension headers, there is none: 0.
func transport(p []byte) (proto uint8, at int) {
	if p[0]>>4 == 4 {
		if binary.BigEndian.Uint16(p[6:])&fragment != 0 {
			return 0, 0
		}
		return p[9], int(p[0]&15) * 4
	}
	switch p[6] {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMPV6:
		return p[6], ipv6Bytes
	}
	return 0, 0
}

// flow hashes what packets of one flow have in common: addresses, and the ports of TCP and UDP. Fragments of a datagram
// are one flow by themselves.
func flow(p []byte, seed uint32) uint32 {
	const prime = 16777619 // FNV-1a
	h := seed ^ 2166136261
	add := func(b []byte) {
		for _, c := range b {
			h = (h ^ uint32(c)) * prime
		}
	}
	add(ends(p))
	if proto, at := transport(p); (proto == unix.IPPROTO_TCP || proto == unix.IPPROTO_UDP) && len(p) >= at+4 {
		add([]byte{proto})
		add(p[at : at+4])
	}
	return h ^ h>>16
}

// tooBig is the ICMP message that tells a packet's sender of the largest packet that fits, in bytes. It comes from
// where the packet went to: for that address alone it is certain that packets from it may come out of the tunnel. It is
// nil when the packet must not be answered (RFC 1122 section 3.2.2, RFC 4443 section 2.4).
func tooBig(p []byte, mtu int) []byte {
	src, dst := addresses(p)
	if src.IsMulticast() || dst.IsMulticast() || src.IsUnspecified() || src.IsLoopback() || dst.Is4() &&
		dst.As4() == [4]byte{255, 255, 255, 255} {
		return nil
	}
	if src.Is4() {
		return tooBig4(p, max(mtu, minMTU4))
	}
	return tooBig6(p, max(mtu, minMTU6))
}

func tooBig4(p []byte, mtu int) []byte {
	const most, unreachable, needsSplitting = 576, 3, 4
	if flags := binary.BigEndian.Uint16(p[6:]); flags&dontSplit == 0 || flags&0x1fff != 0 {
		return nil // it does not ask to be told; or it is not the first fragment
	}
	if proto, at := transport(p); proto == unix.IPPROTO_ICMP && (len(p) <= at || p[at] != 0 && p[at] != 8) {
		return nil
	}
	quote := p[:min(len(p), most-ipv4Bytes-icmpBytes)]
	b := make([]byte, ipv4Bytes+icmpBytes+len(quote))
	b[0], b[1] = 0x45, 0xc0 // internetwork control
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	b[8], b[9] = 64, unix.IPPROTO_ICMP
	copy(b[12:16], p[16:20])
	copy(b[16:20], p[12:16])
	binary.BigEndian.PutUint16(b[10:], inet.Checksum(b[:ipv4Bytes]))
	m := b[ipv4Bytes:]
	m[0], m[1] = unreachable, needsSplitting
	binary.BigEndian.PutUint16(m[6:], uint16(min(mtu, 0xffff)))
	copy(m[icmpBytes:], quote)
	binary.BigEndian.PutUint16(m[2:], inet.Checksum(m))
	return b
}

func tooBig6(p []byte, mtu int) []byte {
	const packetTooBig, firstOfInformation = 2, 128
	if proto, at := transport(p); proto == unix.IPPROTO_ICMPV6 && (len(p) <= at || p[at] < firstOfInformation) {
		return nil
	}
	quote := p[:min(len(p), minMTU6-ipv6Bytes-icmpBytes)]
	b := make([]byte, ipv6Bytes+icmpBytes+len(quote))
	b[0] = 0x60
	binary.BigEndian.PutUint16(b[4:], uint16(icmpBytes+len(quote)))
	b[6], b[7] = unix.IPPROTO_ICMPV6, 64
	copy(b[8:24], p[24:40])
	copy(b[24:40], p[8:24])
	m := b[ipv6Bytes:]
	m[0] = packetTooBig
	binary.BigEndian.PutUint32(m[4:], uint32(mtu))
	copy(m[icmpBytes:], quote)
	binary.BigEndian.PutUint16(m[2:], ^inet.Fold(inet.Sum(m, inet.Pseudo(b[8:40], unix.IPPROTO_ICMPV6, len(m)))))
	return b
}
