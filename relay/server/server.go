package server

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/udp"
	"github.com/skeinmesh/skein/relay/wire"
)

// Config configures a relay. Zero limits mean the defaults.
type Config struct {
	Self identity.ID
	Log  *slog.Logger
	// Member, if set, is asked once more when a session or stream is already registered, so that
	// a node revoked during its handshake does not slip in behind Kick.
	Member func(identity.ID) bool
	// Relay tells whether a member is a relay, whose word on a packet's origin counts; nil: none is.
	Relay func(identity.ID) bool
	// Forward hands a client's packet to another relay; nil: this relay does not. client.Pool.Forward does it.
	Forward func(relay, origin, node identity.ID, channel byte, b []byte) bool
	// UDP, if set, reserves pairs of UDP ports for the clients. The server owns it.
	UDP *udp.Relay

	Limits // that SetLimits changes later

	MaxStreams   int           // 2048 in all
	QueuePackets int           // per destination: 1024
	QueueBytes   int           // per destination: 2 MiB
	IdleTimeout  time.Duration // 10 s without a byte ends a session
}

func (c *Config) defaults() {
	set := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	set(&c.MaxStreams, 2048)
	set(&c.QueuePackets, 1024)
	set(&c.QueueBytes, 2<<20)
	if c.IdleTimeout <= 0 {
		c.IdleTimeout = 10 * time.Second
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Member == nil {
		c.Member = func(identity.ID) bool { return true }
	}
}

// queueStanding is more than a client's: where a relay has no processor to write, its clients should send less.
const queueStanding = 250 * time.Millisecond

const (
	// A reader that has brought a destination more than aheadPackets, some three batches, gives up to aheadTurns more
	// turns to its writer. One that has been at the same write for aheadStuck waits for the network, and no turn helps
	// it.
	aheadPackets = 128
	aheadTurns   = 32
	aheadStuck   = 20 * time.Millisecond
)

var (
	errReplaced = errors.New("replaced by a newer session of the same node")
	errKicked   = errors.New("the node is no longer a member")
	errSilent   = errors.New("the node has not been heard for too long")
	errStuck    = errors.New("the other side stopped reading")
)

// A client whose packets are for absent nodes has so many a second handed back, after a burst of as many as it may hear
// the arrival of and more; the rest is dropped.
const (
	refusalsPerSecond = 500
	refusalsBurst     = 4096
)

// maxWatched bounds the absent nodes whose arrival one session hears of.
const maxWatched = 1024

// Server relays between the nodes that have a session with it.
type Server struct {
	cfg   Config
	pool  wire.PacketPool
	load  wire.Load
	start time.Time

	limits atomic.Pointer[Limits]

	mu       sync.RWMutex
	sessions map[identity.ID]*session
	watchers map[identity.ID]map[*session]struct{} // by absent node
	streams  streamTable
	closed   bool

	rate rateMeter // of keepTime

	stop     chan struct{}
	counters counters
}

type counters struct{ packets, bytes, unroutable, dropped, replaced, refused, limited atomic.Uint64 }

// session is one node's connection. Its reader runs in HandleSession.
type session struct {
	*wire.Conn
	id       identity.ID
	watched  map[identity.ID]struct{} // guarded by Server.mu
	finished chan struct{}            // closed when its reader forwards nothing any more
	quota    quota                    // of its reader
	began    time.Time
	rate     rateMeter // of keepTime

	questions *rate.Limiter              // of its reader, as the next; nil: none was asked yet
	refusals  *rate.Limiter              // packets for absent nodes that are handed back
	shown     atomic.Pointer[netip.Addr] // where another connection of the node came from

	rxPackets, rxBytes, limited atomic.Uint64
}

// New makes a relay and starts its timekeeper; Close ends it.
func New(cfg Config) *Server {
	cfg.defaults()
	s := &Server{
		cfg:      cfg,
		start:    time.Now(),
		sessions: map[identity.ID]*session{},
		watchers: map[identity.ID]map[*session]struct{}{},
		streams:  newStreamTable(),
		stop:     make(chan struct{}),
	}
	if cfg.UDP != nil {
		cfg.UDP.Attach(cfg.Self, s.udpSession)
	}
	s.SetLimits(cfg.Limits)
	go s.keepTime()
	return s
}

func (s *Server) now() time.Duration { return time.Since(s.start) }

// HandleSession serves the session of a node that has proven its identity, and returns when it ends.
// The handshake must be complete. It owns conn.
func (s *Server) HandleSession(conn *tls.Conn, peer identity.ID) {
	q := wire.NewQueue(&s.pool, s.cfg.QueuePackets, s.cfg.QueueBytes, queueStanding)
	x := &session{
		Conn:     wire.NewConn(conn, q, &s.load, s.now),
		id:       peer,
		watched:  map[identity.ID]struct{}{},
		finished: make(chan struct{}),
		began:    time.Now(),
	}
	defer close(x.finished)
	x.Queue.PushControl(func(b []byte) []byte {
		return wire.AppendHello(b, wire.Hello{
			Version:     1,
			QueueBytes:  uint32(s.cfg.QueueBytes),
			QueueCount:  uint32(s.cfg.QueuePackets),
			Streams:     uint16(min(s.limits.Load().MaxStreamsPerClient, 65535)),
			IdleSeconds: uint16(min(s.cfg.IdleTimeout/time.Second, 65535)),
			UDP:         s.cfg.UDP != nil,
		})
	})
	if err := s.register(x); err != nil {
		s.counters.refused.Add(1)
		x.End(err)
		x.Queue.Discard()
		s.cfg.Log.Warn("relay session refused", "node", peer, "error", err)
		return
	}
	defer s.unregister(x)
	if !s.cfg.Member(peer) {
		x.End(errKicked)
	}
	if s.cfg.UDP != nil {
		s.cfg.UDP.SessionBegan(x)
	}
	s.cfg.Log.Debug("relay session open", "node", peer, "address", conn.RemoteAddr())
	go x.WriteLoop()
	x.End(s.readLoop(x))
	x.Queue.Discard()
	s.counters.dropped.Add(x.Queue.Dropped())
	s.cfg.Log.Debug("relay session ended", "node", peer, "reason", x.Why())
}

func (s *Server) register(x *session) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.sessions[x.id]
	switch {
	case s.closed:
		return wire.ErrClosed
	case old == nil && len(s.sessions) >= s.limits.Load().MaxSessions:
		return fmt.Errorf("this relay has reached its limit of %d sessions", s.limits.Load().MaxSessions)
	case old == nil && s.pool.Used.Load()+sessionCost > s.pool.Limit.Load():
		return fmt.Errorf("this relay has reached its limit of %d MiB of memory", s.pool.Limit.Load()>>20)
	case old != nil:
		s.counters.replaced.Add(1)
		s.unwatch(old)
		old.End(errReplaced)
	}
	s.pool.Used.Add(sessionCost)
	s.sessions[x.id] = x
	for w := range s.watchers[x.id] {
		delete(w.watched, x.id)
		w.Queue.PushControl(func(b []byte) []byte { return wire.AppendNode(b, wire.FrameHere, x.id) })
	}
	delete(s.watchers, x.id)
	return nil
}

