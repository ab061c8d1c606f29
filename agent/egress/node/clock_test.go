package node

import (
	"slices"
	"testing"

	"github.com/skeinmesh/skein/identity"
)

// A gateway asks the same nodes for their clocks while they live, and different gateways ask different nodes.
func TestWhoseClocksAreRead(t *testing.T) {
	ids := func(numbers ...byte) (out []identity.ID) {
		for _, n := range numbers {
			out = append(out, identity.ID{n})
		}
		return out
	}
	for _, c := range []struct {
		self       byte
		alive, ask []byte
	}{
		{5, nil, nil},
		{5, []byte{9, 2}, []byte{9, 2}},
		{5, []byte{1, 2, 7, 8, 9, 10}, []byte{7, 8}},
		{9, []byte{1, 2, 7, 8, 10}, []byte{10, 1}},
	} {
		if got := nextAfter(identity.ID{c.self}, ids(c.alive...), 2); !slices.Equal(got, ids(c.ask...)) {
			t.Errorf("node %d, with %v alive, asks %v, want %v", c.self, c.alive, got, c.ask)
		}
	}
	a, err := readClock()
	if err != nil {
		t.Fatal(err)
	}
	b, err := readClock()
	if err != nil || a.Boot == "" || b.Boot != a.Boot || b.At < a.At || a.At == 0 {
		t.Errorf("the clock shows %v, then %v, %v", a, b, err)
	}
}
