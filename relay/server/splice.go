package server

import (
	"crypto/rand"
	"crypto/subtle"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

const (
	// maxOffers bounds the streams that wait for one node at a time.
	maxOffers = 64
	// maxOpening bounds the connections of one node that have not said what they are for: the most that may be offered to
	// it, and as many again.
	maxOpening = 2 * maxOffers
	// copyBuffer holds two TLS records.
	copyBuffer = 32 << 10
)

// stream is two connections that the relay joins, or one that waits for the other.
type stream struct {
	id       uint64
	secret   [wire.SecretSize]byte
	from, to identity.ID
	a, b     *tls.Conn
	joined   chan *tls.Conn // the accepting end
	ended    chan struct{}
	once     sync.Once
}

// end resets both connections at once: a plain close would look like the clean end of the stream.
func (t *stream) end() {
	t.once.Do(func() { close(t.ended) })
	reset(t.a)
	if t.b != nil {
		reset(t.b)
	}
}

func reset(c *tls.Conn) {
	if t, ok := wire.TCP(c.NetConn()); ok {
		_ = t.SetLinger(0) // only makes the close below abrupt
	}
	c.NetConn().Close()
}

// streamTable holds the streams that wait and those that run.
type streamTable struct {
	mu      sync.Mutex
	waiting map[uint64]*stream
	offers  map[identity.ID]int // waiting, by the node they wait for
	running map[*stream]struct{}
	clients map[identity.ID]int // waiting and running, by the node that asked
	fresh   map[identity.ID]int // connections that have not said what they are for
	closed  bool
	total   atomic.Uint64
	bytes   atomic.Uint64
	buffers sync.Pool
}

func newStreamTable() streamTable {
	return streamTable{
		waiting: map[uint64]*stream{}, offers: map[identity.ID]int{},
		running: map[*stream]struct{}{}, clients: map[identity.ID]int{}, fresh: map[identity.ID]int{},
		buffers: sync.Pool{New: func() any { b := make([]byte, copyBuffer); return &b }},
	}
}

// HandleSplice serves one end of a stream for a node that has proven its identity, and returns when the
// stream ends. It owns conn.
func (s *Server) HandleSplice(conn *tls.Conn, peer identity.ID) {
	defer conn.Close()
	wire.TuneStream(conn.NetConn())
	if conn.SetDeadline(time.Now().Add(wire.AcceptTimeout)) != nil {
		return
	}
	opened, ok := s.streams.opening(peer)
	if !ok {
		return
	}
	defer opened()
	var header [wire.HeaderSize]byte
	if _, err := io.ReadFull(conn, header[:]); err != nil {
		return
	}
	t, n, err := wire.ParseHeader(header)
	if err != nil || (t != wire.FrameConnect && t != wire.FrameAccept && t != wire.FrameShow) {
		refuse(conn, wire.ReplyRefused, "want CONNECT or ACCEPT")
		return
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(conn, body); err != nil {
		return
	}
	opened()
	switch t {
	case wire.FrameConnect:
		s.connect(conn, peer, wire.DecodeNode(body))
	case wire.FrameAccept:
		id, secret := wire.DecodeAccept(body)
		s.accept(conn, peer, id, secret)
	case wire.FrameShow:
		if err := s.show(peer, wire.RemoteIP(conn.NetConn())); err != nil {
			refuse(conn, wire.ReplyNotHere, err.Error())
			return
		}
		_, _ = conn.Write(wire.AppendReply(nil, wire.ReplyOK, ""))
	}
}

// refuse answers with the reason; that it does not arrive is the asker's loss.
func refuse(conn *tls.Conn, code wire.ReplyCode, reason string) {
	_, _ = conn.Write(wire.AppendReply(nil, code, reason))
}

// opening counts a connection that has not said what it is for, until opened is called; again does nothing.
func (st *streamTable) opening(peer identity.ID) (opened func(), ok bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.fresh[peer] >= maxOpening {
		return nil, false
	}
	st.fresh[peer]++
	return sync.OnceFunc(func() {
		st.mu.Lock()
		defer st.mu.Unlock()
		decrement(st.fresh, peer)
	}), true
}

// connect offers a stream to its other end, waits for it, and joins both.
func (s *Server) connect(conn *tls.Conn, from, to identity.ID) {
	target := s.session(to)
	if target == nil {
		refuse(conn, wire.ReplyNotHere, "the peer has no session with this relay")
		return
	}
	t, err := s.streams.add(conn, from, to, s.cfg.MaxStreams, s.limits.Load().MaxStreamsPerClient)
	if err != nil {
		refuse(conn, wire.ReplyLimit, err.Error())
		return
	}
	defer s.streams.remove(t)
	if !s.cfg.Member(from) {
		return
	}
	target.Queue.PushControl(func(b []byte) []byte {
		return wire.AppendOffer(b, wire.Offer{Stream: t.id, From: from, Secret: t.secret})
	})
	timer := time.NewTimer(wire.AcceptTimeout)
	defer timer.Stop()
	select {
	case other := <-t.joined:
		s.join(t, conn, other)
	case <-target.Done():
		refuse(conn, wire.ReplyNotHere, "the peer's session with this relay ended")
	case <-timer.C:
		refuse(conn, wire.ReplyTimeout, "the peer did not take the stream within 10 s")
	case <-t.ended:
	}
}

// accept brings the other end of a waiting stream, and stays until the stream ends.
func (s *Server) accept(conn *tls.Conn, peer identity.ID, id uint64, secret [wire.SecretSize]byte) {
	t := s.streams.claim(id, peer, secret, conn)
	if t == nil {
		refuse(conn, wire.ReplyRefused, "no such stream waits for you")
		return
	}
	<-t.ended
}

func (s *Server) join(t *stream, a, b *tls.Conn) {
	ok := wire.AppendReply(nil, wire.ReplyOK, "")
	// The accepting end first: it is then ready when the asker's first bytes come.
	for _, c := range []*tls.Conn{b, a} {
		if _, err := c.Write(ok); err != nil {
			return
		}
		if c.SetDeadline(time.Time{}) != nil {
			return
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() { s.copy(t, a, b) })
	s.copy(t, b, a)
	wg.Wait()
	// Both directions ended. Close sends what TLS still has to say.
	a.Close()
	b.Close()
}

// copy moves one direction. A clean end is passed on and leaves the other direction open; anything else
// ends the stream, so that a cut never looks like an end.
func (s *Server) copy(t *stream, to, from *tls.Conn) {
	b := s.streams.buffers.Get().(*[]byte)
	defer s.streams.buffers.Put(b)
	for {
		n, err := from.Read(*b)
		if n > 0 {
			s.streams.bytes.Add(uint64(n))
			if _, err := to.Write((*b)[:n]); err != nil {
				t.end()
				return
			}
		}
		if errors.Is(err, io.EOF) {
			if to.CloseWrite() != nil {
				t.end()
			}
			return
		}
		if err != nil {
			t.end()
			return
		}
	}
}

// add registers a stream that waits for its other end.
func (st *streamTable) add(a *tls.Conn, from, to identity.ID, limit, perClient int) (*stream, error) {
	t := &stream{from: from, to: to, a: a, joined: make(chan *tls.Conn, 1), ended: make(chan struct{})}
	var id [8]byte
	for _, b := range [][]byte{id[:], t.secret[:]} {
		if _, err := rand.Read(b); err != nil {
			return nil, fmt.Errorf("make the stream's secret: %w", err)
		}
	}
	t.id = binary.BigEndian.Uint64(id[:])
	st.mu.Lock()
	defer st.mu.Unlock()
	switch {
	case st.closed:
		return nil, wire.ErrClosed
	case len(st.waiting)+len(st.running) >= limit:
		return nil, fmt.Errorf("this relay has reached its limit of %d streams", limit)
	case st.clients[from] >= perClient:
		return nil, fmt.Errorf("you have reached your limit of %d streams at this relay", perClient)
	case st.offers[to] >= maxOffers:
		return nil, fmt.Errorf("%d streams wait for that peer already", maxOffers)
	case st.waiting[t.id] != nil:
		return nil, errors.New("stream number is in use: try again")
	}
	st.waiting[t.id] = t
	st.offers[to]++
	st.clients[from]++
	st.total.Add(1)
	return t, nil
}

// claim hands the accepting connection to the stream that waits for this node.
func (st *streamTable) claim(id uint64, peer identity.ID, secret [wire.SecretSize]byte, b *tls.Conn) *stream {
	st.mu.Lock()
	defer st.mu.Unlock()
	t := st.waiting[id]
	if t == nil || t.to != peer || subtle.ConstantTimeCompare(t.secret[:], secret[:]) != 1 {
		return nil
	}
	st.unwait(t)
	st.running[t] = struct{}{}
	t.b = b
	t.joined <- b
	return t
}

// unwait takes a stream out of those that wait. The caller holds mu.
func (st *streamTable) unwait(t *stream) {
	delete(st.waiting, t.id)
	decrement(st.offers, t.to)
}

// remove forgets a stream and lets its accepting end go.
func (st *streamTable) remove(t *stream) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.waiting[t.id] == t {
		st.unwait(t)
	}
	delete(st.running, t)
	decrement(st.clients, t.from)
	t.once.Do(func() { close(t.ended) })
}

func decrement(m map[identity.ID]int, id identity.ID) {
	if m[id]--; m[id] <= 0 {
		delete(m, id)
	}
}

// kick ends every stream that a node has a part in.
func (st *streamTable) kick(id identity.ID) {
	st.endAll(func(t *stream) bool { return t.from == id || t.to == id })
}

func (st *streamTable) close() {
	st.mu.Lock()
	st.closed = true
	st.mu.Unlock()
	st.endAll(func(*stream) bool { return true })
}

func (st *streamTable) endAll(match func(*stream) bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, t := range st.waiting {
		if match(t) {
			t.end()
		}
	}
	for t := range st.running {
		if match(t) {
			t.end()
		}
	}
}

func (st *streamTable) stats(s *Stats) {
	st.mu.Lock()
	s.Streams, s.PendingStreamOffers = len(st.running), len(st.waiting)
	st.mu.Unlock()
	s.StreamsTotal, s.StreamBytes = st.total.Load(), st.bytes.Load()
}
