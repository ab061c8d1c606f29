package sites_test

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// people returns so many live nodes of one site.
func people(n int) (out []sites.Node) {
	for i := range n {
		out = append(out, sites.Node{ID: id(i), Site: "home", Alive: true})
	}
	return out
}

func TestWitnesses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := people(rapid.IntRange(1, 12).Draw(t, "nodes"))
		nodes = append(nodes, sites.Node{ID: id(100), Site: "dc", Alive: true})
		for i := range nodes {
			nodes[i].Alive = rapid.IntRange(0, 4).Draw(t, "alive") > 0
			nodes[i].Unfit = rapid.IntRange(0, 9).Draw(t, "unfit") == 0
		}
		before := sites.Witnesses(nodes, id(0))
		fit := 0
		for i := range nodes {
			n := nodes[i]
			can := n.ID != id(0) && n.Site == "home" && n.Alive && !n.Unfit
			if can {
				fit++
			}
			if slices.Contains(before, n.ID) && !can {
				t.Fatalf("%+v is a witness", n)
			}
		}
		if len(before) != min(fit, sites.MaxWitnesses) {
			t.Fatalf("%d witnesses of %d that could", len(before), fit)
		}
		if again := sites.Witnesses(rapid.Permutation(nodes).Draw(t, "order"), id(0)); !slices.Equal(before, again) {
			t.Fatalf("%v, and by another order %v", before, again)
		}
		// A node that dies changes only its own place.
		gone := rapid.SampledFrom(nodes).Draw(t, "gone").ID
		for i := range nodes {
			nodes[i].Alive = nodes[i].Alive && nodes[i].ID != gone
		}
		after := sites.Witnesses(nodes, id(0))
		for _, w := range before {
			if w != gone && !slices.Contains(after, w) {
				t.Fatalf("%s went away: %v, then %v", gone, before, after)
			}
		}
	})
}

// say makes a node report some leaders as silent.
func say(records map[identity.ID]*skeinv1.Record, who identity.ID, since int64, kinds uint32, leaders ...identity.ID) {
	r := &skeinv1.Record{Site: "home"}
	for _, l := range leaders {
		r.SilentLeaders = append(r.SilentLeaders, &skeinv1.SilentLeader{NodeId: l.String(), Kinds: kinds, Since: since})
	}
	records[who] = r
}

func TestJudge(t *testing.T) {
	for _, c := range []struct{ nodes, say, demote int }{
		{1, 0, 0}, // nobody else is there
		{2, 1, 1},
		{3, 1, 0}, {3, 2, 1},
		{4, 1, 0}, {4, 2, 1}, {4, 3, 1},
		{9, 1, 0}, {9, 2, 1},
	} {
		t.Run(fmt.Sprintf("%d of %d", c.say, c.nodes), func(t *testing.T) {
			nodes, records := people(c.nodes), map[identity.ID]*skeinv1.Record{}
			witnesses := sites.Witnesses(nodes, id(0))
			for i, w := range witnesses[:c.say] {
				say(records, w, int64(10+i), 1<<i, id(0))
			}
			for i := 1; i < c.nodes; i++ { // reports of nodes that are not witnesses do not count
				if !slices.Contains(witnesses, id(i)) {
					say(records, id(i), 1, 8, id(0))
				}
			}
			got := sites.Judge(nodes, records)
			if len(got) != c.demote {
				t.Fatalf("%v", got)
			}
			if f := got[id(0)]; c.demote > 0 && (len(f.By) != c.say || f.Kinds != 1<<c.say-1 ||
				f.Since != int64(9+min(c.say, 2))) {
				t.Errorf("%+v", f)
			}
		})
	}
}

// A witness that is away does not count, neither as reporting nor as not reporting.
func TestJudgeWithoutThoseAway(t *testing.T) {
	nodes, records := people(4), map[identity.ID]*skeinv1.Record{}
	witnesses := sites.Witnesses(nodes, id(0))
	say(records, witnesses[0], 1, 1, id(0))
	say(records, witnesses[1], 1, 1, id(0))
	away := func(who ...identity.ID) (out []sites.Node) {
		for _, n := range nodes {
			n.Alive = !slices.Contains(who, n.ID)
			out = append(out, n)
		}
		return out
	}
	for _, c := range []struct {
		away    []identity.ID
		demoted bool
	}{
		{nil, true},
		{witnesses[:1], false}, // one of two
		{witnesses[2:], true},  // both of two
		{witnesses[1:], true},  // the one of one
		{witnesses[:2], false},
		{witnesses, false},
	} {
		if _, demoted := sites.Judge(away(c.away...), records)[id(0)]; demoted != c.demoted {
			t.Errorf("without %v: %v", c.away, demoted)
		}
	}
}

