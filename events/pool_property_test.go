package events

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// checkPools holds the invariants of section 15 against pools, for any log whatever: no address or block has two
// owners, and what is derived says what the entities say. It knows nothing of how the state is kept.
func checkPools(t fatal, s *State) {
	t.Helper()
	var taken []netip.Prefix
	for _, text := range []string{s.Cluster().GetOverlayIpv4(), s.Cluster().GetOverlayIpv6()} {
		if p, err := netip.ParsePrefix(text); err == nil {
			taken = append(taken, p)
		}
	}
	serves := map[string]string{}
	for _, p := range s.Pools() {
		for _, sub := range p.GetSubnets() {
			for _, text := range []string{sub.GetIpv4(), sub.GetIpv6()} {
				if text == "" {
					continue
				}
				prefix := netip.MustParsePrefix(text)
				for _, other := range taken {
					if other.Overlaps(prefix) {
						t.Fatalf("pool %s: %s overlaps %s", p.GetName(), prefix, other)
					}
				}
				taken = append(taken, prefix)
			}
		}
		for _, ns := range p.GetNamespaces() {
			if serves[ns] != "" {
				t.Fatalf("namespace %s is served by %s and %s", ns, serves[ns], p.GetName())
			}
			serves[ns] = p.GetName()
			if s.PoolOfNamespace(ns) != p {
				t.Fatalf("namespace %s has %v", ns, s.PoolOfNamespace(ns))
			}
		}
		if s.Pool(p.GetName()) != p {
			t.Fatalf("pool %s is not found", p.GetName())
		}
	}
	checkBlocks(t, s)
	checkStatics(t, s)
	checkGrants(t, s)
}

func checkBlocks(t fatal, s *State) {
	t.Helper()
	owned, numbers, of := map[netip.Prefix]string{}, map[string]bool{}, map[string][]string{}
	for _, b := range s.Blocks() {
		name := fmt.Sprintf("%s/%d", b.GetPool(), b.GetNumber())
		for _, text := range []string{b.GetIpv4(), b.GetIpv6()} {
			if text == "" {
				continue
			}
			p := netip.MustParsePrefix(text)
			if other, twice := owned[p]; twice {
				t.Fatalf("%s belongs to %s and to %s", p, other, name)
			}
			owned[p] = name
			last := p.Addr()
			for next := last; p.Contains(next); next = next.Next() {
				last = next
			}
			for _, a := range []netip.Addr{p.Addr(), last} {
				if pool, n, at := s.BlockAt(a); pool.GetName() != b.GetPool() || n != b.GetNumber() || at != b {
					t.Fatalf("%s of block %s lies in %v %d %v", a, name, pool, n, at)
				}
			}
		}
		numbers[name] = true
		of[b.GetNodeId()] = append(of[b.GetNodeId()], name)
		if b.GetNodeId() != "" && !s.everNode(b.GetNodeId()) {
			t.Fatalf("block %s belongs to nobody known", name)
		}
	}
	for id, want := range of {
		if id == "" {
			continue
		}
		var have []string
		for _, b := range s.BlocksOf(id) {
			have = append(have, fmt.Sprintf("%s/%d", b.GetPool(), b.GetNumber()))
		}
		if !slices.Equal(have, want) {
			t.Fatalf("node %s has %v, want %v", id, have, want)
		}
	}
	for _, p := range s.Pools() {
		last := uint64(0)
		for _, f := range s.Freed(p.GetName()) {
			if name := fmt.Sprintf("%s/%d", f.GetPool(), f.GetNumber()); numbers[name] || f.GetIndex() <= last {
				t.Fatalf("freed block %s belongs to somebody, or is out of order", name)
			}
			last = f.GetIndex()
		}
		u := s.PoolUse(p.GetName())
		if u.Owned+u.Reserved+u.Freed+u.Never != u.Blocks || u.Freed != uint64(len(s.Freed(p.GetName()))) {
			t.Fatalf("the use of %s is %+v", p.GetName(), u)
		}
	}
}

func checkStatics(t fatal, s *State) {
	t.Helper()
	seen := map[string]bool{}
	for _, v := range s.Statics() {
		for _, text := range []string{v.GetIpv4(), v.GetIpv6()} {
			if text == "" {
				continue
			}
			if seen[text] {
				t.Fatalf("address %s is kept twice", text)
			}
			seen[text] = true
			if _, _, b := s.BlockAt(netip.MustParseAddr(text)); b == nil || b.GetNodeId() != "" {
				t.Fatalf("static address %s lies in %v", text, b)
			}
			if s.Static(v.GetPool(), netip.MustParseAddr(text)) != v {
				t.Fatalf("static address %s is not found", text)
			}
		}
		if !slices.Contains(s.StaticOf(v.GetNamespace(), v.GetPod()), v) {
			t.Fatalf("pod %s/%s does not have %v", v.GetNamespace(), v.GetPod(), v)
		}
		if id := v.GetNodeId(); id != "" && !slices.Contains(s.StaticsOf(id), v) {
			t.Fatalf("node %s does not have %v", id, v)
		}
	}
}

