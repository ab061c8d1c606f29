package gossip

import (
	"bytes"
	"errors"
	"maps"
	"net"
	"slices"
	"testing"

	"github.com/hashicorp/memberlist"
	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

const (
	forMesh  = skeinv1.RecordScope_RECORD_SCOPE_MESH
	forSite  = skeinv1.RecordScope_RECORD_SCOPE_SITE
	forPlace = skeinv1.RecordScope_RECORD_SCOPE_PLACE
	forBoth  = skeinv1.RecordScope_RECORD_SCOPE_BOTH
)

// scoped is a record of node i.
func scoped(t testing.TB, i int, scope skeinv1.RecordScope, site string, epoch, seq uint64,
	change func(*skeinv1.Record)) *skeinv1.SignedRecord {
	t.Helper()
	r := &skeinv1.Record{NodeId: simKey(i).ID().String(), Epoch: epoch, Seq: seq, Site: site, Scope: scope}
	if change != nil {
		change(r)
	}
	s, err := Sign(simKey(i), r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// atSite holds records at a site but sends nothing; nodes 0 to 3 are of site a by the log, 4 to 7 of site b.
func atSite(wide bool) *Gossip {
	var all []*identity.Key
	homes := map[identity.ID]string{}
	for i := range 8 {
		all = append(all, simKey(i))
		homes[simKey(i).ID()] = []string{"a", "b"}[i/4]
	}
	g := bareGossip(newRoster(all...))
	g.place.Store(&Place{Sited: true, Site: "a", Wide: wide, Home: func(id identity.ID) (string, bool) {
		s, ok := homes[id]
		return s, ok
	}})
	g.near.Store(newPool(g, true, "a"))
	if !wide {
		g.wide.Store(nil)
	}
	return g
}

func away(ids ...int) (list [][]byte) {
	for _, i := range ids {
		id := simKey(i).ID()
		list = append(list, id[:])
	}
	slices.SortFunc(list, bytes.Compare)
	return list
}

// A PLACE says nothing but where its node is, and is small. A list of away nodes can be searched and is bounded.
func TestScopesHaveShape(t *testing.T) {
	var many [][]byte
	for i := range maxAway + 1 {
		many = append(many, []byte{0, 0, 0, 0, 0, 0, byte(i >> 8), byte(i)})
	}
	two := away(1, 2)
	for name, c := range map[string]struct {
		scope  skeinv1.RecordScope
		change func(*skeinv1.Record)
		want   error
	}{
		"a place":             {forPlace, func(r *skeinv1.Record) { r.Time = 5 }, nil},
		"a place with more":   {forPlace, func(r *skeinv1.Record) { r.Version = "1" }, ErrMalformed},
		"a place with a list": {forPlace, func(r *skeinv1.Record) { r.Away = two }, ErrMalformed},
		"a place, padded": {forPlace, func(r *skeinv1.Record) {
			r.ProtoReflect().SetUnknown(append([]byte{0xc2, 0x3e, 0xe0, 0x04}, make([]byte, 608)...))
		}, ErrTooLarge},
		"two away":              {forBoth, func(r *skeinv1.Record) { r.Away = two }, nil},
		"as many as may be":     {forBoth, func(r *skeinv1.Record) { r.Away = many[:maxAway] }, nil},
		"too many":              {forBoth, func(r *skeinv1.Record) { r.Away = many }, ErrMalformed},
		"not sorted":            {forBoth, func(r *skeinv1.Record) { r.Away = [][]byte{two[1], two[0]} }, ErrMalformed},
		"twice":                 {forBoth, func(r *skeinv1.Record) { r.Away = [][]byte{two[0], two[0]} }, ErrMalformed},
		"no ID":                 {forBoth, func(r *skeinv1.Record) { r.Away = [][]byte{{1}} }, ErrMalformed},
		"a scope yet to invent": {9, nil, nil},
	} {
		if _, err := Verify(scoped(t, 0, c.scope, "a", 1, 1, c.change), newRoster(simKey(0))); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// A record for one site stays there, whichever node brings it, and is not accepted from a node that says that it is of
// another site.
func TestRecordsOfAnotherSiteAreNotKept(t *testing.T) {
	g := atSite(true)
	n, errs := g.Merge([]*skeinv1.SignedRecord{
		scoped(t, 0, forSite, "a", 1, 1, nil), scoped(t, 4, forSite, "b", 1, 1, nil), // of another site
		scoped(t, 1, forSite, "a", 1, 1, nil), scoped(t, 1, forPlace, "b", 1, 2, nil), // has moved
		scoped(t, 1, forSite, "a", 1, 1, nil),
		scoped(t, 5, forPlace, "a", 1, 1, nil), scoped(t, 5, forSite, "a", 1, 2, nil), // has come
	})
	if n != 5 || len(errs) != 0 || g.Stats().Elsewhere != 2 {
		t.Errorf("%d taken, %v, %d of another site", n, errs, g.Stats().Elsewhere)
	}
	g.dropStrays()
	shown := g.Records()
	if len(shown) != 2 || shown[simKey(0).ID()].Record == nil || shown[simKey(5).ID()].Record == nil ||
		g.Held().Mesh != 2 {
		t.Errorf("%d are shown, %+v held", len(shown), g.Held())
	}
	for i, want := range map[int]string{0: "a", 1: "b", 2: "a", 4: "b", 5: "a"} {
		if site, _ := g.SiteOf(simKey(i).ID()); site != want {
			t.Errorf("node %d is at %q, want %q", i, site, want)
		}
	}
	placed := maps.Clone(g.Placed())
	delete(placed, simKey(5).ID()) // its record is here
	if placed[simKey(1).ID()] != "b" || len(placed) != 1 {
		t.Errorf("those that are not where the log has them are at %v", placed)
	}
}

// A node's record from before the topology was site has its configured site; the log overrides that.
func TestTheLogOutdoesAnOlderRecord(t *testing.T) {
	g := atSite(true)
	g.Merge([]*skeinv1.SignedRecord{
		scoped(t, 1, forMesh, "", 1, 1, nil), scoped(t, 2, forBoth, "b", 1, 1, nil), scoped(t, 3, forMesh, "b", 1, 1, nil),
		scoped(t, 3, forPlace, "b", 1, 2, nil),
	})
	for i, want := range map[int]string{1: "a", 2: "b", 3: "b"} {
		if site, ok := g.SiteOf(simKey(i).ID()); site != want || !ok {
			t.Errorf("node %d is at %q, want %q", i, site, want)
		}
	}
}

// In whatever order versions come, two nodes of a site that exchange both tables hold the same records, and show the
// newest.
func TestScopesMergeInAnyOrder(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var all []*skeinv1.SignedRecord
		newest := map[int]uint64{}
		for seq := range uint64(rapid.IntRange(1, 10).Draw(rt, "versions")) {
			i := rapid.IntRange(0, 1).Draw(rt, "node")
			scope := rapid.SampledFrom([]skeinv1.RecordScope{forMesh, forSite, forPlace, forBoth}).Draw(rt, "scope")
			all = append(all, scoped(t, i, scope, "a", 1, seq+1, nil))
			newest[i] = seq + 1
		}
		for i := range newest { // a place is followed by the record itself
			all = append(all, scoped(t, i, rapid.SampledFrom([]skeinv1.RecordScope{forSite, forBoth}).Draw(rt, "last"),
				"a", 1, 20, nil))
		}
		a, b := atSite(true), atSite(false)
		a.Merge(rapid.Permutation(all).Draw(rt, "one"))
		b.Merge(rapid.Permutation(all).Draw(rt, "other"))
		for _, kind := range []tableKind{meshTable, siteTable} {
			x, y := a.exchange(), b.exchange()
			y.near = func(identity.ID) bool { return true }
			near, far := net.Pipe()
			done := make(chan error, 1)
			go func() { done <- y.answer(far, a.cfg.Self) }()
			if _, err := x.ask(near, kind, nil); err != nil {
				rt.Fatal(err)
			}
			near.Close()
			<-done
		}
		if a.Hash() != b.Hash() || a.Held().SiteHash != b.Held().SiteHash {
			rt.Fatalf("%+v and %+v are held", a.Held(), b.Held())
		}
		for i := range newest {
			if seq := a.Records()[simKey(i).ID()].Record.GetSeq(); seq != 20 {
				rt.Fatalf("version %d of node %d is shown", seq, i)
			}
		}
	})
}

// A site's records are not sent to a node that is of another site by what this node knows.
func TestOtherSitesGetNoDigests(t *testing.T) {
	g := atSite(true)
	for i, ok := range map[int]bool{1: true, 4: false} {
		near, far := net.Pipe()
		done := make(chan error, 1)
		go func() { done <- g.exchange().answer(far, simKey(i).ID()); far.Close() }()
		_, err := g.exchange().ask(near, siteTable, nil)
		near.Close()
		if got := <-done; (err == nil) != ok || (got == nil) != ok {
			t.Errorf("node %d: %v, %v", i, err, got)
		}
	}
}

// Which nodes each pool admits, and whose packets it accepts.
func TestPoolsTakeTheirOwn(t *testing.T) {
	g := atSite(true)
	g.Merge([]*skeinv1.SignedRecord{
		scoped(t, 0, forBoth, "a", 1, 1, nil), scoped(t, 4, forBoth, "b", 1, 1, nil), scoped(t, 2, forPlace, "b", 1, 1, nil),
		scoped(t, 6, forMesh, "b", 1, 1, nil),
	})
	near, wide := g.near.Load(), g.wide.Load()
	for i, want := range map[int][2]bool{ // in the site's pool, in the mesh pool
		0: {true, true}, 1: {true, false}, 2: {false, false}, 3: {true, false}, 4: {false, true}, 5: {false, false},
		6: {false, true}, 9: {false, false},
	} {
		id := simKey(i).ID()
		at := syntheticAddr(id)
		n := &memberlist.Node{Name: id.String(), Addr: at.Addr().AsSlice(), Port: at.Port(), Meta: encodeMeta(mark{ID: id},
			false), State: memberlist.StateAlive}
		if got := [2]bool{(*delegate)(near).NotifyAlive(n) == nil, (*delegate)(wide).NotifyAlive(n) == nil}; got != want {
			t.Errorf("node %d: %v, want %v", i, got, want)
		}
		if got := near.speaksTo(id); got != want[0] {
			t.Errorf("packets of node %d: %t", i, got)
		}
	}
	packet := func(label string) []byte {
		return append(append([]byte{labelled, byte(len(label))}, label...), make([]byte, 60)...)
	}
	for name, c := range map[string]struct {
		b    []byte
		want *pool
	}{
		"the mesh's": {make([]byte, 60), wide}, "the site's": {packet(siteLabel("a")), near},
		"another site's": {packet(siteLabel("b")), nil},
		"no name":        {[]byte{labelled}, nil}, "a short name": {packet("x"), nil}, "half a " +
			"name": {packet(siteLabel("a"))[:5],
			nil}, "nothing": {nil, wide},
	} {
		if got, _ := g.poolOf(c.b); got != c.want {
			t.Errorf("%s is of another pool", name)
		}
	}
}

// Leaders of a site are asked for its records first, and among them those that the log has chosen.
func TestWhomToAsk(t *testing.T) {
	g := atSite(true)
	place := *g.place.Load()
	place.Chosen = func(id identity.ID, site string) bool { return site == "b" && id == simKey(6).ID() }
	g.place.Store(&place)
	leads := func(r *skeinv1.Record) { r.Leads = 1 }
	g.Merge([]*skeinv1.SignedRecord{scoped(t, 4, forBoth, "b", 1, 1, leads), scoped(t, 5, forBoth, "b", 1, 1, nil),
		scoped(t, 6, forBoth, "b", 1, 1, leads), scoped(t, 0, forBoth, "a", 1, 1, leads)})
	for _, i := range []int{4, 5, 6} {
		g.wide.Load().alive.set(simKey(i).ID(), 1)
	}
	for range 20 { // nodes of equal weight come in any order
		if got := g.whomToAsk("b"); !slices.Equal(got, []identity.ID{simKey(6).ID(), simKey(4).ID(), simKey(5).ID()}) {
			t.Fatalf("%v", got)
		}
	}
}

// The leaders of a site report which of its nodes are away; without leaders, all that speak for the site do. A node is
// alive if one of them does not name it. Nodes that are away themselves, or of another site, do not count. While a
// leader that the log has chosen for the site is alive, other leaders do not count. A local node knows all this from
// the nodes that speak for its own site.
func TestAliveByHearsay(t *testing.T) {
	leads := func(ids ...int) func(*skeinv1.Record) {
		return func(r *skeinv1.Record) { r.Leads, r.Away = 1, away(ids...) }
	}
	says := func(ids ...int) func(*skeinv1.Record) { return func(r *skeinv1.Record) { r.Away = away(ids...) } }
	for name, c := range map[string]struct {
		records []*skeinv1.SignedRecord
		alive   []int // by memberlist
		chosen  []int // for site b, by the log
		node    int
		wide    bool // whether a wide node counts it as alive
		local   bool // and whether a local one does
	}{
		"one says only itself that it leads": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads()),
			scoped(t, 4, forBoth, "b", 1, 1, leads(5)), scoped(t, 6, forBoth, "b", 1, 1, leads())},
			[]int{0, 4, 6}, []int{4}, 5, false, false},
		"the log's choice is away": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads(4)),
			scoped(t, 4, forBoth, "b", 1, 1, leads(5)), scoped(t, 6, forBoth, "b", 1, 1, leads())},
			[]int{0, 6}, []int{4}, 5, true, true},
		"the log's choice does not lead yet": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads()),
			scoped(t, 4, forBoth, "b", 1, 1, says()), scoped(t, 6, forBoth, "b", 1, 1, leads(5))},
			[]int{0, 4, 6}, []int{4}, 5, false, false},
		"the log's choice for another site": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads()),
			scoped(t, 4, forBoth, "c", 1, 1, leads()), scoped(t, 6, forBoth, "b", 1, 1, leads(5))},
			[]int{0, 4, 6}, []int{4}, 5, false, false},
		"nobody speaks": {nil, []int{0, 4}, nil, 5, false, false},
		"a leader": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads()),
			scoped(t, 4, forBoth, "b", 1, 1, leads())}, []int{0, 4}, nil, 5, true, true},
		"a leader says away": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads()),
			scoped(t, 4, forBoth, "b", 1, 1, leads(5))}, []int{0, 4}, nil, 5, false, false},
		"one of two leaders": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads()),
			scoped(t, 4, forBoth, "b", 1, 1, leads(5)), scoped(t, 6, forBoth, "b", 1, 1, leads())}, []int{0, 4, 6},
			nil, 5, true, true},
		"who does not lead says nothing": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads()),
			scoped(t, 4, forBoth, "b", 1, 1, leads(5)), scoped(t, 6, forBoth, "b", 1, 1, says())}, []int{0, 4, 6}, nil,
			5, false, false},
		"while nobody leads": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, says()),
			scoped(t, 4, forBoth, "b", 1, 1, says())}, []int{0, 4}, nil, 5, true, true},
		"the leader is away": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads(4)),
			scoped(t, 4, forBoth, "b", 1, 1, leads())}, []int{0}, nil, 5, false, false},
		"another site's word": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads(5)),
			scoped(t, 4, forBoth, "b", 1, 1, leads())}, []int{0, 4}, nil, 5, true, true},
		"its own word": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads(4)),
			scoped(t, 4, forBoth, "b", 1, 1, leads())}, []int{0}, nil, 4, false, false},
		"of the own site nobody's": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads())}, []int{0}, nil,
			1, false, false},
		"no member": {[]*skeinv1.SignedRecord{scoped(t, 0, forBoth, "a", 1, 1, leads()),
			scoped(t, 4, forBoth, "b", 1, 1, leads())}, []int{0, 4}, nil, 9, false, false},
	} {
		for _, wide := range []bool{true, false} {
			g := atSite(wide)
			place := *g.place.Load()
			place.Chosen = func(id identity.ID, site string) bool {
				return site == "b" && slices.ContainsFunc(c.chosen, func(i int) bool { return simKey(i).ID() == id })
			}
			g.place.Store(&place)
			g.Merge(c.records)
			for _, i := range c.alive {
				if i < 4 {
					g.near.Load().alive.set(simKey(i).ID(), 1)
				}
				if p := g.wide.Load(); p != nil {
					p.alive.set(simKey(i).ID(), 1)
				}
			}
			want := c.local
			if wide {
				want = c.wide
			}
			if got := g.Alive(simKey(c.node).ID()); got != want {
				t.Errorf("%s, as a wide node (%t) sees it: alive %t", name, wide, got)
			}
		}
	}
}
