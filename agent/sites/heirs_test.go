package sites_test

import (
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// TestHeirs: heirs are the nodes that would be elected next, and they are enough for other sites to judge leaders by.
func TestHeirs(t *testing.T) {
	node := func(i int, change func(*sites.Node)) sites.Node {
		n := sites.Node{ID: identity.ID{byte(i)}, Site: "home", Alive: true}
		change(&n)
		return n
	}
	plain := func(*sites.Node) {}
	nodes := []sites.Node{
		node(1, func(n *sites.Node) { n.Wish, n.Term = true, 1 }),
		node(2, func(n *sites.Node) { n.Public, n.Term = true, 1 }),
		node(3, plain), node(4, func(n *sites.Node) { n.Alive = false }),
		node(5, func(n *sites.Node) { n.Unfit = true }), node(6, func(n *sites.Node) { n.Site = "dc" }),
		node(7, func(n *sites.Node) { n.Reluctant = true }), node(8, plain), node(9, plain),
		node(10, func(n *sites.Node) { n.Public = true }),
	}
	for _, c := range []struct {
		perSite int
		chosen  []int
		want    []byte
	}{
		{1, nil, []byte{2, 10, 3}},
		{2, nil, []byte{10, 3}},
		{3, nil, []byte{3, 8, 9}},
		{2, []int{8}, []byte{1, 2, 10}}, // it leads alone
		{1, []int{8, 9}, []byte{9, 1, 2}},
		{9, nil, nil}, // all lead
	} {
		all := slices.Clone(nodes)
		for i := range all {
			all[i].Chosen = slices.Contains(c.chosen, int(all[i].ID[0]))
		}
		var got []byte
		for _, id := range sites.Heirs(all, "home", sites.Elect(all, c.perSite)["home"], c.perSite) {
			got = append(got, id[0])
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%d per site, chosen %v: %v, want %v", c.perSite, c.chosen, got, c.want)
		}
	}
}

// TestOthersElectTheSame: a host of another site has only the records of leaders and heirs, and of nodes that say that
// they lead or that a leader is silent. It finds the same leaders, findings and ways as a host that has all records.
func TestOthersElectTheSame(t *testing.T) {
	local := 0
	compare := func(t *rapid.T) {
		all := mesh(t)
		for _, n := range all.ids() {
			all.away[n] = rapid.IntRange(0, 5).Draw(t, "away") == 0
			if rapid.IntRange(0, 3).Draw(t, "says nothing of leading") > 0 {
				all.records[n].Leads = 0
			}
		}
		honest(all)
		wide := map[identity.ID]bool{}
		for _, n := range all.ids() {
			p, r := all.plan(n), all.records[n]
			wide[n] = p.Topology(p.Site) != sites.Site || p.Elected || p.Next || r.GetLeads() > 0 ||
				len(r.GetSilentLeaders()) > 0
		}
		for _, self := range all.ids() {
			if all.away[self] {
				continue
			}
			part := all.clone()
			part.places = map[identity.ID]string{}
			for n, r := range all.records {
				if !wide[n] && r.GetSite() != all.records[self].GetSite() {
					part.places[n] = r.GetSite()
					delete(part.records, n)
					local++
				}
			}
			whole, mine := all.plan(self), part.plan(self)
			for site, leaders := range whole.Leaders {
				if here(all, site) && !slices.Equal(leaders, mine.Leaders[site]) {
					t.Fatalf("leaders of %q: %v, by all records %v", site, mine.Leaders[site], leaders)
				}
			}
			for n := range mine.Silent {
				if _, found := whole.Silent[n]; !found {
					t.Fatalf("%s is found silent, and is not by all records", n)
				}
			}
			for _, n := range all.ids() {
				site, known := mine.SiteOf(n)
				if !known || !here(all, site) {
					continue
				}
				alive := func(identity.ID) bool { return false }
				a, ok := mine.Way(n, alive)
				if b, has := whole.Way(n, alive); a != b || ok != has || mine.Peer(n) != whole.Peer(n) {
					t.Fatalf("to %s by %+v, by all records by %+v", n, a, b)
				}
			}
		}
	}
	for range 20 { // most random meshes are so small that every node is an heir
		if rapid.Check(t, compare); local > 0 {
			return
		}
	}
	t.Error("no record was left out")
}

// honest keeps only the reports of a leader's witnesses.
func honest(v *view) {
	var nodes []sites.Node
	for _, n := range v.nodes {
		id, _ := identity.ParseID(n.GetId())
		node, _ := sites.Describe(id, n, v.records[id], !v.away[id])
		nodes = append(nodes, node)
	}
	for id, r := range v.records {
		r.SilentLeaders = slices.DeleteFunc(r.GetSilentLeaders(), func(s *skeinv1.SilentLeader) bool {
			leader, _ := identity.ParseID(s.GetNodeId())
			return !slices.Contains(sites.Witnesses(nodes, leader), id)
		})
	}
}

// here reports whether any node of a site is alive: for a site that is cut off, each host keeps trying the nodes it
// knows.
func here(v *view, site string) bool {
	return slices.ContainsFunc(slices.Collect(maps.Keys(v.records)), func(n identity.ID) bool {
		return v.records[n].GetSite() == site && !v.away[n]
	})
}
