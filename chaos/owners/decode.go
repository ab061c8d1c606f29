package owners

import (
	"encoding/binary"
	"net/netip"
)

// Header sizes and fields, in bytes.
const (
	etherHeader = 14
	ipv4Header  = 20
	ipv6Header  = 40
	portsSize   = 4

	etherIPv4 = 0x0800
	etherIPv6 = 0x86dd
	protoTCP  = 6
	protoUDP  = 17
)

// Frame is what the judge needs to know of an Ethernet frame with a TCP or UDP packet.
type Frame struct {
	MAC    [6]byte // of the sender
	Source netip.Addr
	Proto  byte
	Port   uint16 // of the destination
}

// Decode reads the headers of a frame. Others than TCP and UDP, fragments but the first, and IPv6 with extension
// headers give false. It reads no further than the ports.
func Decode(b []byte) (f Frame, ok bool) {
	if len(b) < etherHeader {
		return f, false
	}
	f.MAC = [6]byte(b[6:12])
	ip := b[etherHeader:]
	var rest []byte
	switch binary.BigEndian.Uint16(b[12:]) {
	case etherIPv4:
		if len(ip) < ipv4Header || ip[0]>>4 != 4 {
			return f, false
		}
		size := int(ip[0]&0xf) * 4
		const offset = 0x1fff
		if size < ipv4Header || len(ip) < size || binary.BigEndian.Uint16(ip[6:])&offset != 0 {
			return f, false
		}
		f.Proto, f.Source, rest = ip[9], netip.AddrFrom4([4]byte(ip[12:])), ip[size:]
	case etherIPv6:
		if len(ip) < ipv6Header || ip[0]>>4 != 6 {
			return f, false
		}
		f.Proto, f.Source, rest = ip[6], netip.AddrFrom16([16]byte(ip[8:])), ip[ipv6Header:]
	default:
		return f, false
	}
	if f.Proto != protoTCP && f.Proto != protoUDP || len(rest) < portsSize {
		return f, false
	}
	f.Port = binary.BigEndian.Uint16(rest[2:])
	return f, true
}
