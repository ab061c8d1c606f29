package members

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/api/apitest"
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

// host is a Host of which only the agreed state is asked.
type host struct {
	Host
	state *events.State
}

func (h host) State() *events.State { return h.state }

func TestSetNodeOfNobody(t *testing.T) {
	st, _ := apitest.State(t)
	_, err := MemberService{Host: host{state: st}}.SetNode(t.Context(), &skeinv1.SetNodeRequest{Node: "gw9", Name: "gw2"})
	if connect.CodeOf(err) != connect.CodeNotFound ||
		!strings.Contains(err.Error(), "no member is called \"gw9\"; see `skein nodes`") {
		t.Error(err)
	}
}