func (s *Server) unregister(x *session) {
	s.pool.Used.Add(-sessionCost)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[x.id] == x {
		delete(s.sessions, x.id)
	}
	s.unwatch(x)
}

// unwatch forgets whom a session waits for. The caller holds mu.
func (s *Server) unwatch(x *session) {
	for id := range x.watched {
		delete(s.watchers[id], x)
		if len(s.watchers[id]) == 0 {
			delete(s.watchers, id)
		}
	}
	clear(x.watched)
}

func (s *Server) session(id identity.ID) *session {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.sessions[id]
}

// udpSession is session for the UDP relay, whose nil is the interface's.
func (s *Server) udpSession(id identity.ID) udp.Session {
	if x := s.session(id); x != nil {
		return x
	}
	return nil
}

// Node is whose session it is.
func (x *session) Node() identity.ID { return x.id }

// PushControl queues a control frame that add appends. It is refused when too many wait already.
func (x *session) PushControl(add func([]byte) []byte) bool { return x.Queue.PushControl(add) }

// waiting tells how many of WireGuard's packets wait for the client.
func (x *session) waiting() int {
	x.Queue.Lock()
	defer x.Queue.Unlock()
	return x.Queue.Waiting()
}

// readLoop forwards what a node sends, until its session ends.
func (s *Server) readLoop(x *session) error {
	r := wire.NewFrameReader()
	f := forwarder{s: s, from: x}
	turn := 0
	defer f.flush() // a burst that ends with a broken frame began with whole ones
	for {
		n, err := r.Fill(x.TLS)
		if err != nil {
			return fmt.Errorf("read: %w", err)
		}
		f.now = s.now()
		x.Read(f.now, n)
		for {
			t, body, ok, err := r.Next()
			if err != nil {
				return err
			}
			if !ok {
				break
			}
			if err := f.frame(t, body); err != nil {
				return err
			}
		}
		packets := f.flush()
		x.quota.follow(s.limits.Load())
		if d := x.quota.take(f.now, n, packets); d > 0 {
			s.counters.limited.Add(1)
			x.limited.Add(1)
			x.pause(d)
		}
		if turn += n; turn >= wire.TurnBytes {
			turn = 0
			f.yield()
		}
	}
}

