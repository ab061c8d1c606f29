package agent

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

func TestChangeOfANode(t *testing.T) {
	n := &skeinv1.Node{Id: "0011223344556677", Name: "gw1", Labels: map[string]string{"egress": "yes"}}
	type m = map[string]string
	c, err := changeOfNode(n, "", &skeinv1.SetNodeRequest{Name: "gw2", SetLabels: m{"rack": "r7"},
		RemoveLabels: []string{"egress"}, Fields: []string{"site"},
		Settings: &skeinv1.NodeSettings{SiteSet: true, Site: "dc"}})
	if err != nil || c.GetNodeId() != n.GetId() || c.GetName() != "gw2" || !c.GetSetLabels() ||
		!maps.Equal(c.GetLabels(), m{"rack": "r7"}) || !c.GetCheckLabels() ||
		!maps.Equal(c.GetLabelsWere(), n.GetLabels()) || c.GetSettings().GetSite() != "dc" ||
		len(c.GetSettingsFields()) != 1 {
		t.Errorf("all at once: %v, %v", c, err)
	}
	for what, r := range map[string]*skeinv1.SetNodeRequest{
		"a name":                  {Name: "gw2"},
		"a setting that it has":   {Fields: []string{"site"}},
		"the same name, a label":  {Name: "gw1", SetLabels: m{"rack": "r7"}},
		"the same label, a name":  {Name: "gw2", SetLabels: m{"egress": "yes"}},
		"the last label is taken": {RemoveLabels: []string{"egress"}},
	} {
		c, err := changeOfNode(n, "", r)
		if relabels := len(r.GetSetLabels())+len(r.GetRemoveLabels()) > 0; err != nil || c.GetSetLabels() != relabels {
			t.Errorf("%s: %v, %v", what, c, err)
		}
	}
	for what, c := range map[string]struct {
		r    *skeinv1.SetNodeRequest
		says string
	}{
		"nothing": {&skeinv1.SetNodeRequest{}, "there is nothing to set"},
		"its name": {&skeinv1.SetNodeRequest{Name: "gw1"},
			"nothing changes: node gw1 has this name and these labels already"},
		"its labels":            {&skeinv1.SetNodeRequest{SetLabels: m{"egress": "yes"}}, "nothing changes"},
		"its name and labels":   {&skeinv1.SetNodeRequest{Name: "gw1", SetLabels: m{"egress": "yes"}}, "nothing changes"},
		"a label that is none":  {&skeinv1.SetNodeRequest{SetLabels: m{"egress": "y s"}}, "label egress: the value"},
		"a label that it lacks": {&skeinv1.SetNodeRequest{RemoveLabels: []string{"rack"}}, `node gw1 has no label "rack"`},
		"a label of the Node": {&skeinv1.SetNodeRequest{SetLabels: m{events.KubernetesPrefix + "a": "b"}},
			"kubectl label node n1 skein.dev/a=b"},
	} {
		if have, err := changeOfNode(n, "n1", c.r); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, %v; want %q", what, have, err, c.says)
		}
	}
}

// A node that is chosen to lead stays where it is, unless the command or the log says where.
func TestAgreeOnSite(t *testing.T) {
	home := &skeinv1.Record{Site: "home"}
	for _, c := range []struct {
		name   string
		v      *skeinv1.NodeSettings
		fields []string
		agreed *skeinv1.NodeSettings
		record *skeinv1.Record
		want   *skeinv1.NodeSettings // nil: refused
	}{
		{"by its record", &skeinv1.NodeSettings{Leader: "yes"}, []string{"leader"}, nil, home,
			&skeinv1.NodeSettings{Leader: "yes", SiteSet: true, Site: "home"}},
		{"without a record", &skeinv1.NodeSettings{Leader: "yes"}, []string{"leader"}, nil, nil, nil},
		{"by the command", &skeinv1.NodeSettings{Leader: "yes", SiteSet: true, Site: "dc"}, []string{"leader", "site"}, nil,
			home, &skeinv1.NodeSettings{Leader: "yes", SiteSet: true, Site: "dc"}},
		{"by the log", &skeinv1.NodeSettings{Leader: "yes"}, []string{"leader"},
			&skeinv1.NodeSettings{SiteSet: true, Site: "dc"}, home, &skeinv1.NodeSettings{Leader: "yes"}},
		{"not chosen", &skeinv1.NodeSettings{Leader: "no"}, []string{"leader"}, nil, nil,
			&skeinv1.NodeSettings{Leader: "no"}},
		{"nothing about leaders", &skeinv1.NodeSettings{InternalIp: "10.0.0.7"}, []string{"internal_ip"}, nil, nil,
			&skeinv1.NodeSettings{InternalIp: "10.0.0.7"}},
	} {
		n := &skeinv1.Node{Name: "a", Settings: c.agreed}
		change := &skeinv1.ChangeNode{Settings: c.v, SettingsFields: c.fields}
		err := agreeOnSite(change, n, c.record)
		switch {
		case c.want == nil && (err == nil || !strings.Contains(err.Error(), "--site")):
			t.Errorf("%s: %v", c.name, err)
		case c.want != nil && (err != nil || !proto.Equal(change.GetSettings(), c.want) ||
			slices.Contains(change.GetSettingsFields(), "site") != c.want.GetSiteSet()):
			t.Errorf("%s: %v %v, %v", c.name, change.GetSettings(), change.GetSettingsFields(), err)
		}
	}
}

func TestSetNodeOfNobody(t *testing.T) {
	h := newHost(t, "a")
	w := newWorld(t, h)
	a := newTestAgent(h, w.state)
	a.replica = newReplica(t, w)
	_, err := (services{a: a}).SetNode(t.Context(), &skeinv1.SetNodeRequest{Node: "gw9", Name: "gw1"})
	if connect.CodeOf(err) != connect.CodeNotFound ||
		!strings.Contains(err.Error(), "no member is called \"gw9\"; see `skein nodes`") {
		t.Error(err)
	}
}

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
