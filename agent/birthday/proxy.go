package birthday

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent/probe"
)

const (
	proxyPacket = 64 << 10
	proxyWait   = 2 * time.Second // until the attempt has closed the port
)

// Proxy carries one peer's packets between WireGuard and the port that was hit, on hosts whose kernel cannot rewrite
// ports. Every packet passes through this process. It is safe for concurrent use.
type Proxy struct {
	remote, wireGuard netip.AddrPort
	handle            func(from netip.AddrPort, b []byte, at time.Time)
	outside, inside   *net.UDPConn
	running           sync.WaitGroup
}

// OpenProxy binds the local port of the hit. Argument wireGuard is WireGuard's address on this host. Argument handle
// receives the peer's pings and pongs; this host's own are sent by SendFrom.
func OpenProxy(ctx context.Context, local uint16, remote, wireGuard netip.AddrPort, mark uint32,
	handle func(from netip.AddrPort, b []byte, at time.Time)) (*Proxy, error) {
	p := &Proxy{remote: remote, wireGuard: wireGuard, handle: handle}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark))
		}); cerr != nil {
			return cerr
		}
		return err
	}}
	fail := func(err error) (*Proxy, error) {
		return nil, fmt.Errorf("carry packets for %s through UDP port %d: %w", remote, local, err)
	}
	for deadline := time.Now().Add(proxyWait); ; {
		c, err := config.ListenPacket(ctx, "udp4", netip.AddrPortFrom(netip.IPv4Unspecified(), local).String())
		if err == nil {
			p.outside = c.(*net.UDPConn)
			break
		}
		if !errors.Is(err, unix.EADDRINUSE) || time.Now().After(deadline) {
			return fail(err)
		}
		select {
		case <-ctx.Done():
			return fail(ctx.Err())
		case <-time.After(tick):
		}
	}
	var err error
	if p.inside, err = net.ListenUDP("udp4",
		net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 0))); err != nil {
		p.outside.Close()
		return fail(err)
	}
	p.running.Go(p.out)
	p.running.Go(p.in)
	return p, nil
}

// Endpoint is the address at which WireGuard reaches the peer.
func (p *Proxy) Endpoint() netip.AddrPort { return p.inside.LocalAddr().(*net.UDPAddr).AddrPort() }

// SendFrom sends a ping or pong to the peer.
func (p *Proxy) SendFrom(_ netip.Addr, to netip.AddrPort, b []byte) error {
	_, err := p.outside.WriteToUDPAddrPort(b, to)
	return err
}

// Close ends the proxy.
func (p *Proxy) Close() {
	p.outside.Close()
	p.inside.Close()
	p.running.Wait()
}

// out forwards WireGuard's packets. Failed sends count as loss.
func (p *Proxy) out() {
	p.each(p.inside, p.wireGuard, func(b []byte) { _, _ = p.outside.WriteToUDPAddrPort(b, p.remote) })
}

// in forwards the peer's packets, and passes pings and pongs to handle.
func (p *Proxy) in() {
	p.each(p.outside, p.remote, func(b []byte) {
		if _, err := probe.Parse(b); err == nil {
			p.handle(p.remote, b, time.Now())
			return
		}
		_, _ = p.inside.WriteToUDPAddrPort(b, p.wireGuard)
	})
}

// each reads a socket until it is closed, and ignores packets from other sources.
func (p *Proxy) each(c *net.UDPConn, from netip.AddrPort, do func([]byte)) {
	b := make([]byte, proxyPacket)
	for {
		n, at, err := c.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && at.Port() == from.Port() && at.Addr().Unmap() == from.Addr() {
			do(b[:n])
		}
	}
}
