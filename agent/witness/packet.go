package witness

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"github.com/skeinmesh/skein/internal/inet"
	"golang.org/x/sys/unix"
)

// Kind is the size class and address family of an echo.
type Kind uint8

// The kinds. A bit of SilentLeader.kinds is 1 << Kind.
const (
	SmallIPv4 Kind = iota
	LargeIPv4
	SmallIPv6
	LargeIPv6
	Kinds
)

var kindNames = [Kinds]string{"small IPv4", "large IPv4", "small IPv6", "large IPv6"}

// String names a kind.
func (k Kind) String() string { return kindNames[k] }

func (k Kind) large() bool { return k == LargeIPv4 || k == LargeIPv6 }
func (k Kind) six() bool   { return k >= SmallIPv6 }

// Names lists the kinds of a bit set as in SilentLeader.kinds.
func Names(sum uint32) (out []string) {
	for k := range Kinds {
		if sum&(1<<k) != 0 {
			out = append(out, k.String())
		}
	}
	return out
}

const (
	request = 1
	answer  = 2

	nonceBytes = 16
	viaBytes   = 4

	header4, header6, headerUDP = 20, 40, 8
)

type nonce [nonceBytes]byte

// message is the content of an echo or answer, behind the sender's code. Zeros fill it to its size.
type message struct {
	kind  byte // request or answer
	nonce nonce
	via   netip.Addr // overlay IPv4 address of the leader; invalid: the echo goes directly
}

const messageBytes = 1 + nonceBytes + viaBytes

// encode writes a message of size bytes, at least messageBytes.
func (m message) encode(size int) []byte {
	b := make([]byte, max(size, messageBytes))
	b[0] = m.kind
	copy(b[1:], m.nonce[:])
	if m.via.IsValid() {
		copy(b[1+nonceBytes:], m.via.AsSlice())
	}
	return b
}

var errShort = errors.New("too short for an echo")

func decode(b []byte) (m message, err error) {
	if len(b) < messageBytes {
		return m, errShort
	}
	m.kind, m.nonce = b[0], nonce(b[1:])
	if via := netip.AddrFrom4([viaBytes]byte(b[1+nonceBytes:])); !via.IsUnspecified() {
		m.via = via
	}
	return m, nil
}

// headers returns the length in bytes of the IP and UDP headers.
func headers(six bool) int {
	if six {
		return header6 + headerUDP
	}
	return header4 + headerUDP
}

// datagram builds a whole UDP packet that no router may fragment.
func datagram(from, to netip.AddrPort, content []byte) []byte {
	six := from.Addr().Is6()
	b := make([]byte, headers(six)+len(content))
	u := b[len(b)-len(content)-headerUDP:]
	binary.BigEndian.PutUint16(u, from.Port())
	binary.BigEndian.PutUint16(u[2:], to.Port())
	binary.BigEndian.PutUint16(u[4:], uint16(len(u)))
	copy(u[headerUDP:], content)
	ip(b, unix.IPPROTO_UDP, from.Addr(), to.Addr())
	binary.BigEndian.PutUint16(u[6:], inet.UDP(from.Addr(), to.Addr(), u))
	return b
}

// wrapped encapsulates a packet in an IPv4 packet, as dataplane.Hops do.
func wrapped(from, to netip.Addr, inner []byte) []byte {
	protocol := byte(unix.IPPROTO_IPIP)
	if inner[0]>>4 == 6 {
		protocol = unix.IPPROTO_IPV6
	}
	b := make([]byte, header4+len(inner))
	copy(b[header4:], inner)
	ip(b, protocol, from, to)
	return b
}

// ip writes the IP header of the packet b.
func ip(b []byte, protocol byte, from, to netip.Addr) {
	const ttl, dontFragment = 64, 0x40
	if from.Is6() {
		b[0] = 0x60
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-header6))
		b[6], b[7] = protocol, ttl
		copy(b[8:], from.AsSlice())
		copy(b[24:], to.AsSlice())
		return
	}
	b[0] = 0x45
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	b[6], b[8], b[9] = dontFragment, ttl, protocol
	copy(b[12:], from.AsSlice())
	copy(b[16:], to.AsSlice())
	binary.BigEndian.PutUint16(b[10:], inet.Checksum(b[:header4]))
}
