package path

import "time"

// A death is expensive: it causes a burst, a relay session and a new record, and on an overloaded host each of these
// delays more answers. So a path is not given up at once, and later still by a late host. Where other peers can carry
// the traffic, that wait is not needed: the peer is suspected once its answers have been missing for suspectAfter, not
// counting time in which this process did not run. The path and its pings continue, and the agent sends through other
// peers. A wrong suspicion costs two route changes; a right one moves the traffic before the work of a death begins.

// handleReplaceable sets whether other peers can carry the traffic through this one.
func (s *step) handleReplaceable(is bool) {
	s.Replaceable = is
	if !is {
		s.Path.Suspect = false
	}
}

// noteStall adds up this process's lateness while it waits for an answer, since it could not have seen one then.
func (s *step) noteStall() {
	if len(s.Pending) == 0 {
		return
	}
	s.Stall, s.StallOf = s.stalled(), s.Pending[0]
	if s.Woken.IsZero() {
		return
	}
	if late := s.now.Sub(s.Woken); late >= stallIgnored {
		s.Stall += late
	}
}

// stalled is how long this process has slept since it sent the oldest unanswered ping.
func (s *step) stalled() time.Duration {
	if len(s.Pending) == 0 || !s.StallOf.Equal(s.Pending[0]) {
		return 0
	}
	return s.Stall
}

// suspectAt is when the peer is suspected if no answer comes; zero: never, or it is suspected already.
func (s *step) suspectAt() time.Time {
	if !s.Replaceable || s.Path.Silent || s.Path.Suspect || !s.busy() || len(s.Pending) < deadMissed {
		return time.Time{}
	}
	silence := min(suspectAfter, s.leastPatience()) + s.stalled()
	at := later(s.Pending[0].Add(silence), s.Pending[deadMissed-1].Add(s.leastRTO()))
	return later(at, s.TrustUntil)
}

func (s *step) suspect() {
	if at := s.suspectAt(); !at.IsZero() && !s.now.Before(at) {
		s.Path.Suspect = true
	}
}

// clearSuspicion ends a suspicion after an answer. The time until the next one grows, since the peer or its host is
// slow and each suspicion causes work.
func (s *step) clearSuspicion() {
	if !s.Path.Suspect {
		return
	}
	s.Path.Suspect = false
	if s.now.Sub(s.TrustUntil) >= calmAfter {
		s.Cleared = 0
	}
	s.TrustUntil = s.now.Add(min(trustFirst<<s.Cleared, trustMax))
	s.Cleared = min(s.Cleared+1, 10)
}

// heartbeatRTO is the age of an unanswered ping from which pings become more frequent. Where the peer may be
// suspected it is shorter, so that enough pings are sent before the suspicion.
func (s *step) heartbeatRTO() time.Duration {
	if s.mayBeSuspected() {
		return s.leastRTO()
	}
	return s.rto()
}

// mayBeSuspected reports whether missing answers may make the peer suspected now.
func (s *step) mayBeSuspected() bool {
	return s.Replaceable && !s.Path.Suspect && !s.now.Before(s.TrustUntil)
}
