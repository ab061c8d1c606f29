package gossip

import (
	"fmt"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

// move changes a node's place.
func (s *sited) move(i int, change func(*Place)) {
	p := *s.nodes[i].g.place.Load()
	change(&p)
	s.nodes[i].g.SetPlace(p)
}

// A node that begins to lead is known to all nodes within a second or two. When it no longer leads, all keep only its
// PLACE, and end with the same records.
func TestLeadershipMovesANode(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSited(t, 3, 6, 2, 102)
		defer s.end()
		s.within(time.Minute, "settled", s.settled)
		const i = 3
		id := simKey(i).ID()
		for range 2 {
			s.move(i, func(p *Place) { p.Wide = true })
			s.say(i, "leads")
			t.Logf("known to everybody after %s", s.within(3*time.Second, "everybody has it", heard(s.nodes, id, "leads")))
			s.within(20*time.Second, "it is in the mesh pool", func() bool {
				return s.nodes[17].g.Alive(id) && s.nodes[6].g.wide.Load().alive.has(id)
			})
			s.within(20*time.Second, "settled", s.settled)
			if h := s.nodes[3].g.Held(); h.Mesh != 7 || h.Site != 3 {
				t.Errorf("while it leads %+v is held", h)
			}
			s.move(i, func(p *Place) { p.Wide = false })
			s.say(i, "led")
			alive := func() { // all the while
				for k, n := range s.nodes {
					if !n.g.Alive(id) {
						t.Errorf("node %d takes it for away", k)
					}
				}
			}
			for range 600 {
				time.Sleep(50 * time.Millisecond)
				alive()
			}
			s.within(20*time.Second, "settled", s.settled)
			if h := s.nodes[3].g.Held(); h.Mesh != 7 || h.Site != 4 || s.nodes[3].g.wide.Load() != nil {
				t.Errorf("after that %+v is held", h)
			}
			if _, ok := s.nodes[17].g.Records()[id]; ok {
				t.Error("another site still shows its record")
			}
			if site, ok := s.nodes[17].g.SiteOf(id); !ok || site != "site0" {
				t.Errorf("another site has it at %q", site)
			}
			if !heard(s.of(0), id, "led")() {
				t.Error("its own site lacks its record")
			}
		}
	})
}

// A local node goes to a site that the log does not imply: its record leaves the former site's table, and all nodes
// know where it is.
func TestANodeChangesItsSite(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSited(t, 3, 6, 2, 103)
		defer s.end()
		s.within(time.Minute, "settled", s.settled)
		const i = 5
		id := simKey(i).ID()
		for _, to := range []int{2, 0, 1} {
			s.move(i, func(p *Place) { p.Site = siteName(to) })
			s.say(i, fmt.Sprint("at", to))
			there := s.of(to)
			if to != 0 {
				there = append(there, s.nodes[i])
			}
			t.Logf("known there after %s", s.within(10*time.Second, "the new site has it",
				heard(there, id, fmt.Sprint("at", to))))
			s.within(time.Minute, "all know, the former site has forgotten it, and all hold the same", func() bool {
				sites := map[string][32]byte{}
				for _, n := range s.nodes {
					site, _ := n.g.SiteOf(id)
					name := n.g.place.Load().Site
					_, shown := n.g.Records()[id]
					h, ok := sites[name]
					if site != siteName(to) || shown != (name == siteName(to)) || !n.g.Alive(id) ||
						n.g.Hash() != s.nodes[0].g.Hash() || ok && h != n.g.Held().SiteHash {
						return false
					}
					sites[name] = n.g.Held().SiteHash
				}
				return true
			})
		}
	})
}

// The topology changes on all nodes, not at the same moment. All the time every node has the records that it needs, and
// no live node counts as away.
func TestTopologyIsSwitchedLive(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSited(t, 3, 6, 2, 104)
		defer s.end()
		s.within(time.Minute, "settled", s.settled)
		watch := func(d time.Duration) {
			t.Helper()
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				for i, n := range s.nodes {
					for j, m := range s.nodes {
						if !n.g.Alive(m.key.ID()) {
							t.Fatalf("node %d takes node %d for away", i, j)
						}
						if _, ok := n.g.Records()[m.key.ID()]; i/6 == j/6 && !ok {
							t.Fatalf("node %d of the same site lacks the record of node %d", i, j)
						}
					}
				}
			}
		}
		for range 2 {
			for i := range s.nodes {
				s.move(i, func(p *Place) { p.Sited, p.Wide = false, false })
				watch(100 * time.Millisecond)
			}
			watch(time.Minute)
			t.Logf("all hold all: %s", s.within(time.Minute, "full", func() bool {
				return s.agreed(s.nodes)() && s.meshed(s.nodes)()
			}))
			for i, n := range s.nodes {
				if n.g.near.Load() != nil || n.g.wide.Load() == nil || n.g.Held().Site != 0 {
					t.Errorf("node %d: %+v", i, n.g.Held())
				}
			}
			for i := range s.nodes {
				s.nodes[i].g.SetPlace(s.place(i))
				watch(100 * time.Millisecond)
			}
			watch(time.Minute)
			s.within(time.Minute, "settled", s.settled)
			for i, n := range s.nodes {
				if h := n.g.Held(); h.Site != 4 || (n.g.wide.Load() != nil) != (i%6 < 2) {
					t.Errorf("node %d: %+v", i, h)
				}
			}
		}
	})
}

