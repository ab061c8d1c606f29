package witness

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// send sends a whole packet through a link, or fails. It does not block.
func send(link string, packet []byte) error {
	family, to := unix.AF_INET, unix.Sockaddr(nil)
	if packet[0]>>4 == 6 {
		family, to = unix.AF_INET6, &unix.SockaddrInet6{Addr: [16]byte(packet[24:40])}
	} else {
		to = &unix.SockaddrInet4{Addr: [4]byte(packet[16:20])}
	}
	// A socket of this protocol sends packets with their headers, and receives nothing.
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	if err := unix.BindToDevice(fd, link); err != nil {
		return fmt.Errorf("bind to %s: %w", link, err)
	}
	return os.NewSyscallError("sendto", unix.Sendto(fd, packet, unix.MSG_DONTWAIT, to))
}

// flow is a UDP port of this host that is connected to one port of another host.
type flow struct{ *net.UDPConn }

func openFlow(from netip.Addr, to netip.AddrPort) (flow, error) {
	c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), net.UDPAddrFromAddrPort(to))
	return flow{c}, err
}

func (f flow) local() netip.AddrPort {
	at := f.LocalAddr().(*net.UDPAddr).AddrPort()
	return netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
}

// mtu returns the largest packet in bytes to the other end, by the kernel's routes and by ICMP errors received before.
func (f flow) mtu() (n int, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	level, option := unix.IPPROTO_IP, unix.IP_MTU
	if f.local().Addr().Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU
	}
	e := raw.Control(func(fd uintptr) { n, err = unix.GetsockoptInt(int(fd), level, option) })
	return n, errors.Join(e, err)
}

// receive reads until ok accepts a packet of at most `most` bytes. ICMP errors of routers and the other host, such as
// "packet too big", arrive as read errors: they are no answer, and the kernel remembers them.
func (f flow) receive(until time.Time, most int, ok func([]byte) bool) bool {
	if f.SetReadDeadline(until) != nil {
		return false
	}
	const errorsMost = 16
	b := make([]byte, most)
	for wrong := 0; wrong < errorsMost; {
		n, err := f.Read(b)
		switch {
		case errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded):
			return false
		case err != nil:
			wrong++
		case ok(b[:n]):
			return true
		}
	}
	return false
}
