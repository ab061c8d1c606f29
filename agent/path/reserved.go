package path

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// A relay may reserve a UDP port for this host's packets to a peer: what is sent there arrives at the peer, from the
// peer's own reserved port. Such a port is pinged, proven, heartbeated and left like a direct endpoint. It comes after
// every one of those, and before the relay's session. While it is used the search for a direct path goes on.

// Reserving is how asking for a port goes.
type Reserving struct {
	Of      identity.ID // the relay that is asked
	Next    time.Time   // not asked before
	Tries   int
	Refused string // the relay's last answer, if that was no port
}

// Times of reserving.
const (
	// how long after traffic a port is worth asking for: pairs without any stay in the session
	talkFor      = 5 * time.Second
	portIdle     = 10 * time.Minute // without traffic, after which a port is given back
	reserveFirst = 5 * time.Second  // before asking again: 5, 10, 20 … s up to reserveLast
	reserveLast  = 5 * time.Minute
	portRetry    = 2 * time.Second // after a burst at a port without an answer: 2, 4, 8 … s up to portRetryMax
	portRetryMax = 30 * time.Second
	portDeaf     = time.Second // after the last ping of a burst: nothing comes through
	portsMax     = 4           // reserved ports per peer
)

// probed reports whether the path leads to an endpoint that is pinged: a direct one, or a relay's port.
func (p Path) probed() bool { return p.Kind == Direct || p.Kind == Relay && p.Endpoint.IsValid() }

// UDP reports whether the path leads through a port that a relay has reserved.
func (p Path) UDP() bool { return p.Kind == Relay && p.Endpoint.IsValid() }

// direct is the probe of the direct path in use while it lives, or -1.
func (s *step) direct() int {
	if s.Path.Kind != Direct {
		return -1
	}
	return s.active()
}

// lead makes a probe's endpoint the path's, without a word about whether it lives.
func (s *step) lead(i int) {
	p := &s.Probes[i]
	s.Path.Kind, s.Path.Endpoint, s.Path.Relay = Direct, p.Endpoint, identity.ID{}
	if p.Type == relayC {
		s.Path.Kind, s.Path.Relay = Relay, p.Relay
	}
}

// above reports whether a is a direct endpoint and b a relay's port.
func (s *step) above(a, b int) bool { return s.Probes[a].Type != relayC && s.Probes[b].Type == relayC }

// renews reports whether a is the port that a relay has given in place of b, from before it was started again: b ends
// soon.
func (s *step) renews(a, b int) bool {
	p, q := &s.Probes[a], &s.Probes[b]
	return p.port() && q.Type == relayC && p.Relay == q.Relay && p.FirstSeen.After(q.FirstSeen)
}

// takeReserved takes what a relay says of the port it has reserved, or has not.
func (s *step) takeReserved(relay identity.ID, e netip.AddrPort, ready bool, refused string) {
	if !e.IsValid() {
		s.dropPorts(relay, refused)
		return
	}
	i := s.find(e)
	if i < 0 {
		if s.ports() >= portsMax {
			return
		}
		s.Probes = append(s.Probes, Probe{Endpoint: e, FirstSeen: s.now})
		i = len(s.Probes) - 1
	}
	p := &s.Probes[i]
	p.Type, p.Source, p.Relay, p.Known, p.Planned, p.Old = relayC, "relay", relay, false, false, false
	if ready {
		p.Ready, p.Unheard, p.WindowSent, p.Turns = true, false, 0, 0
	}
	if s.Path.Kind == Direct && s.Path.Endpoint == e {
		s.lead(i) // adopted from WireGuard, before it was known whose port it is
		s.LastDirect = netip.AddrPort{}
	}
	s.Reserving.Refused = ""
	p.Next = len(pacing)
	if s.direct() < 0 && i != s.active() {
		p.BurstAt, p.Next = later(s.now, p.HoldUntil), 0
	}
	s.retire(relay, e, s.Path.Endpoint) // what else there is comes from a former run of the relay
}

// retire marks a relay's ports as old, but those to keep.
func (s *step) retire(relay identity.ID, keep ...netip.AddrPort) {
	for i := range s.Probes {
		if p := &s.Probes[i]; p.Type == relayC && p.Relay == relay && !slices.Contains(keep, p.Endpoint) {
			p.Old, p.Ready, p.Next = true, false, len(pacing)
		}
	}
}

// dropPorts forgets a relay's ports: it has ended them.
func (s *step) dropPorts(relay identity.ID, refused string) {
	if i := s.active(); i >= 0 && s.Path.UDP() && s.Path.Relay == relay {
		s.UDPLost = "The relay has ended the reserved port: " + refused + "."
		s.Pending = nil
		s.Path.Alive, s.Path.Silent = false, false
	}
	s.retire(relay)
	if s.Reserving.Of == relay {
		s.Reserving.Refused = refused
	}
}

// port reports whether a probe is of a port that a relay holds for us now.
func (p *Probe) port() bool { return p.Type == relayC && !p.Old }

// ports counts them.
func (s *step) ports() (n int) {
	for i := range s.Probes {
		if s.Probes[i].port() {
			n++
		}
	}
	return n
}

