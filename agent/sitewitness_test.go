package agent

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/agent/witness"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// silentMesh is two sites whose first two nodes lead them; others say that some are silent.
func silentMesh(t *testing.T, names []string,
	says map[string][]string) (of func(self string) *sites.Plan, id func(string) identity.ID) {
	t.Helper()
	id = func(name string) (out identity.ID) {
		copy(out[:], name+"-------")
		return out
	}
	in := sites.Input{Settings: &skeinv1.Settings{Topology: sites.Site}, Alive: func(identity.ID) bool { return true },
		Records: map[identity.ID]*skeinv1.Record{}}
	var nodes []*skeinv1.Node
	for _, n := range names {
		nodes = append(nodes, &skeinv1.Node{Id: id(n).String(), Name: n})
		r := &skeinv1.Record{Site: n[:1], LeaderWish: n[1] < '3'}
		if r.LeaderWish {
			r.Leads = 1
		}
		for _, l := range says[n] {
			r.SilentLeaders = append(r.SilentLeaders, &skeinv1.SilentLeader{NodeId: id(l).String(), Kinds: 1, Since: 1000})
		}
		in.Records[id(n)] = r
	}
	in.Members = sites.NewMembers(nodes, nil, nil)
	return func(self string) *sites.Plan {
		in.Self = id(self)
		return sites.Make(in)
	}, id
}

var twoSites = []string{"a1", "a2", "a3", "b1", "b2", "b3"}

func TestMirrorsAdmit(t *testing.T) {
	plan, id := silentMesh(t, twoSites, nil)
	for _, c := range []struct {
		self, from, via string
		want            bool
	}{
		{"b1", "a3", "a1", true},
		{"b1", "a3", "a2", true},
		{"b1", "a2", "a1", true},
		{"b1", "a3", "a3", false}, // leads nothing
		{"b1", "a3", "b2", false}, // not of its site
		{"b1", "b3", "b2", false}, // of this site
		{"b3", "a3", "a1", false}, // this one is not a leader, and no peer of a1
		{"b1", "a1", "", true},    // a peer
		{"b1", "b3", "", true},
		{"b1", "a3", "", false}, // none
		{"b1", "b1", "", false},
		{"b1", "c1", "a1", false}, // no member
	} {
		via := identity.ID{}
		if c.via != "" {
			via = id(c.via)
		}
		if got := mirrors(plan(c.self), id(c.from), via); got != c.want {
			t.Errorf("%s answers %s by %q: %v", c.self, c.from, c.via, got)
		}
	}
	if mirrors(nil, id("a3"), id("a1")) || mirrors(&sites.Plan{Full: true}, id("a3"), identity.ID{}) {
		t.Error("an echo is answered where no leader is watched")
	}
}

// A host shuns the leader that it finds silent, and then goes by all the same if it reaches no other.
func TestShunned(t *testing.T) {
	plan, id := silentMesh(t, twoSites, nil)
	m, now := sitemesh.Mesh{}, time.Unix(1000, 0)
	p := plan("a3")
	m.Follow(p, now)
	first, _ := p.Way(id("b3"), func(identity.ID) bool { return false })
	other := map[identity.ID]string{id("a1"): "a2", id("a2"): "a1"}[first.Via]
	for _, c := range []struct {
		name string
		said []identity.ID
		dead string
		want identity.ID
	}{
		{"nothing is said", nil, "", first.Via},
		{"the first is silent", []identity.ID{first.Via}, "", id(other)},
		{"and the other is dead", []identity.ID{first.Via}, other, first.Via},
		{"both are silent", []identity.ID{first.Via, id(other)}, "", first.Via},
	} {
		paths := map[identity.ID]path.Path{}
		for _, n := range twoSites {
			paths[id(n)] = path.Path{Kind: path.Direct, Alive: n != c.dead}
		}
		var said []witness.Said
		for _, l := range c.said {
			said = append(said, witness.Said{Leader: l, Kinds: 1})
		}
		r := &sitemesh.Reach{Reach: m.ReachBy(paths, sitemesh.Shunned(p, said, paths),
			func(identity.ID) time.Time { return now }, now)}
		if via, ok := r.Via(id("b3")); !ok || via != c.want {
			t.Errorf("%s: by %s, want %s", c.name, via, c.want)
		}
	}
}

func TestSilentLeadersAreTold(t *testing.T) {
	h := newHost(t, "a")
	w := newWorld(t, h)
	a := newTestAgent(h, w.state)
	a.metrics = newMetrics(a)
	all := []string{"a1", "a2", "a3", "a4", "b1", "b2"}
	plan, id := silentMesh(t, all, map[string][]string{"a2": {"a1"}, "a3": {"a1"}, "a4": {"a1"}})
	p := plan("a3")
	if got := p.Leads(id("a1")); got != "silent" {
		t.Errorf("a1 is %q", got)
	}
	if got := p.Leads(id("a2")); got != "leader" {
		t.Errorf("a2 is %q", got)
	}
	told := func() (out []string) {
		for _, one := range a.problems.list() {
			out = append(out, one.GetSubject()+": "+one.GetMessage())
		}
		return out
	}
	a.noteSilent(p)
	if got := told(); len(got) != 1 || !strings.Contains(got[0], "does not forward (small IPv4: ") ||
		!strings.Contains(got[0], id("a2").String()) || !strings.HasSuffix(got[0], `others lead site "a"`) {
		t.Errorf("%q", got)
	}
	a.sitePlan.Store(p)
	for member, want := range map[string]bool{"b2": true, "a1": true} {
		if got := a.silentText(id(member)); strings.Contains(got, "does not forward") != want {
			t.Errorf("of %s: %q", member, got)
		}
	}
	plan, _ = silentMesh(t, all, map[string][]string{"a2": {"a1"}})
	a.noteSilent(plan("a3"))
	if got := told(); len(got) != 0 {
		t.Errorf("one of three says so, and status %q", got)
	}
	plan, _ = silentMesh(t, []string{"a1", "a2", "b1", "b2"}, map[string][]string{"a1": {"a2"}, "a2": {"a1"}})
	a.noteSilent(plan("a1"))
	if got := told(); len(got) != 2 || slices.ContainsFunc(got, func(s string) bool {
		return !strings.HasSuffix(s, "so it goes on")
	}) {
		t.Errorf("each of the two says so of the other: %q", got)
	}
	a.noteSilent(&sites.Plan{Full: true})
	if got := told(); len(got) != 0 {
		t.Errorf("in a full mesh: %q", got)
	}
}
