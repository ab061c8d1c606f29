package sites_test

import (
	"cmp"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// small is one host of a mesh of sites a and b, of three nodes each. What it sees changes by hand.
type small struct {
	t        *testing.T
	self     string
	settings *skeinv1.Settings
	nodes    map[string]*skeinv1.Node
	records  map[identity.ID]*skeinv1.Record
	dead     map[identity.ID]bool
	now      time.Time

	course   sites.Course
	follower sites.Follower
	plan     *sites.Plan
	wait     time.Duration
	reach    *sites.Reach
}

var smallNames = []string{"a1", "a2", "a3", "b1", "b2", "b3"}

func smallID(name string) identity.ID { return identity.ID{name[0], name[1]} }

// newSmall has the named nodes lead.
func newSmall(t *testing.T, self string, leaders ...string) *small {
	s := &small{t: t, self: self, settings: &skeinv1.Settings{Topology: sites.Site, LeadersPerSite: 1,
		SiteTopology: map[string]string{}},
		nodes: map[string]*skeinv1.Node{}, records: map[identity.ID]*skeinv1.Record{}, dead: map[identity.ID]bool{},
		now: time.Unix(1e9, 0)}
	for _, name := range smallNames {
		s.nodes[name] = &skeinv1.Node{Id: smallID(name).String(), Settings: &skeinv1.NodeSettings{}}
		s.records[smallID(name)] = &skeinv1.Record{Site: name[:1]}
	}
	for _, name := range leaders {
		s.record(name).Leads = 1
	}
	s.look(0)
	return s
}

func (s *small) record(name string) *skeinv1.Record { return s.records[smallID(name)] }

// look lets time pass, after which the host makes one plan.
func (s *small) look(after time.Duration) {
	s.now = s.now.Add(after)
	in := sites.Input{Self: smallID(s.self), Settings: &skeinv1.Settings{Topology: s.settings.GetTopology(),
		LeadersPerSite: s.settings.GetLeadersPerSite(), SiteTopology: map[string]string{}}, Records: s.records,
		Alive: func(identity.ID) bool { return true }}
	for site, t := range s.settings.GetSiteTopology() {
		in.Settings.SiteTopology[site] = t
	}
	var nodes []*skeinv1.Node
	for _, name := range smallNames {
		nodes = append(nodes, s.nodes[name])
	}
	in.Members = sites.NewMembers(nodes, nil, nil)
	alive := func(id identity.ID) bool { return !s.dead[id] }
	s.plan, s.wait = s.course.Plan(in, time.Time{}, alive, s.now)
	s.follower.Follow(s.plan, s.now)
	s.reach = s.follower.Reach(alive, alive, func(p *sites.Plan, to identity.ID) (sites.Way, bool) {
		return p.Way(to, func(id identity.ID) bool { return s.dead[id] })
	}, s.now)
}

// way is how packets go to a node: through which node, and whether that is only for others' packets; "":
// unencapsulated.
func (s *small) way(to string) string {
	n, ok := s.reach.Way(smallID(to))
	if !ok {
		return ""
	}
	via := string(n.Via[:2])
	if n.Passed {
		return "others " + via
	}
	return via
}

func (s *small) brings(from, of string) bool {
	for _, g := range s.reach.Guards {
		for _, id := range g.Of {
			if g.From == smallID(from) && id == smallID(of) {
				return true
			}
		}
	}
	return false
}

func (s *small) want(what, have, want string) {
	s.t.Helper()
	if have != want {
		s.t.Errorf("%s: %q, want %q", what, have, want)
	}
}

// A quiet host makes no plan for minutes. Its last plan holds until the moment when something changes: from then on,
// those that led by it are accepted for half a minute, and forward for a quarter of a minute.
func TestALastPlanHoldsUntilTheNext(t *testing.T) {
	for _, self := range []string{"a2", "b1"} {
		s := newSmall(t, self, "a2", "b1")
		s.nodes["a1"].Settings.Leader = "yes"
		s.record("a1").Leads = 1
		s.record("a2").Leads = 0
		s.look(10 * time.Minute)
		for range 14 {
			s.look(time.Second)
		}
		if self == "b1" && !s.brings("a2", "a3") {
			t.Error("a leader of a moment ago brings nothing")
		}
		if self == "a2" && !s.plan.Forwards {
			t.Error("who led a moment ago passes nothing on")
		}
		if self == "b1" && s.plan.Leaders["a"][0].ID != smallID("a1") {
			t.Errorf("leaders %v", s.plan.Leaders["a"])
		}
	}
}

// A host that no longer leads forwards for a while. A timer ends that, so that it stops even when nothing else happens.
// A host with nothing to end has no timer.
func TestWhoStopsToLeadLooksAgain(t *testing.T) {
	s := newSmall(t, "a2", "a2", "b1")
	s.look(time.Minute)
	if s.wait != 0 {
		t.Errorf("a quiet host looks again in %s", s.wait)
	}
	s.nodes["a1"].Settings.Leader = "yes"
	s.record("a1").Leads, s.record("a2").Leads = 1, 0
	looks := 0
	for s.look(0); s.plan.Forwards; s.look(s.wait) {
		if looks++; s.wait == 0 || looks > 20 {
			t.Fatalf("it passes packets on, and looks again in %s", s.wait)
		}
	}
	if ended := s.now.Sub(time.Unix(1e9, 0).Add(time.Minute)); ended != sites.ForwardOn {
		t.Errorf("it stops after %s", ended)
	}
}

// The topology changes again before the first change is over. Hosts send as before the first change, since they have
// not sent by the second topology yet, and they accept packets by any of the three.
func TestTopologyChangesTwice(t *testing.T) {
	s := newSmall(t, "b3", "a1", "b1")
	s.look(time.Minute)
	s.want("by leaders", s.way("a3"), "b1")
	s.settings.SiteTopology["a"] = sites.Full
	s.look(0)
	s.settings.Topology = sites.Full
	s.look(2 * time.Second)
	s.want("just changed again", s.way("a3"), "b1")
	s.look(2 * time.Second)
	s.want("four seconds after the first change", s.way("a3"), "b1")
	s.look(sites.SwitchAfter)
	s.want("then", s.way("a3"), "")
	if !s.brings("b1", "a3") {
		t.Error("what comes by the former leader is refused")
	}
	s = newSmall(t, "a1", "a1", "b1")
	s.settings.SiteTopology["b"] = sites.Full
	s.look(time.Minute)
	s.settings.SiteTopology["b"] = sites.Site
	s.look(time.Second)
	s.settings.SiteTopology["b"] = sites.Full
	s.look(time.Second)
	s.look(sites.SwitchAfter)
	s.want("others' packets go by who led when packets went by it", s.way("b3"), "others b1")
	s.look(time.Hour)
	s.settings.SiteTopology["b"] = sites.Site
	s.look(time.Second)
	s.settings.SiteTopology["b"] = sites.Full
	s.look(time.Second)
	s.look(sites.SwitchAfter)
	s.want("others' packets do not go by a topology that nobody went by", s.way("b3"), "others b3")
}

// Leaders change while the topology does. A node that begins to lead accepts and forwards packets by the former
// topology, and forwards nothing by the former way of its own packets.
func TestLeadersChangeWhileTheTopologyDoes(t *testing.T) {
	s := newSmall(t, "a2", "a1", "b1")
	s.look(time.Minute)
	s.want("it leads nothing", s.way("b3"), "a1")
	s.settings.SiteTopology["b"] = sites.Full
	s.look(0)
	s.want("and goes on so", s.way("b3"), "a1")
	s.nodes["a2"].Settings.Leader = "yes"
	s.record("a1").Leads = 0
	for range 10 {
		s.look(time.Second)
	}
	if !s.plan.Forwards {
		t.Fatal("it does not lead")
	}
	s.want("others' packets go by the former leader of the other site", s.way("b3"), "others b1")
	if !s.brings("b1", "b3") || !s.brings("b3", "b3") {
		t.Errorf("what comes by the former topology, or by the new one, is refused")
	}
}

// Hosts forward as before for less time than they accept such packets, and begin sooner to use another way.
func TestThoseWhoTakeWaitLongest(t *testing.T) {
	s := newSmall(t, "a1", "a1", "b1")
	s.look(time.Minute)
	s.settings.Topology = sites.Full
	s.dead[smallID("b3")] = true
	s.look(0)
	for after := time.Duration(0); after < sites.Grace; after += time.Second {
		want := "b1"
		if after >= sites.MissingPath {
			want = "others b1"
		}
		if after >= sites.PassAsBefore {
			want = "others b3"
		}
		s.want(after.String(), s.way("b3"), want)
		if !s.brings("b1", "b3") {
			t.Errorf("after %s nothing is taken from who led", after)
		}
		s.look(time.Second)
	}
}

// While the topology changes, a former way that is dead is left for a new one that is alive.
func TestADeadFormerWayIsLeft(t *testing.T) {
	s := newSmall(t, "a3", "a1", "b1")
	s.look(time.Minute)
	s.settings.Topology = sites.Full
	for _, c := range []struct {
		dead []string
		want string
	}{{nil, "a1"}, {[]string{"a1"}, ""}, {[]string{"a1", "b3"}, "a1"}, {[]string{"b3"}, "a1"}} {
		clear(s.dead)
		for _, name := range c.dead {
			s.dead[smallID(name)] = true
		}
		s.look(0)
		s.want("dead "+cmp.Or(append(c.dead, "nobody")...), s.way("b3"), c.want)
	}
}

// An elected node may begin to lead just when others learn that there are to be fewer leaders: they accept from it what
// they would have accepted a moment ago.
func TestWhoWasElectedIsBelievedForAWhile(t *testing.T) {
	s := newSmall(t, "b1", "a1", "b1")
	s.settings.LeadersPerSite = 2
	s.look(time.Minute)
	if !s.brings("a2", "a3") {
		t.Fatalf("leaders %v", s.plan.Leaders)
	}
	s.settings.LeadersPerSite = 1
	s.look(time.Second)
	if !s.brings("a2", "a3") || s.brings("a3", "a3") {
		t.Error("who was elected brings nothing, or who was not does")
	}
	s.look(sites.Grace - time.Second)
	s.look(time.Second)
	if s.brings("a2", "a3") {
		t.Error("who was elected half a minute ago brings packets")
	}
}

// A node that led while it reached no other site stops at once when another node leads: leaders elsewhere never heard
// that it led, and would refuse its packets.
func TestWhoLedAloneStopsAtOnce(t *testing.T) {
	for _, cut := range []bool{false, true} {
		s := newSmall(t, "a2", "b1")
		s.record("a2").Leads = 1
		s.dead[smallID("b1")] = cut
		s.look(time.Minute)
		s.look(time.Minute)
		s.nodes["a1"].Settings.Leader = "yes"
		s.record("a1").Leads, s.record("a2").Leads = 2, 0
		for range 4 {
			s.look(time.Second)
		}
		if s.plan.Forwards == cut {
			t.Errorf("cut off %v: passes packets on %v", cut, s.plan.Forwards)
		}
	}
}
