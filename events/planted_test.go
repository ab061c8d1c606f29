package events

import (
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// owned is a world in which node a has block 0 of pool p, holds 10.64.0.13 and may use 4 of 5 addresses for web.
func owned(t *testing.T) *world {
	w := newPools(t)
	p := pool("p", 2, "10.64.0.0/28")
	p.Quotas = map[string]uint32{"web": 5}
	w.must(createPool(p))
	w.must(allocate("a", "p", 1))
	w.must(keep("p", "10.64.0.13", "web", "x-0"))
	w.must(claim("a", "p", "10.64.0.13", "web", "x-0"))
	w.must(grant("a", "p", "web", 4))
	return w
}

// foldNext folds an event as the next one and reports whether it changed nothing.
func (w *world) foldNext(e *skeinv1.Event) (s *State, same bool) {
	w.t.Helper()
	s = w.s.Clone()
	e.Index, e.Time, e.Schema = s.Index()+1, s.Time(), 2
	if err := s.Fold(e); err != nil {
		w.t.Fatalf("%v: %v", e, err)
	}
	before, after := w.s.Proto(), s.Proto()
	before.Index = after.Index
	checkPools(w.t, s)
	return s, proto.Equal(before, after)
}

// Facts about pools that Decide never makes: whatever a leader of another version appends, nobody loses what is his.
func TestContradictionsAboutPools(t *testing.T) {
	w := owned(t)
	block := func(n uint64, prefix, node string) *skeinv1.Block {
		return &skeinv1.Block{Pool: "p", Number: n, Ipv4: prefix, NodeId: node, Index: w.s.Index() + 1}
	}
	given := func(b *skeinv1.Block) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_BlockAllocated{BlockAllocated: &skeinv1.BlockAllocated{Block: b}}}
	}
	released := func(n uint64, node string) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_BlockReleased{BlockReleased: &skeinv1.BlockReleased{Pool: "p",
			Number: n, NodeId: node}}}
	}
	created := func(p *skeinv1.Pool) *skeinv1.Event {
		p.CreatedAt, p.CreatedIndex = w.s.Time(), w.s.Index()+1
		return &skeinv1.Event{Body: &skeinv1.Event_PoolCreated{PoolCreated: &skeinv1.PoolCreated{Pool: p}}}
	}
	granted := func(node string, n uint32) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_GrantSet{GrantSet: &skeinv1.GrantSet{Grant: &skeinv1.Grant{Pool: "p",
			Namespace: "web", NodeId: id(node), Addresses: n}}}}
	}
	shrunk, grown := proto.CloneOf(w.s.Pool("p")), proto.CloneOf(w.s.Pool("p"))
	shrunk.Subnets = subnetsOf("10.65.0.0/28")
	grown.Subnets = subnetsOf("10.64.0.0/28", "10.64.0.8/29")
	changed := func(p *skeinv1.Pool) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_PoolChanged{PoolChanged: &skeinv1.PoolChanged{Pool: p}}}
	}
	for name, e := range map[string]*skeinv1.Event{ // the same in order, or the rest would show nothing
		"a free block":            given(block(1, "10.64.0.4/30", id("b"))),
		"a block released":        released(0, id("a")),
		"a pool beside another":   created(pool("q", 0, "10.64.0.16/29")),
		"grants within the quota": granted("b", 1),
		"the end of a claim": {Body: &skeinv1.Event_AddressClaimed{AddressClaimed: &skeinv1.AddressClaimed{Pool: "p",
			Address: "10.64.0.13"}}},
	} {
		if _, same := w.foldNext(e); same {
			t.Errorf("%s changes nothing", name)
		}
	}
	for name, e := range map[string]*skeinv1.Event{
		"a block that another has":          given(block(0, "10.64.0.0/30", id("b"))),
		"a block given again to who has it": given(block(0, "10.64.0.0/30", id("a"))),
		"a block with another's addresses":  given(block(1, "10.64.0.0/30", id("b"))),
		"a block that is not in the pool":   given(block(4, "10.64.0.16/30", id("b"))),
		"a block with static addresses":     given(block(3, "10.64.0.12/30", id("b"))),
		"a block for a stranger":            given(block(1, "10.64.0.4/30", id("no"))),
		"a reserved block that somebody has": {Body: &skeinv1.Event_BlockReserved{BlockReserved: &skeinv1.BlockReserved{
			Block: block(0, "10.64.0.0/30", "")}}},
		"a block released by another":        released(0, id("b")),
		"a block released as a reserved one": released(0, ""),
		"a block with static ones released":  released(3, ""),
		"a free block released":              released(1, id("a")),
		"a pool over another":                created(pool("q", 0, "10.64.0.8/29")),
		"a pool around another":              created(pool("q", 0, "10.64.0.0/16")),
		"a pool over the overlay":            created(pool("q", 0, "10.4.1.0/24")),
		"a pool of the same name":            created(pool("p", 0, "10.65.0.0/24")),
		"the removal of a pool in use": {Body: &skeinv1.Event_PoolRemoved{
			PoolRemoved: &skeinv1.PoolRemoved{Name: "p"}}},
		"a pool without its subnet":   changed(shrunk),
		"a pool that overlaps itself": changed(grown),
		"a claim of what another holds": {Body: &skeinv1.Event_AddressClaimed{AddressClaimed: &skeinv1.AddressClaimed{
			Pool: "p", Address: "10.64.0.13", NodeId: id("b")}}},
		"a release of what a node holds": {Body: &skeinv1.Event_AddressReleased{AddressReleased: &skeinv1.AddressReleased{
			Pool: "p", Address: "10.64.0.13"}}},
		"grants beyond the quota":  granted("b", 2),
		"a grant beyond the quota": granted("a", 6),
		"a grant for a stranger":   granted("no", 1),
	} {
		if s, same := w.foldNext(e); !same {
			t.Errorf("%s changes the state:\n%v", name, Diff(w.s, s))
		}
	}
}

// A pool may share no address with another, whichever of them is the larger.
func TestOverlappingPoolsAreRefused(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 2, "10.64.0.0/24,fd02::/120")))
	w.must(createPool(pool("far", 2, "10.66.0.0/24")))
	for _, subnet := range []string{"10.64.0.0/24", "10.64.0.128/25", "10.64.0.252/30", "10.64.0.0/16", "10.64.0.0/15",
		"fd02::/124", "fd02::f0/124", "fd02::/72",
		"10.65.0.0/24,fd02::/120", "10.64.0.0/24,fd03::/120"} {
		w.refused(createPool(pool("q", 0, subnet)), AlreadyExists, "overlaps", "of pool p")
	}
	w.refused(extendPool("far", "10.64.0.128/25"), AlreadyExists, "overlaps", "of pool p")
	w.must(createPool(pool("q", 0, "10.64.1.0/24,fd02::100/120")))
}
