package events

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// at is a node that says where it is, and folds all that this version does.
func at(site string) func(*skeinv1.AdmitNode) {
	return func(a *skeinv1.AdmitNode) { a.Node.Site, a.Node.SiteSaid, a.Node.MaxSchema = site, true, SchemaMax }
}

func allocateAt(node, pool string, total uint32, site string) *skeinv1.Command {
	c := allocate(node, pool, total)
	c.GetAllocateBlocks().Site, c.GetAllocateBlocks().SiteSaid = site, true
	return c
}

// bySite is a cluster whose sites speak through leaders, with its first node at a site.
func bySite(t testing.TB, overlay, site string) *world {
	w := newWorld(t)
	c := today(createCluster(overlay, "a"))
	n := c.GetCreateCluster().GetFirstNode()
	n.Site, n.SiteSaid = site, true
	c.GetCreateCluster().Settings = &skeinv1.Settings{Topology: "site"}
	w.must(c)
	w.must(createToken("1", 10000, false))
	return w
}

func rangeHistory(t testing.TB) *world {
	w := bySite(t, "10.4.0.0/24", "dc")
	w.must(admit("b", "1", at("home")))
	w.must(createPool(pool("p", 2, "10.64.0.0/24,fd02::/120")))
	w.must(allocateAt("a", "p", 2, "dc"))
	w.must(allocateAt("b", "p", 1, "home"))
	w.must(folds("b", sliceSchema-1))
	w.must(admit("c", "1", at("edge"))) // its range is not sliced
	w.must(folds("b", SchemaMax))
	return w
}

// rangesOf are the ranges, one a line.
func rangesOf(s *State) string {
	var out []string
	for _, r := range s.SiteRanges() {
		out = append(out, fmt.Sprintf("%s %s%s %s", r.Site, r.Pool, text(r.IPv4), text(r.IPv6)))
	}
	return strings.Join(out, "\n")
}

func nodeAddresses(s *State, names ...string) string {
	var out []string
	for _, n := range names {
		out = append(out, s.NodeByName(n).GetIpv4())
	}
	return strings.Join(out, " ")
}

// TestNodesGetAddressesOfTheirSite: from its range, of each half in turn, and from another range when that one is full.
func TestNodesGetAddressesOfTheirSite(t *testing.T) {
	w := bySite(t, "10.4.0.0/24", "dc")
	for _, v := range []struct{ name, site string }{{"b", "home"}, {"c", "dc"}, {"d", "home"}, {"e", ""}} {
		w.must(admit(v.name, "1", at(v.site)))
	}
	if have := nodeAddresses(w.s, "a", "b", "c", "d", "e"); have != "10.4.0.1 10.4.0.16 10.4.0.8 10.4.0.24 10.4.0.32" {
		t.Errorf("addresses %s", have)
	}
	for i := range 40 {
		w.must(admit(fmt.Sprintf("home%d", i), "1", at("home")))
		checkInvariants(t, w.s)
	}
	home := netip.MustParsePrefix("10.4.0.64/27")
	if a := netip.MustParseAddr(w.s.NodeByName("home39").GetIpv4()); !home.Contains(a) {
		t.Errorf("the site's range is full, and the next node has %s", a)
	}
	six := identity.OverlayPrefix(w.cluster()).Addr().As16()
	prefix := func(n byte) string {
		six[9] = n
		return netip.PrefixFrom(netip.AddrFrom16(six), 80).String()
	}
	want := "dc 10.4.0.0/28 " + prefix(1) + "\nhome 10.4.0.16/28 " + prefix(2) + "\n 10.4.0.32/28 " + prefix(3) +
		"\nhome 10.4.0.64/27 "
	if have := rangesOf(w.s); have != want {
		t.Errorf("ranges\n%s\nwant\n%s", have, want)
	}
	for _, n := range w.s.Nodes() {
		r4, _ := w.s.RangeAt(netip.MustParseAddr(n.GetIpv4()))
		r6, ok := w.s.RangeAt(netip.MustParseAddr(n.GetIpv6()))
		if !ok || r6.Site != r4.Site {
			t.Errorf("%s has %s of %q and %s of %q", n.GetName(), n.GetIpv4(), r4.Site, n.GetIpv6(), r6.Site)
		}
	}
	checkSame(t, "through bytes", w.s, throughBytes(t, w.s))
}

