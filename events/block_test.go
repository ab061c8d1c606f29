package events

import (
	"net/netip"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// TestBlocksComeInOrder: first those that were never given, in order of number; then the one that is free for
// the longest; never the one just returned while another is free. At the size of one address, too.
func TestBlocksComeInOrder(t *testing.T) {
	for _, size := range []struct {
		bits   uint32
		subnet string
	}{{5, "10.64.0.0/25"}, {0, "10.64.0.0/30"}, {5, "fd02::/121"}, {3, "10.64.0.0/27,fd02::/123"}} {
		w := newPools(t)
		w.must(createPool(pool("p", size.bits, size.subnet)))
		if have := given(w.must(allocate("a", "p", 3))); have != "0 1 2" {
			t.Fatalf("%s: a got %s", size.subnet, have)
		}
		w.must(release("a", "p", 1))
		if have := given(w.must(allocate("b", "p", 1))); have != "3" {
			t.Fatalf("%s: b got %s, which is not the one never given", size.subnet, have)
		}
		w.must(release("a", "p", 0))
		w.must(release("b", "p", 3))
		for _, want := range []string{"1", "0", "3"} { // as they were returned
			if have := given(w.must(allocate("c", "p", uint32(1+len(w.s.BlocksOf(id("c"))))))); have != want {
				t.Fatalf("%s: c got %s, want %s", size.subnet, have, want)
			}
		}
		if have := numbersOf(w.s, "a") + " | " + numbersOf(w.s, "c"); have != "p/2 | p/0 p/1 p/3" {
			t.Fatalf("%s: they have %s", size.subnet, have)
		}
		w.refused(allocate("b", "p", 1), ResourceExhausted, "pool p is exhausted: its 4 blocks belong to c (3), a (1); add "+
			"a subnet with skein pool extend p")
	}
}

// TestLateReleaseTakesNothing: a copy of a node's request to give a block back arrives when the block is the node's
// anew, and when it is another's. The log may have forgotten the request by then.
func TestLateReleaseTakesNothing(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 5, "10.64.0.0/27")))
	first := w.must(allocate("a", "p", 1)).GetBlocks()[0]
	giveBack := func() *skeinv1.Command {
		c := release("a", "p", first.GetNumber())
		c.GetReleaseBlocks().Indexes = []uint64{first.GetIndex()}
		return c
	}
	w.must(giveBack())
	for _, node := range []string{"a", "b"} {
		w.must(allocate(node, "p", 1))
		w.must(giveBack())
		if have := numbersOf(w.s, node); have != "p/0" {
			t.Fatalf("a late copy leaves %q to %s", have, node)
		}
		w.must(release(node, "p", 0))
	}
	bad := release("a", "p", 0, 1)
	bad.GetReleaseBlocks().Indexes = []uint64{first.GetIndex()}
	w.refused(bad, InvalidArgument, "2 blocks are named with 1 indexes")
}

func TestCooldown(t *testing.T) {
	w := newPools(t)
	p := pool("p", 1, "10.64.0.0/30")
	p.CooldownSeconds = 300
	w.must(createPool(p))
	w.must(allocate("a", "p", 2))
	w.must(release("a", "p", 1))
	returned := w.now
	w.later(time.Minute)
	w.must(release("a", "p", 0))
	w.refused(allocate("b", "p", 1), ResourceExhausted, "of its 2 blocks 2 rest after use (5m0s), the first until "+
		returned.Add(5*time.Minute).UTC().Format(time.RFC3339), "0 belong to nobody")
	if u := w.s.PoolUse("p"); u.Resting(w.now) != 2 || u.Freed != 2 || u.Never != 0 || u.Free() != 2 || u.Owned != 0 {
		t.Fatalf("the use is %+v", u)
	}
	w.now = returned.Add(-time.Hour) // another leader, whose clock is behind
	w.refused(allocate("b", "p", 1), ResourceExhausted, "2 rest")
	w.now = returned.Add(5*time.Minute - 2*time.Second)
	w.refused(allocate("b", "p", 1), ResourceExhausted, "2 rest")
	if have := given(w.must(allocate("b", "p", 2))); have != "1" {
		t.Fatalf("b got %s, want the one that has rested", have)
	}
}

func TestBlockAt(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 2, "10.64.0.0/28,fd02::/124", "10.65.0.0/29,fd03::/125")))
	w.must(allocate("a", "p", 5))
	for addr, want := range map[string]uint64{"10.64.0.0": 0, "10.64.0.15": 3, "fd02::9": 2, "10.65.0.3": 4, "fd03::2": 4,
		"::ffff:10.64.0.5": 1} {
		p, n, b := w.s.BlockAt(netip.MustParseAddr(addr))
		if p.GetName() != "p" || n != want || b.GetNumber() != want || b.GetNodeId() != id("a") {
			t.Fatalf("%s lies in %v %d %v", addr, p, n, b)
		}
	}
	if p, n, b := w.s.BlockAt(netip.MustParseAddr("fd03::7")); p == nil || n != 5 || b != nil {
		t.Fatalf("a free one lies in %v %d %v", p, n, b)
	}
	for _, addr := range []string{"10.64.0.16", "10.63.255.255", "fd03::8", "fd02::10", "10.4.0.1"} {
		if p, _, _ := w.s.BlockAt(netip.MustParseAddr(addr)); p != nil {
			t.Fatalf("%s lies in %v", addr, p)
		}
	}
	b := w.s.Block("p", 4)
	if b.GetIpv4() != "10.65.0.0/30" || b.GetIpv6() != "fd03::/126" {
		t.Fatalf("block 4 is %v", b)
	}
}

// TestHugePool: a /64 with blocks of 32 addresses has 2^59 of them.
func TestHugePool(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 5, "fd02:0:0:1::/64")))
	w.must(reserve("p", "fd02:0:0:1:ffff:ffff:ffff:ffff", "the last"))
	w.must(allocate("a", "p", 2))
	if b := w.s.Block("p", 1<<59-1); b.GetIpv6() != "fd02::1:ffff:ffff:ffff:ffe0/123" || b.GetReason() != "the last" {
		t.Fatalf("the last block is %v", b)
	}
	if b := w.s.Block("p", 1); b.GetIpv6() != "fd02:0:0:1::20/123" {
		t.Fatalf("block 1 is %v", b)
	}
	if u := w.s.PoolUse("p"); u.Blocks != 1<<59 || u.Owned != 2 || u.Reserved != 1 || u.Never != 1<<59-3 {
		t.Fatalf("the use is %+v", u)
	}
	checkSame(t, "snapshot", w.s, mustFromProto(t, w.s))
	w.refused(createPool(pool("q", 0, "fd03::/64")), InvalidArgument, "2^64 blocks", "2^60", "/68")
	w.refused(createPool(&skeinv1.Pool{Name: "q", BlockSizeBits: 17, Subnets: subnetsOf("10.0.0.0/8")}), InvalidArgument,
		"2^17", "0 to 16 bits")
}
