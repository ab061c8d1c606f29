package events

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// TestPoolContradictions: facts about pools that cannot be change nothing but the index.
func TestPoolContradictions(t *testing.T) {
	w := newPools(t)
	p := pool("p", 4, "10.64.0.0/26")
	p.Quotas, p.Namespaces = map[string]uint32{"web": 5}, []string{"web"}
	w.must(createPool(p))
	w.must(createPool(pool("q", 4, "10.65.0.0/26")))
	w.must(allocate("a", "p", 1))
	w.must(keep("p", "10.64.0.17", "web", "x"))
	w.must(claim("a", "p", "10.64.0.17", "web", "x"))
	w.must(keep("p", "10.64.0.18", "web", "y"))
	w.must(reserve("p", "10.64.0.32", "mine"))
	w.must(grant("a", "p", "web", 3))
	next := w.s.Index() + 1
	made := func(change func(*skeinv1.Pool)) *skeinv1.Event {
		v := pool("new", 4, "10.66.0.0/26")
		v.CreatedIndex = next
		change(v)
		return &skeinv1.Event{Body: &skeinv1.Event_PoolCreated{PoolCreated: &skeinv1.PoolCreated{Pool: v}}}
	}
	changed := func(change func(*skeinv1.Pool)) *skeinv1.Event {
		v := proto.CloneOf(w.s.Pool("p"))
		change(v)
		return &skeinv1.Event{Body: &skeinv1.Event_PoolChanged{PoolChanged: &skeinv1.PoolChanged{Pool: v}}}
	}
	reserved := func(n uint64, ipv4 string) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_BlockReserved{BlockReserved: &skeinv1.BlockReserved{
			Block: &skeinv1.Block{Pool: "p", Number: n, Ipv4: ipv4, Index: next}}}}
	}
	static := func(change func(*skeinv1.StaticAddress)) *skeinv1.Event {
		v := &skeinv1.StaticAddress{Pool: "p", Ipv4: "10.64.0.20", Namespace: "web", Pod: "z", Index: next}
		change(v)
		return &skeinv1.Event{Body: &skeinv1.Event_AddressReserved{AddressReserved: &skeinv1.AddressReserved{Address: v}}}
	}
	claimed := func(pool, address, node string) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_AddressClaimed{AddressClaimed: &skeinv1.AddressClaimed{Pool: pool,
			Address: address, NodeId: node}}}
	}
	released := func(n uint64, node string) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_BlockReleased{BlockReleased: &skeinv1.BlockReleased{Pool: "p",
			Number: n, NodeId: node}}}
	}
	granted := func(pool, ns, node string, n uint32) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_GrantSet{GrantSet: &skeinv1.GrantSet{Grant: &skeinv1.Grant{Pool: pool,
			Namespace: ns, NodeId: node, Addresses: n}}}}
	}
	for what, e := range map[string]*skeinv1.Event{
		"a pool's name":            made(func(v *skeinv1.Pool) { v.Name = "p" }),
		"a pool without a name":    made(func(v *skeinv1.Pool) { v.Name = "" }),
		"a pool's addresses":       made(func(v *skeinv1.Pool) { v.Subnets = subnetsOf("10.64.0.0/28") }),
		"the overlay":              made(func(v *skeinv1.Pool) { v.Subnets = subnetsOf("10.4.0.0/28") }),
		"host bits":                made(func(v *skeinv1.Pool) { v.Subnets = subnetsOf("10.66.0.1/26") }),
		"a served namespace":       made(func(v *skeinv1.Pool) { v.Namespaces = []string{"web"} }),
		"a namespace twice":        made(func(v *skeinv1.Pool) { v.Namespaces = []string{"n", "n"} }),
		"another index":            made(func(v *skeinv1.Pool) { v.CreatedIndex = 1 }),
		"no pool":                  {Body: &skeinv1.Event_PoolCreated{}},
		"a change of size":         changed(func(v *skeinv1.Pool) { v.BlockSizeBits = 3 }),
		"a change of subnets":      changed(func(v *skeinv1.Pool) { v.Subnets = subnetsOf("10.67.0.0/26") }),
		"a pool without subnets":   changed(func(v *skeinv1.Pool) { v.Subnets = nil }),
		"a subnet before":          changed(func(v *skeinv1.Pool) { v.Subnets = subnetsOf("10.67.0.0/26", "10.64.0.0/26") }),
		"a subnet of another":      changed(func(v *skeinv1.Pool) { v.Subnets = subnetsOf("10.64.0.0/26", "10.65.0.0/26") }),
		"a change of age":          changed(func(v *skeinv1.Pool) { v.CreatedAt++ }),
		"a change of birth":        changed(func(v *skeinv1.Pool) { v.CreatedIndex++ }),
		"a change of nothing":      changed(func(v *skeinv1.Pool) { v.Name = "none" }),
		"a quota below the grants": changed(func(v *skeinv1.Pool) { v.Quotas = map[string]uint32{"web": 2} }),
		"no quota with grants":     changed(func(v *skeinv1.Pool) { v.Quotas = nil }),
		"the end of a used pool":   {Body: &skeinv1.Event_PoolRemoved{PoolRemoved: &skeinv1.PoolRemoved{Name: "p"}}},
		"the end of no pool":       {Body: &skeinv1.Event_PoolRemoved{PoolRemoved: &skeinv1.PoolRemoved{Name: "none"}}},
		"an owned block":           reserved(0, "10.64.0.0/28"),
		"a reserved block":         reserved(2, "10.64.0.32/28"),
		"a block with statics": {Body: &skeinv1.Event_BlockAllocated{BlockAllocated: &skeinv1.BlockAllocated{
			Block: &skeinv1.Block{
				Pool: "p", Number: 1, Ipv4: "10.64.0.16/28", NodeId: id("b"), Index: next}}}},
		"a release by another":    released(0, id("b")),
		"a release by nobody":     released(0, ""),
		"a release of statics":    released(1, ""),
		"a release of the free":   released(3, ""),
		"a static address twice":  static(func(v *skeinv1.StaticAddress) { v.Ipv4 = "10.64.0.17" }),
		"one of an owned block":   static(func(v *skeinv1.StaticAddress) { v.Ipv4 = "10.64.0.1" }),
		"one of a free block":     static(func(v *skeinv1.StaticAddress) { v.Ipv4 = "10.64.0.50" }),
		"one of no pool":          static(func(v *skeinv1.StaticAddress) { v.Ipv4 = "10.99.0.1" }),
		"one with another's":      static(func(v *skeinv1.StaticAddress) { v.Ipv6 = "fd02::1" }),
		"one that is held":        static(func(v *skeinv1.StaticAddress) { v.NodeId = id("a") }),
		"one for nobody":          static(func(v *skeinv1.StaticAddress) { v.Pod = "" }),
		"one of another index":    static(func(v *skeinv1.StaticAddress) { v.Index = 1 }),
		"one that is none":        static(func(v *skeinv1.StaticAddress) { v.Ipv4 = "x" }),
		"a second claim":          claimed("p", "10.64.0.17", id("b")),
		"a claim of nothing":      claimed("p", "10.64.0.20", id("b")),
		"a claim by a stranger":   claimed("p", "10.64.0.18", id("x")),
		"giving up what none has": claimed("p", "10.64.0.18", ""),
		"a claim in no pool":      claimed("none", "10.64.0.18", id("b")),
		"the end of a held one": {Body: &skeinv1.Event_AddressReleased{AddressReleased: &skeinv1.AddressReleased{Pool: "p",
			Address: "10.64.0.17"}}},
		"the end of none": {Body: &skeinv1.Event_AddressReleased{AddressReleased: &skeinv1.AddressReleased{Pool: "p",
			Address: "10.64.0.20"}}},
		"a grant above the quota": granted("p", "web", id("b"), 3),
		"a grant without quota":   granted("p", "db", id("b"), 1),
		"a grant to a stranger":   granted("p", "web", id("x"), 1),
		"a grant of no pool":      granted("none", "web", id("b"), 1),
		"the end of no grant":     granted("p", "web", id("b"), 0),
		"a node within a pool": {Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: &skeinv1.Node{
			Id: id("x"), Name: "x", WireguardKey: key("wireguard", "x"), Ipv4: "10.64.0.33"}}}},
	} {
		s := w.s.Clone()
		e.Index, e.Time, e.Schema = s.Index()+1, s.Time(), SchemaMax
		if err := s.Fold(e); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		s.index--
		checkSame(t, what, w.s, s)
		checkPools(t, s)
	}
}

