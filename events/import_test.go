package events

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func coil() ([]*skeinv1.Pool, []*skeinv1.ImportBlock) {
	return []*skeinv1.Pool{pool("default", 5, "10.64.0.0/24"), pool("global", 0, "203.0.113.0/29")},
		[]*skeinv1.ImportBlock{
			importBlock("default", "10.64.0.64/27", "a", ""),
			importBlock("default", "10.64.0.0/27", "later", ""),
			importBlock("default", "10.64.0.160/27", "", "routers"),
			importBlock("global", "203.0.113.3/32", "b", ""),
		}
}

// TestImport: a dry run does nothing, the real one does what the dry run says, a second one nothing more, and a
// node that comes later gets its block then.
func TestImport(t *testing.T) {
	w := newPools(t)
	pools, blocks := coil()
	plan := []string{
		"6 changes, 0 are there already",
		"make pool default: 10.64.0.0/24, blocks of 2^5 addresses",
		"make pool global: 203.0.113.0/29, blocks of 2^0 addresses",
		"block 10.64.0.64/27 of pool default: give it to node a",
		"block 10.64.0.0/27 of pool default: reserve it for node later (imported)",
		"block 10.64.0.160/27 of pool default: reserve it routers",
		"block 203.0.113.3/32 of pool global: give it to node b",
	}
	before := w.s.Hash()
	evs, a, err := w.propose(withID("dry", imports(true, pools, blocks...)))
	if err != nil || len(evs) > 0 || w.s.Hash() != before || !slices.Equal(a.GetPlan(), plan) ||
		a.GetIndex() != w.s.Index() {
		t.Fatalf("a dry run gives %v, %v, plan %q", briefs(evs), err, a.GetPlan())
	}
	evs, a, err = w.propose(withID("real", imports(false, pools, blocks...)))
	if want := "PoolCreated default; PoolCreated global; BlockAllocated 10.64.0.64/27 " + id("a") +
		"; BlockReserved 10.64.0.0/27 for node later (imported); " +
		"BlockReserved 10.64.0.160/27 routers; BlockAllocated 203.0.113.3/32 " + id("b") +
		"; CommandAnswered real"; err != nil || briefs(evs) != want || !slices.Equal(a.GetPlan(), plan) {
		t.Fatalf("gives %s, %v, plan %q", briefs(evs), err, a.GetPlan())
	}
	checkInvariants(t, w.s)
	evs, a, err = w.propose(imports(false, pools, blocks...))
	if err != nil || len(evs) > 0 || !slices.Equal(a.GetPlan(), []string{"0 changes, 6 are there already"}) {
		t.Fatalf("a second run gives %s, %v, plan %q", briefs(evs), err, a.GetPlan())
	}

	// What was imported is skipped where blocks come that never were given.
	w.must(allocate("c", "default", 4))
	if have := numbersOf(w.s, "c"); have != "default/1 default/3 default/4 default/6" {
		t.Fatalf("c has %s", have)
	}
	w.must(today(admit("later", "1")))
	w.does(imports(false, pools, blocks...), "BlockAllocated 10.64.0.0/27 "+id("later"))
	w.does(imports(false, pools, blocks...), "")

	// A pool that was extended here stays; one that has grown there grows.
	w.must(extendPool("default", "10.65.0.0/24"))
	w.does(imports(false, pools, blocks...), "")
	pools[1].Subnets = append(pools[1].Subnets, subnetsOf("203.0.113.8/29")...)
	w.does(imports(false, pools), "PoolChanged global extended")
}

