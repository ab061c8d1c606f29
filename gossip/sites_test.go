package gossip

import (
	"fmt"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

// sited is a mesh of sites with as many nodes each, of which the first ones are wide and lead. Node i is in site i/per.
type sited struct {
	*sim
	sites, per, wides int
	homes             map[identity.ID]string
}

func siteName(i int) string { return fmt.Sprintf("site%d", i) }

func newSited(t testing.TB, sites, per, wides int, seed uint64) *sited {
	s := &sited{sim: &sim{t: t, net: newSimNet(seed), roster: newRoster()}, sites: sites, per: per, wides: wides}
	s.homes = map[identity.ID]string{}
	for i := range sites * per {
		s.roster.add(simKey(i))
		s.homes[simKey(i).ID()] = siteName(i / per)
	}
	for i := range sites * per {
		s.begin(i, Config{})
	}
	return s
}

func (s *sited) place(i int) Place {
	return Place{Sited: true, Site: siteName(i / s.per), Wide: i%s.per < s.wides, Home: s.home}
}

func (s *sited) home(id identity.ID) (string, bool) {
	site, ok := s.homes[id]
	return site, ok
}

// begin runs node i at its place, and has it publish.
func (s *sited) begin(i int, c Config) {
	s.t.Helper()
	c.Place = s.place(i)
	s.startSilent(i, c)
	s.say(i, "first")
}

// say publishes a record of node i with a version that others can look for.
func (s *sited) say(i int, version string) {
	s.t.Helper()
	r := simRecord(s.nodes[i].g.place.Load().Site)
	r.Version = version
	if s.nodes[i].g.place.Load().Wide {
		r.Leads = 1
	}
	if err := s.nodes[i].g.Publish(r); err != nil {
		s.t.Fatal(err)
	}
}

// of are the running nodes of a site.
func (s *sited) of(site int) (nodes []*simNode) {
	for _, n := range s.nodes[site*s.per : (site+1)*s.per] {
		if n != nil {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// heard: all given nodes hold that version of node i's record.
func heard(nodes []*simNode, of identity.ID, version string) func() bool {
	return func() bool {
		for _, n := range nodes {
			if n.g.Records()[of].Record.GetVersion() != version {
				return false
			}
		}
		return true
	}
}

// settled: all nodes hold the same records for everybody, the nodes of each site the same ones of their site, as many
// as there are, and each sees all others alive.
func (s *sited) settled() bool {
	var hash *[32]byte
	for site := range s.sites {
		nodes := s.of(site)
		for _, n := range nodes {
			h := n.g.Hash()
			if hash == nil {
				hash = &h
			}
			held := n.g.Held()
			if h != *hash || held.SiteHash != nodes[0].g.Held().SiteHash || len(n.g.Records()) < len(nodes) {
				return false
			}
		}
	}
	for _, n := range s.nodes {
		for _, m := range s.nodes {
			if n != nil && m != nil && !n.g.Alive(m.key.ID()) {
				return false
			}
		}
	}
	return true
}

func (s *sited) explain() {
	for i, n := range s.nodes {
		if n == nil || i > 12 {
			continue
		}
		h, held := n.g.Hash(), n.g.Held()
		away := 0
		for _, m := range s.nodes {
			if m != nil && !n.g.Alive(m.key.ID()) {
				away++
			}
		}
		s.t.Logf("node %d %s %+v: hash %x site %x, mesh %d site %d shown %d away %d %+v", i, n.key.ID(),
			n.g.place.Load().Wide, h[:4], held.SiteHash[:4], held.Mesh, held.Site, len(n.g.Records()), away, n.g.Stats())
	}
}

func (s *sited) within(d time.Duration, what string, ok func() bool) time.Duration {
	s.t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > d {
			s.explain()
			s.t.Fatalf("not within %s: %s", d, what)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return time.Since(start)
}

// A record of a local node reaches its site at once and goes nowhere else. A record for everybody reaches all nodes.
// Other sites hold nothing of local nodes that are where the log implies.
func TestRecordsStayInTheirSite(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSited(t, 3, 6, 2, 101)
		defer s.end()
		t.Logf("settled after %s", s.within(time.Minute, "settled", s.settled))
		for i, n := range s.nodes {
			if h := n.g.Held(); h.Mesh != 3*2 || h.Site != 4 {
				t.Errorf("node %d holds %+v", i, h)
			}
			if local := n.g.wide.Load() == nil; local != (i%6 >= 2) {
				t.Errorf("node %d is in the mesh pool: %t", i, !local)
			}
		}
		t.Logf("own site after %s", s.say4(4))
		time.Sleep(10 * time.Second)
		for i := 6; i < 18; i++ {
			if _, ok := s.nodes[i].g.Records()[simKey(4).ID()]; ok {
				t.Errorf("node %d of another site has the record", i)
			}
		}
		s.say(0, "wide")
		t.Logf("everybody after %s", s.within(5*time.Second, "all have a wide node's record",
			heard(s.nodes, simKey(0).ID(), "wide")))
		if site, ok := s.nodes[17].g.SiteOf(simKey(4).ID()); site != "site0" || !ok {
			t.Errorf("node 4 is at %q, %t", site, ok)
		}
	})
}

// say4 publishes a change of node i and waits for its site.
func (s *sited) say4(i int) time.Duration {
	s.t.Helper()
	s.say(i, "next")
	return s.within(5*time.Second, "the site has the record", heard(s.of(i/s.per), simKey(i).ID(), "next"))
}
