package kube

import (
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/kube/kubetest"
)

func TestWhoIsGone(t *testing.T) {
	l := kubetest.New(t)
	ids := l.Admit("node", "vm")
	alive := map[identity.ID]bool{}
	s := &part.Snapshot{
		Self:  ids[0],
		State: l.State,
		Alive: func(id identity.ID) bool { return alive[id] },
		Records: map[identity.ID]gossip.Entry{
			ids[0]: {
				Record: &skeinv1.Record{KubernetesNode: "self"},
			}, ids[1]: {Record: &skeinv1.Record{KubernetesNode: "node"}}, ids[2]: {Record: &skeinv1.Record{}},
			{9}: {Record: &skeinv1.Record{KubernetesNode: "stranger"}},
		},
	}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	g := gone{}
	none, both := map[string]*Node{}, map[string]*Node{"self": {}, "node": {}}
	for i, step := range []struct {
		what  string
		nodes map[string]*Node
		alive bool
		after time.Duration
		over  bool
		next  time.Duration
	}{
		{"the apiserver has not spoken", nil, false, 0, false, 0},
		{"the Node is there", both, false, time.Hour, false, 0},
		{"it is gone", none, false, time.Second, false, 10 * time.Second},
		{"for a while", none, false, 9 * time.Second, false, time.Second},
		{"it was there for a moment", both, false, 0, false, 0},
		{"gone again", none, false, time.Second, false, 10 * time.Second},
		{"gossip has seen the member", none, true, 9 * time.Second, false, 0},
		{"silent again", none, false, time.Second, false, 10 * time.Second},
		{"for the grace", none, false, 10 * time.Second, true, 0},
	} {
		now = now.Add(step.after)
		alive[ids[1]] = step.alive
		over, next := g.look(s, step.nodes, 10*time.Second, now)
		if slices.Contains(over, ids[1]) != step.over || len(over) > 1 || next != step.next {
			t.Errorf("%d, %s: %v, next %v", i, step.what, over, next)
		}
	}
	if over, next := g.look(s, none, 0, now.Add(time.Hour)); len(over) != 0 || next != 0 {
		t.Errorf("where it is off: %v, %v", over, next)
	}
}
