package client

import (
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

// Packets go over two relays if two nodes share no relay that both can reach: the sender's relay passes the packet to a
// relay that the peer's record lists. A relay delivers what another relay passes to it only to its own clients, so no
// packet takes a third hop or a loop.

const (
	// farHold is how long packets to a peer go back the way that the peer's packets came. It is also the longest time for
	// which a relay's statement counts that it has no session with another one.
	farHold = 30 * time.Second
	// farUnlisted replaces farHold for a relay that the peer's record does not list: long enough for answers. Such a
	// relay may hold a session whose peer is gone, and packets sent there are lost.
	farUnlisted = time.Second
	// refusalFirst is how long a relay's first statement counts that a way does not lead to a peer; each further one
	// counts twice as long.
	refusalFirst = 500 * time.Millisecond

	dialPatience = 500 * time.Millisecond // if a relay takes longer to dial, packets go over two relays meanwhile
	maxEarly     = 64                     // packets that wait for a session with a far relay
)

// farRoute is a way over two relays.
type farRoute struct {
	c   *client
	via identity.ID // the far relay
}

// farKey names a way over two relays. If near is zero, it stands for every way to the far one.
type farKey struct{ near, far identity.ID }

// farState is what is known of a peer's ways over two relays. The peer's mutex guards it.
type farState struct {
	in      farRoute // the way by which the peer's packets came last
	at      time.Duration
	refused map[farKey]refusal
}

// maxRefusals bounds the entries that a relay can cause by inventing other relays.
const maxRefusals = 64

// refusal is a relay's statement that a way over two relays does not lead to a peer. No relay announces, over two
// relays, that the way works again, so this node tries again: soon at first, since most refusals come while something
// starts.
type refusal struct{ at, hold time.Duration }

func (r refusal) stands(now time.Duration) bool { return now-r.at < r.hold }

// next returns the refusal after one more such statement, which counts for most at the longest. While a refusal stands,
// further ones concern packets that were sent before it, and change nothing. Long after it has lapsed, the next one is
// a first one.
func (r refusal) next(now, most time.Duration) refusal {
	switch {
	case r.stands(now):
		return r
	case r.hold == 0 || now-r.at > r.hold+most:
		return refusal{now, refusalFirst}
	}
	return refusal{now, min(2*r.hold, most)}
}

// refuse notes a relay's refusal of a way, and returns the refusal that holds now.
func (f *farState) refuse(k farKey, now, most time.Duration) refusal {
	if f.refused == nil || len(f.refused) >= maxRefusals {
		f.refused = map[farKey]refusal{}
	}
	f.refused[k] = f.refused[k].next(now, most)
	return f.refused[k]
}

// goneFor returns how long the statement counts that a peer is not at a relay, while there is no session with that
// relay.
func (f *farState) goneFor(relay identity.ID, said time.Duration) time.Duration {
	if r := f.refused[farKey{far: relay}]; r.at == said && r.hold > 0 {
		return r.hold // another relay reported it
	}
	return goneUnheard
}

// comesBy reports whether the peer's packets came over two relays recently, and the peer is probably still there. The
// caller holds the peer's mutex.
func (s *peerState) comesBy(now time.Duration) bool {
	hold := farHold
	if len(s.listed) > 0 && s.listed[s.far.in.via] == 0 {
		hold = farUnlisted
	}
	return s.far.in.c != nil && now-s.far.at < hold
}

// farWay returns a way over two relays: back the way that the peer's packets came, or by this node's nearest relay to a
// relay that the peer's record lists. With that far relay this node has no session and can have none soon; with quiet,
// it wants none. The caller holds the peer's mutex.
func (s *peerState) farWay(options []option, clients, idle map[identity.ID]*client, now time.Duration,
	quiet bool) *farRoute {
	if back := s.far.in; s.comesBy(now) && back.c.queue() != nil && !back.c.state().suspect {
		return &back
	}
	var best *farRoute
	var least time.Duration
	for far, rtt := range s.listed {
		if _, isGone := s.gone[far]; isGone || idle[far] == nil || !quiet && !idle[far].outOfReach(now) {
			continue
		}
		for _, o := range options {
			if !o.healthy || o.relay == far || clients[o.relay].queue() == nil {
				continue
			}
			if s.far.refused[farKey{o.relay, far}].stands(now) {
				continue
			}
			sum := o.own + rtt
			if best == nil || sum < least || sum == least && slices.Compare(far[:], best.via[:]) < 0 {
				best, least = &farRoute{clients[o.relay], far}, sum
			}
		}
	}
	return best
}

// outOfReach reports whether no session with this relay is to be expected soon.
func (c *client) outOfReach(now time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.status.connected && (c.lastErr != nil || c.need != needNone && now-c.needAt > dialPatience)
}

// nextHop is where a peer's packets go now: to a relay's session, and on to a second relay if two is set.
type nextHop struct {
	c   *client
	q   *wire.Queue // nil: there is no session
	far identity.ID
	two bool
}

// nextHop finds where a peer's packets go now. Gossip starts no session: if no existing session is known to reach the
// peer, gossip goes over two relays.
func (p *Pool) nextHop(s *peerState, now time.Duration, channel byte) nextHop {
	c, f := (*client)(nil), (*farRoute)(nil)
	if channel == wire.ChannelGossip {
		c = p.route(s, now)
		if !s.here.Load() {
			f = s.quietRoute.Load()
		}
	} else {
		c = p.carry(s, now)
		f = s.farRoute.Load()
	}
	if f != nil {
		if q := f.c.queue(); q != nil {
			return nextHop{f.c, q, f.via, true}
		}
	}
	return nextHop{c: c, q: c.queue()}
}

// send queues one packet to a peer, and returns false if there is no session for it.
func (p *Pool) send(s *peerState, now time.Duration, channel byte, b []byte) bool {
	h := p.nextHop(s, now, channel)
	if h.q == nil {
		return false
	}
	h.q.Lock()
	ok := h.add(now, s.id, channel, b)
	h.q.Unlock()
	h.q.Kick()
	if ok && channel == wire.ChannelWireGuard {
		h.c.stir()
	}
	return ok
}

// add queues a packet for a node. The caller holds the queue's lock.
func (h nextHop) add(now time.Duration, node identity.ID, channel byte, b []byte) bool {
	if h.two {
		if len(b) > wire.MaxFarPayload {
			return false
		}
		return h.q.AddKind(now, wire.FrameForward, h.far, node, channel, b)
	}
	return h.q.Add(now, node, channel, b)
}

// heardFar notes the way of a packet that came over two relays.
func (p *Pool) heardFar(c *client, via, from identity.ID, now time.Duration) {
	s := p.peer(from)
	s.mu.Lock()
	isNew := s.far.in != farRoute{c, via} || !s.comesBy(now)
	s.far.in, s.far.at = farRoute{c, via}, now
	delete(s.gone, via) // the peer is there
	delete(s.far.refused, farKey{far: via})
	delete(s.far.refused, farKey{c.relay.ID, via})
	s.mu.Unlock()
	if isNew {
		s.generation.Store(0)
		p.signal()
		p.release()
	}
}

// noWay handles a relay's report that it could not pass a packet on.
func (p *Pool) noWay(c *client, body []byte) {
	a, node, code := wire.DecodeNoWay(body)
	if code == wire.NoWayOrigin {
		if p.cfg.OnNoWay != nil {
			p.cfg.OnNoWay(c.relay.ID, a, node)
		}
		return
	}
	s, now := p.peer(node), p.now()
	key, most := farKey{c.relay.ID, a}, farHold
	if code == wire.NoWayGone {
		key, most = farKey{far: a}, goneUnheard
	}
	// If this node has a session with that relay, the relay answers itself, and reports when the peer comes.
	tells := code == wire.NoWayGone && p.hasSession(a)
	s.mu.Lock()
	before := s.far.refused[key]
	r := before
	if !tells {
		r = s.far.refuse(key, now, most)
	}
	if !tells && code == wire.NoWayGone {
		s.gone[a] = absence{at: r.at}
	}
	if s.far.in == (farRoute{c, a}) {
		s.far.in = farRoute{}
	}
	s.mu.Unlock()
	s.generation.Store(0)
	p.signal()
	if r != before {
		time.AfterFunc(r.hold, func() { p.wayReopens(s) })
	}
}

func (p *Pool) hasSession(relay identity.ID) bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.relays[relay].queue() != nil
}

