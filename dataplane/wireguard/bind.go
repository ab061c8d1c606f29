package wireguard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"

	"github.com/skeinmesh/skein/internal/mmsg"
)

const (
	// batchSize is how many packets pass from the network to wireguard-go at a time. It keeps a buffer of
	// 64 KiB for each, for each socket.
	batchSize = 32
	// readMessages is how many messages, each of which may be a train, are read from the network at a time.
	readMessages = 8
)

// meshBind is wireguard-go's way to the network: a socket for each family on one port, many packets per
// system call, and an eye on handshakes that cross (see crossing).
type meshBind struct {
	cross *crossing

	mu      sync.Mutex
	sockets []*socket // none while closed
}

// socket is that of one family.
type socket struct {
	*net.UDPConn
	six    bool
	writer *mmsg.Writer
}

func newMeshBind() *meshBind {
	b := &meshBind{}
	b.cross = newCrossing(func(packet []byte, at netip.AddrPort) {
		_ = b.write([][]byte{packet}, &endpoint{to: at}) // if it is lost, wireguard-go tries again
	})
	return b
}

// Open opens the sockets, in the calling thread's network namespace. A family that this host lacks is left out.
func (b *meshBind) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.sockets) > 0 {
		return nil, 0, conn.ErrBindAlreadyOpen
	}
	sockets, port, err := listenBoth(port)
	if err != nil {
		return nil, 0, err
	}
	var receive []conn.ReceiveFunc
	for _, s := range sockets {
		r, err := mmsg.NewReader(s.UDPConn, readMessages)
		if err == nil {
			s.writer, err = mmsg.NewWriter(s.UDPConn)
		}
		if err != nil {
			closeAll(sockets)
			return nil, 0, err
		}
		receive = append(receive, func(packets [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
			return b.receive(r, packets, sizes, eps)
		})
	}
	b.sockets = sockets
	b.cross.reset()
	return receive, port, nil
}

// listenBoth binds both families to one port. Where the port is free to choose, it must be so in both.
func listenBoth(port uint16) ([]*socket, uint16, error) {
	const tries = 100
	for n := 0; ; n++ {
		sockets, got, err := listenEach(port)
		if err == nil || port != 0 || n == tries || !errors.Is(err, unix.EADDRINUSE) {
			return sockets, got, err
		}
	}
}

func listenEach(port uint16) (sockets []*socket, got uint16, err error) {
	l := net.ListenConfig{Control: mmsg.Prepare}
	for _, network := range []string{"udp4", "udp6"} {
		c, err := l.ListenPacket(context.Background(), network, ":"+strconv.Itoa(int(port)))
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue
		}
		if err != nil {
			closeAll(sockets)
			return nil, 0, err
		}
		u := c.(*net.UDPConn)
		port = u.LocalAddr().(*net.UDPAddr).AddrPort().Port()
		sockets = append(sockets, &socket{UDPConn: u, six: network == "udp6"})
	}
	if len(sockets) == 0 {
		return nil, 0, unix.EAFNOSUPPORT
	}
	return sockets, port, nil
}

func closeAll(sockets []*socket) (err error) {
	for _, s := range sockets {
		err = errors.Join(err, s.Close())
	}
	return err
}

// receive fills packets with what has come, but for handshakes that shall not be seen.
func (b *meshBind) receive(r *mmsg.Reader, packets [][]byte, sizes []int, eps []conn.Endpoint) (n int, err error) {
	var last *endpoint
	for n == 0 {
		for n < len(packets) {
			d, ok := r.Next()
			if !ok {
				break
			}
			if !b.cross.admit(d.Data, d.From) {
				continue
			}
			if last == nil || last.to != d.From || last.from != d.To {
				last = &endpoint{to: d.From, from: d.To}
			}
			sizes[n], eps[n] = copy(packets[n], d.Data), last
			n++
		}
		if n > 0 {
			break
		}
		if err := r.Read(); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// Send sends packets, but for handshakes that shall not leave.
func (b *meshBind) Send(packets [][]byte, ep conn.Endpoint) error {
	e, ok := ep.(*endpoint)
	if !ok {
		return conn.ErrWrongEndpointType
	}
	if len(packets) == 1 && !b.cross.leaves(packets[0], e.to) {
		return nil
	}
	return b.write(packets, e)
}

func (b *meshBind) write(packets [][]byte, e *endpoint) error {
	s := b.socketFor(e.to.Addr())
	if s == nil {
		return fmt.Errorf("sending to %s: %w", e.to, unix.EAFNOSUPPORT)
	}
	from := e.source()
	n, err := s.writer.Write(packets, e.to, from)
	if err != nil && from.Addr.IsValid() && !errors.Is(err, net.ErrClosed) { // the address may have left this host
		e.ClearSrc()
		_, err = s.writer.Write(packets[n:], e.to, mmsg.Source{})
	}
	return err
}

func (b *meshBind) socketFor(a netip.Addr) *socket {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.sockets {
		if s.six == a.Is6() {
			return s
		}
	}
	return nil
}

// Close closes the sockets, which ends the receivers.
func (b *meshBind) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := closeAll(b.sockets)
	b.sockets = nil
	return err
}

// SetMark marks what both sockets send.
func (b *meshBind) SetMark(mark uint32) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.sockets {
		raw, err := s.SyscallConn()
		if err != nil {
			return err
		}
		var failed error
		err = raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)) })
		if err := errors.Join(err, failed); err != nil {
			return fmt.Errorf("marking WireGuard's packets with %#x: %w", mark, err)
		}
	}
	return nil
}

// BatchSize is the most packets for one call.
func (b *meshBind) BatchSize() int { return batchSize }

// ParseEndpoint reads address and port.
func (b *meshBind) ParseEndpoint(s string) (conn.Endpoint, error) {
	at, err := netip.ParseAddrPort(s)
	if err != nil {
		return nil, err
	}
	return &endpoint{to: unmapped(at)}, nil
}

// endpoint is where packets go to, and for one that a packet came from, the local address it came to.
type endpoint struct {
	to      netip.AddrPort // IPv4 as IPv4
	from    mmsg.Source
	cleared atomic.Bool // from is no longer to be used
}

// source is what to send from. Only a link-local address needs its link named; others may follow the
// routing table.
func (e *endpoint) source() mmsg.Source {
	switch {
	case e.cleared.Load():
		return mmsg.Source{}
	case e.from.Addr.IsLinkLocalUnicast():
		return e.from
	}
	return mmsg.Source{Addr: e.from.Addr}
}

func (e *endpoint) ClearSrc()           { e.cleared.Store(true) }
func (e *endpoint) SrcIP() netip.Addr   { return e.source().Addr }
func (e *endpoint) DstIP() netip.Addr   { return e.to.Addr() }
func (e *endpoint) DstToString() string { return e.to.String() }

func (e *endpoint) SrcToString() string {
	if a := e.SrcIP(); a.IsValid() {
		return a.String()
	}
	return ""
}

// DstToBytes is what the cookie of a busy device is bound to.
func (e *endpoint) DstToBytes() []byte {
	out, _ := e.to.MarshalBinary()
	return out
}
