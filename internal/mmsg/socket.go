package mmsg

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bufferBytes is asked for in each direction: it rides out bursts, and is a limit, not an allocation.
const bufferBytes = 7 << 20

// Source is the local address of a datagram. The zero Source leaves the choice to the routing table.
type Source struct {
	Addr netip.Addr
	Link int // interface index
	// Class is the octet of DSCP and ECN (RFC 2474, RFC 3168). 0 leaves it to the socket. Of a datagram that came it is
	// known where the socket has IP_RECVTOS or IPV6_RECVTCLASS.
	Class uint8
}

// Prepare sets a UDP socket's options for this package before it is bound; it fits net.ListenConfig.Control.
// What the kernel does not know or does not allow is left out.
func Prepare(network, _ string, c syscall.RawConn) error {
	return c.Control(func(descriptor uintptr) {
		fd := int(descriptor)
		for plain, force := range map[int]int{unix.SO_RCVBUF: unix.SO_RCVBUFFORCE, unix.SO_SNDBUF: unix.SO_SNDBUFFORCE} {
			if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, bufferBytes) != nil {
				_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, plain, bufferBytes)
			}
		}
		if network == "udp6" {
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
		} else {
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		}
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1)
	})
}

// isIPv6 tells the family of a socket.
func isIPv6(c *net.UDPConn) bool {
	local, ok := c.LocalAddr().(*net.UDPAddr)
	return ok && local.AddrPort().Addr().Is6() && !local.AddrPort().Addr().Is4In6()
}

// setName writes a destination as the kernel takes it, and returns its length.
func setName(name *unix.RawSockaddrInet6, to netip.AddrPort, six bool) uint32 {
	port := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, to.Port()))
	if six {
		*name = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: port, Addr: to.Addr().As16(),
			Scope_id: scope(to.Addr().Zone())}
		return unix.SizeofSockaddrInet6
	}
	*(*unix.RawSockaddrInet4)(unsafe.Pointer(name)) = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: port,
		Addr: to.Addr().As4()}
	return unix.SizeofSockaddrInet4
}

// fromName is the reverse of setName. The zone of a link-local address is its interface's index.
func fromName(name *unix.RawSockaddrInet6) netip.AddrPort {
	var port [2]byte
	binary.NativeEndian.PutUint16(port[:], name.Port)
	if name.Family == unix.AF_INET {
		four := (*unix.RawSockaddrInet4)(unsafe.Pointer(name))
		return netip.AddrPortFrom(netip.AddrFrom4(four.Addr), binary.BigEndian.Uint16(port[:]))
	}
	a := netip.AddrFrom16(name.Addr).Unmap()
	if name.Scope_id != 0 {
		a = a.WithZone(strconv.Itoa(int(name.Scope_id)))
	}
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(port[:]))
}

func scope(zone string) uint32 {
	if zone == "" {
		return 0
	}
	if n, err := strconv.ParseUint(zone, 10, 32); err == nil {
		return uint32(n)
	}
	if l, err := net.InterfaceByName(zone); err == nil {
		return uint32(l.Index)
	}
	return 0
}

// controlBytes holds all three control messages in either direction.
var controlBytes = unix.CmsgSpace(unix.SizeofInet6Pktinfo) + 2*unix.CmsgSpace(4)

// addControl appends a control message to b, which has room for it.
func addControl[T any](b []byte, level, kind int32, value T) []byte {
	at := len(b)
	b = b[:at+unix.CmsgSpace(int(unsafe.Sizeof(value)))]
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[at]))
	h.Level, h.Type = level, kind
	h.SetLen(unix.CmsgLen(int(unsafe.Sizeof(value))))
	*(*T)(unsafe.Pointer(&b[at+unix.CmsgLen(0)])) = value
	return b
}

// addSource appends the local address to send from, and the class.
func addSource(b []byte, s Source, six bool) []byte {
	switch {
	case s.Class == 0:
	case six:
		b = addControl(b, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, int32(s.Class))
	default:
		b = addControl(b, unix.IPPROTO_IP, unix.IP_TOS, int32(s.Class))
	}
	switch {
	case !s.Addr.IsValid():
		return b
	case s.Addr.Is4():
		return addControl(b, unix.IPPROTO_IP, unix.IP_PKTINFO, unix.Inet4Pktinfo{Ifindex: int32(s.Link),
			Spec_dst: s.Addr.As4()})
	}
	return addControl(b, unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, unix.Inet6Pktinfo{Ifindex: uint32(s.Link),
		Addr: s.Addr.As16()})
}

// parseControl reads what came with a message: the size of the datagrams in a train, 0 if it is none, and
// the address it was sent to.
func parseControl(b []byte) (segment int, to Source) {
	var class uint8
	defer func() { to.Class = class }()
	for len(b) >= unix.SizeofCmsghdr {
		h, data, rest, err := unix.ParseOneSocketControlMessage(b)
		if err != nil {
			return segment, to
		}
		switch {
		case h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO && len(data) >= 4:
			segment = int(int32(binary.NativeEndian.Uint32(data)))
		case h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO && len(data) >= 2:
			segment = int(binary.NativeEndian.Uint16(data))
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_TOS && len(data) >= 1:
			class = data[0]
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_TCLASS && len(data) >= 4:
			class = uint8(binary.NativeEndian.Uint32(data))
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			info := (*unix.Inet4Pktinfo)(unsafe.Pointer(&data[0]))
			to = Source{Addr: netip.AddrFrom4(info.Spec_dst), Link: int(info.Ifindex)}
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			info := (*unix.Inet6Pktinfo)(unsafe.Pointer(&data[0]))
			to = Source{Addr: netip.AddrFrom16(info.Addr), Link: int(info.Ifindex)}
		}
		b = rest
	}
	return segment, to
}
