package client

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/lag"
	"github.com/skeinmesh/skein/relay/wire"
)

// Relay is a relay that a node may use.
type Relay struct {
	ID        identity.ID
	Addresses []string // host:port; tried one after the other, 250 ms apart
	Key       ed25519.PublicKey
	Order     int64 // of its node's admission: among relays equally near, all nodes prefer the lowest
}

// Link is a session with a relay and its round-trip time.
type Link struct {
	Relay identity.ID
	RTT   time.Duration
}

// PoolConfig configures a Pool.
type PoolConfig struct {
	Self identity.ID
	Key  *identity.Key
	// OnPacket receives what peers send, except WireGuard's packets while Proxies exist. It must not block.
	OnPacket func(from identity.ID, channel byte, b []byte)
	// OnStream receives a stream that a peer opened, in a goroutine of its own. Only the relay says who the peer is: the
	// peer must prove its identity inside the stream.
	OnStream func(c net.Conn, from identity.ID)
	// OnReserved is called when a relay's UDP ports for this node and a peer change. It must not block.
	OnReserved func(Reservation)
	// Known, if set, reports whether this node takes part in a reservation with a peer.
	Known func(identity.ID) bool
	// OnNoWay is called when a relay has no session of a node to which a client of this node's own relay has sent
	// packets.
	OnNoWay func(far, client, node identity.ID)
	// Witness, if set, names relays that Attest asks where a peer's packets come from, besides the nearest ones.
	Witness func(relay identity.ID) bool
	// Lag, if set, measures how late this process wakes. The pool adds to it, and reads it before it blames a relay.
	Lag *lag.Meter
	// Control, if set, prepares each socket, such as with SO_MARK.
	Control func(network, address string, c syscall.RawConn) error
	Log     *slog.Logger
}

// ErrNoRelay is returned when no relay can carry to a peer.
var ErrNoRelay = errors.New("no common relay with the peer")

const (
	// A relay's statement that a peer is absent counts until the relay says that the peer has come, or other packets or
	// records of the peer show it. In case the relay's news is lost, it is asked again after goneHold, and in a new
	// session. Each further question waits twice as long, up to goneLong, since a large mesh has many members that are
	// off for days.
	goneHold = 15 * time.Second
	goneLong = 4 * time.Minute
	// goneUnheard is how long such a statement counts after the session was lost, since the relay can then no longer
	// report the peer's return. If the session was given up, the statement no longer counts.
	goneUnheard = time.Minute
	// seenHold is how long a packet from a relay shows that the peer is there. seenUnlisted replaces it when the peer's
	// record lists other relays: that relay may hold a session whose peer is gone, and packets sent there are lost.
	// Packets are noted once a second.
	seenHold     = 30 * time.Second
	seenUnlisted = 3 * time.Second
	// reviewEvery is how long the choice of a peer's relay stands before it is made again.
	reviewEvery = time.Second
	// sendPackets and sendBytes bound the packets that wait for one relay.
	sendPackets = 2048
	sendBytes   = 4 << 20
	maxPeers    = 1 << 16
)

// Pool is a node's sessions with its relays.
type Pool struct {
	cfg      PoolConfig
	start    time.Time
	packets  wire.PacketPool
	load     wire.Load
	ctx      context.Context
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	changed  chan struct{}
	replan   chan struct{}
	planning sync.Mutex

	mu     sync.RWMutex
	relays map[identity.ID]*client
	peers  map[identity.ID]*peerState

	generation atomic.Uint64 // grows when any relay changes
	pending    pendingQueue
	farFound   atomic.Bool
	reserved   *reservations
	questions  questions
	proxies    atomic.Pointer[Proxies]
}

