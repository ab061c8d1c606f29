package agent

import (
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// A node is called what the log calls it, whatever its configuration says.
func TestNameOfTheLog(t *testing.T) {
	h := newHost(t, "agreed")
	w := newWorld(t, h)
	a := newTestAgent(h, w.state)
	a.cfg.Name = "asked"
	a.phase.Store(PhaseJoining)
	if have := a.name(); have != "asked" {
		t.Errorf("before it has joined: %q", have)
	}
	a.replica = newReplica(t, w)
	a.phase.Store(PhaseRunning)
	if have := a.name(); have != "agreed" {
		t.Errorf("a member: %q", have)
	}
}

// Labels that were put into the configuration after the node had joined are told.
func TestLabelsOfTheConfigurationAreTold(t *testing.T) {
	n := &skeinv1.Node{Name: "gw1", Labels: map[string]string{"egress": "yes", "rack": "r7", "skein.dev/gateway": "yes"}}
	for _, c := range []struct {
		file            map[string]string
		message, advice string
	}{
		{nil, "", ""},
		{map[string]string{"rack": "r7"}, "", ""}, // the log may have more
		{map[string]string{"row": "", "rack": "r8", "egress": "yes"},
			"the configuration has labels that are not agreed, and what is agreed counts: rack=r8 (the log has rack=r7), row=",
			"run `skein node set gw1 rack=r8 row=` on an admin or a server, or make the configuration say what is agreed"},
		{map[string]string{"skein.dev/a": "b"},
			"the configuration has labels that are not agreed, and what is agreed counts: skein.dev/a=b",
			"label the Node in Kubernetes with those under skein.dev/, or make the configuration say what is agreed"},
		{map[string]string{"skein.dev/a": "b", "row": "1"},
			"the configuration has labels that are not agreed, and what is agreed counts: row=1, skein.dev/a=b",
			"run `skein node set gw1 row=1` on an admin or a server, and label the Node in Kubernetes with those " +
				"under skein.dev/, or make the configuration say what is agreed"},
	} {
		if message, advice := labelNews(n, c.file); message != c.message || advice != c.advice {
			t.Errorf("%v: %q\n%q", c.file, message, advice)
		}
	}
	if message, _ := labelNews(nil, map[string]string{"a": "b"}); message != "" {
		t.Errorf("a node that is not a member yet: %q", message)
	}
}
