package path

import "time"

// In a large mesh most pairs of nodes never talk. A pair without traffic stays in a relay's session, which costs
// nothing until there is a packet: no search for a direct path, no port prediction. WireGuard's endpoint of such a
// peer is a local port of this agent, so the first packet goes over the relay at once and is seen as traffic. A
// direct path that works is kept.

// ruleIdle is the rule of a pair without traffic.
const ruleIdle = "idle"

const (
	awakeFor = 30 * time.Second // after traffic, and after the peer asked to be probed
	// Traffic that wakes a pair must appear twice, with a gap of at least stirAfter and at most stirWithin. WireGuard
	// repeats a handshake after 5 to 5.4 s.
	stirAfter  = 500 * time.Millisecond
	stirWithin = 6 * time.Second
	// how long a pair without traffic waits for a relay before it looks for a direct path instead
	lazyWithin = 8 * time.Second
)

// asleep reports whether the pair has no traffic and needs no search for a direct path.
func (s *step) asleep() bool {
	if !s.Settings.Lazy || s.direct() >= 0 || s.now.Before(s.awakeUntil()) {
		return false
	}
	return !s.Relay.ID.IsZero() || s.now.Before(s.relayBy())
}

// awakeUntil is when the pair falls asleep if nothing else happens; zero: no traffic so far.
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

// sleep replaces a burst for a pair that is asleep. If there is no relay, the search begins after relayBy.
func (s *step) sleep() {
	s.Idle, s.NextRetry = true, time.Time{}
	if s.Relay.ID.IsZero() {
		s.NextRetry = s.relayBy()
	}
}

// relayBy is until when a pair that is asleep waits for a relay, longer on a late host, where relays are late, too. A
// peer that relays call absent is most likely off, and is announced when it comes. It is still tried now and then,
// since perhaps only its relays are unreachable for it.
func (s *step) relayBy() time.Time {
	at := s.RelaySince.Add(lazyWithin + 8*s.Late)
	if s.Relay.Absent && !s.BurstAt.IsZero() {
		at = later(at, s.BurstAt.Add(s.jitter(retryAway, 0)))
	}
	return at
}

// away reports whether the peer is probed only in case its relays are unreachable for it. One ping tests that as well
// as a burst, and in a large mesh many peers are off.
func (s *step) away() bool {
	return s.Settings.Lazy && s.Relay.Absent && !s.now.Before(s.awakeUntil())
}

// stirs reports whether WireGuard's traffic wakes the pair. A lone packet and its answer go over the relay, since a
// search for a direct path would cost many times as much. Without a relay any packet wakes the pair, as nothing
// carries it.
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

// stirred reports whether WireGuard recently carried traffic of an idle pair.
func (s *step) stirred() bool {
	return !s.StirredAt.IsZero() && s.now.Sub(s.StirredAt) <= stirWithin+2*s.lateness()
}

// awaken begins the search that sleep had left out.
func (s *step) awaken() {
	if !s.Idle {
		return
	}
	s.Idle = false
	s.restart()
}
