package events

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// briefs are events in a few words each.
func briefs(evs []*skeinv1.Event) string {
	var out []string
	for _, e := range evs {
		out = append(out, brief(e))
	}
	return strings.Join(out, "; ")
}

// does proposes a command that makes just these events.
func (w *world) does(c *skeinv1.Command, want string) {
	w.t.Helper()
	evs, _, err := w.propose(c)
	if have := briefs(evs); err != nil || have != want {
		w.t.Fatalf("%v gives %q, %v; want %q", c, have, err, want)
	}
}

// TestBadPools: what cannot be is refused, and the message names the thing, the cause and the next step.
func TestBadPools(t *testing.T) {
	w := newPools(t)
	long := strings.Repeat("x", 64)
	with := func(change func(*skeinv1.Pool)) *skeinv1.Pool {
		p := pool("p", 5, "10.64.0.0/16")
		change(p)
		return p
	}
	for _, bad := range []struct {
		pool *skeinv1.Pool
		says string
	}{
		{nil, "carries no pool"},
		{pool("", 5, "10.64.0.0/16"), "a pool needs a name"},
		{pool(long, 5, "10.64.0.0/16"), "has 64 characters: at most 63"},
		{pool("P", 5, "10.64.0.0/16"), "lower-case letters"},
		{pool("-p", 5, "10.64.0.0/16"), "at both ends"},
		{pool("p", 5), "pool p has no subnet: name one with --subnet"},
		{pool("p", 5, ""), "pool p: a subnet is empty"},
		{pool("p", 5, "10.64.0.0"), `pool p: subnet "10.64.0.0" is not an IPv4 prefix; write one like`},
		{pool("p", 5, "fd02::/x"), `subnet "fd02::/x" is not an IPv6 prefix`},
		{&skeinv1.Pool{Name: "p", Subnets: []*skeinv1.PoolSubnet{{Ipv4: "fd02::/112"}}}, "is not an IPv4 prefix"},
		{pool("p", 5, "::ffff:10.0.0.0/112"), "is not an IPv6 prefix"},
		{pool("p", 5, "10.64.0.1/16"), "pool p: subnet 10.64.0.1/16 has host bits set; write 10.64.0.0/16"},
		{pool("p", 5, "10.64.0.0/16,fd02::1/112"), "subnet fd02::1/112 has host bits set; write fd02::/112"},
		{pool("p", 5, "10.64.0.0/16,fd02::/64"), "10.64.0.0/16 has 2^16 addresses and fd02::/64 has 2^64; both families " +
			"need as many, so write fd02::/112"},
		{pool("p", 5, "10.64.0.0/16", "fd02::/112"), "10.64.0.0/16 is IPv4 and fd02::/112 is IPv6; all subnets of a pool " +
			"are of one kind"},
		{pool("p", 5, "10.64.0.0/16", "10.65.0.0/16,fd02::/112"), "is dual stack"},
		{pool("p", 5, "10.64.0.0/28"), "a block of 2^5 addresses is larger than the subnet 10.64.0.0/28 with 2^4; use 4 " +
			"bits or fewer"},
		{pool("p", 17, "10.0.0.0/9"), "blocks of 2^17 addresses are too large; use 0 to 16 bits"},
		{pool("p", 5, "10.64.0.0/16", "10.64.128.0/17"), "pool p: its subnets 10.64.0.0/16 and 10.64.128.0/17 overlap"},
		{pool("p", 5, "10.64.0.0/16", "10.64.0.0/16"), "overlap"},
		{pool("p", 5, "10.0.0.0/9"), "pool p: subnet 10.0.0.0/9 overlaps the overlay 10.4.0.0/16"},
		{pool("p", 0, "fd00::/72"), ""}, // not the overlay's
		{pool("p", 5, "10.4.128.0/24"), "overlaps the overlay"},
		{pool("p", 5, w.s.Cluster().GetOverlayIpv6()), "overlaps the overlay"},
		{pool("p", 5, "127.0.0.0/24"), "overlaps 127.0.0.0/8 (loopback)"},
		{pool("p", 5, "169.254.0.0/16"), "the pods' gateway is there"},
		{pool("p", 5, "224.0.0.0/24"), "multicast"},
		{pool("p", 16, "0.0.0.0/0"), "overlaps 0.0.0.0/8"},
		{pool("p", 5, "fe80::/112"), "link-local"},
		{pool("p", 5, slices.Repeat([]string{"10.64.0.0/16"}, 65)...), "65 subnets are too many; use up to 64"},
		{pool("p", 16, "fd02::/16"), "has 2^96 blocks, at most 2^60 are allowed; use a /52, or larger blocks"},
		{with(func(p *skeinv1.Pool) { p.CooldownSeconds = 3_000_000 }), "cooldown_seconds: 3000000 is out of range; use up " +
			"to 2592000"},
		{with(func(p *skeinv1.Pool) { p.StickySeconds = 3_000_000 }), "sticky_seconds"},
		{with(func(p *skeinv1.Pool) { p.MaxBlocksPerNode = 1 << 20 }), "max_blocks_per_node"},
		{with(func(p *skeinv1.Pool) { p.Namespaces = []string{"a b"} }), `namespace "a b": use letters`},
		{with(func(p *skeinv1.Pool) { p.Namespaces = []string{""} }), "namespace is missing"},
		{with(func(p *skeinv1.Pool) { p.Allowed = []string{"*", strings.Repeat("n", 254)} }), "has 254 characters: at most " +
			"253"},
		{with(func(p *skeinv1.Pool) { p.Quotas = map[string]uint32{"-": 1} }), "at both ends"},
	} {
		_, _, err := w.propose(createPool(bad.pool))
		if bad.says == "" {
			if err != nil {
				t.Errorf("%v: %v", bad.pool, err)
			}
			w.must(removePool("p"))
		} else if CodeOf(err) != InvalidArgument || !strings.Contains(err.Error(), bad.says) {
			t.Errorf("%v: %v; want %q", bad.pool, err, bad.says)
		}
	}
	for what, n := range map[string]int{"namespaces": MaxPoolNamespaces, "allowed": MaxPoolNamespaces,
		"quotas": MaxQuotas} {
		p := with(func(p *skeinv1.Pool) { p.Quotas = map[string]uint32{} })
		for i := range n + 1 {
			name := fmt.Sprint("n", i)
			switch what {
			case "namespaces":
				p.Namespaces = append(p.Namespaces, name)
			case "allowed":
				p.Allowed = append(p.Allowed, name)
			case "quotas":
				p.Quotas[name] = 1
			}
		}
		w.refused(createPool(p), InvalidArgument, what+": 1025 is out of range; use up to 1024")
	}
}

