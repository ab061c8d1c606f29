package path

import "time"

// A death is dear: a burst, a relay, a new record, and on a host that has too much to do each of these makes more
// answers late. So a host that was late waits longer before it calls a path dead, by all that it lately was late. Where
// others can carry what goes through a peer, nothing has to wait for that: the peer is suspected once its answers have
// been missing for the usual time, not counting the time in which this process did not run. The path stays as it is,
// its pings go on, and the agent sends through others. A suspicion that was wrong costs two routes.

// takeReplaceable takes whether others can carry what goes through the peer.
func (s *step) takeReplaceable(is bool) {
	s.Replaceable = is
	if !is {
		s.Path.Suspect = false
	}
}

// noteStall adds up how late this process runs while it waits for an answer: it could not have seen one in that time.
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

// stalled is for how long this process did not run since the oldest unanswered ping was sent.
func (s *step) stalled() time.Duration {
	if len(s.Pending) == 0 || !s.StallOf.Equal(s.Pending[0]) {
		return 0
	}
	return s.Stall
}

// suspectAt is when the peer is suspected if nothing is heard; zero: never, or it is already. A path that is given no
// more time than usual is given up instead.
func (s *step) suspectAt() time.Time {
	if !s.Replaceable || s.Path.Silent || s.Path.Suspect || !s.busy() || len(s.Pending) < deadMissed ||
		s.patience() <= s.leastPatience() {
		return time.Time{}
	}
	at := later(s.Pending[0].Add(s.leastPatience()+s.stalled()), s.Pending[deadMissed-1].Add(s.leastRTO()))
	return later(at, s.TrustUntil)
}

func (s *step) suspect() {
	if at := s.suspectAt(); !at.IsZero() && !s.now.Before(at) {
		s.Path.Suspect = true
	}
}

// clearSuspicion ends a suspicion with an answer. The next one has to wait, longer each time: the peer or its host is
// slow, and each suspicion makes work.
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

// heartbeatRTO is after how long without an answer pings become more frequent: sooner where the peer may be suspected,
// or too few would be sent until then.
func (s *step) heartbeatRTO() time.Duration {
	if s.mayBeSuspected() {
		return s.leastRTO()
	}
	return s.rto()
}

// mayBeSuspected reports whether the peer is one that is suspected as soon as it does not answer.
func (s *step) mayBeSuspected() bool {
	return s.Replaceable && !s.Path.Suspect && !s.now.Before(s.TrustUntil)
}
