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
	// Traffic that wakes a pair goes on: it shows again, so long after its first sign at least and at most.
	stirAfter  = 500 * time.Millisecond
	stirWithin = 5 * time.Second
	lazyWithin = 8 * time.Second // how long a pair without traffic waits for a relay before it looks for a direct path instead
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

// relayBy is until when a pair that is asleep waits for a relay; on a late host relays are late, too.
func (s *step) relayBy() time.Time { return s.RelaySince.Add(lazyWithin + 8*s.Late) }

// stirs reports whether what WireGuard carried is to wake the pair. A lone packet and its answer go by the relay, and a
// search for a direct path would cost many times what they do.
func (s *step) stirs() bool {
	if !s.Idle {
		return true
	}
	since := s.now.Sub(s.StirredAt)
	if s.StirredAt.IsZero() || since > stirWithin+2*s.lateness() {
		s.StirredAt = s.now
		return false
	}
	return since >= stirAfter+s.lateness()
}

// awaken begins for a pair that was asleep what had been left.
func (s *step) awaken() {
	if !s.Idle {
		return
	}
	s.Idle = false
	s.restart()
}
