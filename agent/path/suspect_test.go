package path

import (
	"testing"
	"time"
)

// replaceable is a pair with a direct path and traffic. Its first node was late by lag.Meter's reading, and can send
// through other nodes than the second.
func replaceable(t *testing.T, seed uint64, late time.Duration) *sim {
	s := newSim(t, seed, natPortRestricted, natPortRestricted)
	s.start(true)
	s.run(10 * time.Second)
	wantPaths(t, s, "after the start", Direct, true)
	s.input(s.nodes[0], Input{Kind: InputReplaceable, Reply: true})
	s.input(s.nodes[0], Input{Kind: InputLate, RTT: late})
	s.traffic(time.Hour)
	s.run(2 * time.Second)
	return s
}

// avoided reports whether traffic that others can carry avoids the path.
func avoided(n *simNode) bool { return n.m.Path.Kind != Direct || !n.m.Path.Alive || n.m.Path.Suspect }

// pause stops a node's process for some time.
func (s *sim) pause(node int, d time.Duration) {
	until := s.now.Add(d)
	s.stall = func(of int) time.Duration {
		if of != node {
			return 0
		}
		return until.Sub(s.now)
	}
}

// until runs until a condition holds, and returns how long that took.
func (s *sim) until(holds func() bool) time.Duration {
	s.t.Helper()
	began := s.now
	for !holds() {
		if s.run(5 * time.Millisecond); s.now.Sub(began) > time.Minute {
			s.dump()
			s.t.Fatal("nothing has happened for a minute")
		}
	}
	return s.now.Sub(began)
}

// A replaceable peer that is dead is suspected before its path is given up, also by an agent that woke 300 ms late some
// seconds ago, and is on time now, and after a late answer. These still wait longer before they give the path up.
func TestDeadPeerIsSuspectedInTime(t *testing.T) {
	const inTime = heartbeat + suspectAfter + fastHeartbeat
	for name, c := range map[string]struct {
		late  time.Duration
		slack bool
	}{
		"on time":             {},
		"was late":            {late: 400 * time.Millisecond}, // what lag.Meter makes of 300 ms
		"was very late":       {late: 3200 * time.Millisecond},
		"an answer was late":  {slack: true},
		"both have been late": {late: 200 * time.Millisecond, slack: true},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(20) {
				s := replaceable(t, seed, 0)
				n := s.nodes[0]
				if c.slack {
					s.pause(1, 800*time.Millisecond)
					s.run(20 * time.Second)
					if n.m.Slack == 0 || !n.m.direct() {
						t.Fatalf("seed %d: a late answer gave %s, and %s", seed, n.m.Slack, n.m.Path)
					}
				}
				s.input(n, Input{Kind: InputLate, RTT: c.late})
				s.run(time.Second + time.Duration(seed)*11*time.Millisecond) // so far after a heartbeat
				patience := deadAfter + n.m.Slack + 2*c.late
				s.pause(1, time.Hour)
				took := s.until(func() bool { return avoided(n) })
				s.until(func() bool { return n.m.Path.Kind != Direct })
				if took > inTime {
					t.Errorf("seed %d: sent through others after %s, want %s at most", seed, took, inTime)
				}
				if died := n.m.DirectEnd.Sub(n.m.SilentSince); died < patience {
					t.Errorf("seed %d: the path was given up after %s, before the %s that it is given", seed, died, patience)
				}
				if n.m.Path.Suspect {
					t.Errorf("seed %d: a path that was given up is suspected: %+v", seed, n.m.Path)
				}
			}
		})
	}
}

// A peer whose punch says that it has lost the path has waited already, so a late host suspects it as soon as an answer
// is missing for verifyPatience.
func TestPeerThatLostThePathIsSuspectedSooner(t *testing.T) {
	for seed := range uint64(10) {
		s := replaceable(t, seed, 400*time.Millisecond)
		n := s.nodes[0]
		s.run(time.Duration(seed) * 22 * time.Millisecond)
		s.cut = cutAll
		n.m.VerifyUntil = s.now.Add(verifyFor)
		s.input(n, Input{Kind: InputTick})
		if took := s.until(func() bool { return avoided(n) }); took >= suspectAfter {
			t.Errorf("seed %d: sent through others after %s", seed, took)
		}
	}
}

