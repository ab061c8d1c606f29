package client

import (
	"cmp"
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	// warmRelays is how many healthy sessions a node keeps even while they are unused: one to use, and one to use next
	// when that is lost.
	warmRelays = 2
	// warmStay is how long a warm relay that answers stays warm at least: RTTs measured while all relays are briefly
	// overloaded are no reason for a change.
	warmStay = time.Minute
	// trials is how many relays without a measured RTT a node dials at a time.
	trials = 2
	// trialTime is how long a failing relay stays on trial.
	trialTime = 10 * time.Second
	// measured is how many round trips make a relay's RTT known; remeasure is when it is too old to use.
	measured  = 3
	remeasure = 15 * time.Minute
	// retryFailed is when a relay that could not be reached is tried again; retrySoon is the same for a node that has no
	// two healthy ones.
	retryFailed = 2 * time.Minute
	retrySoon   = 5 * time.Second
	// demandHold is how long a session beyond the warm ones stays after its last use.
	demandHold = time.Minute
	planEvery  = time.Second     // between plans while sessions are tried, or needed by peers
	planRest   = 5 * time.Second // between plans while there are only warm sessions
	// lateForTrials is the lateness of wake-ups from which a process tries no further relays.
	lateForTrials = 200 * time.Millisecond
)

// standing holds what the plan needs to know of one relay.
type standing struct {
	id      identity.ID
	order   int64         // of its node's admission
	rtt     time.Duration // 0: never measured
	at      time.Duration // when it was measured
	healthy bool          // has a session that answers
	failed  bool          // it could not be reached, or does not answer
	since   time.Duration // failed since
	warm    bool          // was warm in the last plan
	young   bool          // it has not been warm for long
	trial   time.Duration // since when it is on trial; 0: it is not
	used    time.Duration // last use, or a peer's need; 0: never
	bound   bool          // it holds UDP ports for this node
}

// need is why a node keeps a session with a relay.
type need string

const (
	needNone   need = "standby"
	needWarm   need = "warm"
	needTrial  need = "trial"
	needDemand need = "on-demand"
)

// plan decides with which relays a node keeps a session: the nearest ones until two are healthy, those that peers need,
// and for a short time those without a measured RTT. Among relays equally near, the ones admitted first are taken: all
// nodes of a neighbourhood then meet at the same two, and need no others for each other. late is how late this process
// wakes: once two relays answer, an overloaded process tries no others.
func plan(all []standing, now, late time.Duration) map[identity.ID]need {
	needs := make(map[identity.ID]need, len(all))
	ranked := rank(all, late)
	healthy, farthest := 0, time.Duration(0)
	var last standing // the one admitted last of the warm ones
	for _, s := range ranked {
		known := s.rtt > 0 || len(all) <= warmRelays
		if healthy < warmRelays && known {
			needs[s.id] = needWarm
			if last.id.IsZero() || admittedBefore(last, s) < 0 {
				last = s
			}
			if s.healthy {
				healthy++
				farthest = max(farthest, s.rtt)
			}
		}
	}
	free := trials
	answering := 0
	for _, s := range all {
		if s.healthy {
			answering++
		}
	}
	near := healthy >= warmRelays && farthest <= clearGain(0, late) // no other can be clearly better
	if late > lateForTrials && answering >= warmRelays {
		free = 0
	}
	slices.SortStableFunc(ranked, func(a, b standing) int { // failed relays are tried after the others, and in turn
		switch {
		case a.failed != b.failed && a.failed:
			return 1
		case a.failed != b.failed:
			return -1
		case a.failed:
			return cmp.Compare(a.since, b.since)
		}
		return 0
	})
	for _, s := range ranked {
		switch {
		case needs[s.id] == needWarm:
		case s.bound || s.used > 0 && now-s.used < demandHold:
			needs[s.id] = needDemand
		case s.failed && s.trial > 0 && now-s.trial < trialTime:
			needs[s.id] = needTrial // the relay may not know this node yet: it gets some tries, then others do
		case near && admittedBefore(s, last) > 0: // a relay that was admitted sooner would be taken, so it gets its trial
			needs[s.id] = needNone
		case free > 0 && s.untried(now, healthy):
			free--
			needs[s.id] = needTrial
		default:
			needs[s.id] = needNone
		}
	}
	return needs
}

// rank sorts relays by preference.
func rank(all []standing, late time.Duration) []standing {
	least := time.Duration(0)
	for _, s := range all {
		if s.rtt > 0 && (least == 0 || s.rtt < least) {
			least = s.rtt
		}
	}
	gain := clearGain(least, late)
	class := func(s standing) int {
		switch {
		case s.rtt == 0:
			return 2
		case s.rtt <= least+gain, s.warm && s.rtt <= least+2*gain, s.young && s.healthy:
			return 0
		}
		return 1
	}
	ranked := slices.Clone(all)
	slices.SortFunc(ranked, func(a, b standing) int {
		d := cmp.Compare(class(a), class(b))
		if d == 0 && class(a) == 1 {
			d = cmp.Compare(rankRTT(a), rankRTT(b))
		}
		return cmp.Or(d, admittedBefore(a, b))
	})
	return ranked
}

