package main

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func (f *fakeAgent) SetNode(_ context.Context, r *skeinv1.SetNodeRequest) (*skeinv1.SetNodeResponse, error) {
	return answerTo[*skeinv1.SetNodeResponse](f, r)
}

func (f *fakeAgent) Settings(_ context.Context, r *skeinv1.SettingsRequest) (*skeinv1.SettingsResponse, error) {
	return answerTo[*skeinv1.SettingsResponse](f, r)
}

func TestNodeSet(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.SetNodeRequest{}, &skeinv1.SetNodeResponse{Index: 41, Node: &skeinv1.Node{Name: "edge1",
		Settings: &skeinv1.NodeSettings{
			SiteSet: true, Site: "home", Leader: "yes", ForceEndpoint: "edge.example.com:51820", InternalIp: "10.0.0.7",
			PersistentKeepalive: 25}}})
	for _, c := range []struct {
		args string
		want *skeinv1.SetNodeRequest
	}{
		{"--site home --leader", &skeinv1.SetNodeRequest{Settings: &skeinv1.NodeSettings{SiteSet: true, Site: "home",
			Leader: "yes"}, Fields: []string{"site", "leader"}}},
		{"--site=", &skeinv1.SetNodeRequest{Settings: &skeinv1.NodeSettings{SiteSet: true}, Fields: []string{"site"}}},
		{"--no-site --no-leader", &skeinv1.SetNodeRequest{Settings: &skeinv1.NodeSettings{Leader: "no"},
			Fields: []string{"leader", "site"}}},
		{"--force-endpoint - --internal-ip 10.0.0.7/32",
			&skeinv1.SetNodeRequest{Settings: &skeinv1.NodeSettings{InternalIp: "10.0.0.7"},
				Fields: []string{"force_endpoint", "internal_ip"}}},
		{"--persistent-keepalive 25", &skeinv1.SetNodeRequest{Settings: &skeinv1.NodeSettings{PersistentKeepalive: 25},
			Fields: []string{"persistent_keepalive"}}},
		{"--unset leader,force-endpoint", &skeinv1.SetNodeRequest{Settings: &skeinv1.NodeSettings{},
			Fields: []string{"leader", "force_endpoint"}}},
	} {
		c.want.Node = "edge1"
		out, _, err := f.skein(t, append([]string{"node", "set", "edge1"}, strings.Fields(c.args)...)...)
		if err != nil || !proto.Equal(f.asked[len(f.asked)-1], c.want) {
			t.Errorf("%s asks %v (%v), want %v", c.args, f.asked[len(f.asked)-1], err, c.want)
		}
		want := "node edge1: site \"home\", it shall lead its site, endpoint edge.example.com:51820, internal IP 10.0.0.7, " +
			"a keepalive each 25 seconds, as of event 41\n"
		if out != want {
			t.Errorf("%s says %q", c.args, out)
		}
	}
	for args, says := range map[string]string{
		"":                          "nothing to set: give",
		"--leader --no-leader":      "cannot be used together",
		"--unset color":             `--unset "color": want one or more of`,
		"--site home --no-site":     "site cannot be set and unset at once",
		"--internal-ip 10.0.0.256":  "is not an IP address: want one of the host",
		"--persistent-keepalive -1": "invalid argument",
	} {
		if _, _, err := f.skein(t, append([]string{"node", "set", "edge1"}, strings.Fields(args)...)...); err == nil ||
			!strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", args, err, says)
		}
	}
}

func TestNodeSetNameAndLabels(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.SetNodeRequest{}, &skeinv1.SetNodeResponse{Index: 41, Was: "edge1", Node: &skeinv1.Node{Name: "south",
		Labels:   map[string]string{"rack": "r7", "egress": "yes"},
		Settings: &skeinv1.NodeSettings{SiteSet: true, Site: "home"}}})
	for _, c := range []struct {
		args string
		want *skeinv1.SetNodeRequest
		says string
	}{
		{"egress=yes", &skeinv1.SetNodeRequest{SetLabels: map[string]string{"egress": "yes"}}, "labels egress=yes rack=r7"},
		{"rack-", &skeinv1.SetNodeRequest{RemoveLabels: []string{"rack"}}, "labels egress=yes rack=r7"},
		{"a= b-c=d-e f- g/h-", &skeinv1.SetNodeRequest{SetLabels: map[string]string{"a": "", "b-c": "d-e"},
			RemoveLabels: []string{"f", "g/h"}}, "labels egress=yes rack=r7"},
		{"--name south", &skeinv1.SetNodeRequest{Name: "south"}, "it was called edge1"},
		{"--name south egress=yes --site home", &skeinv1.SetNodeRequest{Name: "south",
			SetLabels: map[string]string{"egress": "yes"}, Settings: &skeinv1.NodeSettings{SiteSet: true, Site: "home"},
			Fields: []string{"site"}},
			"it was called edge1; labels egress=yes rack=r7; site \"home\""},
	} {
		c.want.Node = "edge1"
		if c.want.Settings == nil {
			c.want.Settings = &skeinv1.NodeSettings{}
		}
		out, _, err := f.skein(t, append([]string{"node", "set", "edge1"}, strings.Fields(c.args)...)...)
		if err != nil || !proto.Equal(f.asked[len(f.asked)-1], c.want) {
			t.Errorf("%s asks %v (%v), want %v", c.args, f.asked[len(f.asked)-1], err, c.want)
		}
		if want := "node south: " + c.says + ", as of event 41\n"; out != want {
			t.Errorf("%s says %q, want %q", c.args, out, want)
		}
	}
	for args, says := range map[string]string{
		"":                     "skein node set takes one node's name or ID",
		"edge1":                "nothing to set: give LABEL=VALUE, LABEL-, --name",
		"edge1 egress":         `"egress": want LABEL=VALUE to set a label, or LABEL- to remove one`,
		"edge1 =yes":           "a label needs a key",
		"edge1 -- -":           "want LABEL=VALUE",
		"edge1 a=1 a=2":        "label a is given twice",
		"edge1 a- a=2":         "label a is given twice",
		"edge1 a- a-":          "label a is given twice",
		"edge1 --name= rack-":  "a node needs a name",
		"edge1 home1 --leader": `"home1": want LABEL=VALUE`,
	} {
		asked := len(f.asked)
		if _, _, err := f.skein(t, append([]string{"node", "set"}, strings.Fields(args)...)...); err == nil ||
			!strings.Contains(err.Error(), says) || len(f.asked) != asked {
			t.Errorf("%s: %v, want %q", args, err, says)
		}
	}
}

