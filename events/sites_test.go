package events

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func setNode(name string, v *skeinv1.NodeSettings, fields ...string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: id(name),
		Settings: v, SettingsFields: fields}}}
}

func siteHistory(t *testing.T) *world {
	w := newPools(t)
	w.must(changeSettings(&skeinv1.Settings{Topology: "site", LeadersPerSite: 2,
		SiteTopology: map[string]string{"dc": "full"}}, "topology", "leaders_per_site", "site_topology"))
	w.must(setNode("a", &skeinv1.NodeSettings{SiteSet: true, Site: "home", Leader: "yes",
		ForceEndpoint: "edge.example.com:51820"}, "site", "leader", "force_endpoint"))
	return w
}

// What is set of a node holds until it is taken back, through renames, keys and snapshots, and ends with the member.
func TestNodeSettings(t *testing.T) {
	w := newPools(t)
	step := func(c *skeinv1.Command, node string, want *skeinv1.NodeSettings) {
		t.Helper()
		w.must(c)
		if have := w.s.Node(idOf(node)).GetSettings(); !proto.Equal(have, want) {
			t.Fatalf("after %v: %v, want %v", c, have, want)
		}
		checkInvariants(t, w.s)
		checkSame(t, "through bytes", w.s, throughBytes(t, w.s))
	}
	home := &skeinv1.NodeSettings{SiteSet: true, Site: "home"}
	step(setNode("a", home, "site"), "a", home)
	if evs, _, err := w.propose(setNode("a", home, "site")); err != nil || len(evs) != 0 {
		t.Errorf("what is so already gives %v, %v", evs, err)
	}
	step(setNode("a", &skeinv1.NodeSettings{Leader: "no", Site: "not named"}, "leader"), "a",
		&skeinv1.NodeSettings{SiteSet: true, Site: "home", Leader: "no"})
	step(changeNode("a", "alpha", map[string]string{"rack": "7"}), "a", &skeinv1.NodeSettings{SiteSet: true,
		Site: "home", Leader: "no"})
	step(rotateKey("a", "another key"), "a", &skeinv1.NodeSettings{SiteSet: true, Site: "home", Leader: "no"})
	step(setNode("a", &skeinv1.NodeSettings{SiteSet: true}, "site", "leader"), "a",
		&skeinv1.NodeSettings{SiteSet: true})
	step(setNode("a", nil, "site"), "a", nil)
	step(setNode("b", &skeinv1.NodeSettings{ForceEndpoint: "[2001:db8::7]:51820", InternalIp: "10.0.0.7",
		PersistentKeepalive: 25}, "force_endpoint", "internal_ip", "persistent_keepalive"),
		"b", &skeinv1.NodeSettings{ForceEndpoint: "[2001:db8::7]:51820", InternalIp: "10.0.0.7",
			PersistentKeepalive: 25})
	w.must(revoke(id("b")))
	if r := w.s.Revoked(idOf("b")); r.GetNode().GetSettings() != nil {
		t.Errorf("the revoked node keeps %v", r.GetNode().GetSettings())
	}
	checkInvariants(t, w.s)

	for _, c := range []struct {
		v     *skeinv1.NodeSettings
		field string
		says  string
	}{
		{&skeinv1.NodeSettings{SiteSet: true, Site: strings.Repeat("s", 300)}, "site",
			"node c: the site's name \"ssssssssssssssssssss\"… has 300 bytes: at most 64 are allowed"},
		{&skeinv1.NodeSettings{SiteSet: true, Site: "a\x1b[31m"}, "site", "only printable characters are allowed"},
		{&skeinv1.NodeSettings{Leader: "perhaps"}, "leader",
			"node c: leader \"perhaps\" is not allowed; use yes or no, or leave it empty"},
		{&skeinv1.NodeSettings{ForceEndpoint: "198.18.0.1"}, "force_endpoint",
			"want host:port, such as 192.0.2.7:51820"},
		{&skeinv1.NodeSettings{ForceEndpoint: "a b:51820"}, "force_endpoint", "want host:port"},
		{&skeinv1.NodeSettings{ForceEndpoint: "a:0"}, "force_endpoint", "want host:port"},
		{&skeinv1.NodeSettings{InternalIp: "10.0.0.7/32"}, "internal_ip", "want an IP address of the host"},
		{&skeinv1.NodeSettings{InternalIp: "127.0.0.1"}, "internal_ip", "want an IP address of the host"},
		{&skeinv1.NodeSettings{PersistentKeepalive: 3601}, "persistent_keepalive", "use 1 to 3600, or 0 for none"},
		{&skeinv1.NodeSettings{}, "color", "a node has no setting \"color\"; there are force_endpoint,"},
	} {
		w.refused(setNode("c", c.v, c.field), InvalidArgument, c.says)
	}
}