func TestPools(t *testing.T) {
	w := newPools(t)
	p := pool("web", 4, "10.64.0.0/26,FD02:0::/122")
	p.Namespaces, p.Allowed = []string{"web", "shop", "web"}, []string{"db"}
	w.does(createPool(p), "PoolCreated web")
	have := w.s.Pool("web")
	if have.GetSubnets()[0].GetIpv6() != "fd02::/122" || !slices.Equal(have.GetNamespaces(), []string{"shop", "web"}) ||
		have.GetCreatedIndex() != w.s.Index() || have.GetCreatedAt() != w.s.Time() {
		t.Fatalf("the pool is %v", have)
	}
	w.does(createPool(p), "") // as it is
	w.refused(createPool(pool("web", 5, "10.64.0.0/26")), AlreadyExists, "pool web exists with other properties",
		"skein pool extend web")
	w.refused(createPool(pool("b", 4, "10.64.0.32/27")), AlreadyExists, "pool b: subnet 10.64.0.32/27 overlaps "+
		"10.64.0.0/26 of pool web")
	w.refused(createPool(pool("b", 4, "10.0.0.0/10", "10.64.0.0/10")), InvalidArgument, "overlay")
	w.refused(createPool(pool("b", 4, "10.128.0.0/10", "10.64.0.0/10")), AlreadyExists,
		"overlaps 10.64.0.0/26 of pool web")
	other := pool("b", 4, "10.65.0.0/26")
	other.Namespaces = []string{"shop"}
	w.refused(createPool(other), AlreadyExists, "pool b: namespace shop is served by pool web, and only "+
		"one pool may serve it")

	if w.s.PoolOfNamespace("shop") != have || w.s.PoolOfNamespace("x") != nil || w.s.MayUse("x", "web") ||
		!w.s.MayUse("db", "web") || w.s.MayUse("db", "no") {
		t.Fatal("the wrong namespaces are served")
	}
	w.does(createPool(pool("default", 4, "10.66.0.0/26,fd06::/122")), "PoolCreated default")
	if w.s.PoolOfNamespace("x").GetName() != "default" || !w.s.MayUse("x", "default") || w.s.MayUse("shop", "default") {
		t.Fatal("the default pool serves the wrong namespaces")
	}

	w.does(extendPool("web", "10.67.0.0/27,fd07::/123"), "PoolChanged web extended")
	w.does(extendPool("web", "10.67.0.0/27,fd07::/123"), "")
	w.refused(extendPool("web", "10.68.0.0/26"), InvalidArgument, "all subnets of a pool are of one kind")
	w.refused(extendPool("web", "10.66.0.0/27,fd08::/123"), AlreadyExists, "overlaps 10.66.0.0/26 of pool default")
	w.refused(extendPool("web", "10.67.0.0/28,fd08::/124"), InvalidArgument, "its subnets", "overlap")
	w.refused(extendPool("web", "127.0.0.0/28,fd08::/124"), InvalidArgument, "loopback")
	w.refused(extendPool("no", "10.68.0.0/26"), NotFound,
		`pool "no" does not exist: skein pool list shows those that do (default, web)`)
	if ipv4, ipv6, ok := w.s.BlockPrefixes("web", 5); !ok || ipv4.String() != "10.67.0.16/28" ||
		ipv6.String() != "fd07::10/124" {
		t.Fatalf("block 5 is %s %s", ipv4, ipv6)
	}

	w.does(drainPool("web"), "PoolChanged web drained")
	w.does(drainPool("web"), "")
	w.does(setPool("web", &skeinv1.Pool{CooldownSeconds: 5, Namespaces: []string{"x"}}, "draining", "cooldown_seconds",
		"namespaces"), "PoolChanged web resumed, set")
	if v := w.s.Pool("web"); v.GetDraining() || v.GetCooldownSeconds() != 5 ||
		w.s.PoolOfNamespace("shop").GetName() != "default" || w.s.PoolOfNamespace("x") != v {
		t.Fatalf("the pool is %v", v)
	}
	w.refused(setPool("web", nil, "block_size_bits"), InvalidArgument, `field "block_size_bits" cannot be set`,
		"allowed, cooldown_seconds", "make another pool")
	w.refused(setPool("default", &skeinv1.Pool{Namespaces: []string{"x"}}, "namespaces"), AlreadyExists,
		"namespace x is served by pool web")
	w.refused(setPool("web", &skeinv1.Pool{CooldownSeconds: 1 << 30}, "cooldown_seconds"), InvalidArgument, "out of range")
	w.does(setPool("web", nil, "namespaces"), "PoolChanged web set")

	w.must(allocate("a", "web", 2))
	w.must(reserve("", "10.64.0.40", "spare"))
	w.refused(removePool("web"), FailedPrecondition, "pool web is used: 3 of its blocks belong to a (2), nobody (1 "+
		"reserved); stop new use with skein pool drain web")
	w.must(release("a", "web", 0, 1))
	w.must(release("", "web", 2))
	w.does(removePool("web"), "PoolRemoved web")
	w.refused(removePool("web"), NotFound, "does not exist")
	w.does(createPool(pool("other", 4, "10.64.0.0/26")), "PoolCreated other") // its addresses are free again
}

