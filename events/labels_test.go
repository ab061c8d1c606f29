package events

import (
	"maps"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func TestCheckLabel(t *testing.T) {
	long := strings.Repeat("x", 64)
	for _, ok := range [][2]string{{"rack", "r7"}, {"rack", ""}, {"example.com/Rack_2.b", "A-b_c.d"},
		{"a", long[:63]}, {long[:63], "1"}} {
		if err := CheckLabel(ok[0], ok[1]); err != nil {
			t.Errorf("%q: %v", ok, err)
		}
	}
	for _, c := range []struct{ key, value, says string }{
		{"", "x", "want a key of letters"},
		{"a b", "x", "want a key of letters"},
		{"-rack", "x", "with a letter or digit at both ends"},
		{"rack.", "x", "with a letter or digit at both ends"},
		{"example.com/", "x", "want a key of letters"},
		{"/rack", "x", "is not a DNS name"},
		{"Example.com/rack", "x", "is not a DNS name"},
		{"a..b/rack", "x", "is not a DNS name"},
		{"-a/rack", "x", "is not a DNS name"},
		{"a/b/c", "x", "want a key of letters"},
		{"räck", "x", "want a key of letters"},
		{long, "x", "at most 63"},
		{"rack", long, "at most 63"},
		{"rack", "r 7", "label rack: the value"},
		{"rack", "-", "at both ends"},
		{"rack", "a=b", "label rack: the value"},
		{"rack", "\x1b[2J", `"\x1b[2J"`},
	} {
		if err := CheckLabel(c.key, c.value); CodeOf(err) != InvalidArgument ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%q=%q: %v, want %q", c.key, c.value, err, c.says)
		}
	}
}

func TestRelabel(t *testing.T) {
	n := &skeinv1.Node{Name: "gw1", Labels: map[string]string{"rack": "r7", "egress": "yes", "skein.dev/gateway": "yes"}}
	type m = map[string]string
	for what, c := range map[string]struct {
		node   string
		set    m
		remove []string
		want   m
	}{
		"nothing": {"", nil, nil, n.GetLabels()},
		"set": {"n1", m{"a": "b"}, nil, m{"a": "b", "rack": "r7", "egress": "yes",
			"skein.dev/gateway": "yes"}},
		"changed":            {"", m{"rack": ""}, nil, m{"rack": "", "egress": "yes", "skein.dev/gateway": "yes"}},
		"removed":            {"", m{"a": "b"}, []string{"rack", "egress"}, m{"a": "b", "skein.dev/gateway": "yes"}},
		"no Node any more":   {"", nil, []string{"skein.dev/gateway"}, m{"rack": "r7", "egress": "yes"}},
		"only removed":       {"n1", nil, []string{"rack"}, m{"egress": "yes", "skein.dev/gateway": "yes"}},
		"the same as before": {"", m{"rack": "r7"}, nil, n.GetLabels()},
	} {
		before := maps.Clone(n.GetLabels())
		have, err := Relabel(n, c.node, c.set, c.remove)
		if err != nil || !maps.Equal(have, c.want) || !maps.Equal(before, n.GetLabels()) {
			t.Errorf("%s: %v, %v", what, have, err)
		}
	}
	if have, err := Relabel(&skeinv1.Node{}, "", m{"a": "b"}, nil); err != nil || !maps.Equal(have, m{"a": "b"}) {
		t.Errorf("the first label: %v, %v", have, err)
	}
	for what, c := range map[string]struct {
		node   string
		set    m
		remove []string
		code   Code
		says   string
	}{
		"both": {"", m{"rack": "r8"}, []string{"rack"}, InvalidArgument, `"rack" is to be set and removed at once`},
		"not there": {"", nil, []string{"row"}, NotFound,
			`node gw1 has no label "row"; it has egress=yes rack=r7 skein.dev/gateway=yes`},
		"removed twice": {"", nil, []string{"rack", "rack"}, NotFound, "has no label"},
		"bad":           {"", m{"a b": ""}, nil, InvalidArgument, "want a key"},
		"of a Node, set": {"n1", m{"skein.dev/gateway": "no"}, nil, FailedPrecondition,
			"run `kubectl label node n1 skein.dev/gateway=no`"},
		"of a Node, removed": {"n1", nil, []string{"skein.dev/gateway"}, FailedPrecondition,
			"run `kubectl label node n1 skein.dev/gateway-`"},
		"of no Node, and set": {"", m{"skein.dev/a": "b"}, nil, FailedPrecondition,
			"member gw1 is not one: choose a key without that prefix"},
	} {
		if have, err := Relabel(n, c.node, c.set, c.remove); CodeOf(err) != c.code ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, %v; want %q", what, have, err, c.says)
		}
	}
}

// Two who change a node's labels at once do not undo each other's change: the second is told.
func TestLabelsThatHaveChangedMeanwhile(t *testing.T) {
	w := newPools(t)
	was := w.s.NodeByName("b").GetLabels()
	change := func(labels map[string]string) *skeinv1.Command {
		c := changeNode("b", "", labels)
		c.GetChangeNode().LabelsWere, c.GetChangeNode().CheckLabels = was, true
		return c
	}
	w.must(change(map[string]string{"a": "1"}))
	w.refused(change(map[string]string{"b": "2"}), Aborted, "the labels of node b have been changed meanwhile; it has a=1")
	was = map[string]string{"a": "1"}
	w.must(change(map[string]string{}))
	w.refused(change(map[string]string{"b": "2"}), Aborted, "it has none")
	was = nil
	w.must(change(map[string]string{"b": "2"}))
	if have := w.s.NodeByName("b").GetLabels(); !maps.Equal(have, map[string]string{"b": "2"}) {
		t.Errorf("node b has %v", have)
	}
	w.must(changeNode("b", "", map[string]string{"c": "3"})) // as versions without the check ask
}
