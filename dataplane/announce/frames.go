package announce

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/net/bpf"

	"github.com/skeinmesh/skein/internal/inet"
)

type mac [6]byte

var broadcast = mac{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

const (
	etherLen  = 14
	etherARP  = 0x0806
	etherIPv6 = 0x86dd

	arpLen     = 28
	arpRequest = 1
	arpReply   = 2

	ipv6Len   = 40
	icmpv6    = 58
	hopLimit  = 255 // of all of neighbour discovery, RFC 4861: nobody forwarded it
	solicit   = 135
	advertise = 136
	ndLen     = 24 // with the target
	sourceMAC = 1  // options
	targetMAC = 2

	flagSolicited = 0x40
	flagOverride  = 0x20

	minFrame = etherLen + arpLen
)

var allNodes = netip.MustParseAddr("ff02::1")

// message is what another host said about an address.
type message struct {
	from mac // whose it is
	// who asks, or answers for its own address; unspecified: a host that looks whether an address is free
	sender netip.Addr
	target netip.Addr // that is asked for; of an answer, the address that it is about
	asks   bool
}

// parseARP reads a frame with its Ethernet header.
func parseARP(b []byte) (message, bool) {
	if len(b) < minFrame || binary.BigEndian.Uint16(b[12:]) != etherARP {
		return message{}, false
	}
	a := b[etherLen:]
	if binary.BigEndian.Uint16(a) != 1 || binary.BigEndian.Uint16(a[2:]) != 0x0800 || a[4] != 6 || a[5] != 4 {
		return message{}, false
	}
	m := message{from: mac(a[8:14]), sender: netip.AddrFrom4([4]byte(a[14:18])),
		target: netip.AddrFrom4([4]byte(a[24:28]))}
	switch binary.BigEndian.Uint16(a[6:]) {
	case arpRequest:
		m.asks = true
	case arpReply:
		m.target = m.sender
	default:
		return message{}, false
	}
	return m, !multicast(m.from)
}

func multicast(m mac) bool { return m[0]&1 != 0 }

// parseND reads a neighbour solicitation or advertisement in a frame with its Ethernet header.
func parseND(b []byte) (message, bool) {
	if len(b) < etherLen+ipv6Len+ndLen || binary.BigEndian.Uint16(b[12:]) != etherIPv6 {
		return message{}, false
	}
	m := message{from: mac(b[6:12])}
	ip := b[etherLen:]
	size := int(binary.BigEndian.Uint16(ip[4:]))
	if ip[0]>>4 != 6 || ip[6] != icmpv6 || ip[7] != hopLimit || size < ndLen || ipv6Len+size > len(ip) {
		return message{}, false
	}
	nd := ip[ipv6Len : ipv6Len+size]
	m.sender, m.target = netip.AddrFrom16([16]byte(ip[8:24])), netip.AddrFrom16([16]byte(nd[8:24]))
	if nd[1] != 0 || m.target.IsMulticast() || m.sender.IsMulticast() || checksum(ip[8:24], ip[24:40], nd) != 0 {
		return message{}, false
	}
	option := byte(sourceMAC)
	switch nd[0] {
	case solicit:
		m.asks = true
	case advertise:
		m.sender, option = m.target, targetMAC
	default:
		return message{}, false
	}
	for o := nd[ndLen:]; len(o) >= 2; {
		n := int(o[1]) * 8
		if n == 0 || n > len(o) {
			return message{}, false
		}
		if o[0] == option && n == 8 {
			m.from = mac(o[2:8])
		}
		o = o[n:]
	}
	return m, !multicast(m.from)
}

func ether(to, from mac, typ uint16, size int) []byte {
	b := make([]byte, etherLen, etherLen+size)
	copy(b, to[:])
	copy(b[6:], from[:])
	binary.BigEndian.PutUint16(b[12:], typ)
	return b
}

// arp makes a frame; an invalid sender is the one of a host that only asks.
func arp(op uint16, to, from mac, sender netip.Addr, whom mac, target netip.Addr) []byte {
	b := ether(to, from, etherARP, arpLen)
	b = append(b, 0, 1, 8, 0, 6, 4, 0, byte(op))
	b = append(b, from[:]...)
	if !sender.IsValid() {
		sender = netip.IPv4Unspecified()
	}
	b = append(append(b, sender.AsSlice()...), whom[:]...)
	return append(b, target.AsSlice()...)
}

// advertisement makes a frame that says whose the address is.
func advertisement(to, from mac, dst, target netip.Addr, flags byte) []byte {
	t := target.As16()
	nd := append([]byte{advertise, 0, 0, 0, flags, 0, 0, 0}, t[:]...)
	nd = append(append(nd, targetMAC, 1), from[:]...)
	return icmp(to, from, target, dst, nd)
}

// question makes the frame of a host that looks whether an address is free: a solicitation without a sender.
func question(from mac, target netip.Addr) []byte {
	t := target.As16()
	group := solicitedNode(target)
	return icmp(groupMAC(group), from, netip.IPv6Unspecified(), group,
		append([]byte{solicit, 0, 0, 0, 0, 0, 0, 0}, t[:]...))
}

func icmp(to, from mac, src, dst netip.Addr, nd []byte) []byte {
	b := ether(to, from, etherIPv6, ipv6Len+len(nd))
	s, d := src.As16(), dst.As16()
	b = append(b, 0x60, 0, 0, 0, 0, byte(len(nd)), icmpv6, hopLimit)
	b = append(append(b, s[:]...), d[:]...)
	binary.BigEndian.PutUint16(nd[2:], checksum(s[:], d[:], nd))
	return append(b, nd...)
}

// checksum is ICMPv6's, RFC 4443 section 2.3; over a packet that has its own it is 0.
func checksum(src, dst, nd []byte) uint16 {
	return ^inet.Fold(inet.Sum(nd, inet.Sum(dst, inet.Pseudo(src, icmpv6, len(nd)))))
}

// solicitedNode is the group that solicitations for an address go to, RFC 4291 section 2.7.1.
func solicitedNode(a netip.Addr) netip.Addr {
	b := a.As16()
	return netip.AddrFrom16([16]byte{0: 0xff, 1: 2, 11: 1, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]})
}

