package plainwg

import (
	"crypto/hmac"
	"encoding/binary"
	"errors"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/blake2s"
	"golang.zx2c4.com/wireguard/conn"

	"github.com/skeinmesh/skein/dataplane"
)

// Messages of WireGuard (section 5.4 of its paper): the type is the first byte.
const (
	initiation = 1
	response   = 2
	cookie     = 3
	data       = 4

	initiationSize = 148
	responseSize   = 92
	cookieSize     = 64
	dataSize       = 32 // the smallest: a keepalive
	macSize        = 16
)

const (
	// indexLife is how long an index is remembered: by the paper sessions and handshakes end after three minutes at most.
	indexLife = 7 * time.Minute
	// waiting is how many datagrams may wait for a device; more are dropped, as a socket drops them.
	waiting = 512
	// largest is the largest datagram that is taken, in bytes: jumbo frames.
	largest = 9216
)

// splitter shares the sockets of one port between devices with different keys.
type splitter struct {
	bind      conn.Bind
	handshake func() // told that one may have been completed
	receivers sync.WaitGroup

	mu      sync.RWMutex
	ports   []*port
	indexes map[uint32]owned
	swept   time.Time
}

type owned struct {
	port *port
	at   time.Time
}

// port is a device's share of the sockets: its conn.Bind.
type port struct {
	s       *splitter
	macKey  [blake2s.Size]byte
	packets chan datagram
	came    atomic.Uint64 // datagrams so far
	pending atomic.Bool   // a handshake message has come or gone, and no data since

	mu     sync.Mutex
	closed chan struct{} // nil: not open
}

type datagram struct {
	b    []byte
	from conn.Endpoint
}

// newSplitter opens the sockets. It receives until it is closed.
func newSplitter(number uint16, mark uint32, bind conn.Bind, handshake func()) (*splitter, error) {
	s := &splitter{bind: bind, handshake: handshake, indexes: map[uint32]owned{}}
	receive, _, err := bind.Open(number)
	if err != nil {
		return nil, err
	}
	if mark != 0 {
		if err := bind.SetMark(mark); err != nil {
			bind.Close()
			return nil, err
		}
	}
	for _, f := range receive {
		s.receivers.Go(func() { s.receive(f) })
	}
	return s, nil
}

func (s *splitter) close() error {
	err := s.bind.Close()
	s.receivers.Wait()
	return err
}

func (s *splitter) receive(f conn.ReceiveFunc) {
	n := s.bind.BatchSize()
	packets, sizes, from := make([][]byte, n), make([]int, n), make([]conn.Endpoint, n)
	for i := range packets {
		packets[i] = make([]byte, largest)
	}
	const most = 10 // failures one after the other, as wireguard-go has it
	for failures := 0; failures < most; {
		n, err := f(packets, sizes, from)
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			failures++
			continue
		}
		failures = 0
		for i := range n {
			if p := s.owner(packets[i][:sizes[i]]); p != nil {
				p.enqueue(packets[i][:sizes[i]], from[i])
			}
		}
	}
}

// owner is the device that a datagram is for; nil: none.
func (s *splitter) owner(b []byte) *port {
	if len(b) < dataSize {
		return nil
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	at := 4
	switch kind := b[0]; {
	case kind == initiation && len(b) == initiationSize:
		for _, p := range s.ports {
			if p.addressed(b) {
				return p
			}
		}
		return nil
	case kind == response && len(b) == responseSize:
		at = 8
	case kind == cookie && len(b) == cookieSize, kind == data:
	default:
		return nil
	}
	return s.indexes[binary.LittleEndian.Uint32(b[at:])].port
}

// newPort adds a device with a public key.
func (s *splitter) newPort(key dataplane.Key) *port {
	p := &port{s: s, packets: make(chan datagram, waiting), macKey: blake2s.Sum256(append([]byte("mac1----"),
		key[:]...))}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ports = append(s.ports, p)
	return p
}

// drop takes a device away.
func (s *splitter) drop(p *port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ports = slices.DeleteFunc(slices.Clone(s.ports), func(o *port) bool { return o == p })
	maps.DeleteFunc(s.indexes, func(_ uint32, o owned) bool { return o.port == p })
}

// sends notes the index under which a device will be answered.
func (s *splitter) sends(p *port, b []byte, now time.Time) {
	if len(b) < 8 || b[0] != initiation && b[0] != response {
		return
	}
	p.pending.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.indexes[binary.LittleEndian.Uint32(b[4:])] = owned{p, now}
	if now.Sub(s.swept) < indexLife {
		return
	}
	s.swept = now
	maps.DeleteFunc(s.indexes, func(_ uint32, o owned) bool { return now.Sub(o.at) > indexLife })
}

// addressed reports whether a handshake's mac1 is made with this device's public key.
func (p *port) addressed(b []byte) bool {
	h, err := blake2s.New128(p.macKey[:])
	if err != nil {
		return false // unreachable: the key has the right size
	}
	end := len(b) - 2*macSize
	h.Write(b[:end])
	return hmac.Equal(h.Sum(nil), b[end:end+macSize])
}

// enqueue queues a datagram for the device.
func (p *port) enqueue(b []byte, from conn.Endpoint) {
	p.came.Add(1)
	switch b[0] {
	case initiation, response:
		p.pending.Store(true)
		p.s.handshake()
	case data:
		if p.pending.Swap(false) {
			p.s.handshake()
		}
	}
	select {
	case p.packets <- datagram{append([]byte(nil), b...), from}:
	default:
	}
}

// Open lets the device receive.
func (p *port) Open(uint16) ([]conn.ReceiveFunc, uint16, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed != nil {
		return nil, 0, conn.ErrBindAlreadyOpen
	}
	closed := make(chan struct{})
	p.closed = closed
	return []conn.ReceiveFunc{func(packets [][]byte, sizes []int, from []conn.Endpoint) (int, error) {
		return p.receive(closed, packets, sizes, from)
	}}, dataplane.PlainPort, nil
}

func (p *port) receive(closed chan struct{}, packets [][]byte, sizes []int, from []conn.Endpoint) (int, error) {
	n, open := drain(p.packets, closed, len(packets), func(i int, d datagram) {
		sizes[i], from[i] = copy(packets[i], d.b), d.from
	})
	if !open {
		return 0, net.ErrClosed
	}
	return n, nil
}

// drain waits for the first of what comes, and gives put all that is there, up to most. It tells how many these are;
// open is false when nothing more will come.
func drain[T any](from <-chan T, closed <-chan struct{}, most int, put func(i int, v T)) (n int, open bool) {
	select {
	case v := <-from:
		put(0, v)
	case <-closed:
		return 0, false
	}
	for n = 1; n < most; n++ {
		select {
		case v := <-from:
			put(n, v)
		default:
			return n, true
		}
	}
	return n, true
}

// Close ends receiving; the sockets stay.
func (p *port) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed != nil {
		close(p.closed)
		p.closed = nil
	}
	return nil
}

// Send sends by the shared sockets.
func (p *port) Send(packets [][]byte, to conn.Endpoint) error {
	now := time.Now()
	for _, b := range packets {
		p.s.sends(p, b, now)
	}
	return p.s.bind.Send(packets, to)
}

// SetMark does nothing: the sockets were marked when they were opened.
func (p *port) SetMark(uint32) error { return nil }

// BatchSize is the most packets for one call. wireguard-go keeps buffers of 64 KiB for each, for each device.
func (p *port) BatchSize() int { return batch }

// ParseEndpoint reads address and port.
func (p *port) ParseEndpoint(s string) (conn.Endpoint, error) { return p.s.bind.ParseEndpoint(s) }