func (w *world) cluster() identity.ClusterID {
	c, err := identity.ParseClusterID(clusterID)
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// TestWhereSitesSayNothingAddressesAreAsEver: one after the other, whatever nodes say of their sites.
func TestWhereSitesSayNothingAddressesAreAsEver(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 2, "10.64.0.0/24")))
	w.must(changeSettings(&skeinv1.Settings{SiteTopology: map[string]string{"dc": "site"}}, "site_topology"))
	w.must(admit("d", "1", at("home")))
	w.must(admit("e", "1", at("edge")))
	w.must(today(admit("f", "1")))
	if have := nodeAddresses(w.s, "a", "b", "c", "d", "e", "f"); have != "10.4.0.1 10.4.0.2 10.4.0.3 10.4.0.4 10.4.0.5 "+
		"10.4.0.6" {
		t.Errorf("addresses %s", have)
	}
	for i, name := range []string{"d", "e", "f"} {
		if a := w.must(allocateAt(name, "p", 1, "home")); a.GetBlocks()[0].GetNumber() != uint64(i) {
			t.Errorf("%s gets %v", name, a.GetBlocks())
		}
	}
	w.must(admit("g", "1", at("dc"))) // named: it has ranges
	w.must(allocateAt("g", "p", 1, "dc"))
	w.must(today(admit("h", "1")))
	if have := nodeAddresses(w.s, "g", "h"); have != "10.4.1.0 10.4.2.0" || len(w.s.SiteRangesOf("p")) != 1 {
		t.Errorf("addresses %s, ranges\n%s", have, rangesOf(w.s))
	}
}

// TestMembersBeforeRangesKeepTheirAddresses: a range takes nothing that is somebody's.
func TestMembersBeforeRangesKeepTheirAddresses(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 2, "10.64.0.0/24")))
	w.must(allocate("a", "p", 1))
	w.must(changeSettings(&skeinv1.Settings{Topology: "site"}, "topology"))
	w.must(setNode("b", &skeinv1.NodeSettings{SiteSet: true, Site: "edge"}, "site"))
	w.must(admit("d", "1", at("dc")))
	w.must(allocateAt("b", "p", 1, "dc")) // the log knows better
	w.must(allocateAt("c", "p", 9, "dc"))
	if have := nodeAddresses(w.s, "a", "b", "c", "d"); have != "10.4.0.1 10.4.0.2 10.4.0.3 10.4.1.0" {
		t.Errorf("addresses %s", have)
	}
	var ranges []string
	for _, r := range w.s.SiteRangesOf("p") {
		ranges = append(ranges, r.Site+" "+r.IPv4.String())
	}
	if have := strings.Join(ranges, ", "); have != "edge 10.64.0.32/27, dc 10.64.0.64/27, dc 10.64.0.128/26" {
		t.Errorf("ranges of the pool: %s", have)
	}
	if have := numbersOf(w.s, "c"); have != "p/16 p/17 p/18 p/19 p/20 p/21 p/22 p/23 p/47" {
		t.Errorf("c has %s", have)
	}
	w.must(release("c", "p", 16, 17))
	if a := w.must(allocateAt("c", "p", 9, "dc")); given(a) != given(&skeinv1.Answer{Blocks: []*skeinv1.Block{
		w.s.Block("p", 46), w.s.Block("p", 44)}}) {
		t.Errorf("instead of those that rest c gets %s", given(a))
	}
	w.must(drainPool("p"))
	for _, n := range []string{"a", "b", "c"} {
		for _, b := range w.s.BlocksOf(id(n)) {
			w.must(release(n, "p", b.GetNumber()))
		}
	}
	w.must(removePool("p"))
	if len(w.s.SiteRangesOf("p")) != 0 || len(w.s.SiteRangesOf("")) != 1 {
		t.Errorf("after the pool is gone: %s", rangesOf(w.s))
	}
	checkSame(t, "through bytes", w.s, throughBytes(t, w.s))
}

