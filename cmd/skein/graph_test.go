package main

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
	"github.com/skeinmesh/skein/internal/graph"
)

// meshAnswer is what home1 says of a small mesh: a server that relays, a relay that does nothing else, a
// neighbour that is down, and a member that nothing has been heard of.
func meshAnswer() *skeinv1.GraphResponse {
	node := func(id, name, site string, way string) *skeinv1.NodeView {
		return &skeinv1.NodeView{
			Node:   &skeinv1.Node{Id: id, Name: name, Ipv4: "10.4.0.1"},
			Record: &skeinv1.Record{Site: site, NatType: skeinv1.NatType_NAT_TYPE_NONE}, Path: way, Alive: true, Role: "agent",
		}
	}
	dc, relay := node("d", "dc1", "dc", "direct"), node("r", "relay1", "", "none")
	home1, home2 := node("a", "home1", "home", "self"), node("b", "home2", "home", "relay")
	new1 := node("n", "new1", "", "down")
	dc.Server, dc.Voter, dc.Leader, dc.Role = true, true, true, "server"
	dc.Record.Relay, dc.Record.LeaderWish = &skeinv1.RelayOffer{}, true
	relay.Record.Role = "relay"
	home2.Role, home2.Node.Draining, home2.Record.NatType = "admin", true, skeinv1.NatType_NAT_TYPE_SYMMETRIC
	home2.Record.RelayLinks = []*skeinv1.RelayLink{{NodeId: "d", RttMicros: 1500}, {NodeId: "revoked"}}
	new1.Record, new1.Alive = nil, false
	return &skeinv1.GraphResponse{
		NodeId: "a", Index: 34, Time: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC).UnixNano(),
		Nodes: []*skeinv1.NodeView{dc, relay, home1, home2, new1}, Peers: []*skeinv1.PeerView{
			{NodeId: "d", Path: "direct", Alive: true, Endpoint: "198.18.1.11:51820", RttNanos: 2.4e6},
			{NodeId: "r", Path: "none"},
			{NodeId: "b", Path: "relay", Alive: true, RelayName: "dc1", Endpoint: "198.18.1.11:3478", Detail: "udp",
				RttNanos: 4e6},
			{NodeId: "n", Path: "none"},
		},
	}
}

func TestGraphOf(t *testing.T) {
	want := &graph.Graph{Self: 2, Index: 34, Time: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), Nodes: []graph.Node{
		{Name: "dc1", Address: "10.4.0.1", NAT: "no NAT", Site: "dc", SiteKnown: true,
			LogLeader: true, Voter: true, Server: true, Relays: true, Wishes: true,
			State: graph.Direct, Endpoint: "198.18.1.11:51820", RTT: 2400 * time.Microsecond},
		{Name: "relay1", Address: "10.4.0.1", NAT: "no NAT", SiteKnown: true, OnlyRelays: true, State: graph.None},
		{Name: "home1", Address: "10.4.0.1", NAT: "no NAT", Site: "home", SiteKnown: true, State: graph.Self},
		{Name: "home2", Address: "10.4.0.1", NAT: "symmetric", Site: "home", SiteKnown: true, Admin: true, Draining: true,
			State: graph.Relay, Via: "dc1", UDP: true, Endpoint: "198.18.1.11:3478", RTT: 4 * time.Millisecond,
			Sessions: []graph.Session{{To: 0, RTT: 1500 * time.Microsecond}}},
		{Name: "new1", Address: "10.4.0.1", Unseen: true, State: graph.Down},
	}}
	if d := cmp.Diff(want, graphOf(meshAnswer())); d != "" {
		t.Error(d)
	}
	// Of the past neither gossip nor all paths are known, and the asked node need not have been a member.
	past := meshAnswer()
	past.Past, past.NodeId = true, "z"
	past.Nodes[3].Path, past.Peers[2].Path = "unknown", "unknown"
	past.Peers[0].Alive = false
	got := graphOf(past)
	n := got.Nodes
	if got.Self != -1 || n[0].State != graph.Down || n[3].State != graph.Unknown || n[3].Via != "" || n[4].Unseen {
		t.Errorf("%+v", got)
	}
	if notes := strings.Join(got.Notes, " "); !strings.Contains(notes, "not a member then") {
		t.Errorf("the notes are: %s", notes)
	}
}