// peerState is what the pool knows about one peer.
type peerState struct {
	id         identity.ID
	generation atomic.Uint64 // of the pool, when current was chosen; 0: choose anew
	review     atomic.Int64
	current    atomic.Pointer[client]
	via        atomic.Pointer[client]    // where the peer's last packets came from
	noted      atomic.Int64              // when via was last noted in seen
	needs      atomic.Pointer[[]*client] // relays to dial when there are packets; nil: none
	farRoute   atomic.Pointer[farRoute]  // used instead of current; nil: none
	quietRoute atomic.Pointer[farRoute]  // like farRoute, for packets that start no session
	here       atomic.Bool               // current is known to reach the peer
	absent     atomic.Bool               // no relay reaches the peer, and one says that it is not there

	mu       sync.Mutex
	listed   map[identity.ID]time.Duration // from the peer's record
	listedAt time.Duration                 // when that record came
	gone     map[identity.ID]absence       // by relay
	seen     map[identity.ID]time.Duration // last packet
	rtt      time.Duration                 // of the current choice
	chosen   time.Duration                 // when another relay was last chosen
	far      farState
}

// absence is a relay's statement that it has no session of a peer.
type absence struct {
	at    time.Duration // when the relay last said so, or was asked
	asked int           // how often it was asked since the last sign that the peer may be back
}

// hold is how long to wait before the relay is asked again.
func (a absence) hold() time.Duration { return min(goneHold<<min(a.asked, 8), goneLong) }

// NewPool makes a pool without relays.
func NewPool(cfg PoolConfig) *Pool {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.OnPacket == nil {
		cfg.OnPacket = func(identity.ID, byte, []byte) {}
	}
	if cfg.OnStream == nil {
		cfg.OnStream = func(c net.Conn, _ identity.ID) { c.Close() }
	}
	if cfg.OnReserved == nil {
		cfg.OnReserved = func(Reservation) {}
	}
	if cfg.Known == nil {
		cfg.Known = func(identity.ID) bool { return true }
	}
	p := &Pool{
		cfg:     cfg,
		start:   time.Now(),
		changed: make(chan struct{}, 1),
		replan:  make(chan struct{}, 1),
		relays:  map[identity.ID]*client{},
		peers:   map[identity.ID]*peerState{},

		reserved: newReservations(),
	}
	p.generation.Store(1)
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.wg.Go(p.manage)
	return p
}

func (p *Pool) now() time.Duration { return time.Since(p.start) }

// SetRelays sets the relays that exist. The pool keeps sessions with the two nearest, and with others while peers that
// these do not reach need them.
func (p *Pool) SetRelays(relays []Relay) {
	p.mu.Lock()
	var drop []*client
	want := map[identity.ID]bool{}
	if p.ctx.Err() != nil {
		relays = nil
	}
	for _, r := range relays {
		want[r.ID] = true
		c := p.relays[r.ID]
		if c != nil && c.relay.Key.Equal(r.Key) {
			c.setAddresses(r.Addresses)
			continue
		}
		if c != nil {
			drop = append(drop, c)
		}
		c = newClient(p, r)
		p.relays[r.ID] = c
		p.wg.Go(c.run)
	}
	for id, c := range p.relays {
		if !want[id] {
			delete(p.relays, id)
			drop = append(drop, c)
		}
	}
	p.mu.Unlock()
	for _, c := range drop {
		c.cancel()
		p.reserved.forget(c.relay.ID)
	}
	p.applyPlan()
	if len(drop) > 0 {
		p.relaysChanged()
	}
}

// SetPeerLinks sets with which relays a peer has sessions, as its record lists them.
func (p *Pool) SetPeerLinks(peer identity.ID, links []Link) {
	s, idle := p.peer(peer), p.idle()
	s.mu.Lock()
	old := s.listed
	var ask []identity.ID
	s.listed, s.listedAt = make(map[identity.ID]time.Duration, len(links)), p.now()
	for _, l := range links {
		s.listed[l.Relay] = max(l.RTT, 1)
		word, isGone := s.gone[l.Relay]
		if isGone {
			ask = append(ask, l.Relay) // the record may be newer than the relay's statement, or only late
			s.gone[l.Relay] = absence{at: word.at}
		}
		if idle[l.Relay] != nil { // without a session, the relay can neither be asked nor report
			delete(s.gone, l.Relay)
			delete(s.far.refused, farKey{far: l.Relay})
		}
	}
	for id := range old {
		if _, has := s.listed[id]; !has {
			delete(s.seen, id) // the peer says that it has left that relay, or cannot reach it any more
			if s.far.in.via == id {
				s.far.in = farRoute{}
			}
		}
	}
	s.mu.Unlock()
	s.via.Store(nil)
	s.generation.Store(0)
	for _, id := range ask {
		_ = p.SendVia(id, peer, wire.ChannelWireGuard, nil) // without a session, askAgain asks once there is one
	}
	p.release()
}