func checkGrants(t fatal, s *State) {
	t.Helper()
	sums := map[string]uint64{}
	for _, g := range s.Grants() {
		key := g.GetPool() + " " + g.GetNamespace()
		sums[key] += uint64(g.GetAddresses())
		if quota, ok := s.Pool(g.GetPool()).GetQuotas()[g.GetNamespace()]; !ok || sums[key] > uint64(quota) {
			t.Fatalf("%s: %d addresses are granted of %d", key, sums[key], quota)
		}
		if g.GetAddresses() == 0 || s.Grant(g.GetPool(), g.GetNamespace(), g.GetNodeId()) != g {
			t.Fatalf("grant %v is not found", g)
		}
	}
}

// checkPoolRules is what Decide sees to beyond the invariants, after whole commands: nothing is left with a
// node that was revoked, and no node has more blocks than it may.
func checkPoolRules(t fatal, s *State) {
	t.Helper()
	for _, r := range s.RevokedNodes() {
		id := r.GetNode().GetId()
		if len(s.BlocksOf(id))+len(s.StaticsOf(id))+len(s.GrantsOf(id)) > 0 {
			t.Fatalf("revoked node %s has %v %v %v", id, s.BlocksOf(id), s.StaticsOf(id), s.GrantsOf(id))
		}
	}
}

// anyPoolCommand draws a command about few pools, blocks and pods, so that they meet; some of it is nonsense.
func anyPoolCommand(t *rapid.T, node func() string) *skeinv1.Command {
	draw := func(what string, from ...string) string { return rapid.SampledFrom(from).Draw(t, what) }
	name := func() string { return draw("pool", "p", "p", "p", "default", "v6", "") }
	subnet := func() string {
		return draw("subnet", "10.64.0.0/28", "10.64.0.16/28", "10.64.0.0/26", "10.4.0.0/24", "fd02::/124", "fd02::10/124",
			"10.65.0.0/28,fd03::/124", "10.65.0.16/29,fd03::10/125", "10.64.0.1/28", "10.64.0.0/16,fd02::/64", "x")
	}
	addr := func() string {
		return draw("address", "10.64.0.1", "10.64.0.17", "10.64.0.4/30", "10.64.0.5", "10.65.0.1", "fd03::1", "fd02::4",
			"fd02::4/126", "10.64.0.5/31", "y")
	}
	ns := func() string { return draw("namespace", "web", "web", "web", "web", "db", "x/y", "") }
	number := func(most int) uint32 { return uint32(rapid.IntRange(0, most).Draw(t, "number")) }
	twisted := func(bits uint32) *skeinv1.Pool {
		p := pool(name(), bits, subnet())
		p.CooldownSeconds = number(2) * 600
		p.MaxBlocksPerNode = number(3)
		p.Draining = number(9) == 0
		if number(1) == 0 {
			p.Quotas = map[string]uint32{ns(): number(6), "web": number(6)}
			p.Namespaces = []string{ns()}
			p.Allowed = []string{ns(), "*"}
		}
		return p
	}
	switch rapid.IntRange(0, 15).Draw(t, "pool command") {
	case 0, 1:
		return createPool(twisted(number(3)))
	case 2:
		return extendPool(name(), subnet())
	case 3:
		fields := []string{draw("field", changeable...), draw("field", append(changeable, "subnets")...)}
		return setPool(name(), twisted(2), fields...)
	case 4:
		return removePool(name())
	case 5, 6, 7:
		return allocate(node(), name(), number(5))
	case 8:
		return reserve(name(), addr(), draw("reason", "", "mine", "for node no (imported)"))
	case 9, 10:
		return release(draw("owner", node(), ""), name(), uint64(number(5)), uint64(number(5)))
	case 11:
		return keep("", draw("to keep", "10.65.0.1", "10.65.0.2", addr()), ns(), draw("pod", "x-0", "x-0", "x-1"))
	case 12:
		c := claim(node(), "", draw("kept", "10.65.0.1", "10.65.0.1", "10.65.0.2", addr()), "web",
			draw("pod", "x-0", "x-0", "x-1"))
		c.GetClaimAddress().GiveUp = number(2) == 0
		return c
	case 13:
		return unkeep("", draw("kept", "10.65.0.1", "10.65.0.2", addr()), number(1) == 0)
	case 14:
		return grant(node(), draw("quota", "default", "default", name()), ns(), number(4))
	}
	return imports(number(2) == 0, []*skeinv1.Pool{twisted(2)},
		importBlock(name(), draw("block", "10.64.0.0/30", "10.64.0.4/30", "10.64.0.8/30", "10.64.0.16/30"),
			draw("for", node(), "no", ""), ""),
		importBlock(name(), draw("block", "10.64.0.0/30", "10.64.0.4/30", "10.64.0.8/30", "10.64.0.16/30"),
			draw("for", node(), "no", ""), "r"))
}

