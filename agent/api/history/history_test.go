package history

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/api/apitest"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/planlog"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// A change of a plan names the decisions that were made before it about the peers whose lines it has, and no others.
func TestStepsNameTheirReasons(t *testing.T) {
	home, cloud := identity.ID{1}, identity.ID{2}
	names := map[identity.ID]string{home: "home1", cloud: "cloud1"}
	at := func(second int64) time.Time { return time.Unix(second, 0) }
	decided := func(second int64, peer, rule string) *skeinv1.JournalEntry {
		return &skeinv1.JournalEntry{Time: at(second).UnixNano(), Body: &skeinv1.JournalEntry_PathDecision{
			PathDecision: &skeinv1.PathDecision{Peer: peer, Rule: rule, Reason: "So it is."}}}
	}
	started := &skeinv1.JournalEntry{Time: at(7).UnixNano(), Body: &skeinv1.JournalEntry_AgentStarted{
		AgentStarted: &skeinv1.AgentStarted{}}}
	steps := []planlog.Step{
		{Version: planlog.Version{Time: at(2), Index: 5}, Before: planlog.Version{Index: 5},
			Removed: []string{"peer home1 endpoint a\n"}, Added: []string{"peer home1 endpoint b\n"}},
		{Version: planlog.Version{Time: at(4), Index: 7}, Before: planlog.Version{Index: 5},
			Added: []string{"target 10.4.0.9/32\n"}},
		{Version: planlog.Version{Time: at(8), Index: 7}, Before: planlog.Version{Index: 7},
			Added: []string{"peer cloud1 endpoint c\n"}},
	}
	out := stepViews(steps, []*skeinv1.JournalEntry{
		decided(1, home.String(), "direct-proven"), decided(1, cloud.String(), "relay-first"),
		decided(3, home.String(), "direct-dead"), decided(3, "rubbish", "x"), started, decided(8, cloud.String(), "birthday"),
	}, func(id identity.ID) string { return names[id] })
	want := [][]string{
		{"home1: direct-proven: So it is."}, nil, {"the agent started", "cloud1: birthday: So it is."},
	}
	for i, s := range out {
		if !slices.Equal(s.GetBecause(), want[i]) {
			t.Errorf("step %d: because %q, want %q", i, s.GetBecause(), want[i])
		}
	}
	if len(out) != 3 || out[1].GetFromIndex() != 5 || out[1].GetIndex() != 7 ||
		out[0].GetAdded()[0] != "peer home1 endpoint b" {
		t.Errorf("%v", out)
	}
}

// TestPastGraph: the members are the log's, sites and paths the journal's, and what neither has is said and not
// made up.
func TestPastGraph(t *testing.T) {
	st, ids := apitest.Members(t, "dc1", "home1", "near1", "cloud1", "late1")
	id := func(i int) identity.ID { return must(identity.ParseID(ids[i])) }
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
	g := pastGraph(st, self, moment, then, now)
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
		{"late1", "?", "NAT_TYPE_UNKNOWN", "unknown", "unknown", ""},
		{"near1", "home", "NAT_TYPE_UNKNOWN", "down", "direct", ""},
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
		g.GetIndex() != st.Index() {
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
	says(pastGraph(st, self, moment, then, now), "journal begins at "+then.Begins.Format(time.RFC3339))
	says(pastGraph(st, self, moment, &path.Then{}, now), "journal is empty")
	g = pastGraph(st, self, moment, nil, now)
	if says(g, OnlyRelays); len(g.GetPeers()) != 0 {
		t.Errorf("a node without paths shows %v", g.GetPeers())
	}
}

// TestPastGraphOfSites: a site that the log had set then is not guessed, and the picture says that hops are not kept.
func TestPastGraphOfSites(t *testing.T) {
	st, ids := apitest.Members(t, "home1", "far1")
	self, far := must(identity.ParseID(ids[0])), must(identity.ParseID(ids[1]))
	then := &path.Then{Self: &path.Node{Site: "home"}}
	now := api.Records{far: {Site: "elsewhere"}}
	draw := func() (site, notes string) {
		g := pastGraph(st, self, time.Unix(1000, 0), then, now)
		return g.GetNodes()[0].GetSite(), strings.Join(g.GetNotes(), "\n")
	}
	const guessed = "The site of far1 is today's"
	site, notes := draw()
	if site != "elsewhere" || !strings.Contains(notes, guessed) || strings.Contains(notes, notKeptOfSites) {
		t.Errorf("without settings: site %q, notes:\n%s", site, notes)
	}
	apitest.Decide(t, st, &skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
		Settings: &skeinv1.Settings{Topology: "site"}, Fields: []string{"topology"}}}})
	apitest.Decide(t, st, &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{
		NodeId: far.String(), Settings: &skeinv1.NodeSettings{SiteSet: true, Site: "dc"},
		SettingsFields: []string{"site"}}}})
	site, notes = draw()
	if site != "dc" || strings.Contains(notes, guessed) || !strings.Contains(notes, notKeptOfSites) {
		t.Errorf("with a site of the log: site %q, notes:\n%s", site, notes)
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

func must(id identity.ID, err error) identity.ID {
	if err != nil {
		panic(err)
	}
	return id
}
