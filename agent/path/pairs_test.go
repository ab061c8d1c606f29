package path

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

var nats = []skeinv1.NatType{natNone, natFullCone, natRestricted, natPortRestricted, natSymmetric, natBlocked}

// Every pair of NATs gets the path required by issue 2 within 2 s, or the reason for using the relay.
func TestPairMatrix(t *testing.T) {
	relayed := func(a, b skeinv1.NatType) bool {
		pair := []skeinv1.NatType{a, b}
		has := func(n skeinv1.NatType) bool { return slices.Contains(pair, n) }
		return has(natBlocked) || a == natSymmetric && b == natSymmetric || has(natSymmetric) && has(natPortRestricted)
	}
	for _, a := range nats {
		for _, b := range nats {
			t.Run(candidate.NATName(a)+"/"+candidate.NATName(b), func(t *testing.T) {
				for seed := range uint64(5) {
					s := newSim(t, seed, a, b)
					s.start(true)
					s.run(10 * time.Second)
					for _, n := range s.nodes {
						if at := n.first.Sub(simStart); n.first.IsZero() || at > 50*time.Millisecond {
							t.Errorf("seed %d node %d: first path after %s", seed, n.id, at)
						}
						switch p := n.m.Path; {
						case relayed(a, b):
							if p.Kind != Relay || n.pings != 0 || p.Rule == "" || p.Reason == "" {
								t.Errorf("seed %d node %d: %s (%s) after %d pings, want the relay and none", seed, n.id, p, p.Rule, n.pings)
							}
						case p.Kind != Direct || !p.Alive:
							t.Errorf("seed %d node %d: %s (%s), want direct", seed, n.id, p, p.Rule)
						case n.direct.Sub(simStart) > 2*time.Second:
							t.Errorf("seed %d node %d: direct after %s", seed, n.id, n.direct.Sub(simStart))
						case n.switches > 3:
							t.Errorf("seed %d node %d: %d switches", seed, n.id, n.switches)
						}
					}
					if t.Failed() {
						s.dump()
						return
					}
				}
			})
		}
	}
}

// The path is direct within 2 s at p95, also with 5 % loss each way.
func TestTimeToDirectUnderLoss(t *testing.T) {
	var took []time.Duration
	for _, pair := range [][2]skeinv1.NatType{{natPortRestricted, natPortRestricted}, {natRestricted, natSymmetric},
		{natNone, natSymmetric}, {natFullCone, natPortRestricted}} {
		for seed := range uint64(100) {
			s := newSim(t, seed, pair[0], pair[1])
			s.loss = 0.05
			s.start(true)
			s.run(5 * time.Second)
			for _, n := range s.nodes {
				d := 5 * time.Second
				if !n.direct.IsZero() {
					d = n.direct.Sub(simStart)
				}
				took = append(took, d)
			}
		}
	}
	slices.Sort(took)
	p50, p95, p99 := took[len(took)/2], took[len(took)*95/100], took[len(took)*99/100]
	t.Logf("time to direct over %d ends: p50 %s p95 %s p99 %s max %s", len(took), p50, p95, p99, took[len(took)-1])
	if p95 > 2*time.Second {
		t.Errorf("p95 %s, want at most 2s", p95)
	}
}

// Traffic resumes within a second of a cut at p99, for two-way cuts and one-way cuts in either direction.
func TestBlackoutAfterCut(t *testing.T) {
	cuts := map[string]func(from, to int, _ netip.AddrPort) bool{
		"two-way": func(int, int, netip.AddrPort) bool { return true },
		"there":   func(from, _ int, _ netip.AddrPort) bool { return from == 0 },
		"back":    func(from, _ int, _ netip.AddrPort) bool { return from == 1 },
	}
	for name, cut := range cuts {
		for _, delay := range []time.Duration{500 * time.Microsecond, 10 * time.Millisecond, 60 * time.Millisecond} {
			t.Run(fmt.Sprint(name, "/", delay), func(t *testing.T) {
				var all []time.Duration
				for seed := range uint64(50) {
					s := newSim(t, seed, natPortRestricted, natRestricted)
					s.delay = delay
					s.start(true)
					s.run(3 * time.Second)
					s.traffic(20 * time.Second)
					s.run(4*time.Second + time.Duration(s.rnd.Int64N(int64(time.Second))))
					s.cut = cut
					at := s.now
					s.run(5 * time.Second)
					all = append(all, s.blackout(at))
					for _, n := range s.nodes {
						if n.m.Path.Kind != Relay {
							s.dump()
							t.Fatalf("seed %d node %d: %s, want the relay", seed, n.id, n.m.Path)
						}
					}
				}
				slices.Sort(all)
				p50, p99 := all[len(all)/2], all[len(all)*99/100]
				t.Logf("blackout p50 %s p99 %s", p50, p99)
				if p99 > time.Second {
					t.Errorf("p99 %s, want at most 1s", p99)
				}
			})
		}
	}
}

// 5 % loss each way does not end a direct path.
func TestNoFlappingUnderLoss(t *testing.T) {
	for seed := range uint64(5) {
		s := newSim(t, seed, natPortRestricted, natPortRestricted)
		s.loss = 0.05
		s.start(true)
		s.run(5 * time.Second)
		before := s.nodes[0].switches + s.nodes[1].switches
		s.traffic(10 * time.Minute)
		s.run(10 * time.Minute)
		if n := s.nodes[0].switches + s.nodes[1].switches - before; n > 0 {
			s.dump()
			t.Fatalf("seed %d: %d switches in ten minutes", seed, n)
		}
	}
}