// TestAnyPoolHistory is TestAnyHistory with a cluster that is there, and commands about pools alone.
func TestAnyPoolHistory(t *testing.T) {
	base := newPools(t)
	base.must(createPool(pool("p", 2, "10.64.0.0/28")))
	limited := pool("default", 1, "10.65.0.0/28,fd03::/124")
	limited.Quotas = map[string]uint32{"web": 5}
	base.must(createPool(limited))
	base.must(keep("", "10.65.0.1", "web", "x-0"))
	rapid.Check(t, func(t *rapid.T) {
		s, log := base.s.Clone(), slices.Clone(base.log)
		now := base.now
		for range rapid.IntRange(1, 60).Draw(t, "length") {
			c := anyPoolCommand(t, func() string { return rapid.SampledFrom([]string{"a", "b", "c", "no"}).Draw(t, "node") })
			if rapid.IntRange(0, 30).Draw(t, "revoke") == 0 {
				c = revoke(id("c"))
			}
			now = now.Add(time.Duration(rapid.IntRange(-100, 1000).Draw(t, "seconds")) * time.Second)
			c.Time, c.Entropy = now.UnixNano(), entropy(len(log))
			c.RequestId = rapid.SampledFrom([]string{"", "", "r1", "r2"}).Draw(t, "request")
			evs, _, err := Decide(s, c)
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
			}
			checkPoolRules(t, s)
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
}

// checkEffect: an event that Decide makes is not a contradiction, so it changes something.
func checkEffect(t fatal, before, after *skeinv1.State, e *skeinv1.Event) {
	t.Helper()
	before.Index, before.Time = after.GetIndex(), after.GetTime()
	if proto.Equal(before, after) {
		t.Fatalf("Decide made an event that contradicts the state: %v", e)
	}
}

// slowPool is the slow and obvious allocator: a list of what was never given and a list of what was given back.
type slowPool struct {
	never    []uint64
	freed    []uint64
	at       map[uint64]int64
	owner    map[uint64]string
	cooldown int64
}

func (p *slowPool) give(node string, want int, now int64) (out []uint64) {
	for len(out) < want && len(p.never) > 0 {
		out, p.never = append(out, p.never[0]), p.never[1:]
	}
	for i := 0; len(out) < want && i < len(p.freed); {
		if n := p.freed[i]; p.cooldown == 0 || now >= p.at[n]+p.cooldown {
			out, p.freed = append(out, n), slices.Delete(p.freed, i, i+1)
		} else {
			i++
		}
	}
	for _, n := range out {
		p.owner[n] = node
	}
	return out
}

// TestRestOrder holds Decide against the slow allocator, over random histories in which the clock steps back.
func TestRestOrder(t *testing.T) {
	base := newPools(t)
	rapid.Check(t, func(t *rapid.T) {
		w := &world{t: base.t, s: base.s.Clone(), now: base.now, n: base.n}
		p := pool("p", 1, "10.64.0.0/28")
		slow := &slowPool{at: map[uint64]int64{}, owner: map[uint64]string{}}
		p.CooldownSeconds = uint32(rapid.SampledFrom([]int{0, 0, 20}).Draw(t, "cooldown"))
		slow.cooldown = int64(p.CooldownSeconds) * int64(time.Second)
		w.must(createPool(p))
		for n := range uint64(8) {
			slow.never = append(slow.never, n)
		}
		for range rapid.IntRange(1, 60).Draw(t, "length") {
			w.later(time.Duration(rapid.IntRange(-30, 30).Draw(t, "seconds")) * time.Second)
			node := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "node")
			have := w.s.BlocksOf(id(node))
			switch rapid.IntRange(0, 5).Draw(t, "what") {
			case 0, 1:
				more := rapid.IntRange(1, 4).Draw(t, "more")
				_, a, err := w.propose(allocate(node, "p", uint32(len(have)+more)))
				if want := slow.give(node, more, w.now.UnixNano()); fmt.Sprint(given(a)) != join(want) ||
					(err != nil) != (len(want) == 0) {
					t.Fatalf("%s gets %q, %v; want %v", node, given(a), err, want)
				}
			case 2, 3, 4:
				if len(have) == 0 {
					continue
				}
				n := rapid.SampledFrom(have).Draw(t, "block").GetNumber()
				w.must(release(node, "p", n))
				slow.freed, slow.at[n] = append(slow.freed, n), w.now.UnixNano()
				delete(slow.owner, n)
			case 5: // a block in the middle is taken out of turn
				n := uint64(rapid.IntRange(0, 7).Draw(t, "reserved"))
				ipv4, _, _ := w.s.BlockPrefixes("p", n)
				if _, _, err := w.propose(reserve("p", ipv4.String(), "")); err == nil {
					slow.never = slices.DeleteFunc(slow.never, func(v uint64) bool { return v == n })
					slow.freed = slices.DeleteFunc(slow.freed, func(v uint64) bool { return v == n })
				}
			}
			if rapid.IntRange(0, 9).Draw(t, "restart") == 0 {
				w.s = throughBytes(t, w.s)
			}
		}
	})
}

func join(numbers []uint64) string {
	return given(&skeinv1.Answer{Blocks: func() (out []*skeinv1.Block) {
		for _, n := range numbers {
			out = append(out, &skeinv1.Block{Number: n})
		}
		return out
	}()})
}