// TestRevokedOwner: a log in which a node is revoked and nothing else, as a leader of schema 1 writes it, leaves its
// blocks with it. They have one owner, the snapshot is good, and they can be given back.
func TestRevokedOwner(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 4, "10.64.0.0/26")))
	w.must(allocate("b", "p", 1))
	e := &skeinv1.Event{Index: w.s.Index() + 1, Time: w.s.Time(), Schema: 1,
		Body: &skeinv1.Event_NodeRevoked{NodeRevoked: &skeinv1.NodeRevoked{NodeId: id("b")}}}
	if err := w.s.Fold(e); err != nil {
		t.Fatal(err)
	}
	checkInvariants(t, w.s)
	w.s = throughBytes(t, w.s)
	w.refused(reserve("p", "10.64.0.0", ""), FailedPrecondition, "belongs to node b (revoked)")
	w.does(release("b", "p", 0), "BlockReleased p/0 empty")
}

func TestFromProtoRefusesPools(t *testing.T) {
	w := poolHistory(t)
	w.must(release("a", "default", 1))
	for what, spoil := range map[string]func(*skeinv1.State){
		`pool "coil": its subnets`: func(p *skeinv1.State) { p.Pools = append(p.Pools, p.Pools[0]) },
		`pool "x": its subnets`:    func(p *skeinv1.State) { p.Pools = append(p.Pools, pool("x", 4, "10.64.0.0/24")) },
		`pool "late": its subnets`: func(p *skeinv1.State) {
			p.Pools = append(p.Pools, &skeinv1.Pool{Name: "late", Subnets: subnetsOf("10.99.0.0/24"), CreatedIndex: 1 << 40})
		},
		"of pool \"coil\": it is there": func(p *skeinv1.State) { p.Blocks = append(p.Blocks, p.Blocks[0]) },
		"never was a member":            func(p *skeinv1.State) { p.Blocks[0].NodeId = id("x") },
		"not of the pool":               func(p *skeinv1.State) { p.Blocks[0].Ipv4 = "10.70.0.0/28" },
		"is there twice ":               func(p *skeinv1.State) { p.Blocks[0].Index = p.Blocks[1].Index },
		"or not of the pool":            func(p *skeinv1.State) { p.Blocks[0].Index = 1 << 40 },
		"out of order":                  func(p *skeinv1.State) { slices.Reverse(p.Freed) },
		"freed block":                   func(p *skeinv1.State) { p.Freed[0].Number = 1 << 40 },
		"freed block ": func(p *skeinv1.State) {
			p.Freed[0].Pool, p.Freed[0].Number = p.Blocks[0].Pool,
				p.Blocks[0].Number
		},
		"freed block  ":            func(p *skeinv1.State) { p.Freed[1].Index = p.Blocks[0].Index },
		"static address 10.65.0.5": func(p *skeinv1.State) { p.Statics = append(p.Statics, p.Statics[0]) },
		"not in a reserved block": func(p *skeinv1.State) {
			p.Statics[0].Ipv4,
				p.Statics[0].Ipv6 = "10.65.0.33", "fd03::21"
		},
		"exceeds the quota":         func(p *skeinv1.State) { p.Grants[0].Addresses = 21 },
		"grant of pool":             func(p *skeinv1.State) { p.Grants = append(p.Grants, p.Grants[0]) },
		"grant of pool ":            func(p *skeinv1.State) { p.Grants[0].Addresses = 0 },
		"its subnets are malformed": func(p *skeinv1.State) { p.Cluster = nil },
	} {
		p := proto.CloneOf(w.s.Proto())
		spoil(p)
		if _, err := FromProto(p); err == nil || !strings.Contains(err.Error(), strings.TrimSpace(what)) ||
			!strings.Contains(err.Error(), "snapshot at") {
			t.Errorf("%q: %v", what, err)
		}
	}
}

