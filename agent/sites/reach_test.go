package sites_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/identity"
)

// TestReachIsThePlans: a way that is computed once for a group of members is the plan's way to each of them, whichever
// leaders are dead, and whether members are bound by slices or one by one.
func TestReachIsThePlans(t *testing.T) {
	hops := 0
	for seed := range uint64(40) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		v := large(4, 12)
		v.sliced = seed%2 == 0
		if seed%5 == 0 {
			v.settings.SiteTopology = map[string]string{"s3": sites.Full}
		}
		dead := map[identity.ID]bool{}
		for _, id := range v.ids() {
			r := v.records[id]
			r.LeaderWish = rnd.IntN(3) == 0
			if rnd.IntN(3) == 0 {
				r.Leads = 1 + rnd.Uint64N(2)
			}
			dead[id] = rnd.IntN(4) == 0
			if rnd.IntN(8) == 0 {
				delete(v.records, id)
				v.places = map[identity.ID]string{id: fmt.Sprint("s", rnd.IntN(4))}
			}
		}
		way := func(p *sites.Plan, to identity.ID) (sites.Way, bool) {
			return p.Way(to, func(id identity.ID) bool { return dead[id] })
		}
		lives := func(id identity.ID) bool { return !dead[id] }
		for _, self := range v.ids() {
			p := v.plan(self)
			var f sites.Follower
			f.Follow(p, time.Time{})
			r := f.Reach(lives, lives, way, time.Time{})
			for _, to := range v.ids() {
				got, passed := r.Way(to)
				want := sites.Next{}
				switch w, ok := way(p, to); {
				case to == self || !ok:
				case w.Hop:
					want = sites.Next{Via: w.Via}
					hops++
				case w.Deliver:
					want = sites.Next{Via: to, Passed: true}
				}
				if got != want || passed != (want != sites.Next{}) || r.Peer(to) != p.Peer(to) {
					t.Fatalf("seed %d: %s reaches %s by %+v, and its plan says %+v; peer %t and %t", seed, self, to, got, want,
						r.Peer(to), p.Peer(to))
				}
			}
		}
	}
	if hops == 0 {
		t.Error("nobody sends by a leader")
	}
}

// TestReachEqual: two are equal if all their content is, and not if one thing differs.
func TestReachEqual(t *testing.T) {
	a, b, c := identity.ID{1}, identity.ID{2}, identity.ID{3}
	type parts struct {
		site   string
		peers  map[identity.ID]bool
		ways   map[identity.ID]sites.Next
		known  map[identity.ID]string
		guards []sites.Bring
	}
	base := func() parts {
		return parts{"home", map[identity.ID]bool{a: true}, map[identity.ID]sites.Next{b: {Via: a}},
			map[identity.ID]string{b: "dc", c: "dc"},
			[]sites.Bring{{From: a, Of: []identity.ID{b, c}}}}
	}
	made := func(p parts) *sites.Reach { return sites.NewReach(p.site, p.peers, p.ways, p.known, p.guards) }
	if !made(base()).Equal(made(base())) {
		t.Error("two of the same are not equal")
	}
	for what, change := range map[string]func(*parts){
		"own site":    func(p *parts) { p.site = "" },
		"peer":        func(p *parts) { p.peers[b] = true },
		"way":         func(p *parts) { p.ways[b] = sites.Next{Via: a, Passed: true} },
		"no way":      func(p *parts) { delete(p.ways, b) },
		"site":        func(p *parts) { p.known[b] = "" },
		"no site":     func(p *parts) { delete(p.known, b) },
		"member":      func(p *parts) { p.known[identity.ID{4}] = "dc" },
		"guard":       func(p *parts) { p.guards = nil },
		"who is let":  func(p *parts) { p.guards[0].From = b },
		"what it may": func(p *parts) { p.guards[0].Of = p.guards[0].Of[:1] },
	} {
		p := base()
		change(&p)
		if made(base()).Equal(made(p)) || made(p).Equal(made(base())) {
			t.Errorf("%s differs, and they are equal", what)
		}
	}
	var none *sites.Reach
	if !none.Equal(nil) || none.Equal(made(base())) || made(base()).Equal(none) || !none.Peer(a) || none.Hops() ||
		none.Passes() {
		t.Error("no reach, by which all are peers, is not as it should be")
	}
}
