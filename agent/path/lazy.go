package path

import "time"

// In a large mesh most pairs of nodes never talk. A pair without traffic stays in a relay's session, which costs
// nothing until there is a packet: no direct path is looked for, no port is guessed. WireGuard's endpoint of such a
// peer is a port of this agent, so that the first packet goes by the relay at once, and is what wakes the pair. What is
// known to work is kept.

// ruleIdle is the rule of a path that no traffic asks for.
const ruleIdle = "idle"

const (
	awakeFor = 30 * time.Second // after traffic, and after the peer asked to be probed
	// Traffic that wakes a pair goes on: it shows again, so long after its first sign at least and at most. WireGuard
	// repeats a handshake after 5 to 5.4 s.
	stirAfter  = 500 * time.Millisecond
	stirWithin = 6 * time.Second
	// how long a pair without traffic waits for a relay before it looks for a direct path instead
	lazyWithin = 8 * time.Second
)

// asleep reports whether nothing is to be done for the pair.
func (s *step) asleep() bool {
	if !s.Settings.Lazy || s.direct() >= 0 || s.now.Before(s.awakeUntil()) {
		return false
	}
	return !s.Relay.ID.IsZero() || s.now.Before(s.relayBy())
}

// awakeUntil is when the pair falls asleep if nothing else happens; zero: it is.
func (s *step) awakeUntil() time.Time {
	at := s.AwakenedAt
	if s.TrafficAt.After(at) {
		at = s.TrafficAt
	}
	if at.IsZero() {
		return at
	}
	return at.Add(awakeFor)
}

// sleep is what startBurst does instead for a pair that is asleep: it looks again when no relay has come.
func (s *step) sleep() {
	s.Idle, s.NextRetry = true, time.Time{}
	if s.Relay.ID.IsZero() {
		s.NextRetry = s.relayBy()
	}
}

// relayBy is until when a pair that is asleep waits for a relay; on a late host relays are late, too. A peer that
// relays call absent is most likely off, and announced when it comes. It is tried now and then, since only its relays
// may be out of its reach.
func (s *step) relayBy() time.Time {
	at := s.RelaySince.Add(lazyWithin + 8*s.Late)
	if s.Relay.Absent && !s.BurstAt.IsZero() {
		at = later(at, s.BurstAt.Add(s.jitter(retryAway, 0)))
	}
	return at
}

// away reports whether the peer is tried only because its relays may be out of its reach: one ping shows it as well as
// many, and a large mesh has many peers that are off.
func (s *step) away() bool {
	return s.Settings.Lazy && s.Relay.Absent && !s.now.Before(s.awakeUntil())
}

// stirs reports whether what WireGuard carried is to wake the pair. A lone packet and its answer go by the relay, and a
// search for a direct path would cost many times what they do. Without a relay nothing carries it.
func (s *step) stirs() bool {
	if !s.Idle {
		return true
	}
	lone := !s.stirred()
	if lone {
		s.StirredAt = s.now
	}
	if s.Relay.ID.IsZero() && !s.Relay.Absent {
		return true
	}
	return !lone && s.now.Sub(s.StirredAt) >= stirAfter+s.lateness()
}

// stirred reports whether WireGuard lately had something to say to a peer that is idle.
func (s *step) stirred() bool {
	return !s.StirredAt.IsZero() && s.now.Sub(s.StirredAt) <= stirWithin+2*s.lateness()
}

// awaken begins for a pair that was asleep what had been left.
func (s *step) awaken() {
	if !s.Idle {
		return
	}
	s.Idle = false
	s.restart()
}
