package path

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// A relay may reserve a UDP port for this host's packets to a peer. What is sent there arrives at the peer, from the
// port that the relay has reserved for the peer. Such a port is pinged, proven, supervised and given up like a direct
// endpoint. Every direct endpoint is preferred to it, and it is preferred to the relay's session. The search for a
// direct path continues while it is used.

// Reserving is the state of asking a relay for a port.
type Reserving struct {
	Of      identity.ID // the relay asked
	Next    time.Time   // no request before
	Tries   int
	Refused string // the relay's last refusal; empty: a port was reserved
}

// Times of reserving ports.
const (
	// since the last traffic, for asking: a pair without traffic stays in the session
	talkFor      = 5 * time.Second
	portIdle     = 10 * time.Minute // without traffic, before a port is given back
	reserveFirst = 5 * time.Second  // before asking again: 5, 10, 20 … s up to reserveLast
	reserveLast  = 5 * time.Minute
	portRetry    = 2 * time.Second // after a burst at a port without an answer: 2, 4, 8 … s up to portRetryMax
	portRetryMax = 30 * time.Second
	portDeaf     = time.Second // since the last unanswered ping of a burst: nothing passes the port
	portsMax     = 4           // reserved ports per peer
)

// probed reports whether the path leads to an endpoint that is pinged: a direct one, or a relay's port.
func (p Path) probed() bool { return p.Kind == Direct || p.Kind == Relay && p.Endpoint.IsValid() }

// UDP reports whether the path leads through a port that a relay has reserved.
func (p Path) UDP() bool { return p.Kind == Relay && p.Endpoint.IsValid() }

// direct is the probe of the direct path in use while that path is alive, or -1.
func (s *step) direct() int {
	if s.Path.Kind != Direct {
		return -1
	}
	return s.active()
}

// lead makes a probe's endpoint the path's and leaves its liveness unchanged.
func (s *step) lead(i int) {
	p := &s.Probes[i]
	s.Path.Kind, s.Path.Endpoint, s.Path.Relay = Direct, p.Endpoint, identity.ID{}
	if p.Type == relayC {
		s.Path.Kind, s.Path.Relay = Relay, p.Relay
	}
}

// above reports whether a is a direct endpoint and b a relay's port, so that a is preferred.
func (s *step) above(a, b int) bool { return s.Probes[a].Type != relayC && s.Probes[b].Type == relayC }

// renews reports whether port a replaces port b of the same relay. The relay has restarted, so b ends soon.
func (s *step) renews(a, b int) bool {
	p, q := &s.Probes[a], &s.Probes[b]
	return p.port() && q.Type == relayC && p.Relay == q.Relay && p.FirstSeen.After(q.FirstSeen)
}

// handleReserved handles a relay's answer: a reserved port, or the reason why there is none.
func (s *step) handleReserved(relay identity.ID, e netip.AddrPort, ready bool, refused string) {
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
		s.lead(i) // adopted from WireGuard before its relay was known
		s.LastDirect = netip.AddrPort{}
	}
	s.Reserving.Refused = ""
	p.Next = len(pacing)
	if s.direct() < 0 && i != s.active() {
		p.BurstAt, p.Next = later(s.now, p.HoldUntil), 0
	}
	s.retire(relay, e, s.Path.Endpoint) // other ports are from an earlier run of the relay
}

// retire marks a relay's ports as old, except those in keep.
func (s *step) retire(relay identity.ID, keep ...netip.AddrPort) {
	for i := range s.Probes {
		if p := &s.Probes[i]; p.Type == relayC && p.Relay == relay && !slices.Contains(keep, p.Endpoint) {
			p.Old, p.Ready, p.Next = true, false, len(pacing)
		}
	}
}

// dropPorts drops a relay's ports, which the relay has ended.
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

// port reports whether a probe is of a port that a relay currently holds for this host.
func (p *Probe) port() bool { return p.Type == relayC && !p.Old }

// ports counts the ports that relays currently hold for this host.
func (s *step) ports() (n int) {
	for i := range s.Probes {
		if s.Probes[i].port() {
			n++
		}
	}
	return n
}

// reserve asks the relay in use for a port, and probes the ports that are reserved.
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

// reservable reports whether a port would be better than the present path.
func (s *step) reservable() bool {
	return s.Known && !s.Relay.ID.IsZero() && s.direct() < 0
}

// giveBack returns an unused port to the relay, since relays have few.
func (s *step) giveBack() {
	if at := s.giveBackAt(); at.IsZero() || s.now.Before(at) {
		return
	}
	relay := s.Path.Relay
	s.actions = append(s.actions, Action{Kind: ActionGiveBack, Relay: relay})
	s.dropPorts(relay, "nothing was sent through it for "+portIdle.String())
}

// giveBackAt is when the port in use is given back; zero: never.
func (s *step) giveBackAt() time.Time {
	if !s.Path.UDP() || s.Relay.ID.IsZero() {
		return time.Time{}
	}
	return later(s.TrafficAt, s.Path.Since).Add(portIdle)
}

// reserveAt is when a port is asked for; zero: there is one, or no traffic needs one.
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
		at = later(at, s.BurstTo) // the burst may find a direct path
	}
	return later(at, s.now)
}

// retryPorts begins the next burst at ports that are not in use, and reports ready ports through which nothing
// passes.
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

// deafAt is when a port that never answered is reported to its relay; zero: its burst is under way.
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

// reserveWake is when reserve must run again.
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

// usePort makes a relay's port that has just answered the path.
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

// diePort gives up the relay's port in use. The caller has set its hold.
func (s *step) diePort(i int) {
	p := &s.Probes[i]
	s.UDPLost = fmt.Sprintf("UDP through the relay's port %s died: %d pings in %d ms had no answer.", p.Endpoint,
		len(s.Pending), s.now.Sub(s.SilentSince).Milliseconds())
	s.PortDied = true
	s.Pending = nil
	s.Path.Alive, s.Path.Silent = false, false
	p.BurstAt, p.Next, p.Turns = p.HoldUntil, 0, 0
	s.punch(false) // so that the peer checks its path, too
}
