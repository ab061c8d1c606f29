package tunprobe

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/inet"
)

const (
	ip4Len  = 20
	ip6Len  = 40
	tcpLen  = 20
	echoLen = 16 // with 8 bytes of its own

	ttl    = 64
	window = 1024 // nobody sends into it

	flagSYN = 0x02
	flagRST = 0x04
	flagACK = 0x10
)

// icmp types, for IPv4 and IPv6.
type icmpTypes struct{ proto, request, reply, unreachable, exceeded byte }

func icmpOf(a netip.Addr) icmpTypes {
	if a.Is4() {
		return icmpTypes{unix.IPPROTO_ICMP, 8, 0, 3, 11}
	}
	return icmpTypes{unix.IPPROTO_ICMPV6, 128, 129, 1, 3}
}

// key finds a probe that waits.
type key struct {
	source, target netip.Addr
	port           uint16 // of the target; 0 for an echo
	id             uint16 // the echo's identifier, or our port
}

// answer is a packet that came for a probe.
type answer struct {
	key
	nonce   uint64 // an echo's own bytes; of TCP, the sequence number that the probe must have had
	ack     uint32 // of a SYN-ACK, to reset with
	synAck  bool
	problem byte // an ICMP error's type, 0 for none; nonce is not set then
	code    byte
}

// echo makes the probe of a target without a port.
func echo(k key, nonce uint64) []byte {
	types := icmpOf(k.target)
	b := make([]byte, echoLen)
	b[0] = types.request
	binary.BigEndian.PutUint16(b[4:], k.id)
	binary.BigEndian.PutUint16(b[6:], 1)
	binary.BigEndian.PutUint64(b[8:], nonce)
	if k.target.Is4() {
		binary.BigEndian.PutUint16(b[2:], inet.Checksum(b))
	} else {
		binary.BigEndian.PutUint16(b[2:], checksum(k, types.proto, b))
	}
	return packet(k, types.proto, b)
}

// segment makes a TCP segment without data.
func segment(k key, flags byte, seq uint32) []byte {
	b := make([]byte, tcpLen)
	binary.BigEndian.PutUint16(b, k.id)
	binary.BigEndian.PutUint16(b[2:], k.port)
	binary.BigEndian.PutUint32(b[4:], seq)
	b[12], b[13] = tcpLen/4<<4, flags
	if flags == flagSYN {
		binary.BigEndian.PutUint16(b[14:], window)
	}
	binary.BigEndian.PutUint16(b[16:], checksum(k, unix.IPPROTO_TCP, b))
	return packet(k, unix.IPPROTO_TCP, b)
}

// packet adds the IP header.
func packet(k key, proto byte, b []byte) []byte {
	src, dst := k.source.AsSlice(), k.target.AsSlice()
	if k.target.Is4() {
		h := make([]byte, ip4Len, ip4Len+len(b))
		h[0], h[6], h[8], h[9] = 0x45, 0x40, ttl, proto // do not fragment
		binary.BigEndian.PutUint16(h[2:], uint16(ip4Len+len(b)))
		copy(h[12:], src)
		copy(h[16:], dst)
		binary.BigEndian.PutUint16(h[10:], inet.Checksum(h))
		return append(h, b...)
	}
	h := make([]byte, ip6Len, ip6Len+len(b))
	h[0], h[6], h[7] = 0x60, proto, ttl
	binary.BigEndian.PutUint16(h[4:], uint16(len(b)))
	copy(h[8:], src)
	copy(h[24:], dst)
	return append(h, b...)
}

// checksum is the one with addresses, of TCP and ICMPv6.
func checksum(k key, proto byte, b []byte) uint16 {
	return ^inet.Fold(inet.Sum(b, inet.Pseudo(append(k.source.AsSlice(), k.target.AsSlice()...), proto, len(b))))
}

// ipPacket is what of an IP packet counts here.
type ipPacket struct {
	src, dst netip.Addr
	proto    byte
	payload  []byte
}

// parseIP reads a header. quoted says that the packet may be cut short, as the one inside an ICMP error.
func parseIP(b []byte, quoted bool) (p ipPacket, ok bool) {
	if len(b) < 1 {
		return p, false
	}
	var size, head int
	switch b[0] >> 4 {
	case 4:
		if len(b) < ip4Len {
			return p, false
		}
		head, size = int(b[0]&0xf)*4, int(binary.BigEndian.Uint16(b[2:]))
		if head < ip4Len || binary.BigEndian.Uint16(b[6:])&0x3fff != 0 { // a fragment
			return p, false
		}
		p.src, p.dst, p.proto = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20])), b[9]
	case 6:
		if len(b) < ip6Len {
			return p, false
		}
		head, size = ip6Len, ip6Len+int(binary.BigEndian.Uint16(b[4:]))
		p.src, p.dst, p.proto = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40])), b[6]
	default:
		return p, false
	}
	if !quoted && size > len(b) || head > min(size, len(b)) {
		return p, false
	}
	p.payload = b[head:min(size, len(b))]
	return p, true
}

// parse reads a packet that may answer a probe.
func parse(b []byte) (a answer, ok bool) {
	p, ok := parseIP(b, false)
	if !ok {
		return a, false
	}
	a.key = key{source: p.dst, target: p.src}
	types, d := icmpOf(p.src), p.payload
	switch {
	case p.proto == unix.IPPROTO_TCP && len(d) >= tcpLen:
		flags := d[13]
		a.port, a.id = binary.BigEndian.Uint16(d), binary.BigEndian.Uint16(d[2:])
		a.ack = binary.BigEndian.Uint32(d[8:])
		a.nonce = uint64(a.ack - 1)
		a.synAck = flags&(flagSYN|flagACK|flagRST) == flagSYN|flagACK
		return a, a.port != 0 && (a.synAck || flags&(flagACK|flagRST) == flagACK|flagRST)
	case p.proto != types.proto || len(d) < 8:
		return a, false
	case d[0] == types.reply && d[1] == 0 && len(d) == echoLen:
		a.id, a.nonce = binary.BigEndian.Uint16(d[4:]), binary.BigEndian.Uint64(d[8:])
		return a, true
	case d[0] == types.unreachable || d[0] == types.exceeded:
		a.problem, a.code = d[0], d[1]
		return a, a.quoted(d[8:], p.dst)
	}
	return a, false
}

// quoted takes from an ICMP error which probe it is about.
func (a *answer) quoted(b []byte, source netip.Addr) bool {
	p, ok := parseIP(b, true)
	if !ok || p.src != source || p.dst.Is4() != source.Is4() || len(p.payload) < 8 {
		return false
	}
	a.key = key{source: p.src, target: p.dst}
	types, d := icmpOf(p.dst), p.payload
	switch {
	case p.proto == unix.IPPROTO_TCP:
		a.id, a.port = binary.BigEndian.Uint16(d), binary.BigEndian.Uint16(d[2:])
		return a.port != 0
	case p.proto == types.proto && d[0] == types.request:
		a.id = binary.BigEndian.Uint16(d[4:])
		return true
	}
	return false
}