func TestReserveAndRelease(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 4, "10.64.0.0/26")))
	w.refused(allocate("a", "no", 1), NotFound, `pool "no" does not exist`)
	w.refused(allocate("no", "p", 1), NotFound, "is not a member")
	w.must(allocate("a", "p", 1))
	w.refused(reserve("p", "10.64.0.0/28", ""), FailedPrecondition, "block 10.64.0.0/28 of pool p belongs to node a "+
		"since 20")
	w.refused(reserve("p", "10.64.0.0/27", ""), InvalidArgument, "10.64.0.0/27 is not a block of pool p: the block there "+
		"is 10.64.0.0/28")
	w.refused(reserve("p", "10.64.0.1/28", ""), InvalidArgument, "the block there is 10.64.0.0/28")
	w.refused(reserve("p", "10.65.0.0", ""), InvalidArgument, "10.65.0.0 does not lie in pool p")
	w.refused(reserve("", "10.65.0.0", ""), NotFound, "10.65.0.0 lies in no pool")
	w.refused(reserve("no", "10.64.0.0", ""), NotFound, "does not exist")
	w.refused(reserve("p", "x", ""), InvalidArgument, `"x" is neither an address nor a block's prefix`)
	w.refused(reserve("p", "10.64.0.16", "\x00"), InvalidArgument, "printable")
	w.does(reserve("p", "10.64.0.20", "first"), "BlockReserved 10.64.0.16/28 first")
	w.does(reserve("", "10.64.0.16/28", "second"), "")
	w.refused(release("b", "p", 0), FailedPrecondition, "block 10.64.0.0/28 of pool p does not belong to node b but to "+
		"node a: only its owner can give it back")
	w.refused(release("b", "p", 1), FailedPrecondition, "to nobody (reserved: first)")
	w.refused(release("", "p", 0), FailedPrecondition, "is not reserved: it belongs to node a", "skein node revoke")
	w.refused(release("a", "p", 0, 1), FailedPrecondition, "does not belong to node a") // none of both
	w.refused(release("a", "p", 4), NotFound, "pool p has no block 4: its blocks are 0 to 3")
	w.refused(release("no", "p", 0), NotFound, "is not a member")
	w.refused(release("a", "p", make([]uint64, MaxReleased+1)...), InvalidArgument, "1025 blocks cannot be released at "+
		"once")
	w.does(release("a", "p", 0, 3, 0), "BlockReleased p/0 empty")
	w.does(release("a", "p", 0), "")
	w.does(&skeinv1.Command{Body: &skeinv1.Command_ReleaseBlocks{ReleaseBlocks: &skeinv1.ReleaseBlocks{
		Prefix: "10.64.0.16/28"}}}, "BlockReleased p/1 ")
	if f := w.s.Freed("p"); len(f) != 2 || f[0].GetNumber() != 0 || f[1].GetNumber() != 1 {
		t.Fatalf("freed are %v", f)
	}
}