// forwarder moves the packets of one read burst. It locks a destination once per run of packets for it,
// and wakes each destination once.
type forwarder struct {
	s              *Server
	from           *session
	to             *session // the destination whose queue is locked
	now            time.Duration
	touched        []*session
	ahead          *session // the last destination of this turn with more than aheadPackets waiting
	packets, bytes uint64
}

func (f *forwarder) frame(t wire.FrameType, body []byte) error {
	if t == wire.FrameData {
		f.data(body)
		return nil
	}
	f.release()
	switch {
	case t == wire.FramePing:
		token := wire.DecodeToken(body)
		f.from.Queue.PushControl(func(b []byte) []byte { return wire.AppendToken(b, wire.FramePong, token) })
	case f.s.cfg.UDP != nil && (t == wire.FrameReserve || t == wire.FrameFailed || t == wire.FrameGiveUp):
		f.s.cfg.UDP.TakeFrame(f.from, t, body)
	case t == wire.FrameForward:
		f.forward(body)
	case t == wire.FrameForwarded:
		f.forwarded(body)
	case t == wire.FrameWhere:
		f.s.where(f.from, wire.DecodeNode(body))
	case t == wire.FrameWindow:
		f.from.Queue.Grant(wire.DecodeWindow(body))
	case t >= wire.Ignorable:
	default:
		return fmt.Errorf("%w: a client may not send frame type 0x%02x", wire.ErrProtocol, byte(t))
	}
	return nil
}

func (f *forwarder) data(body []byte) {
	node, channel, payload := wire.DecodeData(body)
	if len(payload) == 0 && channel == wire.ChannelWireGuard { // a question: is that node here?
		f.release()
		if f.s.session(node) == nil {
			f.refuse(node, channel, nil)
			return
		}
		f.s.answerHere(f.from, node)
		return
	}
	if f.to == nil || f.to.id != node {
		f.release()
		to := f.s.session(node)
		if to == nil {
			f.refuse(node, channel, payload)
			return
		}
		to.Queue.Lock()
		f.to = to
	}
	// The source is who sits at this connection, whatever the frame says.
	f.to.Queue.Add(f.now, f.from.id, channel, payload)
	f.packets++
	f.bytes += uint64(len(payload))
}

// refuse hands a packet back, or drops it when the client has sent too many for nodes that are not here: it has been
// told, and each costs a lock that all sessions need.
func (f *forwarder) refuse(node identity.ID, channel byte, payload []byte) {
	x := f.from
	if x.refusals == nil {
		x.refusals = rate.NewLimiter(refusalsPerSecond, refusalsBurst)
	}
	if !x.refusals.Allow() {
		f.s.counters.unroutable.Add(1)
		return
	}
	f.s.gone(x, node, channel, payload)
}

// release unlocks the present destination.
func (f *forwarder) release() {
	if f.to == nil {
		return
	}
	if f.to.Queue.Waiting() > aheadPackets {
		f.ahead = f.to
	}
	f.to.Queue.Unlock()
	if !slices.Contains(f.touched, f.to) {
		f.touched = append(f.touched, f.to)
	}
	f.to = nil
}