// TestNoRangeIsNoRefusal: when ranges have used up the overlay and a pool, everybody still gets what is free.
func TestNoRangeIsNoRefusal(t *testing.T) {
	w := bySite(t, "10.4.0.0/27", "dc")
	for i := range 29 {
		w.must(admit(fmt.Sprintf("n%d", i), "1", at(fmt.Sprintf("site%d", i))))
		checkInvariants(t, w.s)
	}
	w.refused(admit("last", "1", at("dc")), ResourceExhausted, "the overlay 10.4.0.0/27 is full")
	w.must(createPool(pool("p", 2, "10.64.0.0/25")))
	for i := range 29 {
		w.must(allocateAt(fmt.Sprintf("n%d", i), "p", 1, fmt.Sprintf("site%d", i)))
	}
	w.must(allocate("n0", "p", 4))
	w.refused(allocateAt("n1", "p", 2, "site1"), ResourceExhausted, "pool p is exhausted")
	checkInvariants(t, w.s)
}

// TestRangesWaitForWhoDoesNotKnowThem: nobody asked for them, so no member falls behind for them.
func TestRangesWaitForWhoDoesNotKnowThem(t *testing.T) {
	w := newPoolsOf(t, SchemaMax)
	w.must(changeSettings(&skeinv1.Settings{Topology: "site"}, "topology"))
	w.must(folds("b", rangeSchema-1))
	w.must(admit("d", "1", at("dc")))
	w.must(folds("b", rangeSchema))
	old := admit("e", "1", at("dc"))
	old.GetAdmitNode().GetNode().MaxSchema = rangeSchema - 1
	w.must(old)
	if len(w.s.SiteRanges()) > 0 {
		t.Fatalf("ranges %s", rangesOf(w.s))
	}
	w.must(folds("e", rangeSchema))
	w.must(admit("f", "1", at("dc")))
	if have := nodeAddresses(w.s, "d", "e", "f"); have != "10.4.0.4 10.4.0.5 10.4.1.0" {
		t.Errorf("addresses %s", have)
	}
	// no new range is needed
	w.must(admit("g", "1", at("dc"), func(a *skeinv1.AdmitNode) { a.Node.MaxSchema = rangeSchema - 1 }))
	if have := nodeAddresses(w.s, "g"); have != "10.4.1.1" {
		t.Errorf("addresses %s", have)
	}
	w.refused(folds("a", rangeSchema-1), FailedPrecondition, "the cluster has ranges of sites, which need 7")
}

// TestSlicesWaitForWhoDoesNotKnowThem: as soon as one range is sliced all members bind to leaders by slices.
func TestSlicesWaitForWhoDoesNotKnowThem(t *testing.T) {
	w := newPoolsOf(t, SchemaMax)
	w.must(createPool(pool("p", 2, "10.64.0.0/24")))
	w.must(changeSettings(&skeinv1.Settings{Topology: "site"}, "topology"))
	w.must(folds("b", sliceSchema-1))
	w.must(admit("d", "1", at("dc")))
	w.must(allocateAt("d", "p", 1, "dc"))
	w.must(folds("b", sliceSchema))
	old := admit("e", "1", at("home"))
	old.GetAdmitNode().GetNode().MaxSchema = sliceSchema - 1
	w.must(old)
	for _, r := range w.s.SiteRanges() {
		if r.Sliced {
			t.Errorf("%v is sliced", r)
		}
	}
	if len(w.s.SiteRanges()) != 3 || w.s.Slices() != nil {
		t.Fatalf("ranges %s", rangesOf(w.s))
	}
	w.must(folds("e", sliceSchema))
	w.must(admit("f", "1", at("edge")))
	w.must(admit("g", "1", at("edge")))
	if have := nodeAddresses(w.s, "d", "e", "f", "g"); have != "10.4.1.0 10.4.2.0 10.4.3.0 10.4.3.128" {
		t.Errorf("addresses %s", have)
	}
	slice := w.s.Slices()
	for name, want := range map[string]int{"f": 0, "g": Slices / 2} {
		n := w.s.NodeByName(name)
		if got := slice(n, nodeID(t, n), "edge"); got != want {
			t.Errorf("%s is in slice %d, want %d", name, got, want)
		}
		if six := netip.MustParseAddr(n.GetIpv6()).As16(); int(six[10]>>(8-sliceBits)) != want {
			t.Errorf("%s has %s", name, n.GetIpv6())
		}
		if got, byID := slice(n, nodeID(t, n), "dc"), int(nodeID(t, n)[0]>>(8-sliceBits)); got != byID {
			t.Errorf("elsewhere %s is in slice %d, want %d", name, got, byID)
		}
	}
	w.refused(folds("a", sliceSchema-1), FailedPrecondition, "the cluster has ranges of sites in slices, which need 8")
	checkSame(t, "through bytes", w.s, throughBytes(t, w.s))
}

