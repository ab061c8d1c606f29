package agent

import (
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// TestPastGraph: the members are the log's, sites and paths the journal's, and what neither has is said and not
// made up.
func TestPastGraph(t *testing.T) {
	hosts := []host{newHost(t, "dc1"), newHost(t, "home1"), newHost(t, "home2"), newHost(t, "cloud1"), newHost(t, "late1")}
	w := newWorld(t, hosts...)
	id := func(i int) identity.ID { return hosts[i].key.ID() }
	self, moment := id(0), time.Unix(1000, 0)
	then := &path.Then{
		Begins: time.Unix(100, 0), Self: &path.Node{Site: "dc", NAT: skeinv1.NatType_NAT_TYPE_NONE},
		Nodes: map[identity.ID]path.Node{
			id(1): {Site: "home", NAT: skeinv1.NatType_NAT_TYPE_SYMMETRIC}, id(2): {Site: "home"},
		},
		Paths: map[identity.ID]path.Past{
			id(1): {Path: "relay:" + id(3).String(), Rule: "no-answer"},
			id(2): {Path: "direct:192.0.2.7:51820", Rule: path.RuleDirectDead},
			id(3): {Path: "direct:192.0.2.8:51820", Rule: "direct-proven", Restarts: true},
		},
	}
	now := map[identity.ID]*skeinv1.Record{
		id(1): {Site: "elsewhere"}, id(3): {Site: "cloud", NatType: skeinv1.NatType_NAT_TYPE_FULL_CONE, LeaderWish: true},
	}
	g := pastGraph(w.state, self, moment, then, now)
	type row struct{ name, site, nat, way, peer, relay string }
	var got []row
	for i, n := range g.GetNodes() {
		record := n.GetRecord()
		r := row{name: n.GetNode().GetName(), site: record.GetSite(), nat: record.GetNatType().String(), way: n.GetPath()}
		if record == nil {
			r.site = "?"
		}
		for _, p := range g.GetPeers() {
			if p.GetNodeId() == n.GetNode().GetId() {
				r.peer, r.relay = p.GetPath(), p.GetRelayName()
			}
		}
		if n.GetAlive() || n.GetLeader() || record.GetLeaderWish() {
			t.Errorf("%s tells more than is known: %v", r.name, n)
		}
		if i > 0 && g.GetNodes()[i-1].GetNode().GetName() > r.name {
			t.Errorf("%s is not in order", r.name)
		}
		got = append(got, r)
	}
	want := []row{
		{"cloud1", "cloud", "NAT_TYPE_UNKNOWN", "unknown", "unknown", ""},
		{"dc1", "dc", "NAT_TYPE_NONE", "self", "", ""},
		{"home1", "home", "NAT_TYPE_SYMMETRIC", "relay", "relay", "cloud1"},
		{"home2", "home", "NAT_TYPE_UNKNOWN", "down", "direct", ""},
		{"late1", "?", "NAT_TYPE_UNKNOWN", "unknown", "unknown", ""},
	}
	if len(got) != len(want) {
		t.Fatalf("%v", got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("have %+v\nwant %+v", got[i], want[i])
		}
	}
	if !g.GetPast() || g.GetTime() != moment.UnixNano() || g.GetNodeId() != self.String() ||
		g.GetIndex() != w.state.Index() {
		t.Errorf("%t, %d, %s, %d", g.GetPast(), g.GetTime(), g.GetNodeId(), g.GetIndex())
	}
	says := func(g *skeinv1.GraphResponse, text string) {
		t.Helper()
		if notes := strings.Join(g.GetNotes(), "\n"); !strings.Contains(notes, text) {
			t.Errorf("the notes do not say %q:\n%s", text, notes)
		}
	}
	says(g, "The path to cloud1, late1 is not known")
	says(g, "The site of cloud1 is today's")
	then.Begins = moment.Add(time.Second)
	says(pastGraph(w.state, self, moment, then, now), "journal begins at "+then.Begins.Format(time.RFC3339))
	says(pastGraph(w.state, self, moment, &path.Then{}, now), "journal is empty")
	g = pastGraph(w.state, self, moment, nil, now)
	if says(g, onlyRelays); len(g.GetPeers()) != 0 {
		t.Errorf("a node without paths shows %v", g.GetPeers())
	}
}

// TestPastGraphOfSites: a site that the log had set then is not guessed, and the picture says that hops are not kept.
func TestPastGraphOfSites(t *testing.T) {
	self, far := newHost(t, "home1"), newHost(t, "far1")
	w := newWorld(t, self, far)
	then := &path.Then{Self: &path.Node{Site: "home"}}
	now := records{far.key.ID(): {Site: "elsewhere"}}
	draw := func() (site, notes string) {
		g := pastGraph(w.state, self.key.ID(), time.Unix(1000, 0), then, now)
		return g.GetNodes()[0].GetSite(), strings.Join(g.GetNotes(), "\n")
	}
	const guessed = "The site of far1 is today's"
	site, notes := draw()
	if site != "elsewhere" || !strings.Contains(notes, guessed) || strings.Contains(notes, notKeptOfSites) {
		t.Errorf("without settings: site %q, notes:\n%s", site, notes)
	}
	w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
		Settings: &skeinv1.Settings{Topology: "site"}, Fields: []string{"topology"}}}})
	w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{
		NodeId: far.key.ID().String(), Settings: &skeinv1.NodeSettings{SiteSet: true, Site: "dc"},
		SettingsFields: []string{"site"}}}})
	site, notes = draw()
	if site != "dc" || strings.Contains(notes, guessed) || !strings.Contains(notes, notKeptOfSites) {
		t.Errorf("with a site of the log: site %q, notes:\n%s", site, notes)
	}
}

func TestGraphNeedsAClusterAndThePast(t *testing.T) {
	h := newHost(t, "dc1")
	w := newWorld(t, h)
	a := newTestAgent(h, w.state)
	a.phase.Store(PhaseJoining)
	_, err := (services{a: a}).Graph(t.Context(), &skeinv1.GraphRequest{})
	if connect.CodeOf(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "skein status") {
		t.Errorf("error %v", err)
	}
	a.replica = newReplica(t, w)
	a.phase.Store(PhaseRunning)
	_, err = (services{a: a}).Graph(t.Context(), &skeinv1.GraphRequest{AtTime: time.Now().Add(time.Hour).UnixNano()})
	if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), "still to come") {
		t.Errorf("error %v", err)
	}
}

func TestSomeNames(t *testing.T) {
	for want, names := range map[string][]string{
		"a": {"a"}, "a, b, c, d": {"a", "b", "c", "d"}, "a, b, c, d and 2 more": {"a", "b", "c", "d", "e", "f"},
	} {
		if got := someNames(names); got != want {
			t.Errorf("have %q, want %q", got, want)
		}
	}
}