func TestTopologySettings(t *testing.T) {
	w := newPools(t)
	if s := w.s.Settings(); s.GetTopology() != "full" || s.GetLeadersPerSite() != 2 {
		t.Errorf("without settings: %v", s)
	}
	for _, c := range []struct {
		v    *skeinv1.Settings
		says string
	}{
		{&skeinv1.Settings{Topology: "star"}, `setting topology: "star" is not allowed; use full or site`},
		{&skeinv1.Settings{LeadersPerSite: 17}, "setting leaders_per_site: 17 is out of range; use 1 to 16"},
		{&skeinv1.Settings{SiteTopology: map[string]string{"dc": ""}},
			`"" is not allowed for site "dc"; use full or site`},
		{&skeinv1.Settings{SiteTopology: map[string]string{"d\nc": "full"}}, "only printable characters"},
	} {
		w.refused(changeSettings(c.v), InvalidArgument, c.says)
	}
	w.must(changeSettings(&skeinv1.Settings{SiteTopology: map[string]string{"": "site", "dc": "full"}},
		"site_topology"))
	w.must(changeSettings(&skeinv1.Settings{Topology: "site"}, "topology"))
	if s := w.s.Settings(); s.GetSiteTopology()["dc"] != "full" || s.GetTopology() != "site" {
		t.Errorf("%v", s)
	}
	checkSame(t, "through bytes", w.s, throughBytes(t, w.s))
	w.must(changeSettings(&skeinv1.Settings{}, "site_topology", "topology"))
	if s := w.s.Settings(); len(s.GetSiteTopology()) != 0 || s.GetTopology() != "full" {
		t.Errorf("%v", s)
	}
}

// No server may be left behind by what it could not fold.
func TestSitesNeedServersThatKnowThem(t *testing.T) {
	w := newPools(t)
	site := changeSettings(&skeinv1.Settings{Topology: "site"}, "topology")
	w.must(folds("a", 5))
	w.refused(site, FailedPrecondition,
		"server a folds event schemas up to 5 and settings about sites need 6: upgrade skein on a first")
	leads := setNode("b", &skeinv1.NodeSettings{Leader: "yes", SiteSet: true}, "leader", "site")
	w.refused(leads, FailedPrecondition, "server a folds event schemas up to 5 and settings of nodes need 6")
	w.must(folds("a", SchemaMax))
	w.must(site)
	w.refused(folds("a", 5), FailedPrecondition, "the cluster has sites that speak through leaders, which need 6")
	w.must(changeSettings(&skeinv1.Settings{}, "topology"))
	w.must(leads)
	w.refused(folds("a", 5), FailedPrecondition, "the cluster has settings of nodes, which need 6")
	w.must(setNode("b", nil, "leader", "site"))
	w.must(folds("a", 5))
}

// A node that is chosen to lead cannot take that to another site by what it says of itself.
func TestAChosenLeaderHasItsSiteInTheLog(t *testing.T) {
	w := newPools(t)
	const says = "node b is chosen to lead its site, so its site must be set too"
	w.refused(setNode("b", &skeinv1.NodeSettings{Leader: "yes"}, "leader"), FailedPrecondition, says)
	w.must(setNode("b", &skeinv1.NodeSettings{Leader: "yes", SiteSet: true, Site: "dc"}, "leader", "site"))
	w.refused(setNode("b", nil, "site"), FailedPrecondition, says)
	w.must(setNode("b", &skeinv1.NodeSettings{Leader: "no"}, "leader"))
	w.must(setNode("b", nil, "site"))
	// An older leader has let that in.
	old := &skeinv1.Event{Index: w.s.Index() + 1, Schema: siteSchema, Body: &skeinv1.Event_NodeSettingsSet{
		NodeSettingsSet: &skeinv1.NodeSettingsSet{NodeId: id("b"), Settings: &skeinv1.NodeSettings{Leader: "yes"}}}}
	if err := w.s.Fold(old); err != nil {
		t.Fatal(err)
	}
	w.must(setNode("b", &skeinv1.NodeSettings{InternalIp: "10.0.0.7"}, "internal_ip"))
}