// ledAnswer is what home3 says of sites that speak through leaders. The log has put dc2 into a site, and van1 into
// none.
func ledAnswer() *skeinv1.GraphResponse {
	node := func(name, site, leads, way string) *skeinv1.NodeView {
		return &skeinv1.NodeView{
			Node: &skeinv1.Node{Id: name, Name: name}, Record: &skeinv1.Record{Site: site}, Site: site, SiteLeads: leads,
			Path: way, Alive: true, Role: "agent", Self: way == "self",
		}
	}
	dc1, dc2 := node("dc1", "dc", "elected", "hop"), node("dc2", "old", "reserve", "down")
	home1, home3 := node("home1", "home", "leader", "direct"), node("home3", "home", "", "self")
	van1, far1 := node("van1", "home", "", "down"), node("far1", "dc", "", "relay")
	dc2.Record, dc2.Site, dc2.Node.Settings = nil, "dc", &skeinv1.NodeSettings{SiteSet: true, Site: "dc", Leader: "yes"}
	van1.Site, van1.Node.Settings = "", &skeinv1.NodeSettings{SiteSet: true, Leader: "no"}
	van1.Record.LeaderWish = true
	return &skeinv1.GraphResponse{
		NodeId: "home3", Nodes: []*skeinv1.NodeView{dc1, dc2, home1, home3, van1, far1}, Peers: []*skeinv1.PeerView{
			{NodeId: "dc1", Path: "hop", Detail: "site", Relay: "home1", RelayName: "home1", Rule: "site-leader", Alive: true},
			{NodeId: "dc2", Path: "hop", Detail: "site", Relay: "home1", RelayName: "home1", Rule: "site-leader"},
			{NodeId: "home1", Path: "direct", Endpoint: "192.168.2.11:51820", Alive: true},
			{NodeId: "van1", Path: "none", Rule: "no-leader"},
			{NodeId: "far1", Path: "relay", RelayName: "dc1", Alive: true},
		},
	}
}

// TestGraphOfSites: a hop is not a path that is down and names who passes packets on; sites and wishes are the log's
// where it says something.
func TestGraphOfSites(t *testing.T) {
	want := []graph.Node{
		{Name: "dc1", Site: "dc", SiteKnown: true, Leads: graph.Elected, State: graph.Hop, Via: "home1"},
		{Name: "dc2", Site: "dc", SiteKnown: true, Leads: graph.Reserve, Wishes: true, State: graph.Down, Via: "home1"},
		{Name: "home1", Site: "home", SiteKnown: true, Leads: graph.Leader, State: graph.Direct,
			Endpoint: "192.168.2.11:51820"},
		{Name: "home3", Site: "home", SiteKnown: true, State: graph.Self},
		{Name: "van1", SiteKnown: true, State: graph.Down, NoLeader: true},
		{Name: "far1", Site: "dc", SiteKnown: true, State: graph.Relay, Via: "dc1"},
	}
	if d := cmp.Diff(want, graphOf(ledAnswer()).Nodes); d != "" {
		t.Error(d)
	}
	f := newFakeAgent(t)
	f.lay(&skeinv1.GraphRequest{}, ledAnswer())
	out, _, err := f.skein(t, "graph", "-o", "json")
	var a struct {
		Nodes []struct{ Site, SiteLeads, Path string }
		Peers []struct{ Path, RelayName, Rule string }
	}
	if e := json.Unmarshal([]byte(out), &a); err != nil || e != nil || len(a.Nodes) != 6 || len(a.Peers) != 5 {
		t.Fatalf("%v, %v\n%s", err, e, out)
	}
	if n, p := a.Nodes[0], a.Peers[0]; n.Site != "dc" || n.SiteLeads != "elected" || n.Path != "hop" ||
		p.Path != "hop" || p.RelayName != "home1" || p.Rule != "site-leader" {
		t.Errorf("%+v, %+v", n, p)
	}
}

func TestGraphCommand(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.GraphRequest{}, meshAnswer())
	dot, _, err := f.skein(t, "graph")
	if g := graphOf(meshAnswer()); err != nil || dot != g.DOT() {
		t.Errorf("%v\n%s", err, dot)
	}
	svg, _, err := f.skein(t, "graph", "-o", "svg", "--at", "17")
	if g := graphOf(meshAnswer()); err != nil || svg != g.SVG() {
		t.Errorf("%v\n%s", err, svg)
	}
	if r := f.asked[len(f.asked)-1].(*skeinv1.GraphRequest); r.GetAtIndex() != 17 || r.GetAtTime() != 0 {
		t.Errorf("asked for %v", r)
	}
	out, _, err := f.skein(t, "graph", "--output=json", "--at", "5m")
	var m map[string]any
	if e := json.Unmarshal([]byte(out), &m); err != nil || e != nil || m["nodeId"] != "a" || m["past"] != false {
		t.Errorf("%v, %v\n%s", err, e, out)
	}
	r := f.asked[len(f.asked)-1].(*skeinv1.GraphRequest)
	if r.GetAtIndex() != 0 || time.Since(time.Unix(0, r.GetAtTime())) < 5*time.Minute {
		t.Errorf("asked for %v", r)
	}
	for _, args := range [][]string{
		{"graph", "-o", "table"}, {"graph", "-o", "png"}, {"graph", "--at", "soon"}, {"graph", "home1"},
	} {
		before := len(f.asked)
		if _, _, err := f.skein(t, args...); !errors.As(err, new(cli.UsageError)) || len(f.asked) != before {
			t.Errorf("skein %s: %v", strings.Join(args, " "), err)
		}
	}
}
