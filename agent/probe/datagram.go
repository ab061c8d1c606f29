package probe

import (
	"encoding/binary"
	"net/netip"

	"github.com/skeinmesh/skein/internal/inet"
)

const protocolUDP = 17

// appendUDP appends a UDP header with its checksum (RFC 768) and the payload. The kernel adds the IP header.
func appendUDP(b []byte, src, dst netip.AddrPort, payload []byte) []byte {
	start := len(b)
	length := udpHeader + len(payload)
	b = binary.BigEndian.AppendUint16(b, src.Port())
	b = binary.BigEndian.AppendUint16(b, dst.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(length))
	b = append(b, 0, 0)
	b = append(b, payload...)
	binary.BigEndian.PutUint16(b[start+6:], inet.UDP(src.Addr(), dst.Addr(), b[start:]))
	return b
}

// datagram is what a raw socket received, taken apart.
type datagram struct {
	srcPort uint16
	src     netip.Addr // IPv4 only: an IPv6 raw socket tells it beside the packet
	dst     netip.Addr // likewise
	payload []byte
}

// parseIPv4 takes a packet from its IP header on.
func parseIPv4(b []byte, port uint16) (datagram, bool) {
	if len(b) < 20 || b[0]>>4 != 4 || b[9] != protocolUDP {
		return datagram{}, false
	}
	header := int(b[0]&15) * 4
	if header < 20 || len(b) < header {
		return datagram{}, false
	}
	d, ok := parseUDP(b[header:], port)
	d.src = netip.AddrFrom4([4]byte(b[12:16]))
	d.dst = netip.AddrFrom4([4]byte(b[16:20]))
	return d, ok
}

// parseUDP takes a packet from its UDP header on.
func parseUDP(b []byte, port uint16) (datagram, bool) {
	if len(b) < udpHeader || binary.BigEndian.Uint16(b[2:]) != port {
		return datagram{}, false
	}
	length := int(binary.BigEndian.Uint16(b[4:]))
	if length < udpHeader || length > len(b) {
		return datagram{}, false
	}
	return datagram{srcPort: binary.BigEndian.Uint16(b), payload: b[udpHeader:length]}, true
}