// A path with extra patience gets the same number of pings, not more: hosts that are too busy to answer need fewer
// pings.
func TestLateHostsPingNoMore(t *testing.T) {
	for _, c := range []struct {
		late        time.Duration
		replaceable bool
		most        uint32 // pings until the path is given up, the heartbeats before included
	}{
		{0, false, 13},
		{400 * time.Millisecond, false, 14},  // 1.3 s of patience: 26 pings at the pace of a host on time
		{1600 * time.Millisecond, false, 22}, // 3.9 s, no more rarely than with answers: 78
		{400 * time.Millisecond, true, 30},
	} {
		for seed := range uint64(10) {
			s := replaceable(t, seed, c.late)
			n := s.nodes[0]
			s.input(n, Input{Kind: InputReplaceable, Reply: c.replaceable})
			s.pause(1, time.Hour)
			sent := func() (all uint32) {
				for i := range n.m.Probes {
					all += n.m.Probes[i].Sent
				}
				return all
			}
			before, at := sent(), s.now
			s.until(func() bool { return !n.m.direct() || n.m.Path.Suspect })
			if got := sent() - before; got > c.most || got < deadMissed {
				t.Errorf("%s late, replaceable %t, seed %d: %d pings in %s, want at most %d", c.late, c.replaceable, seed, got,
					s.now.Sub(at), c.most)
			}
		}
	}
}

// A peer that no other can replace is never suspected.
func TestOnlyReplaceablePeersAreSuspected(t *testing.T) {
	s := replaceable(t, 1, 400*time.Millisecond)
	n := s.nodes[0]
	s.input(n, Input{Kind: InputReplaceable})
	s.cut = cutAll
	if took := s.until(func() bool { return avoided(n) }); took < deadAfter+800*time.Millisecond {
		t.Errorf("given up after %s by a host that was late", took)
	}

	s = replaceable(t, 1, 400*time.Millisecond)
	n = s.nodes[0]
	s.cut = cutAll
	s.until(func() bool { return n.m.Path.Suspect })
	if s.input(n, Input{Kind: InputReplaceable}); n.m.Path.Suspect {
		t.Error("suspected still, when nobody stands in any more")
	}
}

// Time in which this process sleeps is not held against the peer: each tick comes that much after its time.
func TestOwnDelaysAreNoSilence(t *testing.T) {
	ms := time.Millisecond
	for name, c := range map[string]struct {
		late func(tick int) time.Duration // than it was due
		want [2]time.Duration             // from the oldest unanswered ping until the suspicion
	}{
		"on time":            {func(int) time.Duration { return 0 }, [2]time.Duration{350 * ms, 360 * ms}},
		"a little":           {func(int) time.Duration { return 10 * ms }, [2]time.Duration{350 * ms, 420 * ms}},
		"once by 400 ms":     {onTick(3, 400*ms), [2]time.Duration{750 * ms, 810 * ms}},
		"once by 3 s":        {onTick(4, 3000*ms), [2]time.Duration{3350 * ms, 3410 * ms}},
		"each time by 50 ms": {func(int) time.Duration { return 50 * ms }, [2]time.Duration{600 * ms, 1350 * ms}},
	} {
		s := replaceable(t, 1, 0)
		m := s.nodes[0].m
		m.Late = 3200 * ms // so that the path is not given up before
		for len(m.Pending) == 0 {
			m, _ = Step(m, m.Woken, Input{Kind: InputTick})
		}
		first := m.Pending[0]
		for i := 0; !m.Path.Suspect; i++ {
			now := m.Woken.Add(c.late(i))
			if now.Sub(first) > time.Minute {
				t.Fatalf("%s: never suspected", name)
			}
			m, _ = Step(m, now, Input{Kind: InputTraffic})
			m, _ = Step(m, now, Input{Kind: InputTick}) // the same delay, seen twice
		}
		if took := m.Now.Sub(first); took < c.want[0] || took > c.want[1] {
			t.Errorf("%s: suspected after %s, want %s to %s", name, took, c.want[0], c.want[1])
		}
	}
}

