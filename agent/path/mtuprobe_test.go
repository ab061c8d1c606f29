package path

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

// sized starts a pair whose paths carry the packets that carries accepts.
func sized(t *testing.T, withRelay bool, carries func(from, to, size int) bool) *sim {
	s := newSim(t, 1, natPortRestricted, natPortRestricted)
	s.carries = carries
	for _, n := range s.nodes {
		s.input(n, Input{Kind: InputSettings, Settings: &Settings{MTU: 1420}})
	}
	s.start(withRelay)
	return s
}

func upTo(limit int) func(from, to, size int) bool {
	return func(_, _, size int) bool { return size <= limit }
}

func wantMTU(t *testing.T, s *sim, when string, want int) {
	t.Helper()
	for _, n := range s.nodes {
		if got := n.m.Path.MTU; got != want {
			s.dump()
			t.Errorf("%s: node %d has a path for packets of up to %d bytes, want %d (%s)", when, n.id, got, want,
				n.m.Path.Reason)
		}
	}
}

func TestPathThatCarriesEverythingIsDirectAtOnce(t *testing.T) {
	s := sized(t, true, upTo(1420))
	s.run(500 * time.Millisecond)
	wantPaths(t, s, "after half a second", Direct, true)
	wantMTU(t, s, "after half a second", 0)
	s.run(20 * time.Second)
	for _, n := range s.nodes {
		for _, p := range n.m.Probes {
			if p.Answered > p.Sent {
				t.Errorf("node %d: %d answers from %s to %d pings", n.id, p.Answered, p.Endpoint, p.Sent)
			}
		}
	}
}

func TestPathThatDropsLargePacketsIsNotUsed(t *testing.T) {
	for name, carries := range map[string]func(from, to, size int) bool{
		"both ways":     upTo(1200),
		"one way":       func(from, _, size int) bool { return from == 0 || size <= 1200 },
		"the other way": func(from, _, size int) bool { return from == 1 || size <= 1200 },
	} {
		t.Run(name, func(t *testing.T) {
			s := sized(t, true, carries)
			s.run(20 * time.Second)
			wantPaths(t, s, "after a while", Relay, true)
			for _, n := range s.nodes {
				if n.switches > 1 {
					s.dump()
					t.Errorf("node %d switched %d times", n.id, n.switches)
				}
			}
		})
	}
}

func TestSmallerPacketsWhereLargeOnesAreDropped(t *testing.T) {
	for limit, want := range map[int]int{1412: 1408, 1408: 1408, 1300: 1296, 1280: 1280} {
		s := sized(t, true, upTo(limit))
		s.run(3 * time.Second)
		wantPaths(t, s, "after the search", Direct, true)
		wantMTU(t, s, "after the search", want)
		if r := s.nodes[0].m.Path.Reason; limit == 1300 && !strings.Contains(r, "1296") {
			t.Errorf("reason %q does not tell the size", r)
		}
	}
}

// A black hole that appears under traffic is found by padded heartbeats, and a path that stops carrying large packets
// is given up.
func TestHoleThatAppearsLater(t *testing.T) {
	for limit, want := range map[int]Kind{1400: Direct, 1000: Relay} {
		s := sized(t, true, nil)
		s.run(5 * time.Second)
		wantPaths(t, s, "before", Direct, true)
		wantMTU(t, s, "before", 0)
		s.traffic(12 * time.Second)
		s.run(4 * time.Second)
		s.carries = upTo(limit)
		s.run(4 * time.Second)
		wantPaths(t, s, "four seconds later", want, true)
		if want == Direct {
			wantMTU(t, s, "four seconds later", 1392)
			s.carries = nil
			s.run(directRetry + 5*time.Second)
			wantMTU(t, s, "after the next regular attempt", 0)
		} else if b := s.blackout(simStart.Add(5 * time.Second)); b > 200*time.Millisecond {
			t.Errorf("small packets stood still for %s", b)
		}
	}
}