func nodeID(t testing.TB, n *skeinv1.Node) identity.ID {
	v, err := identity.ParseID(n.GetId())
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestSlicesAreFilledAlike: at any time each half of a range has as many members as the other, and so have halves of
// halves; their blocks lie in the same part of the pool's ranges, however many ranges that are.
func TestSlicesAreFilledAlike(t *testing.T) {
	w := bySite(t, "10.4.0.0/16", "dc")
	w.must(createPool(pool("p", 2, "10.64.0.0/20,fd02::/116")))
	slice := func(n *skeinv1.Node) int { return w.s.Slices()(n, nodeID(t, n), "home") }
	var parts [8]int
	for i := range 100 {
		a := w.must(admit(fmt.Sprintf("home%d", i), "1", at("home")))
		n := w.s.NodeByName(a.GetNode().GetName())
		parts[slice(n)*len(parts)/Slices]++
		if slices.Max(parts[:])-slices.Min(parts[:]) > 1 {
			t.Fatalf("after %d nodes the eighths have %v", i+1, parts)
		}
		for _, b := range w.must(allocateAt(n.GetName(), "p", 2, "home")).GetBlocks() {
			r, ok := rangeOfBlock(w.s, b)
			if !ok || r.slice(netip.MustParsePrefix(b.GetIpv4()).Addr(), identity.ID{})*2/Slices != slice(n)*2/Slices {
				t.Fatalf("home%d in slice %d has the block %s of %v", i, slice(n), b.GetIpv4(), r)
			}
		}
	}
	if n := len(w.s.SiteRangesOf("p")); n < 3 {
		t.Errorf("%d ranges of the pool", n)
	}
}

func rangeOfBlock(s *State, b *skeinv1.Block) (SiteRange, bool) {
	for _, r := range s.SiteRangesOf(b.GetPool()) {
		if r.IPv4.Contains(netip.MustParsePrefix(b.GetIpv4()).Addr()) {
			return r, true
		}
	}
	return SiteRange{}, false
}

// TestContradictionsAboutRanges: facts that Decide never makes change nothing.
func TestContradictionsAboutRanges(t *testing.T) {
	w := rangeHistory(t)
	for _, r := range []*skeinv1.SiteRange{
		{Site: "x", Ipv4: "10.4.0.16/29"}, {Site: "x", Ipv4: "10.4.0.0/23"}, {Site: "x", Ipv4: "10.5.0.0/28"},
		{Site: "x", Ipv4: "10.4.0.129/28"}, {Site: "x", Ipv4: "10.4.0.128/28", Ipv6: "fd02::/80"}, {Site: "x"},
		{Site: strings.Repeat("x", MaxSite+1), Ipv4: "10.4.0.128/28"}, {Site: "x", Ipv4: "::/80"},
		{Site: "x", Ipv6: "10.4.0.128/28"},
		{Site: "x", Pool: "q", Ipv4: "10.64.0.128/28"}, {Site: "x", Pool: "p", Ipv4: "10.64.0.128/28"},
		{Site: "x", Pool: "p", Ipv4: "10.64.0.128/28", Ipv6: "fd02::/124"},
		{Site: "x", Pool: "p", Ipv4: "10.64.0.0/28", Ipv6: "fd02::/124"},
		{Site: "x", Pool: "p", Ipv4: "10.64.0.128/31", Ipv6: "fd02::80/127"},
	} {
		for _, wrong := range []uint64{0, 1} {
			v := proto.CloneOf(r)
			v.Index = w.s.Index() + 1 + wrong
			e := &skeinv1.Event{Body: &skeinv1.Event_SiteRangeAllotted{SiteRangeAllotted: &skeinv1.SiteRangeAllotted{Range: v}}}
			s := w.s.Clone()
			e.Index, e.Time, e.Schema = s.Index()+1, s.Time(), rangeSchema
			if err := s.Fold(e); err != nil {
				t.Fatal(err)
			}
			if rangesOf(s) != rangesOf(w.s) {
				t.Errorf("%v: %s", v, rangesOf(s))
			}
		}
	}
	for _, sliced := range []bool{false, true} { // the event and what it says contradict each other
		s := w.s.Clone()
		v := &skeinv1.SiteRange{Site: "x", Ipv4: "10.4.0.128/28", Index: s.Index() + 1, Sliced: sliced}
		e := &skeinv1.Event{Body: &skeinv1.Event_SlicedRangeAllotted{
			SlicedRangeAllotted: &skeinv1.SlicedRangeAllotted{Range: v}}}
		if sliced {
			e.Body = &skeinv1.Event_SiteRangeAllotted{SiteRangeAllotted: &skeinv1.SiteRangeAllotted{Range: v}}
		}
		e.Index, e.Time, e.Schema = s.Index()+1, s.Time(), sliceSchema
		if err := s.Fold(e); err != nil || rangesOf(s) != rangesOf(w.s) {
			t.Errorf("%v: %v, %s", e, err, rangesOf(s))
		}
	}
}

// checkRanges: no address and no block lies in two ranges, all lie where they may, and what is derived is so.
func checkRanges(t fatal, s *State) {
	t.Helper()
	var all []SiteRange
	for v := range s.rangeTable.all() {
		r := SiteRange{Site: v.GetSite(), Pool: v.GetPool(), Sliced: v.GetSliced()}
		r.IPv4, _ = readRange(v.GetIpv4(), false)
		r.IPv6, _ = readRange(v.GetIpv6(), true)
		within := s.overlays()
		if r.Pool != "" {
			within = s.poolState(r.Pool).layout.prefixes()
		}
		for _, p := range []netip.Prefix{r.IPv4, r.IPv6} {
			if p.IsValid() && !slices.ContainsFunc(within, func(o netip.Prefix) bool { return inside(o, p) }) {
				t.Fatalf("range %v lies in none of %v", r, within)
			}
		}
		for _, o := range all {
			if o.IPv4.Overlaps(r.IPv4) || o.IPv6.Overlaps(r.IPv6) {
				t.Fatalf("ranges %v and %v overlap", o, r)
			}
		}
		all = append(all, r)
	}
	if !slices.Equal(all, s.SiteRanges()) {
		t.Fatalf("ranges %v, kept as %v", all, s.SiteRanges())
	}
	for _, p := range s.Pools() {
		r := s.poolState(p.GetName())
		var blocks []blockRange
		for _, v := range all {
			if v.Pool == p.GetName() {
				b, ok := r.layout.rangeOf(v)
				if !ok {
					t.Fatalf("range %v is none of its pool", v)
				}
				blocks = append(blocks, b)
			}
		}
		slices.SortFunc(blocks, func(a, b blockRange) int { return int(a.first) - int(b.first) })
		if !slices.Equal(blocks, r.ranges) {
			t.Fatalf("pool %s has the ranges %v, kept as %v", p.GetName(), blocks, r.ranges)
		}
		for n := uint64(0); n <= min(r.outer, r.layout.blocks-1); n++ {
			if free := !r.given(n) && r.rangeAt(n) == nil; free != (n == r.outer) {
				t.Fatalf("pool %s: block %d is free and outside of ranges: %t; the first such is kept as %d", p.GetName(),
					n, free, r.outer)
			}
		}
	}
}

// TestAnyRanges: whoever joins where, leaves, takes and gives back blocks, in a mesh that changes between topologies:
// nobody gets what is another's, nobody is refused while there is anything, and who is at a site that has room gets
// what is its.
func TestAnyRanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{t: nil, s: NewState(), now: start}
		must := func(c *skeinv1.Command) *skeinv1.Answer {
			w.n++
			c.Time, c.Entropy = w.now.UnixNano(), entropy(w.n)
			evs, a, err := Decide(w.s, c)
			if err != nil {
				t.Fatalf("%v: %v", c, err)
			}
			for _, e := range evs {
				if err := w.s.Fold(e); err != nil {
					t.Fatal(err)
				}
			}
			return a
		}
		must(today(createCluster("10.4.0.0/26", "a")))
		must(createToken("1", 1000, false))
		must(createPool(pool("p", 1, "10.64.0.0/26,fd02::/122", "10.65.0.0/28,fd03::/124")))
		must(changeSettings(&skeinv1.Settings{Topology: "site"}, "topology"))
		site := rapid.SampledFrom([]string{"", "dc", "home", "edge"})
		live, joined := []string{"a"}, 1
		for range rapid.IntRange(1, 60).Draw(t, "length") {
			at1 := site.Draw(t, "site")
			node := rapid.SampledFrom(live).Draw(t, "node")
			had := fmt.Sprint(w.s.Nodes())
			switch rapid.IntRange(0, 6).Draw(t, "what") {
			case 0, 1, 2:
				if joined >= 60 {
					continue
				}
				name := fmt.Sprintf("n%d", joined)
				joined++
				a := must(admit(name, "1", at(at1), func(a *skeinv1.AdmitNode) {
					a.Node.SiteSaid = rapid.Bool().Draw(t, "says it")
				}))
				live = append(live, name)
				r, in := w.s.RangeAt(netip.MustParseAddr(a.GetNode().GetIpv4()))
				if in && r.Site != at1 && len(w.s.SiteRangesOf("")) < 4 {
					t.Fatalf("%s at %q gets %s of %q", name, at1, a.GetNode().GetIpv4(), r.Site)
				}
			case 3:
				must(changeSettings(&skeinv1.Settings{Topology: rapid.SampledFrom([]string{"full", "site"}).Draw(t, "topology")},
					"topology"))
			case 4:
				if node != "a" {
					must(revoke(id(node)))
					live = slices.DeleteFunc(live, func(n string) bool { return n == node })
				}
			case 5:
				if have := len(w.s.BlocksOf(id(node))); len(w.s.Blocks()) < 40 && have < 16 {
					more := rapid.IntRange(1, min(4, 40-len(w.s.Blocks()), 16-have)).Draw(t, "more")
					a := must(allocateAt(node, "p", uint32(have+more), at1))
					if len(a.GetBlocks()) != more {
						t.Fatalf("%s wants %d blocks and gets %v", node, more, a.GetBlocks())
					}
				}
			case 6:
				if have := w.s.BlocksOf(id(node)); len(have) > 0 {
					must(release(node, "p", rapid.SampledFrom(have).Draw(t, "block").GetNumber()))
				}
			}
			for _, n := range w.s.Nodes() {
				if strings.Contains(had, n.GetId()) && !strings.Contains(had, `ipv4:"`+n.GetIpv4()+`"`) {
					t.Fatalf("%s has another address: %s", n.GetName(), n.GetIpv4())
				}
			}
			checkInvariants(t, w.s)
		}
		checkSame(t, "through bytes", w.s, throughBytes(t, w.s))
	})
}
