package events

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// checkEgresses holds the invariants of section 15 against egresses, for any log whatever: no address has two uses, no
// epoch comes twice, and what is derived says what the entities say. It knows nothing of how the state is kept.
func checkEgresses(t fatal, s *State) {
	t.Helper()
	type place struct {
		egress string
		slot   int
		source bool
	}
	used, epochs, of := map[string]place{}, map[uint64]string{}, map[string][]*skeinv1.EgressSlot{}
	if !slices.IsSortedFunc(s.Egresses(), func(x, y *skeinv1.Egress) int {
		return cmp.Or(cmp.Compare(x.GetNamespace(), y.GetNamespace()), cmp.Compare(x.GetName(), y.GetName()))
	}) {
		t.Fatalf("the egresses are not sorted")
	}
	var all []*skeinv1.EgressSlot
	for _, e := range s.Egresses() {
		name := e.GetNamespace() + "/" + e.GetName()
		slots := s.Slots(e.GetNamespace(), e.GetName())
		if len(slots) != int(e.GetReplicas()) || len(e.GetEndpoints()) != len(slots) || len(e.GetAddresses()) != 0 &&
			len(e.GetAddresses()) != len(slots) {
			t.Fatalf("egress %s has %d slots: %v", name, len(slots), e)
		}
		if s.Egress(e.GetNamespace(), e.GetName()) != e {
			t.Fatalf("egress %s is not found", name)
		}
		use := func(v *skeinv1.EgressAddress, at place) {
			for _, text := range []string{v.GetIpv4(), v.GetIpv6()} {
				if text == "" {
					continue
				}
				if other, twice := used[text]; twice {
					t.Fatalf("%s belongs to %v and to %v", text, other, at)
				}
				used[text] = at
				a := netip.MustParseAddr(text)
				pool, _, b := s.BlockAt(a)
				if b == nil || b.GetNodeId() != "" || !at.source && pool.GetName() != e.GetPool() {
					t.Fatalf("%s of %v lies in %v", text, at, b)
				}
				if v := s.Static(pool.GetName(), a); v != nil {
					t.Fatalf("%s belongs to %v and to pod %s/%s", text, at, v.GetNamespace(), v.GetPod())
				}
				have, ok := s.EgressAddressAt(a)
				if !ok || have != (EgressUse{e.GetNamespace(), e.GetName(), uint32(at.slot), at.source}) {
					t.Fatalf("%s is %v, want %v", text, have, at)
				}
			}
		}
		for i, v := range e.GetEndpoints() {
			use(v, place{name, i, false})
		}
		for i, v := range e.GetAddresses() {
			use(v, place{name, i, true})
		}
		for i, v := range slots {
			if int(v.GetNumber()) != i || v.GetNamespace() != e.GetNamespace() || v.GetName() != e.GetName() ||
				s.Slot(e.GetNamespace(), e.GetName(), uint32(i)) != v {
				t.Fatalf("slot %d of %s is %v", i, name, v)
			}
			if other, twice := epochs[v.GetEpoch()]; v.GetEpoch() != 0 && twice {
				t.Fatalf("epoch %d is that of %s and of %s#%d", v.GetEpoch(), other, name, i)
			}
			epochs[v.GetEpoch()] = fmt.Sprintf("%s#%d", name, i)
			if v.GetEpoch() > s.Index() || v.GetNodeId() != "" && !s.everNode(v.GetNodeId()) || v.GetEpoch() == 0 &&
				v.GetNodeId() != "" {
				t.Fatalf("slot %d of %s is %v at %d", i, name, v, s.Index())
			}
			if v.GetNodeId() != "" {
				of[v.GetNodeId()] = append(of[v.GetNodeId()], v)
			}
			all = append(all, v)
		}
	}
	if have := s.Proto().GetSlots(); !slices.Equal(have, all) {
		t.Fatalf("the snapshot has the slots %v, want %v", have, all)
	}
	nodes := map[string]bool{}
	for _, n := range s.Nodes() {
		nodes[n.GetId()] = true
	}
	for _, r := range s.RevokedNodes() {
		nodes[r.GetNode().GetId()] = true
	}
	for n := range nodes {
		if !slices.Equal(s.SlotsOf(n), of[n]) {
			t.Fatalf("node %s has %v, want %v", n, s.SlotsOf(n), of[n])
		}
	}
	if s.slotCount != len(all) || s.egressAddrs.n != len(used) {
		t.Fatalf("%d slots and %d addresses are counted, there are %d and %d", s.slotCount, s.egressAddrs.n,
			len(all), len(used))
	}
}

