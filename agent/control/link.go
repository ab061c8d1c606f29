package control

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/mmsg"
)

// freeBind lets a socket have an address that the link gets only later, and keep it when the link is made anew. One for
// packets is told by which link each came: it cannot be bound to a link that may be made anew.
func freeBind(network, address string, c syscall.RawConn) error {
	level, option := unix.IPPROTO_IP, unix.IP_FREEBIND
	if strings.HasSuffix(network, "6") {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_FREEBIND
	}
	if strings.HasPrefix(network, "udp") {
		if err := mmsg.Prepare(network, address, c); err != nil {
			return err
		}
	}
	return control(c, func(fd int) error { return unix.SetsockoptInt(fd, level, option, 1) })
}

// bindTo binds a stream to a link for good.
func bindTo(link string) func(_, _ string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		return control(c, func(fd int) error { return unix.BindToDevice(fd, link) })
	}
}

func control(c syscall.RawConn, f func(fd int) error) error {
	var err error
	e := c.Control(func(fd uintptr) { err = f(int(fd)) })
	return errors.Join(e, err)
}

// linkIndex is the index that a link has now, in the socket's namespace.
func linkIndex(c *net.UDPConn, link string) (index uint32, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	request, err := unix.NewIfreq(link)
	if err != nil {
		return 0, err
	}
	err = control(raw, func(fd int) error { return unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, request) })
	if err != nil {
		return 0, fmt.Errorf("the link %s: %w", link, err)
	}
	return request.Uint32(), nil
}

// byLink is the control message that sends a packet over a link, whatever the routes say. No link: the routes decide.
func byLink(c *net.UDPConn, link string, local netip.Addr) ([]byte, error) {
	if link == "" {
		return nil, nil
	}
	index, err := linkIndex(c, link)
	if err != nil {
		return nil, err
	}
	if local.Is4() {
		return unix.PktInfo4(&unix.Inet4Pktinfo{Ifindex: int32(index), Spec_dst: local.As4()}), nil
	}
	return unix.PktInfo6(&unix.Inet6Pktinfo{Ifindex: index, Addr: local.As16()}), nil
}

// cameBy tells whether a packet came by a link. By another one anybody can send it in a member's name: only WireGuard
// knows whose an overlay address is.
func cameBy(c *net.UDPConn, link string, d mmsg.Datagram) bool {
	if link == "" {
		return true
	}
	index, err := linkIndex(c, link)
	return err == nil && d.To.Link == int(index)
}