// TestRestingIsNotReserved: a block that rests is not taken by a reservation either, else its addresses could
// be given to pods before their time.
func TestRestingIsNotReserved(t *testing.T) {
	w := newPools(t)
	p := pool("p", 4, "10.64.0.0/26")
	p.CooldownSeconds = 60
	w.must(createPool(p))
	w.must(allocate("a", "p", 1))
	w.must(release("a", "p", 0))
	until := w.now.Add(time.Minute).UTC().Format(time.RFC3339)
	w.refused(reserve("p", "10.64.0.0", ""), FailedPrecondition, "rests until "+until)
	w.refused(keep("p", "10.64.0.3", "web", "x"), FailedPrecondition, "rests until "+until)
	w.later(time.Minute)
	w.does(keep("p", "10.64.0.3", "web", "x"), "BlockReserved 10.64.0.0/28 static addresses; AddressReserved 10.64.0.3 x")
}

func TestStaticAddresses(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 4, "10.64.0.0/26,fd02::/122")))
	w.must(allocate("a", "p", 1))
	w.does(keep("p", "fd02::12", "web", "zero-0"), "BlockReserved 10.64.0.16/28 static addresses; AddressReserved "+
		"10.64.0.18 zero-0")
	w.does(keep("", "10.64.0.18", "web", "zero-0"), "")
	w.does(keep("", "10.64.0.19", "web", "zero-1"), "AddressReserved 10.64.0.19 zero-1")
	w.refused(keep("", "10.64.0.18", "web", "zero-1"), AlreadyExists, "10.64.0.18 of pool p is kept for pod web/zero-0")
	w.refused(keep("", "10.64.0.1", "web", "x"), FailedPrecondition, "belongs to node a")
	w.refused(keep("", "10.65.0.1", "web", "x"), NotFound, "lies in no pool")
	w.refused(keep("", "10.64.0.0/28", "web", "x"), InvalidArgument, "is not an address")
	w.refused(keep("", "10.64.0.20", "", "x"), InvalidArgument, "the namespace is missing")
	w.refused(keep("", "10.64.0.20", "web", "x/y"), InvalidArgument, `pod's name "x/y"`)
	if have := w.s.StaticOf("web", "zero-0"); len(have) != 1 || have[0].GetIpv6() != "fd02::12" ||
		have[0] != w.s.Static("p", netip.MustParseAddr("fd02::12")) {
		t.Fatalf("the pod has %v", have)
	}

	w.refused(claim("b", "p", "10.64.0.18", "web", "zero-1"), PermissionDenied, "is kept for pod web/zero-0")
	w.refused(claim("b", "p", "10.64.0.20", "web", "zero-1"), NotFound, "is kept for no pod")
	w.does(claim("b", "p", "fd02::12", "web", "zero-0"), "AddressClaimed 10.64.0.18 "+id("b"))
	w.does(claim("b", "p", "10.64.0.18", "web", "zero-0"), "")
	w.refused(claim("c", "p", "10.64.0.18", "web", "zero-0"), FailedPrecondition, "is held by node b since",
		"or when that node is revoked")
	w.does(giveUp("c", "p", "10.64.0.18"), "") // it has nothing, which is what it wants
	w.refused(unkeep("p", "10.64.0.18", false), FailedPrecondition, "is held by node b for pod web/zero-0", "with --force")
	w.does(giveUp("b", "p", "10.64.0.18"), "AddressClaimed 10.64.0.18 ")
	w.does(claim("c", "p", "10.64.0.18", "web", "zero-0"), "AddressClaimed 10.64.0.18 "+id("c"))
	w.refused(release("", "p", 1), FailedPrecondition, "block 10.64.0.16/28 of pool p holds the static address 10.64.0.1",
		"release that first")
	w.does(unkeep("p", "10.64.0.18", true), "AddressClaimed 10.64.0.18 ; AddressReleased 10.64.0.18")
	w.refused(unkeep("p", "10.64.0.18", false), NotFound, "is kept for no pod")
	w.does(unkeep("p", "10.64.0.19", false), "AddressReleased 10.64.0.19; BlockReleased p/1 its last static address was "+
		"released")

	w.must(reserve("p", "10.64.0.32", "mine"))
	w.must(keep("p", "10.64.0.32", "web", "x"))
	w.does(unkeep("p", "10.64.0.32", false), "AddressReleased 10.64.0.32") // the block was reserved by hand
	for i := range MaxPodStatics {
		w.must(keep("p", fmt.Sprint("10.64.0.", 32+i), "web", "many"))
	}
	w.refused(keep("p", "10.64.0.48", "web", "many"), ResourceExhausted, "pod web/many has 16 static addresses already")
}