func (f *forwarder) flush() (packets int) {
	f.release()
	for i, t := range f.touched {
		t.Queue.Kick()
		f.touched[i] = nil
	}
	f.touched = f.touched[:0]
	f.s.counters.packets.Add(f.packets)
	f.s.counters.bytes.Add(f.bytes)
	f.from.rxPackets.Add(f.packets)
	f.from.rxBytes.Add(f.bytes)
	packets = int(f.packets)
	f.packets, f.bytes = 0, 0
	return packets
}

// yield lets others run; and again while a destination's writer has much to do and could do it, if it had its turn. A
// reader that got further ahead of it would only fill its queue, of which then the oldest is dropped.
func (f *forwarder) yield() {
	runtime.Gosched()
	for range aheadTurns {
		if f.ahead == nil || f.ahead.waiting() <= aheadPackets || f.ahead.Stuck(f.s.now()) > aheadStuck {
			break
		}
		runtime.Gosched()
	}
	f.ahead = nil
}

// answerHere answers a client that asks whether a node has a session here, and it has.
func (s *Server) answerHere(x *session, node identity.ID) {
	x.Queue.PushControl(func(b []byte) []byte { return wire.AppendNode(b, wire.FrameHere, node) })
}

// gone hands a packet back whose destination has no session here, and remembers to say when it comes.
func (s *Server) gone(x *session, node identity.ID, channel byte, payload []byte) {
	s.counters.unroutable.Add(1)
	x.Queue.PushControl(func(b []byte) []byte { return wire.AppendRefused(b, node, channel, payload) })
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[x.id] != x || len(x.watched) >= maxWatched {
		return
	}
	if s.sessions[node] != nil { // it came this moment
		x.Queue.PushControl(func(b []byte) []byte { return wire.AppendNode(b, wire.FrameHere, node) })
		return
	}
	if s.watchers[node] == nil {
		s.watchers[node] = map[*session]struct{}{}
	}
	s.watchers[node][x] = struct{}{}
	x.watched[node] = struct{}{}
}

// Kick ends a node's session and streams, and drops what it still has queued for others. The agent
// calls it when a node is revoked, after its own TLS verification has begun to refuse the node.
func (s *Server) Kick(id identity.ID) {
	s.mu.RLock()
	x := s.sessions[id]
	others := make([]*session, 0, len(s.sessions))
	for _, o := range s.sessions {
		others = append(others, o)
	}
	s.mu.RUnlock()
	if x != nil {
		x.End(errKicked)
		<-x.finished // readers wait for nobody, so this is at once
	}
	for _, o := range others {
		o.Queue.Forget(id)
	}
	s.streams.kick(id)
	if s.cfg.UDP != nil {
		s.cfg.UDP.Kick(id)
	}
}

// keepTime ends sessions that are silent or stuck. One goroutine for all spares a timer per read and write.
func (s *Server) keepTime() {
	tick := time.NewTicker(min(time.Second, s.cfg.IdleTimeout/4))
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-tick.C:
		}
		now := s.now()
		s.mu.RLock()
		s.rate.update(now, s.counters.bytes.Load())
		for _, x := range s.sessions {
			x.rate.update(now, x.rxBytes.Load()+x.Queue.SentBytes())
			switch {
			case x.Silent(now) > s.cfg.IdleTimeout-s.cfg.IdleTimeout/8:
				x.End(errSilent)
			case x.Stuck(now) > min(wire.StuckWrite, s.cfg.IdleTimeout):
				x.End(errStuck)
			}
		}
		s.mu.RUnlock()
	}
}

// Connected reports whether a node has a session here.
func (s *Server) Connected(id identity.ID) bool { return s.session(id) != nil }

// Close ends every session and stream.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return errors.New("relay server: closed already")
	}
	s.closed = true
	close(s.stop)
	for _, x := range s.sessions {
		x.End(wire.ErrClosed)
	}
	s.mu.Unlock()
	s.streams.close()
	if s.cfg.UDP != nil {
		s.cfg.UDP.Close()
	}
	return nil
}
