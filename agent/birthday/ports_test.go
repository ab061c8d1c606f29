package birthday

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// The figures of FIELD.md, and the same by trying it out with a seeded generator.
func TestOddsAgainstFormulaAndSimulation(t *testing.T) {
	for _, c := range []struct {
		probes int
		apart  float64 // FIELD.md
	}{{256, 0.639}, {1024, 0.983}, {2048, 0.9997}} {
		if got := oddsApart(MaxSockets, c.probes); math.Abs(got-c.apart) > 0.0006 {
			t.Errorf("%d probes that may repeat a port hit with %.4f, FIELD.md says %.4f", c.probes, got, c.apart)
		}
		if a, b := odds(MaxSockets, c.probes), oddsApart(MaxSockets, c.probes); a < b || a > b+0.01 {
			t.Errorf("%d probes of different ports hit with %.4f, with repetitions %.4f", c.probes, a, b)
		}
		const runs = 4000
		hits, rnd := 0, rand.New(rand.NewPCG(1, uint64(c.probes)))
		for range runs {
			if probesUntilHit(rnd, MaxSockets, c.probes) > 0 {
				hits++
			}
		}
		want := odds(MaxSockets, c.probes)
		sigma := math.Sqrt(want * (1 - want) / runs)
		if got := float64(hits) / runs; math.Abs(got-want) > 4*sigma+0.0005 {
			t.Errorf("%d probes hit in %.4f of %d runs, the formula says %.4f", c.probes, got, runs, want)
		}
	}
	if odds(portCount, 1) != 1 || odds(0, 100) != 0 {
		t.Error("the odds of certain and impossible hits")
	}
}

// probesUntilHit is a simulated attempt: the number of the probe that hit, or 0.
func probesUntilHit(rnd *rand.Rand, sockets, probes int) int {
	open := map[uint16]bool{}
	for len(open) < sockets {
		open[uint16(firstPort+rnd.IntN(portCount))] = true
	}
	p := NewPorts(rnd, allPorts, 0, 0, 0)
	for i := range probes {
		if port, ok := p.Next(); ok && open[port] {
			return i + 1
		}
	}
	return 0
}

// At the pace of an attempt nearly all hits are in time.
func TestMedianAndTailOfProbes(t *testing.T) {
	const runs = 2000
	rnd := rand.New(rand.NewPCG(7, 7))
	var all []int
	for range runs {
		if n := probesUntilHit(rnd, MaxSockets, MaxProbes); n > 0 {
			all = append(all, n)
		}
	}
	slices.Sort(all)
	share, median := float64(len(all))/runs, all[len(all)/2]
	t.Logf("%.2f %% hit; probes p50 %d, p99 %d", 100*share, median, all[len(all)*99/100])
	if perSecond := probesPerTick * int(1e9/tick.Nanoseconds()); share < 0.995 || median > 200 ||
		MaxProbes/perSecond > int(attemptFor.Seconds()) {
		t.Errorf("share %.4f, median %d, %d probes a second", share, median, perSecond)
	}
}

func TestEveryPortOnceAndPredictedFirst(t *testing.T) {
	p := NewPorts(rand.New(rand.NewPCG(1, 2)), allPorts, 40000, 2, 10)
	seen := map[uint16]bool{}
	for i := 0; ; i++ {
		port, ok := p.Next()
		if !ok {
			break
		}
		if port < firstPort || seen[port] {
			t.Fatalf("port %d, seen before: %t", port, seen[port])
		}
		if seen[port] = true; i < 10 && port != uint16(40002+2*i) {
			t.Errorf("port %d comes at place %d", port, i)
		}
	}
	if len(seen) != portCount {
		t.Errorf("%d ports, want all %d", len(seen), portCount)
	}
}

func TestPortsOfARange(t *testing.T) {
	p := NewPorts(rand.New(rand.NewPCG(1, 2)), Range{60000, 100}, 59990, 1, 20)
	seen := map[uint16]bool{}
	for port, ok := p.Next(); ok; port, ok = p.Next() {
		if port < 60000 || port >= 60100 || seen[port] {
			t.Fatalf("port %d, seen before: %t", port, seen[port])
		}
		seen[port] = true
	}
	if len(seen) != 100 {
		t.Errorf("%d ports, want all 100", len(seen))
	}
}

func TestPredict(t *testing.T) {
	for _, c := range []struct {
		base uint16
		step int
		want []uint16
	}{
		{40000, 1, []uint16{40001, 40002, 40003}},
		{40000, -2, []uint16{39998, 39996, 39994}},
		{65534, 1, []uint16{65535, 1024, 1025}},
		{1025, -1, []uint16{1024, 65535, 65534}},
		{40000, 0, nil},
		{0, 1, []uint16{64513, 64514, 64515}}, // no NAT has it; it must not leave the range
	} {
		if got := Predict(c.base, c.step, 3); !slices.Equal(got, c.want) {
			t.Errorf("after %d by %d: %v, want %v", c.base, c.step, got, c.want)
		}
	}
}

// odds is the probability that so many probes of different ports meet one of so many open ports.
func odds(sockets, probes int) float64 {
	miss := 1.0
	for i := range min(probes, portCount) {
		miss *= 1 - float64(sockets)/float64(portCount-i)
		if miss <= 0 {
			return 1
		}
	}
	return 1 - miss
}

// oddsApart is the same for probes that may repeat a port: 1 − (1 − sockets/64512)^probes, as FIELD.md has it.
func oddsApart(sockets, probes int) float64 {
	return 1 - math.Pow(1-float64(sockets)/portCount, float64(probes))
}
