package path

import (
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// lazySim is a pair of a large mesh.
func lazySim(t *testing.T) *sim { return lazyBehind(t, natPortRestricted, natPortRestricted) }

func lazyBehind(t *testing.T, a, b skeinv1.NatType) *sim {
	s := newSim(t, 1, a, b)
	for _, n := range s.nodes {
		s.input(n, Input{Kind: InputSettings, Settings: &Settings{Lazy: true}})
	}
	return s
}

func pingsOf(s *sim) int { return s.nodes[0].pings + s.nodes[1].pings }

// A pair of a large mesh without traffic stays with the relay and sends nothing. Its traffic goes over the relay at
// first, without loss, and soon directly. When the traffic ends, the path stays for one keepalive interval.
func TestLazyPair(t *testing.T) {
	s := lazySim(t)
	s.turn = 100 * time.Millisecond
	s.start(true)
	s.run(10 * time.Minute)
	wantPaths(t, s, "without traffic", Relay, true)
	if rule := s.nodes[0].m.Path.Rule; rule != ruleIdle || pingsOf(s) > 0 {
		t.Errorf("without traffic there were %d pings, and the rule is %s", pingsOf(s), rule)
	}
	began := s.now
	s.traffic(10 * time.Second)
	s.run(2 * time.Second)
	wantPaths(t, s, "with traffic", Direct, true)
	s.run(8*time.Second + 100*time.Millisecond)
	if echoes := len(s.nodes[0].echoes); echoes != 501 || s.blackout(began) > 130*time.Millisecond {
		t.Errorf("%d echoes of 501, longest silence %s", echoes, s.blackout(began))
	}
	s.run(time.Minute)
	before := pingsOf(s)
	s.run(10 * time.Minute)
	wantPaths(t, s, "long after the traffic", Direct, true)
	if n := pingsOf(s) - before; n > 70 {
		t.Errorf("%d pings in ten idle minutes, want a keepalive of each end", n)
	}
	s.cut = cutAll
	s.run(2 * time.Minute)
	wantPaths(t, s, "the idle path was cut", Relay, true)
	before = pingsOf(s)
	s.run(10 * time.Minute)
	if n := pingsOf(s) - before; n > 0 {
		t.Errorf("%d pings after an idle path had died", n)
	}
}

// The heartbeats of a lazy pair take no longer to find something than those of any other.
func TestLazyPairIsCut(t *testing.T) {
	s := lazySim(t)
	s.start(true)
	s.run(time.Minute)
	s.traffic(20 * time.Second)
	s.run(10 * time.Second)
	wantPaths(t, s, "with traffic", Direct, true)
	s.cut = cutAll
	began := s.now
	s.run(8 * time.Second)
	wantPaths(t, s, "cut", Relay, true)
	if b := s.blackout(began); b > time.Second {
		t.Errorf("nothing for %s", b)
	}
}

// Without a relay nothing could carry the first packet: after some seconds the search for a direct path begins, as in
// a small mesh.
func TestLazyWithoutRelay(t *testing.T) {
	s := lazySim(t)
	s.start(false)
	s.run(lazyWithin - time.Second)
	if n := pingsOf(s); n > 0 {
		t.Errorf("%d pings, though a relay may come yet", n)
	}
	s.run(5 * time.Second)
	wantPaths(t, s, "no relay has come", Direct, true)
}

// Traffic wakes an idle pair at once if no relay carries it, also traffic from just before the last relay was lost:
// two hosts of a site that is cut off find each other in their own network.
func TestLazyPairLosesItsRelay(t *testing.T) {
	for name, lost := range map[string]time.Duration{"before the packet": 0, "after it": time.Second} {
		t.Run(name, func(t *testing.T) {
			s := lazyBehind(t, natNone, natNone)
			s.start(true)
			s.run(10 * time.Second)
			lose := func() {
				for _, n := range s.nodes {
					s.input(n, Input{Kind: InputRelay})
				}
			}
			if lost == 0 {
				lose()
			}
			s.traffic(50 * time.Millisecond)
			s.run(lost)
			if lost > 0 {
				lose()
			}
			s.run(2 * time.Second)
			wantPaths(t, s, "without the relay", Direct, true)
		})
	}
}

// Bursts of a large mesh take turns, fewer on a host that is late.
func TestTurns(t *testing.T) {
	if room(0) != burstsMax || room(lateStep) != burstsMax/2 || room(8*lateStep) != 1 || room(time.Hour) != 1 {
		t.Errorf("room: %d %d %d %d", room(0), room(lateStep), room(8*lateStep), room(time.Hour))
	}
}

// A single packet now and then wakes no pair: it goes over the relay, and no search begins.
func TestLonePacketsWakeNobody(t *testing.T) {
	s := lazySim(t)
	s.start(true)
	s.run(10 * time.Second)
	want := 0
	for i := range 20 {
		// seen in one reading of the counters, or in two
		d := []time.Duration{50 * time.Millisecond, 400 * time.Millisecond}[i%2]
		s.traffic(d)
		s.run(10 * time.Second)
		want += int(d/(20*time.Millisecond)) + 1
	}
	wantPaths(t, s, "after lone packets", Relay, true)
	if n := pingsOf(s); n > 0 {
		t.Errorf("%d pings for lone packets", n)
	}
	if n := len(s.nodes[0].echoes); n != want {
		t.Errorf("%d echoes, want %d", n, want)
	}
}

// A change of the best relay does not concern an idle pair.
func TestRelaysThatChangeAreNothingToAnIdlePair(t *testing.T) {
	s := lazySim(t)
	s.start(true)
	s.run(10 * time.Second)
	n := s.nodes[0]
	before := n.m.Path
	s.input(n, Input{Kind: InputRelay, Relay: RelayChoice{ID: identity.ID{77}, RTT: time.Second}})
	if !n.m.Path.same(before) || !before.Relay.IsZero() || before.Rule != ruleIdle {
		t.Errorf("the path was %+v, and is %+v", before, n.m.Path)
	}
	s.traffic(5 * time.Second)
	s.run(time.Second)
	if p := n.m.Path; p.Kind == Relay && p.Relay != (identity.ID{77}) {
		t.Errorf("with traffic the path is %s; want the relay that was chosen last", p)
	}
}

// A peer of a large mesh that relays report absent is tried every ten minutes, with one ping per address; with
// traffic as usual. The relays announce its return.
func TestLazyPeerIsOff(t *testing.T) {
	s := lazySim(t)
	s.start(true)
	s.run(time.Minute)
	n := s.nodes[0]
	s.cut = cutAll
	s.input(n, Input{Kind: InputRelay, Relay: RelayChoice{Absent: true}})
	if n.m.Path.Kind != None || !n.m.Idle {
		t.Fatalf("the peer is off: %+v", n.m.Path)
	}
	before := n.pings
	s.run(time.Hour)
	const addresses = 2 // the peer's, on its LAN and as its NAT shows it
	if pings := n.pings - before; pings < 5*addresses || pings > 7*addresses {
		t.Errorf("%d pings in an hour at a peer that is off, want one for each address in six attempts", pings)
	}
	s.traffic(5 * time.Second)
	if s.run(5 * time.Second); n.m.Idle {
		t.Error("traffic is waiting, and no direct path is looked for")
	}
	s.run(5 * time.Minute)
	s.cut = nil
	s.input(n, Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID, RTT: 2 * s.relay}})
	if n.m.Path.Kind != Relay || n.m.Path.Rule != ruleIdle {
		t.Errorf("the peer is back: %+v", n.m.Path)
	}
	s.traffic(10 * time.Second)
	s.run(3 * time.Second)
	wantPaths(t, s, "the peer is back, and there is traffic", Direct, true)
}