func TestGrants(t *testing.T) {
	w := newPools(t)
	p := pool("p", 4, "10.64.0.0/26")
	p.Quotas = map[string]uint32{"web": 10, "none": 0}
	w.must(createPool(p))
	w.does(grant("a", "p", "web", 6), "GrantSet web 6")
	w.does(grant("a", "p", "web", 6), "")
	w.refused(grant("b", "p", "web", 5), ResourceExhausted, "namespace web may have 10 addresses of pool p, and nodes "+
		"hold 6 of them (a 6): end pods there, or raise the quota")
	w.does(grant("b", "p", "web", 4), "GrantSet web 4")
	w.does(grant("a", "p", "web", 2), "GrantSet web 2")
	w.does(grant("b", "p", "web", 8), "GrantSet web 8")
	w.refused(grant("a", "p", "none", 1), ResourceExhausted, "may have 0 addresses", "(nobody)")
	w.refused(grant("a", "p", "other", 1), FailedPrecondition, "has no quota in pool p: its pods need no grant")
	w.refused(grant("no", "p", "web", 1), NotFound, "is not a member")
	w.refused(grant("a", "no", "web", 1), NotFound, "does not exist")
	w.refused(grant("a", "p", "", 1), InvalidArgument, "namespace is missing")
	w.does(grant("a", "p", "web", 0), "GrantSet web 0")
	w.does(grant("a", "p", "web", 0), "")
	w.refused(setPool("p", &skeinv1.Pool{Quotas: map[string]uint32{"web": 7}}, "quotas"), FailedPrecondition,
		"a quota of 7 for namespace web is below the 8 addresses that nodes hold for it (b 8)")
	w.does(setPool("p", &skeinv1.Pool{Quotas: map[string]uint32{"web": 8}}, "quotas"), "PoolChanged p set")
	w.does(setPool("p", nil, "quotas"), "GrantSet web 0; PoolChanged p set")
	w.must(setPool("p", &skeinv1.Pool{Quotas: map[string]uint32{"web": 8}}, "quotas"))
	w.must(grant("b", "p", "web", 3))
	w.does(removePool("p"), "GrantSet web 0; PoolRemoved p")
}