// checkEgressRules is what Decide sees to beyond the invariants, after whole commands: who has a slot is a member, no
// destination but everything overlaps the mesh, and no block is kept for an egress that has nothing in it.
func checkEgressRules(t fatal, s *State) {
	t.Helper()
	inside := s.overlays()
	for _, p := range s.Pools() {
		for _, sub := range p.GetSubnets() {
			for _, text := range []string{sub.GetIpv4(), sub.GetIpv6()} {
				if text != "" {
					inside = append(inside, netip.MustParsePrefix(text))
				}
			}
		}
	}
	blocks := map[*skeinv1.Block]bool{}
	for _, e := range s.Egresses() {
		for _, text := range e.GetDestinations() {
			p := netip.MustParsePrefix(text)
			if i := slices.IndexFunc(inside, p.Overlaps); p.Bits() > 0 && i >= 0 {
				t.Fatalf("egress %s/%s leads to %s, and %s is in the mesh", e.GetNamespace(), e.GetName(), p, inside[i])
			}
		}
		for _, v := range s.Slots(e.GetNamespace(), e.GetName()) {
			if v.GetNodeId() != "" && find(&s.nodes, v.GetNodeId()) == nil {
				t.Fatalf("slot %v has an owner that is not a member", v)
			}
			if v.GetNodeId() != "" && (v.GetLeaseMillis() < MinEgressLease || v.GetNodeId() == v.GetFromNodeId()) {
				t.Fatalf("slot %v makes no sense", v)
			}
		}
		for _, v := range slices.Concat(e.GetEndpoints(), e.GetAddresses()) {
			for _, text := range []string{v.GetIpv4(), v.GetIpv6()} {
				if text != "" {
					_, _, b := s.BlockAt(netip.MustParseAddr(text))
					blocks[b] = true
				}
			}
		}
	}
	for _, v := range s.Statics() {
		_, _, b := s.BlockAt(staticAddr(v))
		blocks[b] = true
	}
	for _, b := range s.Blocks() {
		if strings.HasPrefix(b.GetReason(), "egress ") && !blocks[b] {
			t.Fatalf("block %v is kept for nothing", b)
		}
	}
}

// checkEpochs: a slot's epoch rises whenever something of it changes, and nothing else changes it.
func checkEpochs(t fatal, before, after *State) {
	t.Helper()
	for _, old := range before.Proto().GetSlots() {
		now := after.Slot(old.GetNamespace(), old.GetName(), old.GetNumber())
		if now == nil || before.Egress(old.GetNamespace(),
			old.GetName()).GetCreatedIndex() != after.Egress(old.GetNamespace(), old.GetName()).GetCreatedIndex() {
			continue
		}
		if !proto.Equal(old, now) && now.GetEpoch() <= old.GetEpoch() {
			t.Fatalf("%v became %v", old, now)
		}
		if now.GetFormerLeaseMillis() < max(old.GetFormerLeaseMillis(), 0) || now.GetEpoch() != old.GetEpoch() &&
			now.GetFormerLeaseMillis() < old.GetLeaseMillis() {
			t.Fatalf("%v became %v and forgot a lease", old, now)
		}
		if was, is := before.Egress(old.GetNamespace(), old.GetName()), after.Egress(old.GetNamespace(),
			old.GetName()); !proto.Equal(
			was.GetEndpoints()[old.GetNumber()], is.GetEndpoints()[old.GetNumber()]) {
			t.Fatalf("slot %v got another endpoint", old)
		}
	}
}

