// Package sock opens sockets that carry a mark, so that the tunnel's routing leaves their packets alone.
package sock

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// Mark is a net.ListenConfig's or net.Dialer's Control that sets SO_MARK; 0 sets none.
func Mark(mark uint32) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		if mark == 0 {
			return nil
		}
		var err error
		if cerr := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark))
		}); cerr != nil {
			return cerr
		}
		if err != nil {
			return fmt.Errorf("set mark %#x: %w", mark, err)
		}
		return nil
	}
}

// ListenUDP opens a marked UDP socket. The zero Addr listens on every address of the network, "udp4" or "udp6".
func ListenUDP(network string, local netip.AddrPort, mark uint32) (*net.UDPConn, error) {
	lc := net.ListenConfig{Control: Mark(mark)}
	host := ""
	if local.Addr().IsValid() {
		host = local.Addr().String()
	}
	conn, err := lc.ListenPacket(context.Background(), network, net.JoinHostPort(host, fmt.Sprint(local.Port())))
	if err != nil {
		return nil, err
	}
	return conn.(*net.UDPConn), nil
}