// TestDrainingGivesNothing is Coil #284: addresses came from a pool that was being deleted.
func TestDrainingGivesNothing(t *testing.T) {
	w := newPools(t)
	p := pool("p", 4, "10.64.0.0/26")
	p.Quotas = map[string]uint32{"web": 10}
	w.must(createPool(p))
	w.must(allocate("a", "p", 1))
	w.must(grant("a", "p", "web", 5))
	w.must(keep("p", "10.64.0.60", "web", "x"))
	w.must(drainPool("p"))
	for _, c := range []*skeinv1.Command{
		allocate("a", "p", 2), allocate("b", "p", 1), reserve("p", "10.64.0.16", ""), keep("p", "10.64.0.20", "web", "y"),
		grant("a", "p", "web", 6),
		claim("a", "p", "10.64.0.60", "web", "x"),
	} {
		w.refused(c, FailedPrecondition, "pool p is being drained, and nothing new is taken from it")
	}
	w.refused(imports(false, nil, importBlock("p", "10.64.0.16/28", "a", "")), FailedPrecondition, "is being drained")
	w.does(allocate("a", "p", 1), "") // what it has, it has
	w.does(grant("a", "p", "web", 2), "GrantSet web 2")
	w.does(unkeep("p", "10.64.0.60", false), "AddressReleased 10.64.0.60; BlockReleased p/3 its last static address was "+
		"released")
	w.does(release("a", "p", 0), "BlockReleased p/0 empty")
	w.does(removePool("p"), "GrantSet web 0; PoolRemoved p")
}

// TestAskedTwiceGivenOnce is Coil #271: a request during the controller's downtime made two blocks, and one leaked.
func TestAskedTwiceGivenOnce(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 4, "10.64.0.0/26")))
	first := w.must(withID("once", allocate("a", "p", 1)))
	if again := w.must(withID("once", allocate("a", "p", 1))); !proto.Equal(first, again) {
		t.Fatalf("the same request gives %v", again)
	}
	w.does(allocate("a", "p", 1), "") // nor does a retry that lost its ID
	if have := numbersOf(w.s, "a"); have != "p/0" {
		t.Fatalf("a has %s", have)
	}
}

