package probe

import (
	"encoding/binary"
	"net/netip"
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
	binary.BigEndian.PutUint16(b[start+6:], checksum(src.Addr(), dst.Addr(), b[start:]))
	return b
}

// checksum is UDP's over the pseudo header and the segment, whose checksum field is zero. Zero is sent as all ones.
func checksum(src, dst netip.Addr, segment []byte) uint16 {
	sum := uint32(protocolUDP) + uint32(len(segment))
	for _, a := range [2]netip.Addr{src, dst} {
		if a.Is4() {
			v := a.As4()
			sum = addWords(sum, v[:])
		} else {
			v := a.As16()
			sum = addWords(sum, v[:])
		}
	}
	sum = addWords(sum, segment)
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	if c := ^uint16(sum); c != 0 {
		return c
	}
	return 0xffff
}

// addWords needs at most 64 KiB, so 32 bits never overflow.
func addWords(sum uint32, b []byte) uint32 {
	for len(b) >= 2 {
		sum += uint32(binary.BigEndian.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	return sum
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