// reserve asks the relay in use for a port, and tries the ports that there are.
func (s *step) reserve() {
	r := &s.Reserving
	s.giveBack()
	if !s.reservable() {
		return
	}
	if r.Of != s.Relay.ID {
		*r = Reserving{Of: s.Relay.ID}
	}
	s.retryPorts()
	if at := s.reserveAt(); at.IsZero() || s.now.Before(at) {
		return
	}
	r.Tries++
	r.Next = s.now.Add(s.jitter(min(reserveFirst<<min(r.Tries-1, 10), reserveLast), r.Tries))
	s.actions = append(s.actions, Action{Kind: ActionReserve, Relay: r.Of})
}

// reservable reports whether a port would be better than what there is.
func (s *step) reservable() bool {
	return s.Known && !s.Relay.ID.IsZero() && s.direct() < 0
}

// giveBack lets the relay have a port that is not needed: relays have few.
func (s *step) giveBack() {
	if at := s.giveBackAt(); at.IsZero() || s.now.Before(at) {
		return
	}
	relay := s.Path.Relay
	s.actions = append(s.actions, Action{Kind: ActionGiveBack, Relay: relay})
	s.dropPorts(relay, "nothing was sent through it for "+portIdle.String())
}

// giveBackAt is when that is; zero: never.
func (s *step) giveBackAt() time.Time {
	if !s.Path.UDP() || s.Relay.ID.IsZero() {
		return time.Time{}
	}
	return later(s.TrafficAt, s.Path.Since).Add(portIdle)
}

// reserveAt is when a port is asked for; zero: there is one, or nothing to send through it.
func (s *step) reserveAt() time.Time {
	r := &s.Reserving
	if s.TrafficAt.IsZero() || s.now.Sub(s.TrafficAt) >= talkFor {
		return time.Time{}
	}
	for i := range s.Probes {
		if p := &s.Probes[i]; p.port() && p.Relay == s.Relay.ID {
			return time.Time{}
		}
	}
	at := r.Next
	if s.Plan.Probe {
		at = later(at, s.BurstTo) // a direct path may come out of it
	}
	return later(at, s.now)
}

// retryPorts begins the next burst at ports that are not in use, and tells of those that should carry and do not.
func (s *step) retryPorts() {
	for i := range s.Probes {
		p := &s.Probes[i]
		if !p.port() || i == s.active() {
			continue
		}
		if at := p.deafAt(); p.Ready && !p.Unheard && !at.IsZero() && !s.now.Before(at) {
			p.Unheard = true
			s.actions = append(s.actions, Action{Kind: ActionPortDeaf, Relay: p.Relay})
		}
		if at := p.againAt(); !at.IsZero() && !s.now.Before(at) {
			p.Turns = min(p.Turns+1, 10)
			p.BurstAt, p.Next = s.now, 0
		}
	}
}

// deafAt is when a port that never carried anything is called deaf; zero: its burst goes on.
func (p *Probe) deafAt() time.Time {
	if _, more := p.due(); more || p.Answered > 0 || p.Sent == 0 {
		return time.Time{}
	}
	return p.LastSent.Add(portDeaf)
}

// againAt is when a port's next burst begins; zero: one is under way.
func (p *Probe) againAt() time.Time {
	if _, more := p.due(); more {
		return time.Time{}
	}
	return later(p.BurstAt.Add(burstFor+min(portRetry<<min(p.Turns, 10), portRetryMax)), p.HoldUntil)
}

// reserveWake is when reserve has something to do.
func (s *step) reserveWake() time.Time {
	at := s.giveBackAt()
	if !s.reservable() {
		return at
	}
	at = earlier(at, s.reserveAt())
	for i := range s.Probes {
		p := &s.Probes[i]
		if !p.port() || i == s.active() {
			continue
		}
		at = earlier(at, p.againAt())
		if p.Ready && !p.Unheard {
			at = earlier(at, p.deafAt())
		}
	}
	return at
}

// usePort takes a relay's port that has just answered.
func (s *step) usePort(i int) {
	p := &s.Probes[i]
	s.UDPLost, s.PortDied = "", false
	reason := fmt.Sprintf("A ping through the relay's port %s was answered after %s, so packets pass the relay as plain "+
		"UDP.", p.Endpoint, round(p.RTT))
	if rule := s.ruleWithoutDirect(); rule != "relay-first" {
		reason += " " + s.reasonWithoutDirect(rule)
	}
	s.Path = Path{Since: s.now, RTT: p.RTT, Alive: true, Rule: ruleRelayUDP, Reason: reason}
	s.lead(i)
	p.Turns = 0
	s.watch(i)
	s.retire(p.Relay, p.Endpoint)
}

// diePort gives up a relay's port that was in use. Its hold is set.
func (s *step) diePort(i int) {
	p := &s.Probes[i]
	s.UDPLost = fmt.Sprintf("UDP through the relay's port %s died: %d pings in %d ms had no answer.", p.Endpoint,
		len(s.Pending), s.now.Sub(s.SilentSince).Milliseconds())
	s.PortDied = true
	s.Pending = nil
	s.Path.Alive, s.Path.Silent = false, false
	p.BurstAt, p.Next, p.Turns = p.HoldUntil, 0, 0
	s.punch(false) // the other end notices, too
}