// TestImportConflicts: all are named, and nothing is applied.
func TestImportConflicts(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("default", 4, "10.64.0.0/24")))
	w.must(createPool(pool("p", 5, "10.66.0.0/24", "10.67.0.0/24")))
	w.must(createPool(pool("r", 5, "10.72.0.0/24", "10.73.0.0/24")))
	w.must(createPool(pool("elsewhere", 5, "10.70.0.0/24")))
	w.must(allocate("a", "p", 1))
	w.must(reserve("p", "10.66.0.32", "mine"))
	before := w.s.Hash()
	_, _, err := w.propose(imports(false,
		[]*skeinv1.Pool{pool("default", 5, "10.64.0.0/24"), pool("new", 5, "10.70.0.0/16"),
			pool("r", 5, "10.72.0.0/24", "10.68.0.0/24"), pool("Bad", 5, "10.90.0.0/24"), pool("good", 5, "10.80.0.0/24")},
		importBlock("new", "10.70.0.0/27", "b", ""), // not named again: there is no such pool, and its conflict says why
		importBlock("p", "10.66.0.0/27", "b", ""),
		importBlock("p", "10.66.0.0/27", "", "reserved there"),
		importBlock("p", "10.66.0.32/27", "a", ""),
		importBlock("p", "10.66.0.64/28", "a", ""),
		importBlock("no", "10.66.0.64/27", "a", ""),
		importBlock("p", "", "a", ""),
		importBlock("good", "10.80.0.0/27", "a", ""),
		importBlock("good", "10.80.0.0/27", "b", ""),
		importBlock("good", "10.80.0.32/27", "bad name", ""),
		&skeinv1.ImportBlock{Pool: "good", Ipv4: "fd00::/123"},
	))
	if CodeOf(err) != FailedPrecondition || w.s.Hash() != before {
		t.Fatalf("answered %v", err)
	}
	lines := strings.Split(err.Error(), "\n")
	for i, want := range []string{
		"nothing was imported, because of 13 conflicts:",
		"pool default: it has blocks of 2^4 addresses here and of 2^5 there",
		"pool new: subnet 10.70.0.0/16 overlaps 10.70.0.0/24 of pool elsewhere",
		"pool r: its subnet 2 is 10.73.0.0/24 here and 10.68.0.0/24 there",
		`pool name "Bad"`,
		"block 10.66.0.0/27 of pool p: it belongs to node a here, and the import would give it to node b",
		"block 10.66.0.0/27 of pool p: it belongs to node a here, and the import would reserve it reserved there",
		"block 10.66.0.32/27 of pool p: it belongs to nobody (reserved: mine) here, and the import would give it to " +
			"node a",
		"10.66.0.64/28 is not a block of pool p, whose blocks have 2^5 addresses of 10.66.0.0/24 10.67.0.0/24",
		`block 10.66.0.64/27: pool "no" does not exist`,
		"a block of pool p has neither an IPv4 nor an IPv6 prefix",
		"block 10.80.0.0/27 of pool good: it belongs to node a here, and the import would give it to node b",
		`node "bad name"`,
		`block "fd00::/123" of pool good is not a prefix`,
		"repair them in the file or here, then import it again",
	} {
		if i >= len(lines) || !strings.Contains(lines[i], want) {
			t.Errorf("line %d of %q does not say %q", i, lines, want)
		}
	}
	var many []*skeinv1.ImportBlock
	for i := range 200 {
		many = append(many, importBlock("no", fmt.Sprintf("10.66.%d.0/27", i), "a", ""))
	}
	w.refused(imports(true, nil, many...), FailedPrecondition, "because of 200 conflicts", "10.66.49.0/27", "- 150 more")
	if _, _, err := w.propose(imports(true, nil, many...)); len(err.Error()) > 16<<10 {
		t.Fatalf("the refusal has %d bytes", len(err.Error()))
	}
	w.refused(imports(false, make([]*skeinv1.Pool, MaxImportPools+1)), InvalidArgument, "1025 pools")
	w.refused(imports(false, nil, make([]*skeinv1.ImportBlock, MaxImportBlocks+1)...), InvalidArgument,
		"16385 blocks", "split it")
	dual := pool("dual", 2, "10.81.0.0/28,fd02::/124")
	w.refused(imports(false, []*skeinv1.Pool{dual}, &skeinv1.ImportBlock{Pool: "dual", Ipv4: "10.81.0.0/30",
		Ipv6: "fd02::4/126"}), FailedPrecondition, "10.81.0.0/30 and fd02::4/126 are not one block of pool dual")
	w.does(imports(false, []*skeinv1.Pool{dual}, &skeinv1.ImportBlock{Pool: "dual", Ipv4: "10.81.0.4/30",
		Ipv6: "fd02::4/126"}), "PoolCreated dual; BlockReserved 10.81.0.4/30 imported")
}

// TestKeptPlanIsBounded: a real run's plan stays in the state with the answer, and so is short.
func TestKeptPlanIsBounded(t *testing.T) {
	w := newPools(t)
	var blocks []*skeinv1.ImportBlock
	for i := range 256 {
		blocks = append(blocks, importBlock("p", fmt.Sprintf("10.64.0.%d/32", i), "a", ""))
	}
	pools := []*skeinv1.Pool{pool("p", 0, "10.64.0.0/24")}
	if n := len(w.must(imports(true, pools, blocks...)).GetPlan()); n != 258 {
		t.Fatalf("a dry run has %d lines", n)
	}
	plan := w.must(imports(false, pools, blocks...)).GetPlan()
	if len(plan) != maxPlan+2 || plan[0] != "257 changes, 0 are there already" || plan[101] != "and 157 more" {
		t.Fatalf("the plan is %q", plan)
	}
}