// A forged log brings in no settings that a command could not give, and no other event does.
func TestForgedNodeSettings(t *testing.T) {
	w := siteHistory(t)
	before := w.s.Node(idOf("a")).GetSettings()
	bad := &skeinv1.NodeSettings{SiteSet: true, Site: "\x1b]0;owned\a"}
	renamed := copyNode(w.s.Node(idOf("a")))
	renamed.Settings = nil
	for _, e := range []*skeinv1.Event{
		{Body: &skeinv1.Event_NodeSettingsSet{NodeSettingsSet: &skeinv1.NodeSettingsSet{NodeId: id("a"),
			Settings: bad}}},
		{Body: &skeinv1.Event_NodeSettingsSet{NodeSettingsSet: &skeinv1.NodeSettingsSet{NodeId: id("a"),
			Settings: &skeinv1.NodeSettings{}}}},
		{Body: &skeinv1.Event_NodeSettingsSet{NodeSettingsSet: &skeinv1.NodeSettingsSet{NodeId: id("nobody"),
			Settings: before}}},
		{Body: &skeinv1.Event_NodeChanged{NodeChanged: &skeinv1.NodeChanged{Node: renamed}}},
	} {
		e.Index, e.Schema = w.s.Index()+1, siteSchema
		if err := w.s.Fold(e); err != nil {
			t.Fatal(err)
		}
		if have := w.s.Node(idOf("a")).GetSettings(); !proto.Equal(have, before) {
			t.Errorf("%v makes %v", e, have)
		}
		checkInvariants(t, w.s)
	}
	p := proto.CloneOf(w.s.Proto())
	for _, n := range p.GetNodes() {
		if n.GetSettings() != nil {
			n.Settings = bad
		}
	}
	if _, err := FromProto(p); err == nil || !strings.Contains(err.Error(), "its settings are malformed") {
		t.Errorf("a snapshot with them gives %v", err)
	}
}

// An agent does not say where it is, and no admin is needed for one's own node that is a server.
func TestNodeSettingsNeedARole(t *testing.T) {
	w := newPools(t)
	c := setNode("b", &skeinv1.NodeSettings{Leader: "yes"}, "leader")
	c.Issuer = id("b")
	if err := Authorise(w.s, c); err == nil || !strings.Contains(err.Error(),
		"may not change its name, labels or settings") {
		t.Errorf("an agent for itself: %v", err)
	}
	c.Issuer = id("a")
	if err := Authorise(w.s, c); err != nil {
		t.Errorf("a server for another: %v", err)
	}
}

// anySiteCommand is a command about sites; some of it is nonsense.
func anySiteCommand(t *rapid.T, n func() string) *skeinv1.Command {
	if rapid.IntRange(0, 3).Draw(t, "about") == 0 {
		return changeSettings(&skeinv1.Settings{
			Topology:     rapid.SampledFrom([]string{"", "full", "site", "ring"}).Draw(t, "topology"),
			SiteTopology: map[string]string{n(): "site"},
		}, "topology", "site_topology")
	}
	return setNode(n(), &skeinv1.NodeSettings{
		SiteSet: rapid.Bool().Draw(t, "site set"), Site: n(), Leader: rapid.SampledFrom([]string{"", "yes", "no",
			"x"}).Draw(t, "leader"),
		InternalIp: rapid.SampledFrom([]string{"", "10.0.0.7", "x"}).Draw(t, "internal"),
	}, rapid.SliceOfDistinct(rapid.SampledFrom([]string{"site", "leader", "internal_ip", "x"}), rapid.ID).Draw(t,
		"fields")...)
}

// checkNodesSet: the state knows how many nodes have settings, and all of them make sense.
func checkNodesSet(t fatal, s *State) {
	t.Helper()
	n := 0
	for _, v := range s.Nodes() {
		if v.GetSettings() != nil {
			n++
			if !soundNodeSettings(v.GetSettings()) {
				t.Fatalf("node %s has the settings %v", v.GetName(), v.GetSettings())
			}
		}
	}
	if n != s.nodesSet {
		t.Fatalf("%d nodes have settings, and %d are counted", n, s.nodesSet)
	}
}

// A revoke that is repeated is answered as it was, also of a node with settings, which end with its membership.
func TestRevokeOfANodeWithSettingsIsAnsweredAlike(t *testing.T) {
	w := newPools(t)
	w.must(setNode("b", &skeinv1.NodeSettings{SiteSet: true, Site: "edge"}, "site"))
	first := w.must(revoke(id("b"))).GetNode()
	again := w.must(revoke(id("b"))).GetNode()
	if first.GetName() != "b" || !proto.Equal(first, again) {
		t.Errorf("answered with %v, and again with %v", first, again)
	}
}
