package sites_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// acting returns n leaders that say that they lead and which slots they have.
func acting(n int) (out []sites.Leader) {
	for i := range n {
		out = append(out, sites.Leader{ID: id(i), Term: 1, Acting: true, Slot: uint32(i + 1)})
	}
	return out
}

// users returns the leaders that carry each slice, by slot.
func users(leaders []sites.Leader) (out [events.Slices]uint32) {
	for i, first := range sites.Carriers(leaders) {
		out[i] = leaders[slices.IndexFunc(leaders, func(l sites.Leader) bool { return l.ID == first })].Slot
	}
	return out
}

func changed(a, b [events.Slices]uint32) float64 {
	n := 0
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return float64(n) / events.Slices
}

// Whichever of n leaders is lost or returns, its share of the slices moves, and hardly anything else, even if one is
// missing already. All leaders have about equal shares.
func TestSharesMoveLittle(t *testing.T) {
	for n := 2; n <= 16; n++ {
		for missing := range n {
			for _, less := range []bool{false, true} {
				leaders := acting(n)
				if less {
					leaders = slices.Delete(leaders, missing, missing+1)
				} else if missing > 0 {
					continue
				}
				have, one := users(leaders), 1/float64(len(leaders))
				for i, l := range leaders {
					share := 0
					for _, s := range have {
						if s == l.Slot {
							share++
						}
					}
					if f := float64(share) / events.Slices; f > one+0.03 || f < one-0.03 {
						t.Errorf("%d leaders, less %t %d: slot %d has %.1f %%", n, less, missing, l.Slot, 100*f)
					}
					if len(leaders) == 1 {
						continue
					}
					left := slices.Delete(slices.Clone(leaders), i, i+1)
					more := 0.01
					if less {
						more = 0.05
					}
					if f := changed(have, users(left)); f > one+more {
						t.Errorf("%d leaders, less %t %d: without slot %d %.1f %% move", n, less, missing, l.Slot, 100*f)
					}
				}
			}
		}
	}
}

// Nodes of different versions must come to the same shares.
func TestSharesArePinned(t *testing.T) {
	for n, want := range map[int]string{
		2: strings.Repeat("1", 64) + strings.Repeat("2", 64),
		3: "1111111111111111111111111111111111111111111333333333333333333333" +
			"2222222222222222222222222222222222222222222333333333333333333333",
		5: "1111111111111111111111111555555544444444444333333333333333333333" +
			"2222222222222222222222222255555544444444444333335555554444555555",
	} {
		got := ""
		for _, s := range users(acting(n)) {
			got += fmt.Sprint(s)
		}
		if got != want {
			t.Errorf("%d leaders: %s, want %s", n, got, want)
		}
	}
	leaders := slices.Delete(acting(4), 1, 2)
	got := ""
	for _, s := range users(leaders) {
		got += fmt.Sprint(s)
	}
	want := "1111111111111111111111111111111144444444444333333333333333333333" +
		"3341343411313343134111414314311444444444444333333333334444444444"
	if got != want {
		t.Errorf("without the second of four: %s, want %s", got, want)
	}
}

// The order of a slice is the leader that has it, then the one that has it when the first is lost, and so on: a host
// that finds leaders dead does what all hosts do once they are gone.
func TestOrderIsWhoIsNext(t *testing.T) {
	leaders := acting(5)
	for slice := range events.Slices {
		left := slices.Clone(leaders)
		for _, next := range sites.SliceOrder(leaders, slice) {
			if first := sites.SliceOrder(left, slice)[0]; first != next {
				t.Fatalf("slice %d: %s is next, and %s has it when the others are gone", slice, next, first)
			}
			left = slices.DeleteFunc(left, func(l sites.Leader) bool { return l.ID == next })
		}
	}
}

// Leaders publish their slots one after another. Before and after that, all hosts compute the same slots, and no two
// leaders have one slot. A leader that goes on keeps its slot when others come and go.
func TestSlotsAreKept(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		perSite := rapid.IntRange(0, 16).Draw(t, "leaders per site")
		n := rapid.IntRange(1, max(1, 2*perSite)).Draw(t, "leaders")
		says := map[identity.ID]uint32{}
		var leaders []sites.Leader
		for i := range n {
			l := sites.Leader{ID: id(i), Term: rapid.Uint64Range(0, 2).Draw(t, "term"), Acting: rapid.Bool().Draw(t, "acting")}
			leaders = append(leaders, l)
			says[l.ID] = rapid.Uint32Range(0, 40).Draw(t, "says")
		}
		take := func(of []sites.Leader) []sites.Leader {
			of = slices.Clone(of)
			sites.TakeSlots(of, perSite, func(id identity.ID) uint32 { return says[id] })
			return of
		}
		want := take(leaders)
		for range rapid.IntRange(0, 5).Draw(t, "say") {
			if l := rapid.SampledFrom(want).Draw(t, "one"); l.Term > 0 {
				says[l.ID] = l.Slot
			}
			if got := take(leaders); !slices.Equal(got, want) {
				t.Fatalf("%v, then %v", want, got)
			}
		}
		for i, l := range want {
			twice := slices.ContainsFunc(want[:i], func(o sites.Leader) bool { return o.Slot == l.Slot })
			if l.Slot == 0 || l.Slot > 32 || twice {
				t.Fatalf("slots %v", want)
			}
			says[l.ID] = l.Slot
		}
		gone := rapid.IntRange(0, n-1).Draw(t, "gone")
		for _, l := range take(slices.Delete(slices.Clone(leaders), gone, gone+1)) {
			was := want[slices.IndexFunc(want, func(o sites.Leader) bool { return o.ID == l.ID })]
			if l.Term > 0 && l.Slot != was.Slot && int(was.Slot) <= max(perSite, n-1) {
				t.Fatalf("%v, and without %s %v", want, leaders[gone].ID, l)
			}
		}
	})
}
