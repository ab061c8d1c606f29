package sites

import (
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// The record names a term once the election has given it for two seconds and the other sites' leaders are reached, or
// once they have not been reached for ten.
func TestTermIsDamped(t *testing.T) {
	var c termClock
	start := time.Unix(1000, 0)
	for _, step := range []struct {
		after  time.Duration
		wanted uint64
		ready  bool
		term   uint64
		again  bool
	}{
		{0, 1, true, 0, true},
		{time.Second, 0, true, 0, false}, // a view that was not complete
		{2 * time.Second, 1, false, 0, true},
		{11 * time.Second, 1, false, 0, true},
		{11*time.Second + time.Millisecond, 1, true, 1, false},
		{20 * time.Second, 2, false, 1, true},
		{22 * time.Second, 2, false, 2, false},
		{30 * time.Second, 0, true, 2, true},
		{31 * time.Second, 2, true, 2, false},
		{40 * time.Second, 0, true, 2, true},
		{42 * time.Second, 0, true, 0, false},
		{50 * time.Second, 3, false, 0, true},
		{60 * time.Second, 3, false, 3, false}, // the host never became ready
	} {
		again := c.next(step.wanted, step.ready, start.Add(step.after))
		if c.term != step.term || again > 0 != step.again || again > ElectionRests {
			t.Errorf("after %s: term %d, again in %s; want %d, %t", step.after, c.term, again, step.term, step.again)
		}
	}
}

// TestTermIsToldOncePacketsAreForwarded: others send by a new leader as soon as its record names a term, so its data
// plane comes first. A record that names one follows at once.
func TestTermIsToldOncePacketsAreForwarded(t *testing.T) {
	var c Course
	for _, step := range []struct {
		decided uint64
		told    uint64
		again   bool
	}{
		{0, 0, false},
		{3, 3, true},
		{3, 3, false},
	} {
		c.term.term = step.decided
		if again := c.Tell(); c.told != step.told || again != step.again {
			t.Errorf("%+v: told %d, again %v", step, c.told, again)
		}
	}
}

// TestChosenLeadersTakeOverWhenTheyAreReady: when the log chooses another leader, a former one goes on until the new
// one says that it leads, or until HandOver is over, for the hosts that have seen the former one lead. No other node
// leads by its own claim.
func TestChosenLeadersTakeOverWhenTheyAreReady(t *testing.T) {
	former, next, liar, self, outside := identity.ID{1}, identity.ID{2}, identity.ID{3}, identity.ID{4}, identity.ID{5}
	set := &skeinv1.Settings{Topology: Site, LeadersPerSite: 1}
	nodes := func(former, next string) (out []*skeinv1.Node) {
		for i, leader := range []string{former, next, "", "", ""} {
			out = append(out, &skeinv1.Node{Id: identity.ID{byte(i + 1)}.String(),
				Settings: &skeinv1.NodeSettings{Leader: leader}})
		}
		return out
	}
	records := map[identity.ID]*skeinv1.Record{
		former: {Site: "home", Leads: 5}, next: {Site: "home"}, liar: {Site: "home", LeaderWish: true, Leads: 9},
		self: {Site: "home"}, outside: {Site: "dc", Leads: 1},
	}
	start := time.Unix(1e9, 0)
	var c, fresh Course
	for _, step := range []struct {
		name         string
		after        time.Duration
		former, next string
		says         uint64 // the next one, in its record
		saw, started identity.ID
		freshToo     bool
	}{
		{name: "the log has chosen one", former: "yes", saw: former, freshToo: true},
		{"and another one", time.Hour, "", "yes", 0, former, next, false},
		{"which is not ready", time.Hour + HandOver - time.Second, "no", "yes", 0, former, next, false},
		{"for long", time.Hour + HandOver, "no", "yes", 0, next, next, false},
		{"the log goes back", 2 * time.Hour, "yes", "", 0, former, former, true},
		{"and forth", 3 * time.Hour, "no", "yes", 0, former, former, true},
		{"the next one is ready", 3*time.Hour + 4*time.Second, "no", "yes", 6, next, next, true},
		{"and starts again", 4 * time.Hour, "no", "yes", 0, next, next, true},
	} {
		records[next].Leads = step.says
		in := Input{Self: self, Settings: set, Records: records,
			Members: NewMembers(nodes(step.former, step.next), nil, nil),
			Alive:   func(identity.ID) bool { return true }}
		now := start.Add(step.after)
		via := func(c *Course) identity.ID {
			p, wait := c.Plan(in, start.Add(-time.Hour), func(identity.ID) bool { return true }, now)
			if p.Leaders["home"][0].HandsOver || len(p.Leaders["home"]) > 1 && wait > HandOver {
				t.Errorf("%s: %+v, and looks again in %s", step.name, p.Leaders["home"], wait)
			}
			for _, g := range p.Guards {
				if g.From == liar {
					t.Errorf("%s: the liar brings packets", step.name)
				}
			}
			w, _ := p.Way(outside, func(identity.ID) bool { return false })
			return w.Via
		}
		if got := via(&c); got != step.saw {
			t.Errorf("%s: who saw it sends by %s, want %s", step.name, got, step.saw)
		}
		if !step.freshToo {
			fresh = Course{}
		}
		want := step.started
		if want.IsZero() {
			want = step.saw
		}
		if got := via(&fresh); got != want {
			t.Errorf("%s: who has just started sends by %s, want %s", step.name, got, want)
		}
	}
}

// A node that led only while the chosen ones were away does not hand over: a chosen one that has restarted has not seen
// it lead, and would refuse its packets.
func TestChosenLeadersThatReturnTakeOverAtOnce(t *testing.T) {
	chosen, other, self := identity.ID{1}, identity.ID{2}, identity.ID{3}
	var c Course
	away := true
	in := Input{Self: self, Settings: &skeinv1.Settings{Topology: Site, LeadersPerSite: 1},
		Members: NewMembers([]*skeinv1.Node{{Id: chosen.String(), Settings: &skeinv1.NodeSettings{Leader: "yes"}},
			{Id: other.String()}, {Id: self.String()}}, nil, nil),
		Alive: func(id identity.ID) bool { return id != chosen || !away },
		Records: map[identity.ID]*skeinv1.Record{chosen: {Site: "home"}, other: {Site: "home", Leads: 2},
			self: {Site: "home"}}}
	for _, want := range []identity.ID{other, chosen} {
		p, _ := c.Plan(in, time.Time{}, func(identity.ID) bool { return true }, time.Unix(1e9, 0))
		if l := p.Leaders["home"]; l[0].ID != want || len(l) != 1 {
			t.Errorf("%+v, want %s alone", l, want)
		}
		away = false
	}
}

// A node that begins to lead sends its own packets to acting leaders and to the nodes of full sites itself, so it waits
// for the paths to all of them.
func TestReachesOthers(t *testing.T) {
	self, leader, member, away := identity.ID{1}, identity.ID{2}, identity.ID{3}, identity.ID{4}
	in := Input{Self: self, Alive: func(id identity.ID) bool { return id != away },
		Records: map[identity.ID]*skeinv1.Record{
			self: {Site: "a", Leads: 1}, leader: {Site: "b", Leads: 1}, member: {Site: "b"}, away: {Site: "b"}}}
	var nodes []*skeinv1.Node
	for id := range in.Records {
		nodes = append(nodes, &skeinv1.Node{Id: id.String()})
	}
	in.Members = NewMembers(nodes, nil, nil)
	for topology, want := range map[string][3]bool{Site: {false, true, true}, Full: {false, false, true}} {
		in.Settings = &skeinv1.Settings{Topology: Site, LeadersPerSite: 1, SiteTopology: map[string]string{"b": topology}}
		p := Make(in)
		for i, dead := range []identity.ID{leader, member, self} {
			if got := p.reachesOthers(in.Alive, func(id identity.ID) bool { return id != dead && id != away }); got != want[i] {
				t.Errorf("topology %s without a path to %s: %v", topology, dead, got)
			}
		}
	}
}