// TestOneNodeDoesNotEatThePool is Coil #202: a retry loop on one node ate a /16.
func TestOneNodeDoesNotEatThePool(t *testing.T) {
	w := newPools(t)
	p := pool("p", 4, "10.64.0.0/16")
	p.MaxBlocksPerNode = 20
	w.must(createPool(p))
	for range 100 {
		w.must(allocate("a", "p", 3))
	}
	if n := len(w.s.BlocksOf(id("a"))); n != 3 {
		t.Fatalf("a hundred requests gave %d blocks", n)
	}
	if n := len(w.must(allocate("a", "p", 1<<31)).GetBlocks()); n != MaxBlocksAtOnce {
		t.Fatalf("one request gave %d blocks", n)
	}
	if n := len(w.must(allocate("a", "p", 1<<31)).GetBlocks()); n != 1 {
		t.Fatalf("up to the limit there was %d block", n)
	}
	w.refused(allocate("a", "p", 21), ResourceExhausted, "node a has 20 blocks of pool p, and a node may have 20 there "+
		"(--max-blocks-per-node)")
	w.must(allocate("b", "p", 1))
}

// TestRevokedNodeLeavesNothing is Coil #204: a block was stuck after its node had died.
func TestRevokedNodeLeavesNothing(t *testing.T) {
	w := newPools(t)
	p := pool("p", 4, "10.64.0.0/26")
	p.Quotas = map[string]uint32{"web": 10}
	w.must(createPool(p))
	w.must(allocate("b", "p", 2))
	w.must(allocate("a", "p", 1))
	w.must(keep("p", "10.64.0.60", "web", "x"))
	w.must(claim("b", "p", "10.64.0.60", "web", "x"))
	w.must(grant("b", "p", "web", 10))
	w.does(revoke(id("b")), "AddressClaimed 10.64.0.60 ; BlockReleased p/0 revoked; BlockReleased p/1 revoked; GrantSet "+
		"web 0; NodeRevoked stolen; GossipKeyRotated")
	w.must(claim("a", "p", "10.64.0.60", "web", "x"))
	w.must(grant("a", "p", "web", 10))
	w.must(allocate("a", "p", 3))
	if have := numbersOf(w.s, "a"); have != "p/0 p/1 p/2" {
		t.Fatalf("a has %s", have)
	}
	// a late word of the dead
	w.refused(release("b", "p", 0), FailedPrecondition, "does not belong to node b (revoked) but to node a")
}

// TestNoPodCIDRTwice is Cilium's: the same pod CIDR was given to several nodes. Not even a log that a broken
// leader wrote can do it, nor one that gives what overlaps.
func TestNoPodCIDRTwice(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 4, "10.64.0.0/26")))
	w.must(allocate("a", "p", 1))
	block := func(change func(*skeinv1.Block)) *skeinv1.Event {
		v := &skeinv1.Block{Pool: "p", Number: 0, Ipv4: "10.64.0.0/28", NodeId: id("b"), Index: w.s.Index() + 1}
		change(v)
		return &skeinv1.Event{Body: &skeinv1.Event_BlockAllocated{BlockAllocated: &skeinv1.BlockAllocated{Block: v}}}
	}
	for what, e := range map[string]*skeinv1.Event{
		"the same block":     block(func(*skeinv1.Block) {}),
		"under another name": block(func(v *skeinv1.Block) { v.Number = 1 }),
		"a part of it":       block(func(v *skeinv1.Block) { v.Number, v.Ipv4 = 1, "10.64.0.0/29" }),
		"the whole pool":     block(func(v *skeinv1.Block) { v.Number, v.Ipv4 = 1, "10.64.0.0/26" }),
		"beyond the pool":    block(func(v *skeinv1.Block) { v.Number, v.Ipv4 = 4, "10.64.0.64/28" }),
		"of no pool":         block(func(v *skeinv1.Block) { v.Pool, v.Number = "q", 1 }),
		"to nobody":          block(func(v *skeinv1.Block) { v.Number, v.Ipv4, v.NodeId = 1, "10.64.0.16/28", "" }),
		"to a stranger":      block(func(v *skeinv1.Block) { v.Number, v.Ipv4, v.NodeId = 1, "10.64.0.16/28", id("x") }),
		"of another index":   block(func(v *skeinv1.Block) { v.Number, v.Ipv4, v.Index = 1, "10.64.0.16/28", 1 }),
		"by an overlapping pool": {Body: &skeinv1.Event_PoolCreated{PoolCreated: &skeinv1.PoolCreated{Pool: &skeinv1.Pool{
			Name: "q", Subnets: subnetsOf("10.64.0.0/24"), CreatedIndex: w.s.Index() + 1}}}},
	} {
		s := w.s.Clone()
		e.Index, e.Time = s.Index()+1, s.Time()
		if err := s.Fold(e); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		s.index--
		checkSame(t, what, w.s, s)
	}
}

