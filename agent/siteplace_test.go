package agent

import (
	"fmt"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/metrics"
	"github.com/skeinmesh/skein/agent/roster"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

// planIn is the plan of a node in a mesh of sites that speak through leaders: n nodes of site "home", the first of
// which leads it if somebody does.
func planIn(settings *skeinv1.Settings, self, n int, change func(records map[identity.ID]*skeinv1.Record)) *sites.Plan {
	in := sites.Input{Self: identity.ID{byte(self)}, Settings: settings, Records: map[identity.ID]*skeinv1.Record{},
		Alive: func(identity.ID) bool { return true }}
	var nodes []*skeinv1.Node
	for i := 1; i <= n; i++ {
		id := identity.ID{byte(i)}
		nodes = append(nodes, &skeinv1.Node{Id: id.String()})
		in.Records[id] = &skeinv1.Record{Site: "home"}
	}
	in.Members = sites.NewMembers(nodes, nil, nil)
	in.Records[identity.ID{1}].Leads = 1
	if change != nil {
		change(in.Records)
	}
	return sites.Make(in)
}

// TestWhoIsWide: everybody has the records of those whom other sites need, and no others.
func TestWhoIsWide(t *testing.T) {
	apart := &skeinv1.Settings{Topology: sites.Site, LeadersPerSite: 2}
	type facts struct {
		self     int
		settings *skeinv1.Settings
		node     *skeinv1.Node
		record   *skeinv1.Record
		duties
	}
	for name, c := range map[string]struct {
		facts
		wide, sure bool
	}{
		"one of many":              {facts{self: 5}, false, false},
		"the leader":               {facts{self: 1, record: &skeinv1.Record{Leads: 1}}, true, true},
		"it was elected":           {facts{self: 2}, true, false},
		"it would be elected next": {facts{self: 3}, true, false},
		"so would this one":        {facts{self: 4}, true, false},
		"a server":                 {facts{self: 5, duties: duties{server: true}}, true, true},
		"it relays":                {facts{self: 5, record: &skeinv1.Record{Relay: &skeinv1.RelayOffer{}}}, true, true},
		"it only relays":           {facts{self: 5, record: &skeinv1.Record{Role: gossip.RoleRelay}}, true, true},
		"it answers STUN": {facts{self: 5, record: &skeinv1.Record{StunAddresses: []string{"198.18.0.1:3478"}}},
			true, true},
		"it takes joiners": {facts{self: 5, record: &skeinv1.Record{JoinAddresses: []string{"198.18.0.1:7443"}}},
			true, true},
		"networks are behind it": {facts{self: 5, record: &skeinv1.Record{NodeAddresses: []string{"192.168.1.0/24"}}},
			true, true},
		"pods of another CNI": {facts{self: 5,
			node: &skeinv1.Node{PodCidrs: &skeinv1.PodCidrs{Cidrs: []string{"10.244.1.0/24"}}}}, true, true},
		"it carries a plain peer": {facts{self: 5, duties: duties{plain: true}}, true, true},
		"it has carried one": {facts{self: 5,
			record: &skeinv1.Record{PlainSessions: []*skeinv1.PlainSession{{Peer: 9}}}}, true, true},
		"a Kubernetes Node":           {facts{self: 5, record: &skeinv1.Record{KubernetesNode: "worker1"}}, true, true},
		"a machine beside Kubernetes": {facts{self: 5, duties: duties{kubernetes: true}}, true, true},
		"it speaks of a leader": {facts{self: 5,
			record: &skeinv1.Record{SilentLeaders: []*skeinv1.SilentLeader{{Kinds: 1}}}}, true, true},
		"its site is full": {facts{self: 5, settings: &skeinv1.Settings{Topology: sites.Site,
			SiteTopology: map[string]string{"home": sites.Full}}}, true, true},
		"no site has leaders": {facts{self: 5, settings: &skeinv1.Settings{}}, true, true},
		"it has peers and a NAT": {facts{self: 6, record: &skeinv1.Record{PeersDirect: 3, NatType: 5, PlainPort: 51821}},
			false, false},
		"it wishes to lead, if any": {facts{self: 7, record: &skeinv1.Record{LeaderWish: true}}, false, false},
	} {
		settings, r := c.settings, c.record
		if settings == nil {
			settings = apart
		}
		if r == nil {
			r = &skeinv1.Record{}
		}
		why, sure := whyWide(planIn(settings, c.self, 9, nil), c.node, r, c.duties)
		if (why != "") != c.wide || sure != c.sure {
			t.Errorf("%s: %q, sure %v", name, why, sure)
		}
	}
}

// TestWideClock: who has just started, and finds itself elected since it knows nobody, waits; and nobody is forgotten
// by others while they may still send by it.
func TestWideClock(t *testing.T) {
	var c placeClock
	start := time.Unix(1000, 0)
	for _, step := range []struct {
		at   time.Duration
		why  string
		sure bool
		wide bool
		wait time.Duration
	}{
		{0, "elected", false, false, sites.ElectionRests},
		{time.Second, "elected", false, false, sites.ElectionRests - time.Second},
		{1500 * time.Millisecond, "", false, false, 0}, // now it knows the others
		{3 * time.Second, "elected", false, true, 0},
		{10 * time.Second, "", false, true, wideFor - 7*time.Second},
		{20 * time.Second, "a server", true, true, 0},
		{20*time.Second + wideFor - 1, "", false, true, 1},
		{20*time.Second + wideFor, "", false, false, 0},
	} {
		wide, wait := c.next(step.why, step.sure, sites.ElectionRests-step.at, start.Add(step.at))
		if wide != step.wide || wait != step.wait {
			t.Errorf("after %s: %v, again in %s; want %v, %s", step.at, wide, wait, step.wide, step.wait)
		}
	}
	// Who had everybody's ear before it started again keeps it, if it is elected then.
	c = placeClock{needed: start}
	if wide, _ := c.next("elected", false, time.Second, start.Add(time.Second)); !wide {
		t.Error("who starts again and is elected waits")
	}
	c = placeClock{}
	if wide, _ := c.next("a server", true, sites.ElectionRests, start); !wide {
		t.Error("a server waits")
	}
}

func TestPlaceOf(t *testing.T) {
	h := &roster.Homes{IDs: []identity.ID{{1}}, Sites: []string{"home"}}
	for name, c := range map[string]struct {
		homes          *roster.Homes
		site, topology string
		wide           bool
		want           gossip.Place
	}{
		"no site has leaders": {nil, "home", sites.Site, false, gossip.Place{}},
		"its own is full":     {h, "home", sites.Full, false, gossip.Place{Site: "home", Wide: true}},
		"one of many":         {h, "home", sites.Site, false, gossip.Place{Sited: true, Site: "home"}},
		"a leader":            {h, "home", sites.Site, true, gossip.Place{Sited: true, Site: "home", Wide: true}},
		"of the default site": {h, "", sites.Site, false, gossip.Place{Sited: true}},
	} {
		got := placeOf(c.homes, c.site, c.topology, c.wide)
		if got.Sited != c.want.Sited || got.Site != c.want.Site || got.Wide != c.want.Wide ||
			(got.Home != nil) != (c.homes != nil) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestAlone(t *testing.T) {
	p := planIn(&skeinv1.Settings{Topology: sites.Site}, 1, 2, func(r map[identity.ID]*skeinv1.Record) {
		r[identity.ID{2}].Site = "dc"
	})
	members := []identity.ID{{1}, {2}, {3}}
	for home, want := range map[string]bool{"dc": true, "home": false, "": true} {
		h := &roster.Homes{}
		if home != "" {
			h.IDs, h.Sites = []identity.ID{{3}}, []string{home}
		}
		if got := alone(p, members, h); got != want {
			t.Errorf("the third one is at %q: alone %v", home, got)
		}
	}
	if alone(planIn(&skeinv1.Settings{Topology: sites.Site}, 1, 2, nil), members[:2], &roster.Homes{}) {
		t.Error("alone beside a node whose record tells its site")
	}
}

// TestHomesFollowTheLog: the log implies a member's site by what it says of it, else by the range of its address, and
// the same map stands for as long as that does not change.
func TestHomesFollowTheLog(t *testing.T) {
	a, b := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, a, b)
	r := roster.New(w.state)
	if r.Homes() != nil || r.Placed() != nil {
		t.Error("homes in topology full")
	}
	keys := r.Keys()
	w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
		Settings: &skeinv1.Settings{Topology: sites.Site}, Fields: []string{"topology"}}}})
	r.Update(w.state)
	before := r.Homes()
	if before == nil || r.Placed() != before {
		t.Fatalf("homes %v, of which all members know %v", before, r.Placed())
	}
	w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
		Settings: &skeinv1.Settings{PersistentKeepaliveSeconds: 19}, Fields: []string{"persistent_keepalive_seconds"}}}})
	r.Update(w.state)
	if r.Homes() != before || fmt.Sprintf("%p", r.Keys()) != fmt.Sprintf("%p", keys) {
		t.Error("other maps, and nothing of them has changed")
	}
	if _, known := before.Site(b.key.ID()); known {
		t.Error("b is at home, and the log says nothing of it")
	}
	w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: b.key.ID().String(),
		Settings: &skeinv1.NodeSettings{SiteSet: true, Site: "dc"}, SettingsFields: []string{"site"}}}})
	r.Update(w.state)
	if site, known := r.Homes().Site(b.key.ID()); site != "dc" || !known || r.Homes() == before {
		t.Errorf("b is at %q, %v", site, known)
	}
	leads := func(v *skeinv1.NodeSettings, field string) (out [2]bool) {
		t.Helper()
		last := r.Homes()
		w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: b.key.ID().String(),
			Settings: v, SettingsFields: []string{field}}}})
		r.Update(w.state)
		if r.Homes() == last {
			t.Error("the same homes, and the log's choice is another")
		}
		return [2]bool{r.Homes().Leads(b.key.ID(), "dc"), r.Homes().Leads(b.key.ID(), "home")}
	}
	if got := leads(&skeinv1.NodeSettings{Leader: "yes"}, "leader"); got != [2]bool{true, false} {
		t.Errorf("chosen to lead dc: it leads dc, home: %v", got)
	}
	if got := leads(&skeinv1.NodeSettings{SiteSet: true, Site: "home"}, "site"); got != [2]bool{false, true} {
		t.Errorf("moved home by the log: it leads dc, home: %v", got)
	}
	if r.Homes().Leads(a.key.ID(), "dc") {
		t.Error("one leads that the log has not chosen")
	}
}