// groupMAC is the address of a group's frames, RFC 2464 section 7.
func groupMAC(group netip.Addr) mac {
	b := group.As16()
	return mac{0x33, 0x33, b[12], b[13], b[14], b[15]}
}

// announcement makes the frames that tell all neighbours.
func announcement(from mac, a netip.Addr) [][]byte {
	if a.Is4() {
		return [][]byte{arp(arpRequest, broadcast, from, a, mac{}, a), arp(arpReply, broadcast, from, a, broadcast, a)}
	}
	return [][]byte{advertisement(groupMAC(allNodes), from, allNodes, a, flagOverride)}
}

// probe makes the frame that asks whether an address is another host's.
func probe(from mac, a netip.Addr) []byte {
	if a.Is4() {
		return arp(arpRequest, broadcast, from, netip.Addr{}, mac{}, a)
	}
	return question(from, a)
}

// answer makes the frame that answers a question. One that looks whether the address is free is answered to everybody,
// and must not change what the others know: it may have moved to who asks, and we hear of that a little later.
func answer(from mac, m message) []byte {
	switch {
	case m.target.Is4():
		return arp(arpReply, m.from, from, m.target, m.from, m.sender)
	case m.sender.IsUnspecified():
		return advertisement(groupMAC(allNodes), from, allNodes, m.target, 0)
	}
	return advertisement(m.from, from, m.sender, m.target, flagSolicited|flagOverride)
}

// ndFilter lets solicitations and advertisements through, of frames with IPv6.
func ndFilter() ([]bpf.RawInstruction, error) {
	return bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: etherLen + 6, Size: 2}, // next header and hop limit
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: icmpv6<<8 | hopLimit, SkipTrue: 4},
		bpf.LoadAbsolute{Off: etherLen + ipv6Len, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: solicit, SkipTrue: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: advertise, SkipTrue: 1},
		bpf.RetConstant{Val: 0xffff},
		bpf.RetConstant{Val: 0},
	})
}