// TestManyReadersOfPools: one published state with pools is read, hashed and cloned by many at once (run with -race).
func TestManyReadersOfPools(t *testing.T) {
	w := poolHistory(t)
	published := throughBytes(t, w.s) // with no digest computed yet
	next, _, err := Decide(published, withTime(w, allocate("a", "default", 4)))
	if err != nil {
		t.Fatal(err)
	}
	want := w.s.Hash()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 30 {
				c := published.Clone()
				for _, e := range next {
					if err := c.Fold(e); err != nil {
						t.Error(err)
					}
				}
				if c.Hash() == want || published.Hash() != want || len(published.BlocksOf(id("a"))) != 2 ||
					len(c.BlocksOf(id("a"))) != 5 {
					t.Error("a clone and its origin are mixed up")
				}
				published.Proto()
				published.PoolUse("default")
			}
		})
	}
	all.Wait()
}

func TestPoolDiff(t *testing.T) {
	w := newPoolsOf(t, 2)
	before := w.s.Clone()
	w = poolHistory(t)
	if lines := Diff(w.s, throughBytes(t, w.s)); len(lines) != 0 {
		t.Fatalf("a state differs from itself: %q", lines)
	}
	middle := w.s.Clone()
	w.must(extendPool("coil", "10.71.0.0/24"))
	w.must(release("a", "default", 1))
	w.must(claim("a", "default", "10.65.0.5", "web", "zero-0"))
	w.must(grant("a", "default", "web", 12))
	golden(t, "pool_diff.golden", strings.Join(append(append(Diff(before, middle), "--- and on"),
		Diff(middle, w.s)...), "\n")+"\n")
}