// TestPlaceFollowsThePlan: a node's own record is for everybody in topology full; it stays so for a while when sites
// begin to speak through leaders; then it is for its site, until there is a reason.
func TestPlaceFollowsThePlan(t *testing.T) {
	h := newHost(t, "a")
	others := make([]host, 5)
	for i := range others {
		others[i] = newHost(t, fmt.Sprint("n", i))
	}
	w := newWorld(t, append([]host{others[0], h}, others[1:]...)...) // the first one is a server
	replica := newReplica(t, w)
	simtime.Test(t, func(t *testing.T) {
		a := newTestAgent(h, w.state)
		a.cfg.Site = "dc"
		a.replica, a.started = replica, time.Now()
		defer a.withGossip(t, h.key, w.state)()
		for i, other := range others {
			r := &skeinv1.Record{NodeId: other.key.ID().String(), Epoch: 1, Seq: 1, Site: "dc", LeaderWish: true}
			if i == 0 {
				r.Leads = 1
			}
			signed, err := gossip.Sign(other.key, r)
			if err != nil {
				t.Fatal(err)
			}
			if _, errs := a.gossip.Merge([]*skeinv1.SignedRecord{signed}); len(errs) > 0 {
				t.Fatal(errs)
			}
		}
		topology := func(name string) {
			w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
				Settings: &skeinv1.Settings{Topology: name}, Fields: []string{"topology"}}}})
			a.roster.Update(w.state)
		}
		scope := func() skeinv1.RecordScope {
			t.Helper()
			for range 2 { // a record's changes take turns
				a.loop.state = w.state
				a.sitePlan.Store(sites.Make(sites.Input{Self: a.id, Settings: w.state.Settings(), Members: a.roster.ForPlans(),
					Records: a.recordsNow(), Alive: func(identity.ID) bool { return true }}))
				a.publish()
				time.Sleep(time.Second)
			}
			return a.gossip.Records()[a.id].Record.GetScope()
		}
		status := func() *skeinv1.GossipStatus {
			r := &skeinv1.StatusResponse{}
			a.placeStatus(r)
			return r.GetGossip()
		}
		if got := scope(); got != skeinv1.RecordScope_RECORD_SCOPE_MESH || status() != nil {
			t.Errorf("in topology full: %s, %v", got, status())
		}
		topology("site")
		if got := scope(); got != skeinv1.RecordScope_RECORD_SCOPE_BOTH || status().GetWith() != metrics.WithEverybody ||
			status().GetBecause() == "" {
			t.Errorf("after the change: %s, %v", got, status())
		}
		time.Sleep(wideFor)
		if got := scope(); got != skeinv1.RecordScope_RECORD_SCOPE_SITE || status().GetWith() != metrics.WithSite ||
			status().GetBecause() != "" || status().GetSiteRecords() != 1 || status().GetRecords() != 5 {
			t.Errorf("then: %s, %v", got, status())
		}
		a.cfg.NodeAddresses = []string{"192.168.7.0/24"}
		if got := scope(); got != skeinv1.RecordScope_RECORD_SCOPE_BOTH || status().GetBecause() != "networks are behind it" {
			t.Errorf("with networks behind it: %s, %v", got, status())
		}
		topology("full")
		scope()
		time.Sleep(sites.Grace) // the others of the site may not have heard of it
		if got := scope(); got != skeinv1.RecordScope_RECORD_SCOPE_MESH || status() != nil {
			t.Errorf("in topology full again: %s, %v", got, status())
		}
	})
}