// A node whose site has changed with the topology says so at once, and does not speak for the former site.
func TestANodeLeavesItsSiteWithTheTopology(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSited(t, 2, 4, 2, 106)
		defer s.end()
		s.within(time.Minute, "settled", s.settled)
		for i := range s.nodes {
			s.move(i, func(p *Place) { *p = Place{Left: i == 1} })
		}
		const i = 1
		if err := s.nodes[i].g.Publish(&skeinv1.Record{Site: "elsewhere"}); err != nil {
			t.Fatal(err)
		}
		s.within(5*time.Second, "all know where it is", func() bool {
			for _, n := range s.nodes {
				r := n.g.Records()[simKey(i).ID()].Record
				if r.GetSite() != "elsewhere" || r.GetScope() != skeinv1.RecordScope_RECORD_SCOPE_MESH {
					return false
				}
			}
			return true
		})
	})
}

// A site is cut off and comes back. Inside the site nothing changes. For other sites its nodes are away, and for it all
// others are.
func TestASiteIsCutOff(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSited(t, 3, 6, 2, 105)
		defer s.end()
		s.within(time.Minute, "settled", s.settled)
		s.net.mu.Lock()
		for _, n := range s.of(2) {
			s.net.side[n.key.ID()] = 1
		}
		s.net.mu.Unlock()
		t.Logf("seen after %s", s.within(time.Minute, "each side takes the other for away", func() bool {
			for i, n := range s.nodes {
				for j, m := range s.nodes {
					if n.g.Alive(m.key.ID()) != ((i/6 == 2) == (j/6 == 2)) {
						return false
					}
				}
			}
			return true
		}))
		s.say4(16)
		s.move(15, func(p *Place) { p.Wide = true }) // nobody outside hears it
		s.say(15, "leads")
		time.Sleep(10 * time.Minute)
		s.net.mu.Lock()
		clear(s.net.side)
		s.net.mu.Unlock()
		t.Logf("healed after %s", s.within(time.Minute, "settled", s.settled))
		if !heard(s.nodes, simKey(15).ID(), "leads")() {
			t.Error("the record of the new wide node is not everywhere")
		}
	})
}

// A leader dies, then the local node, and then a whole site: the others notice. A node that restarts is accepted
// although its epoch is new, whatever it was before.
func TestDeathsAreKnownElsewhere(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSited(t, 3, 6, 2, 106)
		defer s.end()
		s.within(time.Minute, "settled", s.settled)
		time.Sleep(10 * time.Second)
		away := func(id identity.ID) func() bool {
			return func() bool {
				for _, n := range s.nodes {
					if n != nil && n.g.Alive(id) {
						return false
					}
				}
				return true
			}
		}
		for _, i := range []int{0, 4} {
			s.stop(i)
			t.Logf("node %d: seen away by all after %s", i, s.within(time.Minute, "seen away", away(simKey(i).ID())))
		}
		time.Sleep(30 * time.Second)
		if h := len(s.nodes[1].g.Records()[simKey(1).ID()].Record.GetAway()); h != 2 {
			t.Errorf("%d are called away, want 2", h)
		}
		s.begin(0, Config{Epoch: 2})
		s.begin(4, Config{Epoch: 2})
		t.Logf("back after %s", s.within(time.Minute, "settled", s.settled))
		for i := range 6 {
			s.stop(i)
		}
		t.Logf("site away after %s", s.within(time.Minute, "the site is away", func() bool {
			for i := range 6 {
				if !away(simKey(i).ID())() {
					return false
				}
			}
			return true
		}))
		for i := range 6 { // wide nodes are local now, and the other way round
			s.startSilent(i, Config{Epoch: 3, Place: Place{Sited: true, Site: siteName(0), Wide: i >= 4, Home: s.home}})
			s.say(i, "again")
		}
		t.Logf("back after %s", s.within(time.Minute, "settled", s.settled))
		s.within(time.Minute, "the site has all", func() bool {
			for i := range 6 {
				if !heard(s.of(0), simKey(i).ID(), "again")() {
					return false
				}
			}
			return true
		})
		for i, n := range s.nodes[:6] {
			if h := n.g.Held(); h.Mesh != 3*2+2 || h.Site != 4 {
				t.Errorf("node %d holds %+v", i, h)
			}
		}
	})
}