// Forget drops what is known about a peer.
func (p *Pool) Forget(peer identity.ID) {
	p.reserved.forget(peer)
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.peers, peer)
}

func (p *Pool) peer(id identity.ID) *peerState {
	p.mu.RLock()
	s := p.peers[id]
	p.mu.RUnlock()
	if s != nil {
		return s
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if s = p.peers[id]; s == nil {
		s = &peerState{
			id:     id,
			listed: map[identity.ID]time.Duration{},
			gone:   map[identity.ID]absence{},
			seen:   map[identity.ID]time.Duration{},
		}
		// A relay that invents senders must not fill the memory.
		if len(p.peers) < maxPeers {
			p.peers[id] = s
		}
	}
	return s
}

// route returns the client of the relay that reaches a peer, or nil. It usually takes no lock.
func (p *Pool) route(s *peerState, now time.Duration) *client {
	if s.generation.Load() == p.generation.Load() && now < time.Duration(s.review.Load()) {
		return s.current.Load()
	}
	return p.choose(s, now)
}

// carry is route for a packet: if no session is known to reach the peer, other relays are dialed.
func (p *Pool) carry(s *peerState, now time.Duration) *client {
	c := p.route(s, now)
	if others := s.needs.Load(); others != nil {
		for _, o := range *others {
			o.demand(now)
		}
	}
	return c
}

func (p *Pool) choose(s *peerState, now time.Duration) *client {
	generation := p.generation.Load()
	options, clients := p.options(s, now, true)
	idle := p.idle() // before the peer's mutex, since other functions lock the two in this order
	s.mu.Lock()
	defer s.mu.Unlock()
	var current identity.ID
	if c := s.current.Load(); c != nil {
		current = c.relay.ID
	}
	o, ok := pick(options, current, s.chosen > 0 && now-s.chosen < settled, p.cfg.Lag.Late(time.Now()))
	if o.relay != current {
		s.chosen = now
	}
	s.current.Store(clients[o.relay])
	s.rtt = o.rtt()
	s.needs.Store(s.dial(idle, o, ok))
	var far *farRoute
	if !ok || o.know != knownHere || clients[o.relay].queue() == nil {
		far = s.farWay(options, clients, idle, now, false)
	}
	s.here.Store(ok && o.know == knownHere && o.healthy)
	s.quietRoute.Store(far)
	if far == nil && !s.here.Load() {
		s.quietRoute.Store(s.farWay(options, clients, idle, now, true))
	}
	if s.farRoute.Swap(far) == nil && far != nil {
		p.farFound.Store(true)
		p.planAgain() // waiting packets can go now
		p.signal()
	}
	absent := !ok && far == nil && slices.ContainsFunc(options, func(o option) bool { return o.know == knownGone })
	turned := s.absent.Swap(absent) != absent
	s.review.Store(int64(now + reviewEvery))
	s.generation.Store(generation)
	if o.relay != current || turned {
		p.signal()
	}
	if !ok {
		return nil
	}
	return clients[o.relay]
}

// idle lists the relays that the pool has no session with.
func (p *Pool) idle() map[identity.ID]*client {
	p.mu.RLock()
	defer p.mu.RUnlock()
	var idle map[identity.ID]*client
	for id, c := range p.relays {
		if c.queue() == nil {
			if idle == nil {
				idle = make(map[identity.ID]*client)
			}
			idle[id] = c
		}
	}
	return idle
}

// dial returns the relays without a session that a peer's packets need: those where the peer should be, and if no relay
// is left to try, all that have not said that it is gone. The caller holds the peer's mutex.
func (s *peerState) dial(idle map[identity.ID]*client, best option, ok bool) *[]*client {
	if ok && best.know == knownHere && best.healthy {
		return nil
	}
	var dial []*client
	for id, c := range idle {
		_, isGone := s.gone[id]
		if !isGone && (s.listed[id] != 0 || !ok) {
			dial = append(dial, c)
		}
	}
	if len(dial) == 0 {
		return nil
	}
	return &dial
}

// options returns the relays for a peer. With usable, these are only the relays with a session and, since they can be
// dialed, those where the peer is known to be.
func (p *Pool) options(s *peerState, now time.Duration, usable bool) ([]option, map[identity.ID]*client) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	options := make([]option, 0, len(p.relays))
	clients := make(map[identity.ID]*client, len(p.relays))
	for id, c := range p.relays {
		st := c.state()
		word, isGone := s.gone[id]
		said := word.at
		if isGone && !st.connected && (now-said >= s.far.goneFor(id, said) || said <= c.lastGivenUp() ||
			s.listedSince(id, said)) {
			delete(s.gone, id)
			isGone = false
		}
		if usable && !st.connected && (isGone || s.listed[id] == 0 || c.failing()) {
			continue
		}
		o := option{relay: id, healthy: st.connected && !st.suspect, own: cmp.Or(st.published, c.lastRTT()),
			peer: s.listed[id], know: unlisted}
		switch {
		case isGone:
			o.know = knownGone
			if now-said > word.hold() && st.connected {
				s.gone[id] = absence{now, word.asked + 1}
				c.send(now, s.id, wire.ChannelWireGuard, nil)
			}
		case o.peer != 0 || s.seenAt(id, now):
			o.know = knownHere
		case len(s.listed) == 0:
			o.know = unknown
		}
		options = append(options, o)
		clients[id] = c
	}
	return options, clients
}

