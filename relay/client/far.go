package client

import (
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

// Two relays in a row, for nodes that share none that both can reach: the sender's relay hands the packet to the relay
// that the peer's record lists. A relay delivers what another relay hands it to its own clients only, so that no packet
// makes a third hop or a loop.

const (
	// farHold is how long a peer's packets go back by the way that its own came, and the most that a relay's word counts
	// that it has no session with another.
	farHold = 30 * time.Second
	// farUnlisted is how long they go back so by a relay that the peer's record does not list: enough for answers. Such a
	// relay may hold a session whose peer is gone, and swallows what is sent there.
	farUnlisted = time.Second
	// refusalFirst is how long a relay's first word that a way does not lead to a peer counts; each further one counts
	// twice as long.
	refusalFirst = 500 * time.Millisecond

	dialPatience = 500 * time.Millisecond // a relay that takes longer to dial is gone round meanwhile
	maxEarly     = 64                     // packets that wait for a session with a far relay
)

// farRoute is a way over two relays.
type farRoute struct {
	c   *client
	via identity.ID // the far relay
}

// farKey names a way. Without a near relay it is every way to the far one.
type farKey struct{ near, far identity.ID }

// farState is what is known of a peer's ways over two relays. The peer's lock guards it.
type farState struct {
	in      farRoute // by which its packets came last
	at      time.Duration
	refused map[farKey]refusal
}

// maxRefusals bounds what a relay that invents others can fill.
const maxRefusals = 64

// refusal is a relay's word that a way over two relays does not lead to a peer. No relay tells over two when it does
// again, so it is tried again: soon at first, since most such words come while something starts anew.
type refusal struct{ at, hold time.Duration }

func (r refusal) stands(now time.Duration) bool { return now-r.at < r.hold }

// next is the refusal after another such word, which counts for most at the longest. While one stands, others are about
// packets that were sent before it; long after it has lapsed, it is a first one.
func (r refusal) next(now, most time.Duration) refusal {
	switch {
	case r.stands(now):
		return r
	case r.hold == 0 || now-r.at > r.hold+most:
		return refusal{now, refusalFirst}
	}
	return refusal{now, min(2*r.hold, most)}
}

// refuse notes a relay's word about a way, and tells how long it counts from now on.
func (f *farState) refuse(k farKey, now, most time.Duration) refusal {
	if f.refused == nil || len(f.refused) >= maxRefusals {
		f.refused = map[farKey]refusal{}
	}
	f.refused[k] = f.refused[k].next(now, most)
	return f.refused[k]
}

// goneFor is how long the word that a peer is not at a relay counts, here without a session with that relay.
func (f *farState) goneFor(relay identity.ID, said time.Duration) time.Duration {
	if r := f.refused[farKey{far: relay}]; r.at == said && r.hold > 0 {
		return r.hold // another relay brought it
	}
	return goneUnheard
}

// comesBy tells whether the peer's packets came over two relays lately, and it is still to be found there. The caller
// holds the peer's lock.
func (s *peerState) comesBy(now time.Duration) bool {
	hold := farHold
	if len(s.listed) > 0 && s.listed[s.far.in.via] == 0 {
		hold = farUnlisted
	}
	return s.far.in.c != nil && now-s.far.at < hold
}

// farWay finds a way over two relays: back by the way the peer's packets came, or by the nearest relay here to one that
// the peer's record lists and this node has no session with, nor could have one soon; quiet: nor wants one. The caller
// holds the peer's lock.
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

// outOfReach tells whether a session with this relay is not to be expected soon.
func (c *client) outOfReach(now time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.status.connected && (c.lastErr != nil || c.need != needNone && now-c.needAt > dialPatience)
}

// nextHop is where a peer's packets go now: the session of a relay, and the second relay if there are two.
type nextHop struct {
	c   *client
	q   *wire.Queue // nil: there is no session
	far identity.ID
	two bool
}

// nextHop finds where a peer's packets go now. Gossip has no session begun for it: where none is sure to do, it goes
// over two relays.
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

// send queues one packet where a peer's packets go. It is false when there is no session for it.
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

// heardFar takes a packet that came over two relays.
func (p *Pool) heardFar(c *client, via, from identity.ID, now time.Duration) {
	s := p.peer(from)
	s.mu.Lock()
	isNew := s.far.in != farRoute{c, via} || !s.comesBy(now)
	s.far.in, s.far.at = farRoute{c, via}, now
	delete(s.gone, via) // there it is
	delete(s.far.refused, farKey{far: via})
	delete(s.far.refused, farKey{c.relay.ID, via})
	s.mu.Unlock()
	if isNew {
		s.generation.Store(0)
		p.signal()
		p.release()
	}
}

// noWay takes a relay's word that a packet could not be handed on.
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
	// With a session that relay answers for itself, and tells when the peer comes.
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

// wayReopens has a way to a peer tried again that a relay has refused some time ago.
func (p *Pool) wayReopens(s *peerState) {
	if p.ctx.Err() != nil {
		return
	}
	s.generation.Store(0)
	p.signal()
	p.release()
}

// Forward hands a packet of a client of this node's relay to another relay. It is false when that is not known or
// cannot be reached. While the session is being dialed a few packets wait.
func (p *Pool) Forward(relay, origin, node identity.ID, channel byte, b []byte) bool {
	p.mu.RLock()
	c := p.relays[relay]
	p.mu.RUnlock()
	if c == nil || relay == p.cfg.Self {
		return false
	}
	now := p.now()
	c.demand(now) // also one that could not be reached last time: nobody else may have it dialed again
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

// sendEarly sends what has waited for the session.
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
