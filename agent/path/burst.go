package path

import "time"

// startBurst pings every planned candidate now and in the next seconds, and asks the peer to do the same at the same
// time.
func (s *step) startBurst(punch bool) {
	s.forget()
	if !s.Plan.Probe || s.Unready {
		s.NextRetry = time.Time{}
		return
	}
	if s.asleep() {
		s.sleep()
		return
	}
	s.Idle = false
	if s.waits(punch) {
		return
	}
	active := s.active()
	for i := range s.Probes {
		p := &s.Probes[i]
		if i == active || p.Type == relayC || !p.Planned && p.Answered == 0 {
			continue
		}
		p.BurstAt, p.Next = s.now.Add(p.After), 0
		if p.Answered == 0 && p.Sent > 0 && s.now.Sub(p.LastSent) < firstPacing[1] {
			p.BurstAt, p.Next = p.LastSent, 1 // the first ping has just left, and few are allowed
		}
		if s.away() {
			p.single(s.now)
		}
	}
	s.BurstAt, s.BurstTo = s.now, s.now.Add(burstFor)
	s.NextRetry = s.BurstTo.Add(s.retryDelay())
	if s.direct() >= 0 {
		s.NextRetry = s.now.Add(s.jitter(s.directRetry(), s.Retries))
	}
	if punch {
		s.punch(false)
	}
}

// waits reports whether a burst must wait for the manager. A large mesh has so many pairs that their bursts take
// turns. A pair without a relay does not wait.
func (s *step) waits(punch bool) bool {
	if !s.Settings.Lazy || s.allowed || s.Relay.ID.IsZero() {
		return false
	}
	s.NextRetry = time.Time{}
	s.WishPunch = punch || s.Wishes && s.WishPunch
	if !s.Wishes {
		s.Wishes = true
		s.actions = append(s.actions, Action{Kind: ActionBurst})
	}
	return true
}

// retryDelay grows from attempt to attempt, up to the setting.
func (s *step) retryDelay() time.Duration {
	d := min(retryFirst<<min(s.Retries, 10), s.directRetry())
	if !s.Path.Alive && s.Relay.ID.IsZero() && !s.Relay.Absent { // the relays announce the return of an absent peer
		d = min(d, retryDown)
	}
	return s.jitter(d, s.Retries)
}

// burst sends the pings of the bursts that are due.
func (s *step) burst() {
	if !s.NextRetry.IsZero() && !s.now.Before(s.NextRetry) {
		s.retry()
	}
	active := s.active()
	for i := range s.Probes {
		p := &s.Probes[i]
		if i == active {
			p.Next = len(pacing)
		}
		at, ok := p.due()
		if !ok || s.now.Before(at) {
			continue
		}
		for ok && !s.now.Before(at) { // steps during which this process slept count as one
			p.Next++
			at, ok = p.due()
		}
		if active >= 0 && !s.worthwhile(i, active) {
			p.Next = len(pacing)
			continue
		}
		s.ping(i)
	}
}

// retry is the regular attempt: at a direct path for relayed peers, at a better one for others.
func (s *step) retry() {
	s.Retries++
	if s.direct() < 0 {
		s.startBurst(true)
		return
	}
	s.NextRetry = s.now.Add(s.jitter(s.directRetry(), s.Retries))
	if s.Path.MTU > 0 {
		s.startMTUProbe(s.direct()) // a larger size may pass again
	}
	for i := range s.Probes {
		if p := &s.Probes[i]; p.Planned && p.Answered > 0 {
			p.single(s.now)
		}
	}
}

// single replaces the endpoint's burst by one ping at now.
func (p *Probe) single(now time.Time) {
	steps := firstPacing[:]
	if p.Answered > 0 {
		steps = pacing[:]
	}
	p.Next = len(steps) - 1
	p.BurstAt = now.Add(-steps[p.Next])
}

// worthwhile reports whether an endpoint could replace the path in use.
func (s *step) worthwhile(i, active int) bool {
	return !s.above(active, i) && !(s.Probes[active].Type == host && s.Probes[i].Type != host)
}

// due is when the endpoint's next ping of its burst is due, if any is left.
func (p *Probe) due() (time.Time, bool) {
	if p.Answered > 0 || p.Type == relayC {
		if p.Next < len(pacing) {
			return p.BurstAt.Add(pacing[p.Next]), true
		}
		return time.Time{}, false
	}
	if p.Next < len(firstPacing) {
		return p.BurstAt.Add(firstPacing[p.Next]), true
	}
	return time.Time{}, false
}

// nextWake is when the next step has something to do (zero: never), and how much sooner that may happen.
func (s *step) nextWake() (at time.Time, early time.Duration) {
	at = earlier(earlier(s.NextRetry, s.predictionDue()), earlier(s.reserveWake(), s.mtuProbeWake()))
	active := s.active()
	var beat time.Time
	if active >= 0 {
		beat, early = s.heartbeatWake(active)
		at = earlier(at, beat)
	} else if s.now.Before(s.BurstTo) {
		at = earlier(at, s.BurstTo) // then the rule's reason changes
	}
	if s.Path.Kind == None && s.Relay.Absent && s.LastDirect.IsValid() {
		at = earlier(at, s.AwaySince.Add(awayAfter))
	}
	for i := range s.Probes {
		if t, ok := s.Probes[i].due(); ok && i != active {
			at = earlier(at, t)
		}
	}
	if !at.IsZero() && !at.After(s.now) {
		at = s.now.Add(time.Millisecond)
	}
	if !at.Equal(beat) {
		early = 0
	}
	return at, max(min(early, at.Sub(s.now)-1), 0) // what may be done at now has been done
}
