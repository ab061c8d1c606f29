package kube

import (
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

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
	none, both := map[string]*Node{}, map[string]*Node{"self": {UID: "1"}, "node": {UID: "2"}}
	anew := map[string]*Node{"self": {UID: "1"}, "node": {UID: "3"}}
	h := homes{}
	h.learn(map[identity.ID]*Node{ids[1]: {Name: "node", UID: "2"}})
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
		{"it was there", both, false, 0, false, 0},
		{"another Node has its name", anew, false, time.Second, false, 10 * time.Second},
		{"for the grace", anew, false, 10 * time.Second, true, 0},
	} {
		now = now.Add(step.after)
		alive[ids[1]] = step.alive
		over, next := g.look(s, step.nodes, h, 10*time.Second, now)
		if slices.Contains(over, ids[1]) != step.over || len(over) > 1 || next != step.next {
			t.Errorf("%d, %s: %v, next %v", i, step.what, over, next)
		}
	}
	if over, next := g.look(s, none, h, 0, now.Add(time.Hour)); len(over) != 0 || next != 0 {
		t.Errorf("where it is off: %v, %v", over, next)
	}
}

// After a restart of the controller, MeshNodes tell which Nodes members were.
func TestHomesAreRecalled(t *testing.T) {
	ids := kubetest.New(t).Admit("node", "other")
	meshNode := func(id identity.ID, node, uid string) custom {
		return custom{&unstructured.Unstructured{Object: map[string]any{
			"spec":   map[string]any{"nodeID": id.String()},
			"status": map[string]any{"kubernetesNode": node, "kubernetesNodeUID": uid},
		}}}
	}
	h := homes{}
	h.learn(map[identity.ID]*Node{ids[1]: {Name: "node", UID: "2"}})
	h.recall(map[string]custom{
		"node": meshNode(ids[1], "node", "1"), "other": meshNode(ids[2], "n2", "7"), "a": meshNode(ids[0], "n3", ""),
	})
	for _, c := range []struct {
		id        identity.ID
		node, uid string
		another   bool
	}{
		{ids[1], "node", "2", false}, {ids[1], "node", "3", true}, {ids[1], "renamed", "3", false},
		{ids[2], "n2", "7", false}, {ids[2], "n2", "8", true}, {ids[0], "n3", "9", false}, {identity.ID{9}, "n2", "8", false},
	} {
		if another := h.another(c.id, c.node, c.uid); another != c.another {
			t.Errorf("%v %s %s: %v", c.id, c.node, c.uid, another)
		}
	}
	if h.of(ids[2], "n2") != "7" || h.of(ids[2], "n3") != "" {
		t.Error("a member's Node is told wrongly")
	}
}