// TestHugePoolTurns: a pool so large that it never ends would grow the state for ever. Once MaxFreed of its blocks
// wait, they come again before new ones, but not before they have rested.
func TestHugePoolTurns(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 5, "fd02::/64")))
	s := w.s
	fold := func(c *skeinv1.Command) *skeinv1.Answer {
		t.Helper()
		c.Time = w.now.UnixNano()
		evs, a, err := Decide(s, c)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range evs {
			if err := s.Fold(e); err != nil {
				t.Fatal(err)
			}
		}
		return a
	}
	for i := 0; i < MaxFreed; i += MaxBlocksAtOnce {
		var numbers []uint64
		for _, b := range fold(allocate("a", "p", MaxBlocksAtOnce)).GetBlocks() {
			numbers = append(numbers, b.GetNumber())
		}
		if numbers[0] != uint64(i) {
			t.Fatalf("after %d blocks came %d", i, numbers[0])
		}
		fold(release("a", "p", numbers...))
	}
	if have := given(fold(allocate("b", "p", 2))); have != "0 1" {
		t.Fatalf("then came %s", have)
	}
	if have := given(fold(allocate("b", "p", 3))); have != fmt.Sprint(MaxFreed) {
		t.Fatalf("with fewer waiting came %s", have)
	}
	fold(release("b", "p", 0, 1))
	fold(setPool("p", &skeinv1.Pool{CooldownSeconds: 60}, "cooldown_seconds"))
	if have := given(fold(allocate("c", "p", 1))); have != fmt.Sprint(MaxFreed+1) {
		t.Fatalf("while all rest came %s", have)
	}

	// The same for what is known of all pools.
	full := s.Clone()
	full.numbers = MaxNumbers
	c := allocate("c", "p", 2)
	c.Time = w.now.UnixNano()
	if _, _, err := Decide(full, c); CodeOf(err) != ResourceExhausted || !strings.Contains(err.Error(), "rest after use") {
		t.Fatalf("answered %v", err)
	}
	c.Time += 61e9
	if _, a, err := Decide(full, c); err != nil || given(a) != "2" {
		t.Fatalf("answered %v, %v", a, err)
	}
}

// TestOneNodeMayBeRevoked: whatever a node has, the events that take it away fit into one entry of the log.
func TestOneNodeMayBeRevoked(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 0, "10.64.0.0/17", "10.65.0.0/16")))
	var blocks []*skeinv1.ImportBlock
	for i := range MaxNodeBlocks {
		blocks = append(blocks, importBlock("p", fmt.Sprintf("10.64.%d.%d/32", i>>8, i&255), "b", ""))
	}
	w.must(imports(false, nil, blocks[1:]...))
	w.refused(imports(false, nil, blocks[0], importBlock("p", "10.64.127.255/32", "b", "")), FailedPrecondition,
		"node b would have more than 16384 blocks")
	if have := given(w.must(allocate("b", "p", 1<<20))); have != "0" {
		t.Fatalf("b got %s", have)
	}
	w.refused(allocate("b", "p", 1<<20), ResourceExhausted, "node b has 16384 blocks, and a node may have 16384 in all "+
		"pools")
	evs, _, err := w.propose(revoke(id("b")))
	if err != nil || len(evs) != MaxNodeBlocks+2 {
		t.Fatalf("%d events, %v", len(evs), err)
	}
}