// TestOnlyTheOwnerGivesBack is Calico #5044: garbage collection released addresses of healthy pods. Whoever cleans
// up says whose block it believes it to be, and a mistaken belief changes nothing.
func TestOnlyTheOwnerGivesBack(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 4, "10.64.0.0/27")))
	w.must(allocate("c", "p", 1))
	w.must(release("c", "p", 0))
	w.must(allocate("b", "p", 2)) // has what was c's
	w.refused(release("c", "p", 0), FailedPrecondition, "does not belong to node c but to node b")
	w.refused(release("", "p", 0), FailedPrecondition, "is not reserved")
	w.must(revoke(id("c")))
	w.refused(release("c", "p", 0), FailedPrecondition, "does not belong to node c (revoked) but to node b")
	s := w.s.Clone()
	e := &skeinv1.Event{Index: s.Index() + 1, Time: s.Time(), Schema: 2,
		Body: &skeinv1.Event_BlockReleased{BlockReleased: &skeinv1.BlockReleased{Pool: "p", NodeId: id("c")}}}
	if err := s.Fold(e); err != nil {
		t.Fatal(err)
	}
	if have := numbersOf(s, "b"); have != "p/0 p/1" {
		t.Fatalf("b has %s", have)
	}
}

// TestHashBeforeSchema2: a state that holds nothing of schema 2 has the hash that it always had, also after it held
// something: servers of both versions agree during an upgrade.
func TestHashBeforeSchema2(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 4, "10.64.0.0/26")))
	w.must(allocate("a", "p", 1))
	w.must(release("a", "p", 0))
	with := w.s.Hash()
	w.must(removePool("p"))
	p := proto.CloneOf(w.s.Proto())
	p.Pools, p.Blocks, p.Freed, p.Statics, p.Grants = nil, nil, nil, nil, nil
	old, err := FromProto(p)
	if err != nil {
		t.Fatal(err)
	}
	if w.s.Hash() != old.Hash() || w.s.Hash() == with {
		t.Fatal("what is gone is in the hash, or what is there is not")
	}
	// TestGoldenHash holds hash.golden, which the first version wrote.
}

func TestOldServersStopPools(t *testing.T) {
	w := newCluster(t) // whose node folds schema 1
	w.refused(createPool(pool("p", 4, "10.64.0.0/26")), FailedPrecondition, "server a folds event schemas up to 1 and "+
		"this command needs 2: upgrade skein on a first")

	w = newPools(t)
	w.must(admit("agent", "1"))
	w.must(admit("old", "1", asServer))
	w.refused(createPool(pool("p", 4, "10.64.0.0/26")), FailedPrecondition, "server old folds event schemas up to 1")
	w.must(revoke(id("old")))
	w.must(createPool(pool("p", 4, "10.64.0.0/26")))
	w.refused(admit("older", "1", asServer), FailedPrecondition, "older folds event schemas up to 1, and the cluster "+
		"has pools, which need 2: upgrade skein on older")
	w.refused(addServer(id("agent")), FailedPrecondition, "agent folds event schemas up to 1")
	w.must(admit("older", "1"))
	w.must(today(admit("new", "1", asServer)))
}