// A site's records are fetched from its wide nodes, no more often than a member may, and are kept for a while.
func TestFetch(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSited(t, 3, 6, 2, 107)
		defer s.end()
		s.within(time.Minute, "settled", s.settled)
		g := s.nodes[16].g
		fetched := func() uint64 { return s.nodes[0].g.Stats().Fetched + s.nodes[1].g.Stats().Fetched }
		for range 3 {
			got, err := g.Fetch(t.Context(), []string{"site0", "site1", "site2", "site0"})
			if err != nil || len(got) != 12 {
				t.Fatalf("%d records, %v", len(got), err)
			}
			for id, e := range got {
				if site := s.homes[id]; e.Record.GetSite() != site || e.Record.GetScope() != skeinv1.RecordScope_RECORD_SCOPE_SITE {
					t.Errorf("%s: %v", id, e.Record)
				}
			}
		}
		if n := fetched(); n != 1 {
			t.Errorf("asked %d times, want once", n)
		}
		if len(g.Records()) != 6+4 {
			t.Errorf("%d records are shown, those fetched among them", len(g.Records()))
		}
		refused := 0
		for range 40 { // like a node that does not keep what it got
			if _, err := g.fetchFrom(t.Context(), simKey(0).ID(), "site0"); err != nil {
				refused++
			}
		}
		if refused < 40-askerBurst-5 || s.nodes[0].g.Stats().Fetched > askerBurst+5 {
			t.Errorf("%d of 40 questions in a row were refused", refused)
		}
		s.stop(0)
		s.stop(1)
		time.Sleep(time.Minute)
		if got, err := g.Fetch(t.Context(), []string{"site0", "site1"}); err == nil || len(got) != 4 {
			t.Errorf("%d records of a site that is there and one that is not, %v", len(got), err)
		}
	})
}

// What a local node sends at rest does not grow with the number of sites.
func TestLocalNodesRestWhateverTheSites(t *testing.T) {
	sent := func(sites int) (each float64) {
		simtime.Test(t, func(t *testing.T) {
			s := newSited(t, sites, 6, 2, 108)
			defer s.end()
			s.within(time.Minute, "settled", s.settled)
			time.Sleep(2 * time.Minute)
			before := int64(0)
			for _, n := range s.of(0)[2:] {
				before -= n.bytes.Load()
			}
			const rest = 5 * time.Minute
			time.Sleep(rest)
			for _, n := range s.of(0)[2:] {
				before += n.bytes.Load()
			}
			each = float64(before) / 4 / rest.Seconds()
		})
		return each
	}
	few, many := sent(2), sent(10)
	t.Logf("%.0f bytes/s with 2 sites, %.0f with 10", few, many)
	if many > few*1.1 {
		t.Errorf("a local node sends %.0f bytes/s at rest with 10 sites and %.0f with 2", many, few)
	}
}

// A site without wide nodes still gets the records for everybody.
func TestASiteWithoutWideNodes(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSited(t, 2, 4, 1, 109)
		defer s.end()
		s.within(time.Minute, "settled", s.settled)
		s.move(0, func(p *Place) { p.Wide = false })
		time.Sleep(time.Minute)
		s.say(4, "news")
		t.Logf("heard after %s", s.within(2*outsideSpacing, "the site hears news", heard(s.nodes, simKey(4).ID(), "news")))
		s.within(time.Minute, "the other site takes it for away", func() bool {
			return !s.nodes[4].g.Alive(simKey(0).ID()) &&
				!s.nodes[5].g.Alive(simKey(1).ID())
		})
	})
}

// A local node that restarts has the records of its site and of all wide nodes from its disk. Its restart is news in
// its site only.
func TestALocalNodeStartsAgain(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSited(t, 2, 5, 2, 110)
		defer s.end()
		s.within(time.Minute, "settled", s.settled)
		const i = 4
		dir := t.TempDir()
		s.stop(i)
		s.begin(i, Config{Dir: dir, Epoch: 2})
		s.within(time.Minute, "settled", s.settled)
		time.Sleep(time.Minute)
		s.nodes[i].g.Close()
		time.Sleep(10 * time.Second)
		n := s.startSilent(i, Config{Dir: dir, Epoch: 3, Place: s.place(i)})
		if got, f := len(n.g.Records()), n.g.Former(); got != 4+2 || f.GetEpoch() != 2 || Wide(f) {
			t.Errorf("%d records from the disk, and its own former one %v", got, f)
		}
		s.say(i, "again")
		s.within(10*time.Second, "the site has it", heard(s.of(0), simKey(i).ID(), "again"))
		s.within(time.Minute, "settled", s.settled)
		if h := s.nodes[9].g.Held(); h.Mesh != 4 {
			t.Errorf("%+v is held elsewhere", h)
		}
	})
}
