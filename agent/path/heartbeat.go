package path

import (
	"fmt"
	"time"
)

// heartbeats supervises the path in use if it is pinged: heartbeats with traffic, keepalives without, and death when
// answers are missing.
func (s *step) heartbeats() {
	s.followTunnel()
	i := s.active()
	if i < 0 {
		return
	}
	if s.Path.Silent {
		s.heartbeatSilent(i)
		return
	}
	if s.Path.Rule == unverified && s.fresh == s.Path.Endpoint {
		s.use(i, "direct-proven")
		return
	}
	s.check()
	if s.dead() && s.heardOut() {
		if s.tunnelLives() {
			s.silence()
		} else {
			s.die(i)
		}
		return
	}
	s.suspect()
	if s.heartbeatDue(i) {
		s.ping(i)
		s.padHeartbeat(i)
	}
}

// busy reports whether there is traffic, or a ping sent during traffic is still unanswered.
func (s *step) busy() bool {
	return s.now.Before(s.BusyUntil) || len(s.Pending) > 0 && s.Pending[0].Before(s.BusyUntil)
}

// rto is how long an answer may take.
func (s *step) rto() time.Duration { return s.leastRTO() + s.lateness() }

// leastRTO is rto on a host that is not late.
func (s *step) leastRTO() time.Duration { return min(max(s.SRTT+4*s.RTTVar, rtoMin), rtoMax) }

// lateness is extra time for answers on a busy host: an answer may wait in this host's queues. The peer's host may be
// as busy, hence twice. Up to lateIgnored the floors of the timeouts suffice.
func (s *step) lateness() time.Duration {
	if s.Late <= lateIgnored {
		return 0
	}
	return 2 * s.Late
}

// overdue counts pings that are unanswered after rto.
func (s *step) overdue() int { return s.unanswered(s.rto()) }

// unanswered counts pings that have had no answer for at least rto.
func (s *step) unanswered(rto time.Duration) int {
	n := 0
	for _, t := range s.Pending {
		if s.now.Sub(t) >= rto {
			n++
		}
	}
	return n
}

func (s *step) verifying() bool {
	return s.now.Before(s.VerifyUntil) && s.LastPong.Before(s.VerifyUntil.Add(-verifyFor))
}

// leastPatience is the age at which the oldest unanswered ping means death, on a host that is not late.
func (s *step) leastPatience() time.Duration {
	if s.verifying() {
		return verifyPatience
	}
	return deadAfter
}

func (s *step) patience() time.Duration {
	patience := s.leastPatience()
	if s.now.Before(s.SlackUntil) {
		patience += s.Slack
	}
	return patience + s.lateness()
}

func (s *step) dead() bool {
	if len(s.Pending) == 0 {
		return false
	}
	if s.busy() {
		return s.now.Sub(s.Pending[0]) >= s.patience() && s.overdue() >= deadMissed
	}
	return s.overdue() > idleRetries
}

// nextHeartbeat is when the next ping on the path in use is due, and how much sooner it may leave with others.
func (s *step) nextHeartbeat(i int) (at time.Time, early time.Duration) {
	last := s.Probes[i].LastSent
	switch {
	case s.Path.Silent && s.now.Sub(s.SilentAt) < watchFor:
		return last.Add(heartbeat), heartbeatEarly
	case s.Path.Silent && s.busy():
		return last.Add(silentHeartbeat), heartbeatEarly
	case s.Path.Silent:
	case s.busy() && (s.unanswered(s.heartbeatRTO()) > 0 || s.verifying()):
		return last.Add(s.overduePace()), 0
	case s.busy():
		return last.Add(heartbeat), heartbeatEarly
	case len(s.Pending) > 0:
		return last.Add(max(idleRetry, s.rto())), 0
	}
	return last.Add(s.jitter(s.keepalive(), int(s.Probes[i].Sent))), s.keepalive() / keepaliveEarly
}

// overduePace is the interval between pings once an answer is overdue. It grows with the path's patience, so that the
// number of tries stays the same: faster pings would slow machines that are late already, and in a large overloaded
// mesh all pairs would send four times as many.
func (s *step) overduePace() time.Duration {
	if s.mayBeSuspected() {
		return fastHeartbeat
	}
	return min(fastHeartbeat*s.patience()/s.leastPatience(), heartbeat)
}

func (s *step) heartbeatDue(i int) bool {
	at, early := s.nextHeartbeat(i)
	return !s.now.Before(at.Add(-early))
}

// heartbeatWake is when heartbeats must run again, and how much sooner it may.
func (s *step) heartbeatWake(i int) (time.Time, time.Duration) {
	beat, early := s.nextHeartbeat(i)
	if at := earlier(beat, s.heartbeatTrouble()); !at.Equal(beat) {
		return at, 0
	}
	return beat, early
}

// heartbeatTrouble is when heartbeats must decide whether the path in use is alive; zero: nothing is unanswered.
func (s *step) heartbeatTrouble() time.Time {
	if s.Path.Silent {
		return s.tunnelEnd()
	}
	if len(s.Pending) == 0 {
		return time.Time{}
	}
	at := s.nextCheck()
	if s.dead() && s.Checks > 1 && s.CheckOf.Equal(s.Pending[0]) {
		return earlier(at, s.CheckedAt.Add(verdictIn))
	}
	if s.busy() {
		if rto := s.heartbeatRTO(); s.unanswered(rto) == 0 {
			at = earlier(at, s.Pending[0].Add(rto))
		}
		at = earlier(at, s.suspectAt())
		if n := len(s.Pending); n >= deadMissed {
			at = earlier(at, later(s.Pending[0].Add(s.patience()), s.Pending[deadMissed-1].Add(s.rto())))
		}
	} else if len(s.Pending) > idleRetries {
		at = earlier(at, s.Pending[idleRetries].Add(s.rto()))
	}
	return at
}

// die gives up the path in use and puts its endpoint on hold, longer with each death. The burst that begins may
// forget probes, so indices of probes and pointers to them are invalid afterwards.
func (s *step) die(i int) {
	p := &s.Probes[i]
	if s.now.Sub(s.Path.Since) >= calmAfter {
		p.Flaps = 0
	}
	p.Flaps = min(p.Flaps+1, 10)
	p.Died, p.Streak = s.now, 0
	p.HoldUntil = s.now.Add(min(holdFirst<<(p.Flaps-1), holdMax))
	s.SilentSince = s.now
	if len(s.Pending) > 0 {
		s.SilentSince = s.Pending[0]
	}
	if p.Type == relayC {
		s.diePort(i)
		return
	}
	s.Lost = fmt.Sprintf("The direct path to %s died: %d pings in %d ms had no answer.", p.Endpoint, len(s.Pending),
		s.now.Sub(s.SilentSince).Milliseconds())
	if s.Path.Silent {
		s.Lost = fmt.Sprintf("The direct path to %s died: the peer's agent does not answer, and WireGuard does not hear "+
			"the peer any more.", p.Endpoint)
	}
	hold := p.HoldUntil
	s.Pending = nil
	s.Path.Alive, s.Path.Silent = false, false
	s.DirectEnd = s.now
	s.Retries = 0
	s.startBurst(true)
	s.NextRetry = hold
}
