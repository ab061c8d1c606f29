package consensus

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"
)

// allocFaults break something that leaves a majority of the servers able to decide, and repair it.
var allocFaults = map[string]func(*allocStorm, *rand.Rand){
	"leader killed": func(s *allocStorm, rng *rand.Rand) { s.down(s.c.leader(), rng) },
	"server killed": func(s *allocStorm, rng *rand.Rand) { s.down(s.server(rng), rng) },
	"leader cut off": func(s *allocStorm, rng *rand.Rand) {
		l := s.c.leader()
		s.c.net.cut(ids(l), ids(s.c.others(l)...))
		s.repair(rng)
	},
	"two servers apart": func(s *allocStorm, rng *rand.Rand) {
		a, b := s.two(rng)
		s.c.net.cut(ids(a), ids(b))
		s.repair(rng)
	},
	"leader not heard": func(s *allocStorm, rng *rand.Rand) {
		l := s.c.leader()
		s.c.net.cutWay(ids(l), ids(s.c.others(l)...))
		s.repair(rng)
	},
	"leader deaf": func(s *allocStorm, rng *rand.Rand) {
		l := s.c.leader()
		s.c.net.cutWay(ids(s.c.others(l)...), ids(l))
		s.repair(rng)
	},
	"one way lost": func(s *allocStorm, rng *rand.Rand) {
		a, b := s.two(rng)
		s.c.net.cutWay(ids(a), ids(b))
		s.repair(rng)
	},
	"delays": func(s *allocStorm, rng *rand.Rand) {
		s.slow(rng)
		s.repair(rng)
	},
	// its successor is asked before it has folded all
	"leader killed while all is slow": func(s *allocStorm, rng *rand.Rand) {
		s.slow(rng)
		s.pause(rng, 500)
		s.down(s.c.leader(), rng)
		s.c.net.heal()
	},
	"clock forward": func(s *allocStorm, rng *rand.Rand) {
		s.clock(s.c.leader().id).Add(int64(time.Duration(1+rng.IntN(60)) * time.Second))
		s.pause(rng, 2000)
	},
	"clock back": func(s *allocStorm, rng *rand.Rand) {
		s.clock(s.c.leader().id).Add(-int64(time.Duration(1+rng.IntN(600)) * time.Second))
		s.pause(rng, 2000)
		s.down(s.c.leader(), rng) // so that another clock decides then
	},
}

// plan has every fault once, in any order.
func (s *allocStorm) plan(rng *rand.Rand) []string {
	out := slices.Sorted(maps.Keys(allocFaults))
	rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

func (s *allocStorm) server(rng *rand.Rand) *node { return s.c.nodes[rng.IntN(3)] }

func (s *allocStorm) two(rng *rand.Rand) (a, b *node) {
	i := rng.IntN(3)
	return s.c.nodes[i], s.c.nodes[(i+1+rng.IntN(2))%3]
}

func (s *allocStorm) pause(rng *rand.Rand, most int) {
	time.Sleep(time.Duration(200+rng.IntN(most)) * time.Millisecond)
}

// slow makes everything that is sent take a while.
func (s *allocStorm) slow(rng *rand.Rand) {
	for _, n := range s.c.nodes {
		s.c.net.delay(ids(n), ids(s.c.others(n)...), time.Duration(1+rng.IntN(150))*time.Millisecond)
	}
}

func (s *allocStorm) repair(rng *rand.Rand) {
	s.pause(rng, 3000)
	s.c.net.heal()
}

func (s *allocStorm) down(n *node, rng *rand.Rand) {
	n.crash()
	s.pause(rng, 2500)
	n.start(false)
}
