package events

import (
	"fmt"
	"math"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// The slots of clients are agreed without a word, so they may never change, in no version.
func TestSlotForIsFixed(t *testing.T) {
	for _, c := range []struct {
		key              string
		one, two, three  uint32
		seven, sixtyFour uint32
	}{
		{"", 0, 0, 0, 5, 61},
		{"web/a", 0, 0, 0, 0, 56},
		{"web/b", 0, 0, 2, 3, 24},
		{"db/postgres-0", 0, 0, 0, 6, 62},
		{"10.4.0.7", 0, 1, 1, 6, 62},
		{"fd02::17", 0, 0, 0, 0, 47},
	} {
		for n, want := range map[uint32]uint32{0: 0, 1: c.one, 2: c.two, 3: c.three, 7: c.seven, 64: c.sixtyFour} {
			if have := SlotFor(c.key, n); have != want {
				t.Errorf("%q of %d: slot %d, want %d", c.key, n, have, want)
			}
		}
	}
}

// With one slot more, clients move to the new one and nowhere else; and each slot gets its share.
func TestSlotForMovesFewAndSpreadsEvenly(t *testing.T) {
	const clients = 20_000
	for name, key := range map[string]func(i int) string{
		"pods":      func(i int) string { return fmt.Sprintf("web/nginx-%d", i) },
		"hashes":    func(i int) string { return fmt.Sprintf("ns%d/app-%x", i%17, i*7919) },
		"addresses": func(i int) string { return fmt.Sprintf("10.4.%d.%d", i/256, i%256) },
	} {
		for n := uint32(1); n <= MaxReplicas; n++ {
			count := make([]int, n)
			for i := range clients {
				now := SlotFor(key(i), n)
				if now >= n {
					t.Fatalf("%s of %d is slot %d", key(i), n, now)
				}
				count[now]++
				if n > 1 {
					if before := SlotFor(key(i), n-1); now != before && now != n-1 {
						t.Fatalf("%s moves from slot %d to %d when slot %d is added", key(i), before, now, n-1)
					}
				}
			}
			mean := float64(clients) / float64(n)
			chi := 0.0
			for _, c := range count {
				chi += (float64(c) - mean) * (float64(c) - mean) / mean
			}
			// Chi-square has the mean n-1 and the variance 2(n-1): five deviations and a bit.
			if limit := float64(n-1) + 6*math.Sqrt(2*float64(n)) + 6; chi > limit {
				t.Errorf("%s: chi-square of %d slots is %.1f, above %.1f: %v", name, n, chi, limit, count)
			}
		}
	}
}

func TestEligible(t *testing.T) {
	e := &skeinv1.Egress{Gateways: map[string]string{"gateway": "", "site": "dc"}}
	node := func(labels map[string]string, draining bool) *skeinv1.Node {
		return &skeinv1.Node{Labels: labels, Draining: draining}
	}
	for _, c := range []struct {
		e    *skeinv1.Egress
		n    *skeinv1.Node
		want bool
	}{
		{e, node(map[string]string{"gateway": "", "site": "dc", "more": "x"}, false), true},
		{e, node(map[string]string{"gateway": "", "site": "dc"}, true), false},
		{e, node(map[string]string{"site": "dc"}, false), false}, // a label without a value is a label
		{e, node(map[string]string{"gateway": "", "site": "home"}, false), false},
		{e, node(nil, false), false},
		{e, nil, false},
		{&skeinv1.Egress{}, node(map[string]string{"site": "dc"}, false), false}, // who asks for nothing gets nobody
	} {
		if have := Eligible(c.e, c.n); have != c.want {
			t.Errorf("%v on %v: %t", c.e, c.n, have)
		}
	}
}
