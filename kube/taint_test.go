package kube

import (
	"reflect"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/kube/kubetest"
)

func taints(of ...string) (out []any) {
	for i := 0; i < len(of); i += 2 {
		out = append(out, map[string]any{"key": of[i], "effect": of[i+1]})
	}
	return out
}

func TestOnlyOurTaintChanges(t *testing.T) {
	for what, c := range map[string]struct {
		before  []any
		on      bool
		after   []any
		changed bool
	}{
		"on":        {taints("a", "NoExecute"), true, taints("a", "NoExecute", taintKey, "NoSchedule"), true},
		"the first": {nil, true, taints(taintKey, "NoSchedule"), true},
		"on already": {taints(taintKey, "NoSchedule", "a", ""), true, taints(taintKey, "NoSchedule",
			"a", ""), false},
		"on twice": {taints(taintKey, "NoSchedule", taintKey, "NoSchedule"), true,
			taints(taintKey, "NoSchedule"), true},
		"with another effect": {taints(taintKey, "NoExecute"), true, taints(taintKey, "NoSchedule"), true},
		"off":                 {taints("a", "", taintKey, "NoSchedule", "b", ""), false, taints("a", "", "b", ""), true},
		"the last":            {taints(taintKey, "NoExecute"), false, nil, true},
		"off already":         {taints("a", ""), false, taints("a", ""), false},
		"none":                {nil, false, nil, false},
		"rubbish":             {[]any{"x"}, false, []any{"x"}, false},
	} {
		if after, changed := withTaint(c.before, c.on); !reflect.DeepEqual(after, c.after) || changed != c.changed {
			t.Errorf("%s: %v, %v", what, after, changed)
		}
	}
}

func TestWhenTheTaintIsOn(t *testing.T) {
	for _, c := range []struct {
		what                   string
		serves, fresh, on, yes bool
	}{
		{"the host starts", false, true, true, true},
		{"pods can start", true, true, false, true},
		{"the agent starts again", false, false, true, false},
		{"and serves", true, false, false, true},
	} {
		if on, decided := wishTaint(c.serves, c.fresh); decided != c.yes || decided && on != c.on {
			t.Errorf("%s: %v, %v", c.what, on, decided)
		}
	}
}

func TestWhatAnAgentSeesOfItsNode(t *testing.T) {
	var o metav1.Object = &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"uid": "u", "resourceVersion": "7"},
		"spec":     map[string]any{"taints": taints("a", "", taintKey, "NoSchedule")},
		"status": map[string]any{"conditions": []any{
			map[string]any{"type": "Ready", "status": "False"},
			map[string]any{"type": "NetworkUnavailable", "status": "False"},
		}},
	}}
	if n := slimWhole(o); n != (wholeNode{"u", "7", true, true}) {
		t.Errorf("%+v", n)
	}
	o = &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"uid": "u"}}}
	if n := slimWhole(o); n != (wholeNode{uid: "u"}) {
		t.Errorf("%+v", n)
	}
}

func TestWhoIsLost(t *testing.T) {
	ids := kubetest.New(t).Admit("node", "vm")
	node := &Node{Name: "node"}
	both := map[identity.ID]*Node{ids[0]: {Name: "self"}, ids[1]: node}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	l := losses{}
	for i, step := range []struct {
		what    string
		members map[identity.ID]*Node
		alive   bool
		after   time.Duration
		taint   bool
		next    time.Duration
	}{
		{"all is well", both, true, time.Hour, false, 0},
		{"it is silent", both, false, time.Second, false, lostAfter},
		{"for a while", both, false, lostAfter - time.Second, false, time.Second},
		{"it is heard for a moment", both, true, time.Second, false, 0},
		{"silent again", both, false, time.Second, false, lostAfter},
		{"it proves no more that it is the Node", nil, false, time.Second, false, 0},
		{"and does again", both, false, lostAfter, false, lostAfter},
		{"for long", both, false, lostAfter, true, 0},
		{"once only, since its agent may have taken it off", both, false, time.Hour, false, 0},
		{"it is back", both, true, time.Second, false, 0},
		{"and lost another time", both, false, time.Second, false, lostAfter},
		{"for long", both, false, lostAfter, true, 0},
	} {
		now = now.Add(step.after)
		over, next := l.look(step.members, func(identity.ID) bool { return step.alive }, ids[0], now)
		if slices.Contains(over, ids[1]) != step.taint || len(over) > 1 || next != step.next {
			t.Errorf("%d, %s: %v, next %v", i, step.what, over, next)
		}
		for _, id := range over {
			l[id].tainted = true
		}
	}
}

func TestWhoSeesNobodyTaintsNobody(t *testing.T) {
	l := kubetest.New(t)
	ids := l.Admit("admin")
	for what, c := range map[string]struct {
		self identity.ID
		sees bool
		most bool
	}{
		"the only server":          {ids[0], false, true},
		"an admin that sees it":    {ids[1], true, true},
		"an admin that is cut off": {ids[1], false, false},
	} {
		s := &part.Snapshot{Self: c.self, State: l.State, Alive: func(identity.ID) bool { return c.sees }}
		if most := withMost(s); most != c.most {
			t.Errorf("%s: %v", what, most)
		}
	}
}