func TestSilentLeaders(t *testing.T) {
	const none, chosen, no = "", "yes", "no"
	for name, c := range map[string]struct {
		leader []string // what the log says of each node
		term   []uint64
		silent []int
		carry  []int // those that lead and are no reserve
		led    []int // all
	}{
		"of two that act the other carries": {[]string{none, none}, []uint64{1, 1}, []int{0},
			[]int{1}, []int{0, 1}},
		"who does not act yet carries at once": {[]string{none, none}, []uint64{1, 0}, []int{0},
			[]int{1}, []int{0, 1}},
		"a third one comes": {[]string{none, none, none}, []uint64{1, 1, 0}, []int{0},
			[]int{1}, []int{1, 2}},
		"all silent go on": {[]string{none, none}, []uint64{1, 1}, []int{0, 1},
			[]int{0, 1}, []int{0, 1}},
		"one that shall not lead does not come instead": {[]string{none, none, no}, []uint64{1, 1, 0}, []int{0, 1},
			[]int{0, 1}, []int{0, 1}},
		"of two chosen the other carries": {[]string{chosen, chosen, none}, []uint64{1, 1, 0}, []int{0},
			[]int{1}, []int{0, 1}},
		"a chosen one leaves the site to no other": {[]string{chosen, none, none}, []uint64{1, 0, 0}, []int{0},
			[]int{0}, []int{0}},
	} {
		t.Run(name, func(t *testing.T) {
			var nodes []sites.Node
			for i, l := range c.leader {
				nodes = append(nodes, sites.Node{ID: id(i), Site: "home", Alive: true, Chosen: l == chosen, Reluctant: l == no,
					Term: c.term[i], Silent: slices.Contains(c.silent, i)})
			}
			var carry, led []int
			for _, l := range sites.Elect(nodes, 2)["home"] {
				i := slices.IndexFunc(nodes, func(n sites.Node) bool { return n.ID == l.ID })
				if led = append(led, i); l.Acting && !l.Reserve {
					carry = append(carry, i)
				}
				if l.Silent && !l.Reserve && l.Acting {
					t.Errorf("%d carries", i)
				}
			}
			slices.Sort(carry)
			slices.Sort(led)
			if !slices.Equal(carry, c.carry) || !slices.Equal(led, c.led) {
				t.Errorf("%v carry of %v", carry, led)
			}
		})
	}
}

// All ways pass over a leader that its witnesses demote, as long as another one leads.
func TestDemotedCarryNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := mesh(t)
		plans := plansOf(v, same(v))
		carries := func(n identity.ID) bool { // n forwards because it is elected, not because it is the only one
			site, _ := plans[n].SiteOf(n)
			i := slices.IndexFunc(plans[n].Leaders[site], func(l sites.Leader) bool { return l.ID == n })
			return i < 0 || !plans[n].Leaders[site][i].Silent
		}
		for _, a := range v.ids() {
			for _, b := range v.ids() {
				if a == b {
					continue
				}
				r := walk(plans, same(v), a, b)
				for _, n := range r.way[1 : len(r.way)-1] {
					if !carries(n) {
						t.Fatalf("%s carries %s, with the findings %v", n, r, plans[n].Silent)
					}
				}
			}
		}
	})
}

// A witness watches acting leaders of its site, with mirrors in other sites that a leader peers with.
func TestWatched(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := mesh(t)
		for _, n := range v.ids() {
			v.away[n] = rapid.IntRange(0, 5).Draw(t, "away") == 0
		}
		plans := plansOf(v, same(v))
		watchers := map[identity.ID]int{}
		for _, w := range v.ids() {
			p := plans[w]
			if v.away[w] { // it sees another mesh
				continue
			}
			for _, x := range p.Watched() {
				watchers[x.Leader]++
				site, _ := p.SiteOf(x.Leader)
				if x.Leader == w || site != p.Site || p.Topology(site) != sites.Site {
					t.Fatalf("%s of %q watches %s of %q", w, p.Site, x.Leader, site)
				}
				if len(x.Mirrors) == 0 || len(x.Mirrors) > 2 || slices.Contains(x.Others, x.Leader) {
					t.Fatalf("%+v", x)
				}
				for _, r := range x.Mirrors {
					far, _ := p.SiteOf(r)
					if far == site || v.away[r] {
						t.Fatalf("the mirror %s is of %q, away: %v", r, far, v.away[r])
					}
					if v.away[x.Leader] {
						continue
					}
					if !plans[x.Leader].Peer(r) || !plans[r].Peer(x.Leader) {
						t.Fatalf("%s and %s are not peers", x.Leader, r)
					}
					// There and back, each node accepts the echo from the one before.
					if !takes(plans[x.Leader], w, w) || !takes(plans[r], x.Leader, w) ||
						!takes(plans[x.Leader], r, r) || !takes(p, x.Leader, r) {
						t.Fatalf("an echo of %s by %s to %s is refused", w, x.Leader, r)
					}
				}
				if far := farSites(p, v); len(x.Mirrors) == 2 && far > 1 {
					a, _ := p.SiteOf(x.Mirrors[0])
					if b, _ := p.SiteOf(x.Mirrors[1]); a == b {
						t.Fatalf("both mirrors are of %q, and there are %d sites", a, far)
					}
				}
			}
		}
		for l, n := range watchers {
			if n > sites.MaxWitnesses {
				t.Fatalf("%d watch %s", n, l)
			}
		}
	})
}

// farSites is how many other sites have a node that a leader of this one peers with and that is alive.
func farSites(p *sites.Plan, v *view) int {
	found := map[string]bool{}
	for _, n := range v.ids() {
		site, _ := p.SiteOf(n)
		gate := p.Topology(site) == sites.Full
		for _, l := range p.Leaders[site] {
			gate = gate || l.ID == n && l.Acting
		}
		if site != p.Site && gate && !v.away[n] {
			found[site] = true
		}
	}
	return len(found)
}

// In a site that is cut off from all others, a witness has no mirrors.
func TestCutOffSiteWatchesNobody(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := mesh(t)
		self := v.ids()[0]
		home := v.records[self].GetSite()
		for _, n := range v.ids() {
			v.away[n] = v.records[n].GetSite() != home
		}
		for _, n := range v.ids() {
			if p := v.plan(n); !v.away[n] && len(p.Watched()) > 0 {
				t.Fatalf("%+v", p.Watched())
			}
		}
	})
}
