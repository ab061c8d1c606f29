package client

import (
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

// What the tests of the external package see of the insides, and do to them.

const (
	NeedNone   = string(needNone)
	NeedWarm   = string(needWarm)
	NeedDemand = string(needDemand)

	WhereWait = whereWait
)

// ClientOf is the client of one relay.
func (p *Pool) ClientOf(relay identity.ID) *client { return p.client(relay) }

// Now is the pool's clock.
func (p *Pool) Now() time.Duration { return p.now() }

// Plan applies a new plan of the sessions now.
func (p *Pool) Plan() { p.applyPlan() }

// HoldPlans lets no plan be carried out until the function that it returns is called.
func (p *Pool) HoldPlans() (release func()) {
	p.planning.Lock()
	return p.planning.Unlock
}

// ChooseAnew makes all choices due again.
func (p *Pool) ChooseAnew() { p.relaysChanged() }

// Listed are the relays that a peer's record lists.
func (p *Pool) Listed(peer identity.ID) (relays []identity.ID) {
	s := p.peer(peer)
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, rtt := range s.listed {
		if rtt != 0 {
			relays = append(relays, id)
		}
	}
	return relays
}

// Refused counts the refused ways over two relays to a peer.
func (p *Pool) Refused(peer identity.ID) int {
	s := p.peer(peer)
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.far.refused)
}

// AgeAbsence makes a relay's statement that it does not have a peer so old that the relay is asked again.
func (p *Pool) AgeAbsence(relay, peer identity.ID) {
	s := p.peer(peer)
	s.mu.Lock()
	defer s.mu.Unlock()
	word := s.gone[relay]
	s.gone[relay] = absence{word.at - word.hold(), word.asked}
}

// AskedAgain counts how often a relay that does not have a peer was asked again.
func (p *Pool) AskedAgain(relay, peer identity.ID) int {
	s := p.peer(peer)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gone[relay].asked
}

// HasSeen tells whether a peer is known to have been at a relay.
func (p *Pool) HasSeen(relay, peer identity.ID) bool {
	s := p.peer(peer)
	s.mu.Lock()
	defer s.mu.Unlock()
	_, seen := s.seen[relay]
	return seen
}

// HasSession tells whether there is a session that takes packets.
func (c *client) HasSession() bool { return c.queue() != nil }

// SentPackets counts what the session has sent.
func (c *client) SentPackets() uint64 { return c.queue().Sent() }

// LastError is why the relay counts as failed.
func (c *client) LastError() string { return c.stats().LastError }

// Cut ends the session as a loss does.
func (c *client) Cut() { c.wire.Load().End(wire.ErrClosed) }

// Demand says that a peer needs the relay now.
func (c *client) Demand() { c.demand(c.pool.now()) }

// StandBy gives the session up.
func (c *client) StandBy() { c.setNeed(needNone) }

// IsFailing tells whether the last try to reach the relay came to nothing.
func (c *client) IsFailing() bool { return c.failing() }

// IsOver tells whether no session is left, nor one that is given up.
func (c *client) IsOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leaving == nil && c.wire.Load() == nil
}

// GoneCount counts the relay's statements that a peer is not there.
func (c *client) GoneCount() uint64 { return c.gone.Load() }

// TunnelCount counts WireGuard's packets that have passed.
func (c *client) TunnelCount() uint64 { return c.tunnel.Load() }

// LastUse is when the relay was last used, as a plan sees it; 0: never.
func (c *client) LastUse() time.Duration { return c.standing(false).used }

// NotedUse is when use of the relay was last noted; 0: never.
func (c *client) NotedUse() int64 { return c.used.Load() }

// ForgetUse makes it a relay that was never used.
func (c *client) ForgetUse() { c.used.Store(0) }

// Plain tells whether the proxies send without UDP_SEGMENT.
func (x *Proxies) Plain() bool { return x.plain.Load() }

// SetPlain says whether they do.
func (x *Proxies) SetPlain(plain bool) { x.plain.Store(plain) }

// SetWitness sets which relays are asked besides the nearest ones.
func (p *Pool) SetWitness(witness func(relay identity.ID) bool) { p.cfg.Witness = witness }

// Witnesses returns the relays that would be asked about a peer.
func (p *Pool) Witnesses(peer identity.ID) (relays []identity.ID) {
	for _, c := range p.witnesses(peer) {
		relays = append(relays, c.relay.ID)
	}
	return relays
}
