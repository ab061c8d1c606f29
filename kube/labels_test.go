package kube

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/kube/kubetest"
)

// A member is a Node by two proofs, and neither a claim nor a copied record is one.
func TestWhoIsANode(t *testing.T) {
	l := kubetest.New(t)
	ids := l.Admit("victim", "liar", "vm")
	victim, liar := ids[1], ids[2]
	says := func(node string) gossip.Entry {
		return gossip.Entry{Record: &skeinv1.Record{KubernetesNode: node}}
	}
	node := func(name, record string) *Node {
		return &Node{Name: name, UID: "1", hasRecord: record != "", recordSum: sha256.Sum256([]byte(record))}
	}
	held := &holders{}
	n := node("n1", "victim's record")
	held.set(n, victim)
	again := *n
	again.UID = "2"
	for what, c := range map[string]struct {
		node    *Node
		records map[identity.ID]gossip.Entry
		is      map[identity.ID]bool
	}{
		"both": {n, map[identity.ID]gossip.Entry{victim: says("n1")}, map[identity.ID]bool{victim: true}},
		"another claims it too": {n, map[identity.ID]gossip.Entry{victim: says("n1"), liar: says("n1")},
			map[identity.ID]bool{victim: true}},
		"another claims it": {n, map[identity.ID]gossip.Entry{victim: says(""), liar: says("n1")}, nil},
		"it says another":   {n, map[identity.ID]gossip.Entry{victim: says("n2")}, nil},
		"another record":    {node("n1", "changed"), map[identity.ID]gossip.Entry{victim: says("n1")}, nil},
		"no record":         {node("n1", ""), map[identity.ID]gossip.Entry{victim: says("n1")}, nil},
		"made anew":         {&again, map[identity.ID]gossip.Entry{victim: says("n1")}, nil},
		"no member":         {n, map[identity.ID]gossip.Entry{{9}: says("n1")}, nil},
	} {
		s := &part.Snapshot{State: l.State, Records: c.records}
		have := map[identity.ID]bool{}
		for id := range proven(s, map[string]*Node{"n1": c.node}, held.of) {
			have[id] = true
		}
		if !maps.Equal(have, c.is) {
			t.Errorf("%s: %v", what, have)
		}
	}
	held.keep(map[string]*Node{})
	if _, ok := held.of(n); ok {
		t.Error("a Node that is gone holds a record")
	}
}

func TestLabelsOfANode(t *testing.T) {
	long := Prefix + strings.Repeat("x", 60)
	for what, c := range map[string]struct{ have, node, want map[string]string }{
		"none": {map[string]string{"a": "b"}, nil, map[string]string{"a": "b"}},
		"added": {map[string]string{"a": "b"}, map[string]string{"skein.dev/gateway": "yes", "x/y": "z"},
			map[string]string{"a": "b", "skein.dev/gateway": "yes"}},
		"changed": {map[string]string{"skein.dev/gateway": "yes"}, map[string]string{"skein.dev/gateway": ""},
			map[string]string{"skein.dev/gateway": ""}},
		"removed": {map[string]string{"skein.dev/gateway": "yes", "gateway": "yes"}, nil,
			map[string]string{"gateway": "yes"}},
		"one is too long": {nil, map[string]string{long: "1", "skein.dev/a": "1"}, map[string]string{"skein.dev/a": "1"}},
	} {
		want, bad := labelsOf(c.have, c.node)
		if !maps.Equal(want, c.want) || (len(bad) == 1) != (what == "one is too long") {
			t.Errorf("%s: %v, %v", what, want, bad)
		}
	}
	many := map[string]string{}
	for i := range 70 {
		many[fmt.Sprint(Prefix, i)] = ""
	}
	if want, bad := labelsOf(map[string]string{"a": "b"}, many); len(want) != 64 || len(bad) != 7 || want["a"] != "b" {
		t.Errorf("%d labels, %d left out", len(want), len(bad))
	}
}

func TestWhoseLabelsChange(t *testing.T) {
	l := kubetest.New(t)
	ids := l.Admit("node")
	id := ids[1]
	set := func(labels map[string]string) {
		t.Helper()
		if err := l.Give(&skeinv1.Command{Issuer: ids[0].String(), Body: &skeinv1.Command_ChangeNode{
			ChangeNode: &skeinv1.ChangeNode{NodeId: id.String(), Labels: labels, SetLabels: true}}}); err != nil {
			t.Fatal(err)
		}
	}
	labeled := &Node{Name: "n1", Labels: map[string]string{"skein.dev/gateway": "yes", regionLabel: "eu"}}
	plain := &Node{Name: "n1"}
	gone := map[string]*Node{}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	state := labeling{map[identity.ID]time.Time{}, map[identity.ID]time.Time{}, map[string]bool{}}
	for i, step := range []struct {
		what   string
		node   *Node
		nodes  map[string]*Node // nil: the Node
		says   string
		proven bool
		after  time.Duration
		want   map[string]string // nil: no change
	}{
		{"the Node has a label", labeled, nil, "n1", true, 0, map[string]string{"gateway": "yes",
			"skein.dev/gateway": "yes"}},
		{"it is in the log", labeled, nil, "n1", true, 0, nil},
		{"the proof is gone for a moment", labeled, nil, "n1", false, time.Second, nil},
		{"and is back", labeled, nil, "n1", true, 59 * time.Second, nil},
		{"the label is gone", plain, nil, "n1", true, 0, map[string]string{"gateway": "yes"}},
		{"it has it again", labeled, nil, "n1", true, 0, map[string]string{"gateway": "yes", "skein.dev/gateway": "yes"}},
		{"the Node is gone", labeled, gone, "n1", false, 2 * unprovenAfter, nil},
		{"the Node is another's", plain, nil, "n1", false, 0, nil},
		{"for a minute", plain, nil, "n1", false, unprovenAfter, map[string]string{"gateway": "yes"}},
		{"it has it again", labeled, nil, "n1", true, 0, map[string]string{"gateway": "yes", "skein.dev/gateway": "yes"}},
		{"the member says that it is not a Node", plain, nil, "", false, 0, nil},
		{"for a minute", plain, nil, "", false, unprovenAfter, map[string]string{"gateway": "yes"}},
		{"and has none", labeled, nil, "", false, unprovenAfter, nil},
	} {
		now = now.Add(step.after)
		s := &part.Snapshot{State: l.State, Records: map[identity.ID]gossip.Entry{
			id: {Record: &skeinv1.Record{KubernetesNode: step.says}}}}
		nodes, members := step.nodes, map[identity.ID]*Node{}
		if nodes == nil {
			nodes = map[string]*Node{"n1": step.node}
		}
		if step.proven {
			members[id] = step.node
		}
		out, _ := state.look(s, nodes, members, now)
		if len(out) > 1 || (len(out) == 1) != (step.want != nil) || len(out) == 1 && !maps.Equal(out[0].want, step.want) {
			t.Errorf("%d, %s: %+v, want %v", i, step.what, out, step.want)
		}
		for _, r := range out {
			set(r.want)
		}
	}
}