// anyEgressCommand draws a command about few egresses, addresses and nodes, so that they meet; some of it is nonsense.
// Most epochs are the present ones.
func anyEgressCommand(t *rapid.T, s *State, node func() string) *skeinv1.Command {
	draw := func(what string, from ...string) string { return rapid.SampledFrom(from).Draw(t, what) }
	number := func(most int) uint32 { return uint32(rapid.IntRange(0, most).Draw(t, "number")) }
	name := func() string {
		return []string{"web/out", "web/out", "web/out", "web/out", "db/out", "db/out", "db/out", "/"}[number(7)]
	}
	twisted := func() *skeinv1.Egress {
		replicas := 1 + number(3)
		var addresses []string
		for range make([]int, []uint32{0, 0, 0, replicas, replicas, number(3)}[number(5)]) {
			addresses = append(addresses, draw("source", "10.65.0.1", "10.65.0.2", "10.65.0.3", "10.65.0.9", "10.65.0.12",
				"10.64.0.2", "fd03::5", "10.65.0.6,fd03::7", "10.9.9.9"))
		}
		e := egress(name(), draw("destinations", "192.0.2.0/24", "192.0.2.0/24", "0.0.0.0/0", "192.0.2.0/24",
			"0.0.0.0/0 ::/0", "10.66.0.0/24", "10.64.0.0/10", "2001:db8::/32", ""), replicas, addresses...)
		e.Pool = draw("pool", "", "", "", "p", "p", "v6")
		e.LeaseMillis = []uint32{0, 500, 500, 2000, 2000, 2000, 2000, 3}[number(7)]
		e.Gateways = []map[string]string{{"site": "dc"}, {"site": "dc"}, {"site": "dc"}, {"site": "dc"}, {"site": "dc"},
			{"site": "dc"}, {"site": "a"}, nil}[number(7)]
		return e
	}
	epoch := func(name string, slot uint32) uint64 {
		namespace, name, _ := strings.Cut(name, "/")
		if number(9) == 7 {
			return uint64(number(40))
		}
		return s.Slot(namespace, name, slot).GetEpoch()
	}
	switch rapid.IntRange(0, 15).Draw(t, "egress command") { // small numbers are drawn more often
	case 4, 5, 6:
		return define(twisted())
	case 7, 8, 9:
		return setEgress(twisted(), draw("field", changeableEgress...),
			draw("field", append(slices.Clone(changeableEgress), "replicas", "replicas", "pool")...))
	case 10:
		return removeEgress(name())
	case 0, 1, 2, 3:
		of, slot := name(), number(2)
		c := assign(of, slot, node(), epoch(of, slot))
		c.GetAssignSlot().Planned = number(1) == 0
		return c
	case 11, 12:
		of, slot := name(), number(3)
		return releaseSlot(of, slot, epoch(of, slot))
	case 13:
		return drainNode(node(), number(3) == 2)
	}
	return createPool(pool("q", 0, draw("subnet", "10.66.0.0/28", "192.0.2.16/28", "198.51.100.0/28")))
}

// TestEveryShortEgressHistory tries all sequences of a few commands about one egress.
func TestEveryShortEgressHistory(t *testing.T) {
	depth := 5
	if testing.Short() {
		depth = 3
	}
	now := func(s *State, number uint32) uint64 { return s.Slot("web", "out", number).GetEpoch() }
	alphabet := []func(s *State) *skeinv1.Command{
		func(*State) *skeinv1.Command { return define(egress("web/out", "192.0.2.0/24", 1, "203.0.113.4")) },
		func(*State) *skeinv1.Command { return setEgress(egress("web/out", "", 2), "replicas", "addresses") },
		func(*State) *skeinv1.Command {
			return setEgress(egress("web/out", "", 1, "203.0.113.5"), "replicas", "addresses")
		},
		func(*State) *skeinv1.Command { return removeEgress("web/out") },
		func(s *State) *skeinv1.Command { return assign("web/out", 0, "b", now(s, 0)) },
		func(s *State) *skeinv1.Command { return assign("web/out", 0, "c", now(s, 0)) },
		func(s *State) *skeinv1.Command { return assign("web/out", 1, "b", now(s, 1)) },
		func(s *State) *skeinv1.Command { return releaseSlot("web/out", 0, now(s, 0)) },
		func(*State) *skeinv1.Command { return revoke(id("b")) },
		func(*State) *skeinv1.Command { return drainNode("c", true) },
		func(*State) *skeinv1.Command { return keep("", "203.0.113.4", "web", "x-0") },
		func(*State) *skeinv1.Command { return unkeep("", "203.0.113.4", true) },
	}
	w := newEgresses(t)
	states := 0
	var visit func(s *State, left int)
	visit = func(s *State, left int) {
		states++
		checkInvariants(t, s)
		checkEgressRules(t, s)
		checkSame(t, "snapshot", s, mustFromProto(t, s))
		if left == 0 {
			return
		}
		for i, make := range alphabet {
			c := make(s)
			c.Time, c.Entropy = s.Time()+int64(time.Second), entropy(100*left+i)
			evs, _, err := Decide(s, c)
			if err != nil && CodeOf(err) == "" {
				t.Fatalf("%v: %v", c, err)
			}
			if len(evs) == 0 {
				continue
			}
			next := s.Clone()
			for _, e := range evs {
				if err := next.Fold(e); err != nil {
					t.Fatal(err)
				}
			}
			checkEpochs(t, s, next)
			visit(next, left-1)
		}
	}
	visit(w.s, depth)
	t.Logf("%d states", states)
}

