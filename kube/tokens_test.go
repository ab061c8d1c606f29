package kube

import (
	"testing"

	"github.com/skeinmesh/skein/identity"
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