func TestTopologyIsASetting(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.SettingsRequest{}, &skeinv1.SettingsResponse{Settings: &skeinv1.Settings{Topology: "site",
		LeadersPerSite: 2, SiteTopology: map[string]string{"dc": "full"}}})
	out, _, err := f.skein(t, "settings", "--topology", "site", "--site-topology", "dc=full")
	r, _ := f.asked[len(f.asked)-1].(*skeinv1.SettingsRequest)
	if err != nil || r.GetChange().GetTopology() != "site" || r.GetChange().GetSiteTopology()["dc"] != "full" ||
		len(r.GetFields()) != 2 {
		t.Errorf("it asks %v (%v)", r, err)
	}
	for _, line := range []string{"topology site", "leaders_per_site 2", "site_topology dc=full"} {
		if !strings.Contains(strings.Join(strings.Fields(out), " "), line) {
			t.Errorf("no %q in\n%s", line, out)
		}
	}
	if _, _, err := f.skein(t, "settings", "--site-topology", ""); err != nil {
		t.Error(err)
	}
	if r := f.asked[len(f.asked)-1].(*skeinv1.SettingsRequest); len(r.GetFields()) != 1 ||
		len(r.GetChange().GetSiteTopology()) != 0 {
		t.Errorf("taking all back asks %v", r)
	}
	if _, _, err := f.skein(t, "settings", "--site-topology", "dc"); err == nil || !strings.Contains(err.Error(),
		"want SITE=full or SITE=site") {
		t.Errorf("a site without a topology: %v", err)
	}
}

// Who leads has a column where sites have leaders.
func TestNodesWithLeaders(t *testing.T) {
	nodes := []*skeinv1.NodeView{
		{Node: &skeinv1.Node{Id: "b33ad742981917ca", Name: "home1", Ipv4: "10.4.0.5"}, Path: "direct", Alive: true,
			Site: "home", SiteLeads: "leader"},
		{Node: &skeinv1.Node{Id: "7ef4fee4c02da850", Name: "home2", Ipv4: "10.4.0.6"}, Path: "self", Self: true,
			Site: "home"},
		{Node: &skeinv1.Node{Id: "17e391664883f273", Name: "home3", Ipv4: "10.4.0.7"}, Path: "direct", Site: "home",
			SiteLeads: "reserve"},
	}
	var b bytes.Buffer
	printNodes(&b, nodes)
	goldenText(t, "nodes-leaders", b.String())
	b.Reset()
	printStatus(&b, &skeinv1.StatusResponse{Name: "home2", Site: "home", Topology: "site",
		SiteLeaders: []string{"home1", "home3"}})
	if !strings.Contains(b.String(), "site       led by home1, then home3\n") {
		t.Errorf("status says\n%s", b.String())
	}
	b.Reset()
	printStatus(&b, &skeinv1.StatusResponse{Name: "home1", Site: "home", Topology: "site",
		SiteLeaders: []string{"home1"}, SiteLeads: "leader"})
	if !strings.Contains(b.String(), "led by home1; this node leads\n") {
		t.Errorf("status of a leader says\n%s", b.String())
	}
	for want, s := range map[string]*skeinv1.StatusResponse{
		"events     from home1, which leads this site\n": {EventsFrom: "b33ad742981917ca", EventsFromName: "home1",
			EventsByLeader: true},
		"events     from server 17e391664883f273\n": {EventsFrom: "17e391664883f273"},
		"events     from server dc1; passed on to 3 of this site\n": {EventsFrom: "17e391664883f273", EventsFromName: "dc1",
			EventsStreams: 3},
	} {
		b.Reset()
		if printStatus(&b, s); !strings.Contains(b.String(), want) {
			t.Errorf("status says\n%swant the line %q", b.String(), want)
		}
	}
	b.Reset()
	if printStatus(&b, &skeinv1.StatusResponse{Topology: "full"}); strings.Contains(b.String(), "led by") {
		t.Errorf("status without leaders says\n%s", b.String())
	}
}