// TestAnyEgressHistory is TestAnyHistory with a cluster that is there, and commands about egresses and pools.
func TestAnyEgressHistory(t *testing.T) {
	base := newPools(t)
	base.must(createPool(pool("p", 2, "10.64.0.0/28")))
	base.must(createPool(pool("default", 1, "10.65.0.0/28,fd03::/124")))
	base.must(keep("", "10.65.0.1", "web", "x-0"))
	base.must(define(egress("web/out", "192.0.2.0/24", 2, "10.65.0.2", "10.65.0.3")))
	done := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		s, log := base.s.Clone(), slices.Clone(base.log)
		now := base.now
		node := func() string { return rapid.SampledFrom([]string{"a", "b", "b", "c", "c", "no"}).Draw(t, "node") }
		for range rapid.IntRange(10, 60).Draw(t, "length") {
			c := anyEgressCommand(t, s, node)
			switch rapid.IntRange(0, 60).Draw(t, "other") {
			case 55:
				c = revoke(id("c"))
			case 56:
				c = changeNode("b", "", map[string]string{"site": rapid.SampledFrom([]string{"a", "dc"}).Draw(t, "site")})
			case 7, 15, 23, 31, 39, 47:
				c = anyPoolCommand(t, node)
			}
			now = now.Add(time.Duration(rapid.IntRange(-100, 1000).Draw(t, "seconds")) * time.Second)
			c.Time, c.Entropy = now.UnixNano(), entropy(len(log))
			c.RequestId = rapid.SampledFrom([]string{"", "", "r1", "r2"}).Draw(t, "request")
			hash, old := s.Hash(), s.Clone()
			evs, answer, err := Decide(s, c)
			if s.Hash() != hash {
				t.Fatalf("Decide changed the state")
			}
			if err != nil && (CodeOf(err) == "" || evs != nil) {
				t.Fatalf("%v is refused with %v %v", c, evs, err)
			}
			for _, e := range evs {
				before := s.Proto()
				if err := s.Fold(e); err != nil {
					t.Fatalf("fold %v: %v", e, err)
				}
				checkInvariants(t, s)
				checkEffect(t, before, s.Proto(), e)
				done[strings.Fields(brief(e))[0]]++
			}
			if err == nil && !c.GetImportPools().GetDryRun() {
				checkRetry(t, s, c, answer)
			}
			checkPoolRules(t, s)
			checkEgressRules(t, s)
			checkEpochs(t, old, s)
			log = append(log, evs...)
		}
		replayed := NewState()
		half := rapid.IntRange(0, len(log)).Draw(t, "snapshot")
		for i, e := range log {
			if i == half {
				replayed = throughBytes(t, replayed)
			}
			if err := replayed.Fold(e); err != nil {
				t.Fatalf("replay %v: %v", e, err)
			}
		}
		checkSame(t, "snapshot and tail", s, replayed)
		checkSame(t, "snapshot", s, throughBytes(t, s))
	})
	t.Logf("events: %v", done)
}