// admittedBefore compares by admission: negative if a's node was admitted first.
func admittedBefore(a, b standing) int {
	return cmp.Or(cmp.Compare(a.order, b.order), slices.Compare(a.id[:], b.id[:]))
}

// untried reports whether to dial a relay: to measure its RTT, or because too few others answer.
func (s standing) untried(now time.Duration, healthy int) bool {
	switch {
	case s.failed:
		return now-s.since > retryFailed || healthy < warmRelays && now-s.since > retrySoon
	case s.rtt == 0:
		return true
	}
	return now-s.at > remeasure && !s.healthy
}

// rankRTT returns a relay's RTT, reduced for a warm one: another relay must be better by a fifth and 5 ms.
func rankRTT(s standing) time.Duration {
	if s.warm {
		return max(s.rtt-clearGain(s.rtt, 0), 0)
	}
	return s.rtt
}

// manage keeps the sessions that plan decides on.
func (p *Pool) manage() {
	timer := time.NewTimer(planEvery)
	defer timer.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-timer.C:
		case <-p.replan:
		}
		next := planEvery
		if p.applyPlan() {
			next = planRest
		}
		timer.Reset(next)
		if p.farFound.Swap(false) {
			p.release()
		}
	}
}

func (p *Pool) planAgain() {
	select {
	case p.replan <- struct{}{}:
	default:
	}
}

// applyPlan starts and ends sessions. rests reports that another plan is needed only when something changes.
func (p *Pool) applyPlan() (rests bool) {
	p.planning.Lock()
	defer p.planning.Unlock()
	now := p.now()
	p.mu.RLock()
	clients := make([]*client, 0, len(p.relays))
	for _, c := range p.relays {
		clients = append(clients, c)
	}
	p.mu.RUnlock()
	all := make([]standing, len(clients))
	for i, c := range clients {
		all[i] = c.standing(p.reserved.bound(c.relay.ID))
	}
	needs := plan(all, now, p.cfg.Lag.Late(time.Now()))
	rests = true
	for i, c := range clients {
		n := needs[c.relay.ID]
		c.setNeed(n)
		rests = rests && (n == needWarm && all[i].healthy && all[i].rtt > 0 || n == needNone)
	}
	return rests
}

func (c *client) standing(bound bool) standing {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := c.tunnel.Load(); n != c.planned { // watch may not have noticed these packets yet
		c.planned = n
		c.used.Store(int64(max(c.pool.now(), 1)))
	}
	s := standing{
		id: c.relay.ID, order: c.relay.Order, rtt: c.knownRTT, at: c.measuredAt, healthy: c.status.connected &&
			!c.status.suspect,
		failed: c.status.suspect || !c.status.connected && c.lastErr != nil, since: c.failedAt,
		warm: c.need == needWarm, used: time.Duration(c.used.Load()), bound: bound,
	}
	s.young = s.warm && c.pool.now()-c.needAt < warmStay
	if c.need == needTrial {
		s.trial = c.needAt
	}
	return s
}

// setNeed starts or ends the session.
func (c *client) setNeed(n need) {
	c.mu.Lock()
	old := c.need
	if c.need = n; old != n {
		c.needAt = max(c.pool.now(), 1)
	}
	c.mu.Unlock()
	switch {
	case old == n:
	case n == needNone:
		if w := c.wire.Load(); w != nil {
			c.giveUp(w)
		}
	case old == needNone:
		c.again()
	}
}

func (c *client) needIs(n need) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.need == n
}

// failing reports whether the last try to reach the relay failed.
func (c *client) failing() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.status.connected && c.lastErr != nil
}

// lastRTT returns the last measured RTT of the relay; 0: it was never measured.
func (c *client) lastRTT() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.knownRTT
}

// lastGivenUp returns when the last session that was given up ended; 0: there was none.
func (c *client) lastGivenUp() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gaveUp
}

// demand notes that a peer needs this relay, or uses it. c may be nil.
func (c *client) demand(now time.Duration) {
	if c == nil {
		return
	}
	if old := time.Duration(c.used.Swap(int64(max(now, 1)))); old == 0 || now-old > demandHold/2 || c.needIs(needNone) {
		c.pool.planAgain()
	}
}

// bound reports whether a relay holds ports for this node.
func (r *reservations) bound(relay identity.ID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for l := range r.byOf {
		if l.relay == relay {
			return true
		}
	}
	return false
}
