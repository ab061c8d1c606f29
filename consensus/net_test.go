package consensus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// network is a control net in memory. A cut makes the streams between two nodes silent for good, as a
// broken path does, and new ones impossible until it heals.
type network struct {
	mu        sync.Mutex
	listeners map[string]*listener // node and protocol
	cuts      map[way]bool
	delays    map[way]time.Duration // the longest that what is written may take
	conns     map[*wire]bool
	slowest   time.Duration // the longest of all delays that there were
	tcp       bool          // loopback TCP in place of pipes
	closed    chan struct{} // the test is over, and dials that nothing waits for end too
}

func newNetwork() *network {
	return &network{closed: make(chan struct{}), listeners: make(map[string]*listener), cuts: make(map[way]bool),
		delays: make(map[way]time.Duration), conns: make(map[*wire]bool)}
}

// way is one direction between two nodes.
type way struct{ from, to identity.ID }

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
		cut, l := d.n.cuts[way{d.self, to}] || d.n.cuts[way{to, d.self}], d.n.listeners[to.String()+alpn]
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
		case <-d.n.closed:
			return nil, fmt.Errorf("dial %s: the network is gone", to)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (n *network) connect(from, to identity.ID, l *listener) (net.Conn, error) {
	a, b := bufferedPipe()
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
	n.cutWay(a, b)
	n.cutWay(b, a)
}

// cutWay loses what one group sends to the other. Answers still arrive on existing streams; new streams need both
// directions.
func (n *network) cutWay(from, to []identity.ID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, x := range from {
		for _, y := range to {
			n.cuts[way{x, y}] = true
		}
	}
	for c := range n.conns {
		if n.cuts[way{c.self, c.peer}] {
			c.silence()
		}
	}
}

// delay makes what one group sends to the other arrive later, in order and at most so much.
func (n *network) delay(from, to []identity.ID, most time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, x := range from {
		for _, y := range to {
			n.delays[way{x, y}] = most
			n.slowest = max(n.slowest, most)
		}
	}
}

func (n *network) delayed(from, to identity.ID) time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	if most := n.delays[way{from, to}]; most > 0 {
		return rand.N(most)
	}
	return 0
}

// heal ends cuts and delays.
func (n *network) heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.cuts)
	clear(n.delays)
}

// wire is one end of a stream. When it is silenced, what is written vanishes and nothing arrives, so
// that it ends by deadline or Close alone.
type wire struct {
	net.Conn
	n          *network
	self, peer identity.ID

	mu     sync.Mutex
	silent bool
}

func newWire(n *network, c net.Conn, self, peer identity.ID) *wire {
	return &wire{Conn: c, n: n, self: self, peer: peer}
}

func (w *wire) Peer() identity.ID { return w.peer }

func (w *wire) silence() {
	w.mu.Lock()
	w.silent = true
	w.mu.Unlock()
}

func (w *wire) Write(b []byte) (int, error) {
	w.mu.Lock()
	silent := w.silent
	w.mu.Unlock()
	if silent {
		return len(b), nil // the kernel's buffer takes it
	}
	if pipe, ok := w.Conn.(halves); ok {
		return pipe.out.write(b, w.n.delayed(w.self, w.peer))
	}
	return w.Conn.Write(b)
}

func (w *wire) Close() error {
	w.n.mu.Lock()
	delete(w.n.conns, w)
	w.n.mu.Unlock()
	return w.Conn.Close()
}

// half is one direction of a stream with a buffer like a kernel's. Without the buffer a writer would hold its locks
// until the other end reads, and virtual time cannot pass while a goroutine waits for a lock.
type half struct {
	mu       sync.Mutex
	buf      []byte
	late     []chunk       // what was written later and has not arrived
	held     int           // bytes in late
	closed   bool          // by either end
	changed  chan struct{} // closed at every change
	deadline [2]time.Time  // of its reader and of its writer
}

// chunk arrives at a time.
type chunk struct {
	data []byte
	at   time.Time
}

const halfSize = 256 << 10

// arrive moves what is due into the buffer, and wakes readers when more is due; it is called with mu held.
func (h *half) arrive() (next time.Time) {
	for len(h.late) > 0 {
		first := h.late[0]
		if time.Now().Before(first.at) {
			return first.at
		}
		h.buf, h.late, h.held = append(h.buf, first.data...), h.late[1:], h.held-len(first.data)
	}
	return time.Time{}
}