// The end of a trial that gives up a path also forgets old learned addresses, before and behind its probe. The trials
// of other probes continue, and the reason names the path that was lost.
func TestVerdictForgetsOtherAddresses(t *testing.T) {
	used, old := ap("203.0.113.2:2000"), []netip.AddrPort{ap("203.0.113.3:3000"), ap("203.0.113.4:4000")}
	for before := range len(old) + 1 { // so many of the old addresses stand in front
		now := simStart.Add(time.Hour)
		m := NewMachine(nodeIDs[0], nodeIDs[1], now)
		m.Known, m.Remote, m.Relay = true, node(natNone, Candidate{Type: srflx, Addr: used}), RelayChoice{ID: relayID}
		m.Settings.MTU = 1420
		m.Plan = Plan{Probe: true}
		for _, e := range old {
			m.Probes = append(m.Probes, Probe{Endpoint: e, Type: prflx, FirstSeen: simStart, Next: len(pacing)})
		}
		m.Probes = slices.Insert(m.Probes, before, Probe{Endpoint: used, Type: srflx, Known: true, Answered: 1, Sent: 1,
			LastSent: now, LastAnswered: now,
			Next: len(pacing), MTUProbe: MTUProbe{Began: now.Add(-time.Second), Next: len(mtuProbeSteps),
				Sent: now.Add(-time.Second)}})
		m.Path = Path{Kind: Direct, Endpoint: used, Alive: true, Since: simStart, Rule: "direct-proven",
			Reason: "It answers."}
		m.LastDirect, m.LastPong = used, now

		next, _ := Step(m, now, Input{Kind: InputTick})

		if next.Path.Kind != Relay || !strings.Contains(next.Lost, used.String()) {
			t.Errorf("%d in front: path %s, lost: %q", before, next.Path, next.Lost)
		}
		if len(next.Probes) != 1 || next.Probes[0].Endpoint != used {
			t.Errorf("%d in front: the probes are %+v", before, next.Probes)
		}
	}
}

// Loss does not count as a black hole: of five tries in each trial, and three padded heartbeats, one gets through.
func TestLossIsTakenForNoHole(t *testing.T) {
	for seed := range uint64(20) {
		s := newSim(t, seed, natPortRestricted, natPortRestricted)
		s.loss = 0.05
		for _, n := range s.nodes {
			s.input(n, Input{Kind: InputSettings, Settings: &Settings{MTU: 1420}})
		}
		s.start(true)
		s.run(2 * time.Second)
		s.traffic(2 * time.Minute)
		s.run(2 * time.Minute)
		wantPaths(t, s, "with 5 % loss", Direct, true)
		wantMTU(t, s, "with 5 % loss", 0)
	}
}

// Without a relay a path for small packets is better than none, with the smallest packets that IPv6 allows.
func TestNarrowPathWithoutARelay(t *testing.T) {
	s := sized(t, false, upTo(1000))
	s.run(5 * time.Second)
	wantPaths(t, s, "without a relay", Direct, true)
	s.traffic(5 * time.Second)
	s.run(5 * time.Second)
	wantPaths(t, s, "under traffic", Direct, true)
	wantMTU(t, s, "under traffic", 1280)
}

// The search is bounded: an endpoint that answers only small pings costs one trial, and the next only at the regular
// attempt.
func TestTrialIsBounded(t *testing.T) {
	s := sized(t, true, upTo(100))
	s.run(time.Minute)
	for _, n := range s.nodes {
		if n.padded > 40 {
			t.Errorf("node %d sent %d padded pings in a minute", n.id, n.padded)
		}
	}
}

func TestSizes(t *testing.T) {
	if got, want := ladder(1420), []int{1420, 1408, 1392, 1376, 1360, 1344, 1328, 1312, 1296,
		1280}; !slices.Equal(got, want) {
		t.Errorf("ladder of 1420: %v, want %v", got, want)
	}
	if got := ladder(1280); !slices.Equal(got, []int{1280}) {
		t.Errorf("ladder of 1280: %v", got)
	}
	for _, c := range []struct{ packet, link, want int }{{1420, 1420, 1452}, {1408, 1420, 1440}, {1300, 1420, 1344},
		{1280, 1420, 1312}, {1419, 1420, 1452}} {
		if got := Wire(c.packet, c.link); got != c.want {
			t.Errorf("Wire(%d, %d) = %d, want %d", c.packet, c.link, got, c.want)
		}
	}
}
