package kube

import (
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/kube/join"
)

func TestWaiting(t *testing.T) {
	one, two := &Node{Name: "one"}, &Node{Name: "two"}
	for _, c := range []struct {
		name    string
		nodes   map[string]*Node
		members map[identity.ID]*Node
		want    int
	}{
		{"no Node is known", nil, nil, 0},
		{"all have members", map[string]*Node{"one": one, "two": two}, map[identity.ID]*Node{{1}: one, {2}: two}, 0},
		{"one has none", map[string]*Node{"one": one, "two": two}, map[identity.ID]*Node{{1}: one}, 1},
		{"two members of one Node", map[string]*Node{"one": one, "two": two},
			map[identity.ID]*Node{{1}: one, {2}: one}, 1},
		{"nobody has", map[string]*Node{"one": one, "two": two}, nil, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := waiting(c.nodes, c.members); got != c.want {
				t.Errorf("%d Nodes wait, want %d", got, c.want)
			}
		})
	}
}

// A token's end is by the leader's clock: a host whose own is hours off neither takes a good one for one that has
// ended, and so makes another each second, nor keeps one that has.
func TestAWrongClockMakesNoTokens(t *testing.T) {
	leader := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, off := range []time.Duration{0, 5 * time.Hour, -5 * time.Hour} {
		s := part.Snapshot{ClockOff: off}
		own := leader.Add(off)
		for left, want := range map[time.Duration]bool{join.Lifetime: false, -time.Minute: true} {
			k := join.Kept{Text: "t", Cluster: "c", Token: &skeinv1.Token{ExpiresAt: leader.Add(left).UnixNano(), UsesLeft: 9}}
			if uses, _ := join.Keep(k, "c", 1, s.LeadersTime(own)); uses > 0 != want {
				t.Errorf("a clock that is %s off, a token that ends in %s: a new one is made: %v", off, left, uses > 0)
			}
		}
	}
}