// wayReopens makes the pool try a way to a peer again, after a relay's refusal has lapsed.
func (p *Pool) wayReopens(s *peerState) {
	if p.ctx.Err() != nil {
		return
	}
	s.generation.Store(0)
	p.signal()
	p.release()
}

// Forward passes a packet of a client of this node's own relay to another relay. It returns false if that relay is
// unknown or cannot be reached. While the session is being dialed, up to maxEarly packets wait.
func (p *Pool) Forward(relay, origin, node identity.ID, channel byte, b []byte) bool {
	p.mu.RLock()
	c := p.relays[relay]
	p.mu.RUnlock()
	if c == nil || relay == p.cfg.Self {
		return false
	}
	now := p.now()
	c.demand(now) // even if the last dial failed: only this may dial it again
	if c.failing() {
		return false
	}
	q := c.queue()
	if q == nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.early) < maxEarly {
			c.early = append(c.early, early{now, origin, node, channel, slices.Clone(b)})
		}
		return true
	}
	q.Lock()
	ok := q.AddKind(now, wire.FrameForwarded, origin, node, channel, b)
	q.Unlock()
	q.Kick()
	return ok
}

type early struct {
	at           time.Duration
	origin, node identity.ID
	channel      byte
	b            []byte
}

// sendEarly sends the packets that waited for the session.
func (c *client) sendEarly() {
	c.mu.Lock()
	all := c.early
	c.early = nil
	c.mu.Unlock()
	now := c.pool.now()
	for _, e := range all {
		if now-e.at < pendingAge {
			c.pool.Forward(c.relay.ID, e.origin, e.node, e.channel, e.b)
		}
	}
}