// seenAt reports whether the peer's packets came from a relay recently. The caller holds the peer's mutex.
func (s *peerState) seenAt(relay identity.ID, now time.Duration) bool {
	hold := seenHold
	if len(s.listed) > 0 && s.listed[relay] == 0 {
		hold = seenUnlisted
	}
	seen, has := s.seen[relay]
	return has && now-seen < hold
}

// listedSince reports whether a record of the peer that came after then lists a relay. The caller holds the peer's
// mutex.
func (s *peerState) listedSince(relay identity.ID, then time.Duration) bool {
	return s.listed[relay] != 0 && then < s.listedAt
}

// Choose returns the relay that packets to a peer go by now, and the RTT over both hops as far as it is known.
func (p *Pool) Choose(peer identity.ID) (relay identity.ID, rtt time.Duration, ok bool) {
	s := p.peer(peer)
	c := p.route(s, p.now())
	if f := s.farRoute.Load(); f != nil {
		c = f.c
	}
	if c == nil {
		return identity.ID{}, 0, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return c.relay.ID, s.rtt, true
}

// Absent reports whether no relay reaches a peer, and relays say that it is not there.
func (p *Pool) Absent(peer identity.ID) bool {
	s := p.peer(peer)
	p.route(s, p.now())
	return s.absent.Load()
}

// Ask asks the relay that would be used whether the peer is there; if it is not, the next one is asked. Changed and
// Choose show the result.
func (p *Pool) Ask(peer identity.ID) {
	now := p.now()
	p.carry(p.peer(peer), now).send(now, peer, wire.ChannelWireGuard, nil)
}

// askAgain asks a relay, at the start of a session, about all peers that it called absent before.
func (p *Pool) askAgain(c *client) {
	p.mu.RLock()
	var ask []identity.ID
	for id, s := range p.peers {
		s.mu.Lock()
		if word, isGone := s.gone[c.relay.ID]; isGone {
			ask = append(ask, id)
			s.gone[c.relay.ID] = absence{at: word.at}
		}
		s.mu.Unlock()
	}
	p.mu.RUnlock()
	for _, id := range ask {
		c.send(p.now(), id, wire.ChannelWireGuard, nil)
	}
}

// Send queues a packet for a peer at the best relay. While no relay reaches the peer, WireGuard's packets and signals
// are kept for three seconds, so that a first handshake is not lost. Gossip, which repeats itself, gets ErrNoRelay.
func (p *Pool) Send(peer identity.ID, channel byte, b []byte) error {
	if len(b) > wire.MaxPayload {
		return fmt.Errorf("send %d bytes to node %s: a relay carries at most %d", len(b), peer, wire.MaxPayload)
	}
	now := p.now()
	s := p.peer(peer)
	for {
		released := p.pending.released()
		if p.send(s, now, channel, b) {
			return nil
		}
		if p.ctx.Err() != nil {
			return fmt.Errorf("send to node %s: relay pool: %w", peer, wire.ErrClosed)
		}
		if channel == wire.ChannelGossip {
			return fmt.Errorf("send to node %s: %w", peer, ErrNoRelay)
		}
		if p.pending.keep(now, wire.Unsent{Node: peer, Channel: channel, Payload: slices.Clone(b)}, released) {
			return nil
		}
	}
}

// SendVia queues a packet at one relay, whichever Choose returns.
func (p *Pool) SendVia(relay, peer identity.ID, channel byte, b []byte) error {
	if len(b) > wire.MaxPayload {
		return fmt.Errorf("send %d bytes to node %s: a relay carries at most %d", len(b), peer, wire.MaxPayload)
	}
	p.mu.RLock()
	c := p.relays[relay]
	p.mu.RUnlock()
	if c.send(p.now(), peer, channel, b) {
		return nil
	}
	return fmt.Errorf("send to node %s: no session with relay %s", peer, relay)
}

// resend tries again to send packets that a relay could not deliver.
func (p *Pool) resend(all []wire.Unsent) {
	now := p.now()
	for _, w := range all {
		s := p.peer(w.Node)
		if len(w.Payload) == 0 { // a question; only relays that have not answered get it, or it would circulate for ever
			p.carry(s, now).send(now, w.Node, w.Channel, nil)
			continue
		}
		for {
			released := p.pending.released()
			if p.send(s, now, w.Channel, w.Payload) || w.Channel == wire.ChannelGossip || p.pending.keep(now, w, released) {
				break
			}
		}
	}
}

// release sends the kept packets, because something has changed.
func (p *Pool) release() { p.resend(p.pending.drain(p.now())) }

// relaysChanged makes the choice for every peer due again.
func (p *Pool) relaysChanged() {
	p.generation.Add(1)
	p.signal()
	p.release()
	p.planAgain()
}

func (p *Pool) signal() {
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

// absent notes that a relay has no session of a peer, and sends the refused packets another way.
func (p *Pool) absent(c *client, peer identity.ID, refused []wire.Unsent) {
	s := p.peer(peer)
	s.mu.Lock()
	s.gone[c.relay.ID] = absence{p.now(), s.gone[c.relay.ID].asked}
	delete(s.far.refused, farKey{far: c.relay.ID}) // this session will report the peer's return
	if s.far.in.via == c.relay.ID {
		s.far.in = farRoute{}
	}
	delete(s.seen, c.relay.ID)
	s.mu.Unlock()
	s.via.Store(nil)
	s.generation.Store(0)
	p.route(s, p.now())
	p.resend(refused)
}

// present notes that a peer has a session with a relay.
func (p *Pool) present(c *client, s *peerState, now time.Duration) {
	s.mu.Lock()
	_, wasGone := s.gone[c.relay.ID]
	wasSeen := s.seenAt(c.relay.ID, now)
	delete(s.gone, c.relay.ID)
	s.seen[c.relay.ID] = now
	s.mu.Unlock()
	s.noted.Store(int64(now))
	s.via.Store(c)
	if wasGone || !wasSeen {
		s.generation.Store(0)
		p.signal()
		p.release()
	}
}

// handleHere handles a relay's statement that it has a session of a peer. If the peer's record lists other relays, that
// session may be one whose peer is gone. So the statement only ends an absence; only a packet of the peer makes that
// relay as good as a listed one.
func (p *Pool) handleHere(c *client, s *peerState, now time.Duration) {
	s.mu.Lock()
	elsewhere := len(s.listed) > 0 && s.listed[c.relay.ID] == 0
	_, wasGone := s.gone[c.relay.ID]
	if elsewhere {
		delete(s.gone, c.relay.ID)
	}
	s.mu.Unlock()
	switch {
	case !elsewhere:
		p.present(c, s, now)
	case wasGone:
		s.generation.Store(0)
		p.signal()
		p.release()
	}
}

// heardFrom notes by which relay a packet came, at most once a second.
func (p *Pool) heardFrom(c *client, s *peerState, now time.Duration) {
	if s.via.Load() != c || now-time.Duration(s.noted.Load()) > time.Second {
		p.present(c, s, now)
	}
}

// Retry dials a relay now instead of after its backoff, because something shows that its host is up.
func (p *Pool) Retry(relay identity.ID) {
	p.mu.RLock()
	c := p.relays[relay]
	p.mu.RUnlock()
	if c != nil && !c.state().connected {
		c.again()
	}
}

// Links lists the healthy sessions that are to last, by relay. RTTs change only when the change matters, so that a
// record with these links does not change with every ping.
func (p *Pool) Links() []Link {
	p.mu.RLock()
	defer p.mu.RUnlock()
	var links, passing []Link
	for id, c := range p.relays {
		st := c.state()
		switch {
		case !st.connected || st.suspect || st.published == 0:
		case c.needIs(needWarm):
			links = append(links, Link{id, st.published})
		default: // the session ends when its need does
			passing = append(passing, Link{id, st.published})
		}
	}
	if len(links) < warmRelays {
		links = append(links, passing...)
	}
	slices.SortFunc(links, func(a, b Link) int { return slices.Compare(a.Relay[:], b.Relay[:]) })
	return links
}

// Changed signals that sessions, their health or RTT, or a peer's relay have changed. Signals coalesce; there may be
// one consumer.
func (p *Pool) Changed() <-chan struct{} { return p.changed }

// Close ends all sessions and waits for their goroutines.
func (p *Pool) Close() error {
	p.cancel()
	p.SetRelays(nil)
	p.wg.Wait()
	return nil
}

// pendingQueue keeps the few packets that no relay can carry at the moment.
type pendingQueue struct {
	mu       sync.Mutex
	kept     []kept
	releases uint64
}

type kept struct {
	at time.Duration
	wire.Unsent
}

const (
	pendingPackets = 256
	pendingAge     = 3 * time.Second
)

// released counts the releases so far, for keep.
func (q *pendingQueue) released() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.releases
}

// keep returns false if there was a release since the caller began to try: the release came too early for this packet,
// and the change may have made a way for it.
func (q *pendingQueue) keep(now time.Duration, w wire.Unsent, released uint64) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.releases != released {
		return false
	}
	if len(q.kept) >= pendingPackets {
		q.kept = slices.Delete(q.kept, 0, 1)
	}
	q.kept = append(q.kept, kept{now, w})
	return true
}

// drain empties the queue and returns the packets that are not too old, the oldest first.
func (q *pendingQueue) drain(now time.Duration) []wire.Unsent {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.releases++
	var all []wire.Unsent
	for _, k := range q.kept {
		if now-k.at <= pendingAge {
			all = append(all, k.Unsent)
		}
	}
	q.kept = q.kept[:0]
	return all
}