// put takes what is written; it is called with mu held.
func (h *half) put(b []byte, delay time.Duration) {
	at := time.Now().Add(delay)
	if len(h.late) > 0 && at.Before(h.late[len(h.late)-1].at) { // a stream keeps its order
		at = h.late[len(h.late)-1].at
	}
	if len(h.late) == 0 && delay == 0 {
		h.buf = append(h.buf, b...)
		return
	}
	h.late, h.held = append(h.late, chunk{bytes.Clone(b), at}), h.held+len(b)
}

func (h *half) change(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
	h.tell()
}

// tell wakes all waiters; it is called with mu held.
func (h *half) tell() {
	close(h.changed)
	h.changed = make(chan struct{})
}

// wait blocks until the half changes or the deadline passes; it is called with mu held and unlocks it.
func (h *half) wait(deadline time.Time) {
	changed := h.changed
	h.mu.Unlock()
	if deadline.IsZero() {
		<-changed
		return
	}
	t := time.NewTimer(time.Until(deadline))
	defer t.Stop()
	select {
	case <-changed:
	case <-t.C:
	}
}

func expired(t time.Time) bool { return !t.IsZero() && !time.Now().Before(t) }

func (h *half) read(b []byte) (int, error) {
	for {
		h.mu.Lock()
		next := h.arrive()
		switch {
		case expired(h.deadline[0]):
			h.mu.Unlock()
			return 0, os.ErrDeadlineExceeded
		case len(h.buf) > 0:
			n := copy(b, h.buf)
			h.buf = h.buf[n:] // at once: Close empties the buffer of who still reads
			h.tell()
			h.mu.Unlock()
			return n, nil
		case h.closed && next.IsZero():
			h.mu.Unlock()
			return 0, io.EOF
		}
		if deadline := h.deadline[0]; !deadline.IsZero() && (next.IsZero() || deadline.Before(next)) {
			next = deadline
		}
		h.wait(next)
	}
}

func (h *half) write(b []byte, delay time.Duration) (n int, err error) {
	for len(b) > 0 {
		h.mu.Lock()
		switch {
		case h.closed:
			h.mu.Unlock()
			return n, io.ErrClosedPipe
		case expired(h.deadline[1]):
			h.mu.Unlock()
			return n, os.ErrDeadlineExceeded
		case len(h.buf)+h.held < halfSize:
			took := min(len(b), halfSize)
			h.put(b[:took], delay)
			h.tell()
			h.mu.Unlock()
			n, b = n+took, b[took:]
			continue
		}
		h.wait(h.deadline[1])
	}
	return n, nil
}

type halves struct{ in, out *half }

func bufferedPipe() (a, b net.Conn) {
	x, y := &half{changed: make(chan struct{})}, &half{changed: make(chan struct{})}
	return halves{x, y}, halves{y, x}
}

func (c halves) Read(b []byte) (int, error)  { return c.in.read(b) }
func (c halves) Write(b []byte) (int, error) { return c.out.write(b, 0) }
func (c halves) LocalAddr() net.Addr         { return nodeAddr{} }
func (c halves) RemoteAddr() net.Addr        { return nodeAddr{} }

func (c halves) Close() error {
	c.in.change(func() { c.in.closed, c.in.buf, c.in.late, c.in.held = true, nil, nil, 0 })
	c.out.change(func() { c.out.closed = true })
	return nil
}

func (c halves) SetDeadline(t time.Time) error {
	_ = c.SetReadDeadline(t)
	return c.SetWriteDeadline(t)
}

func (c halves) SetReadDeadline(t time.Time) error {
	c.in.change(func() { c.in.deadline[0] = t })
	return nil
}

func (c halves) SetWriteDeadline(t time.Time) error {
	c.out.change(func() { c.out.deadline[1] = t })
	return nil
}

// A stream is closed while its reader is in the middle of a read, as a killed node's streams are.
func TestPipeClosedDuringARead(t *testing.T) {
	sent, got := make([]byte, halfSize), make([]byte, halfSize) // so much that the read takes a while
	for range 200 {
		a, b := bufferedPipe()
		if _, err := a.Write(sent); err != nil {
			t.Fatal(err)
		}
		begun, closed := make(chan struct{}), make(chan struct{})
		go func() { <-begun; b.Close(); close(closed) }()
		close(begun)
		if n, err := b.Read(got); n != len(sent) && err != io.EOF {
			t.Fatalf("%d bytes, %v", n, err)
		}
		<-closed
	}
}