func onTick(n int, late time.Duration) func(int) time.Duration {
	return func(i int) time.Duration {
		if i == n {
			return late
		}
		return 0
	}
}

// A process that is late suspects no peer that answers, although both ends sleep 300 ms again and again.
func TestLateProcessSuspectsNoLivePeer(t *testing.T) {
	for seed := range uint64(5) {
		s := replaceable(t, seed, 400*time.Millisecond)
		var until [2]time.Time
		s.stall = func(node int) time.Duration {
			if s.now.Sub(until[node]) > time.Duration(50+s.rnd.IntN(300))*time.Millisecond {
				until[node] = s.now.Add(300 * time.Millisecond)
			}
			return until[node].Sub(s.now)
		}
		for range 60_000 {
			if s.run(10 * time.Millisecond); s.nodes[0].m.Path.Suspect {
				t.Fatalf("seed %d: suspected %s after the start", seed, s.now.Sub(simStart))
			}
		}
	}
}

// A peer that freezes for 1.2 s again and again is suspected more and more rarely, its path is kept, and an answer
// ends each suspicion.
func TestSuspicionsAreDamped(t *testing.T) {
	const stop = 1200 * time.Millisecond
	s := replaceable(t, 1, 1600*time.Millisecond)
	n := s.nodes[0]
	switches := n.switches
	began := s.now
	s.stall = func(node int) time.Duration {
		if in := s.now.Sub(began) % (7 * time.Second); node == 1 && in < stop {
			return stop - in
		}
		return 0
	}
	var suspected int
	var longest time.Duration
	for was, since := false, s.now; s.now.Sub(began) < 10*time.Minute; s.run(5 * time.Millisecond) {
		if is := n.m.Path.Suspect; is && !was {
			suspected, since = suspected+1, s.now
		} else if is {
			longest = max(longest, s.now.Sub(since))
		}
		was = n.m.Path.Suspect
	}
	// After 10, 20, 40, 80 and then each 120 s: at most 8 in ten minutes, and each within one stop.
	if suspected < 6 || suspected > 8 {
		t.Errorf("suspected %d times in 85 stops", suspected)
	}
	if longest > stop-suspectAfter+heartbeat {
		t.Errorf("suspected for %s by a stop of %s", longest, stop)
	}
	if n.switches != switches {
		s.dump()
		t.Errorf("%d changes of a path that was never given up", n.switches-switches)
	}
	s.stall = nil
	s.run(calmAfter + trustMax + time.Second)
	s.pause(1, stop)
	if took := s.until(func() bool { return n.m.Path.Suspect }); took > heartbeat+suspectAfter+fastHeartbeat {
		t.Errorf("after two calm minutes it took %s", took)
	}
	s.until(func() bool { return !n.m.Path.Suspect })
	if hold := n.m.TrustUntil.Sub(s.now); hold > trustFirst {
		t.Errorf("after two calm minutes it is not suspected for %s", hold)
	}
}

// However late this process is and however patient its paths are, the remembered pings suffice for a death.
func TestMostPatientPathDies(t *testing.T) {
	s := replaceable(t, 1, 3200*time.Millisecond)
	n := s.nodes[0]
	s.input(n, Input{Kind: InputReplaceable})
	n.m.Slack, n.m.SlackUntil = slackMax, s.now.Add(slackFor)
	n.trace = trace{}
	s.pause(1, time.Hour)
	patience := n.m.Slack + 2*n.m.Late + deadAfter
	if took := s.until(func() bool { return n.m.Path.Kind != Direct }); took > patience+time.Second {
		t.Errorf("given up after %s, of a patience of %s", took, patience)
	}
}
