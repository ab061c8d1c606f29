package consensus

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// network is a control net in memory. A cut makes the streams between two nodes silent for good, as a
// broken path does, and new ones impossible until it heals.
type network struct {
	mu        sync.Mutex
	listeners map[string]*listener // node and protocol
	cuts      map[[2]identity.ID]bool
	conns     map[*wire]bool
	tcp       bool // loopback TCP in place of pipes
}

func newNetwork() *network {
	return &network{listeners: make(map[string]*listener), cuts: make(map[[2]identity.ID]bool), conns: make(map[*wire]bool)}
}

func pair(a, b identity.ID) [2]identity.ID {
	if a.String() > b.String() {
		a, b = b, a
	}
	return [2]identity.ID{a, b}
}

type listener struct {
	n      *network
	id     identity.ID
	alpn   string
	in     chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (n *network) listen(id identity.ID, alpn string) net.Listener {
	l := &listener{n: n, id: id, alpn: alpn, in: make(chan net.Conn, 64), closed: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.listeners[id.String()+alpn] = l
	return l
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.in:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() {
		close(l.closed)
		l.n.mu.Lock()
		defer l.n.mu.Unlock()
		if l.n.listeners[l.id.String()+l.alpn] == l {
			delete(l.n.listeners, l.id.String()+l.alpn)
		}
	})
	return nil
}

func (l *listener) Addr() net.Addr { return nodeAddr(l.id) }

// dialer is a node's view of the network.
type dialer struct {
	n    *network
	self identity.ID
}

func (d dialer) Dial(ctx context.Context, to identity.ID, alpn string) (net.Conn, error) {
	for {
		d.n.mu.Lock()
		cut, l := d.n.cuts[pair(d.self, to)], d.n.listeners[to.String()+alpn]
		d.n.mu.Unlock()
		if !cut && l == nil {
			return nil, fmt.Errorf("dial %s for %s: connection refused", to, alpn)
		}
		if !cut {
			return d.n.connect(d.self, to, l)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("dial %s: %w", to, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (n *network) connect(from, to identity.ID, l *listener) (net.Conn, error) {
	a, b := net.Pipe()
	if n.tcp {
		var err error
		if a, b, err = tcpPair(); err != nil {
			return nil, err
		}
	}
	here, there := newWire(n, a, from, to), newWire(n, b, to, from)
	n.mu.Lock()
	n.conns[here], n.conns[there] = true, true
	n.mu.Unlock()
	select {
	case l.in <- there:
		return here, nil
	case <-l.closed:
		here.Close()
		there.Close()
		return nil, errors.New("connection refused")
	}
}

func tcpPair() (a, b net.Conn, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	if a, err = net.Dial("tcp", l.Addr().String()); err != nil {
		return nil, nil, err
	}
	b, err = l.Accept()
	return a, b, err
}

// cut separates two groups of nodes.
func (n *network) cut(a, b []identity.ID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, x := range a {
		for _, y := range b {
			n.cuts[pair(x, y)] = true
		}
	}
	for c := range n.conns {
		if n.cuts[pair(c.self, c.peer)] {
			c.silence()
		}
	}
}

func (n *network) heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.cuts)
}

// wire is one end of a stream. When it is silenced, reads and writes go to a pipe that nobody serves,
// so that they end by deadline or Close alone.
type wire struct {
	net.Conn
	n          *network
	self, peer identity.ID

	mu        sync.Mutex
	hole      net.Conn
	deadlines [2]time.Time
}

func newWire(n *network, c net.Conn, self, peer identity.ID) *wire {
	return &wire{Conn: c, n: n, self: self, peer: peer}
}

func (w *wire) Peer() identity.ID { return w.peer }

func (w *wire) silence() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hole == nil {
		w.hole, _ = net.Pipe()
		w.hole.SetReadDeadline(w.deadlines[0])
		w.hole.SetWriteDeadline(w.deadlines[1])
	}
}

func (w *wire) conn() net.Conn {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hole != nil {
		return w.hole
	}
	return w.Conn
}

func (w *wire) Read(b []byte) (int, error)  { return w.conn().Read(b) }
func (w *wire) Write(b []byte) (int, error) { return w.conn().Write(b) }

func (w *wire) SetDeadline(t time.Time) error {
	_ = w.SetReadDeadline(t)
	return w.SetWriteDeadline(t)
}

func (w *wire) SetReadDeadline(t time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deadlines[0] = t
	if w.hole != nil {
		w.hole.SetReadDeadline(t)
	}
	return w.Conn.SetReadDeadline(t)
}

func (w *wire) SetWriteDeadline(t time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deadlines[1] = t
	if w.hole != nil {
		w.hole.SetWriteDeadline(t)
	}
	return w.Conn.SetWriteDeadline(t)
}

func (w *wire) Close() error {
	w.mu.Lock()
	if w.hole != nil {
		w.hole.Close()
	}
	w.mu.Unlock()
	w.n.mu.Lock()
	delete(w.n.conns, w)
	w.n.mu.Unlock()
	return w.Conn.Close()
}
