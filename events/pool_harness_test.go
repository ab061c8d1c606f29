package events

import (
	"fmt"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// today makes the node of a command one of this version.
func today(c *skeinv1.Command) *skeinv1.Command {
	switch b := c.GetBody().(type) {
	case *skeinv1.Command_CreateCluster:
		b.CreateCluster.FirstNode.MaxSchema = SchemaMax
	case *skeinv1.Command_AdmitNode:
		b.AdmitNode.Node.MaxSchema = SchemaMax
	}
	return c
}

// newPools is a world with the nodes a, b and c.
func newPools(t testing.TB) *world { return newPoolsOf(t, SchemaMax) }

// newPoolsOf is newPools with nodes that fold schemas up to high.
func newPoolsOf(t testing.TB, high uint32) *world {
	of := func(n *skeinv1.NewNode, c *skeinv1.Command) *skeinv1.Command {
		n.MaxSchema = high
		return c
	}
	w := newWorld(t)
	c := createCluster("10.4.0.0/16", "a")
	w.must(of(c.GetCreateCluster().GetFirstNode(), c))
	w.must(createToken("1", 1000, false))
	for _, name := range []string{"b", "c"} {
		c := admit(name, "1")
		w.must(of(c.GetAdmitNode().GetNode(), c))
	}
	return w
}

// pool is one of some subnets, each IPV4, IPV6 or IPV4,IPV6.
func pool(name string, bits uint32, subnets ...string) *skeinv1.Pool {
	return &skeinv1.Pool{Name: name, BlockSizeBits: bits, Subnets: subnetsOf(subnets...)}
}

func subnetsOf(subnets ...string) (out []*skeinv1.PoolSubnet) {
	for _, s := range subnets {
		v := &skeinv1.PoolSubnet{}
		for part := range strings.SplitSeq(s, ",") {
			if strings.Contains(part, ":") {
				v.Ipv6 = part
			} else {
				v.Ipv4 = part
			}
		}
		out = append(out, v)
	}
	return out
}

func createPool(p *skeinv1.Pool) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: p}}}
}

func extendPool(name string, subnets ...string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: &skeinv1.ChangePool{Name: name,
		AddSubnets: subnetsOf(subnets...)}}}
}

func setPool(name string, set *skeinv1.Pool, fields ...string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: &skeinv1.ChangePool{Name: name, Set: set,
		Fields: fields}}}
}

func drainPool(name string) *skeinv1.Command {
	return setPool(name, &skeinv1.Pool{Draining: true}, "draining")
}

func removePool(name string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RemovePool{RemovePool: &skeinv1.RemovePool{Name: name}}}
}

func allocate(node, pool string, total uint32) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{NodeId: id(node),
		Pool: pool, Total: total}}}
}

func reserve(pool, prefix, reason string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ReserveBlock{ReserveBlock: &skeinv1.ReserveBlock{Pool: pool,
		Prefix: prefix, Reason: reason}}}
}

// release gives a node's blocks back; without a node, reserved ones.
func release(node, pool string, numbers ...uint64) *skeinv1.Command {
	c := &skeinv1.ReleaseBlocks{Pool: pool, Numbers: numbers, Reason: "empty"}
	if node != "" {
		c.NodeId = id(node)
	}
	return &skeinv1.Command{Body: &skeinv1.Command_ReleaseBlocks{ReleaseBlocks: c}}
}

// numbersOf are a node's blocks in the order of their numbers, as pool/number.
func numbersOf(s *State, node string) string {
	var out []string
	for _, b := range s.BlocksOf(id(node)) {
		out = append(out, fmt.Sprintf("%s/%d", b.GetPool(), b.GetNumber()))
	}
	return strings.Join(out, " ")
}

// given are the numbers of the blocks that a command gave.
func given(a *skeinv1.Answer) string {
	var out []string
	for _, b := range a.GetBlocks() {
		out = append(out, fmt.Sprint(b.GetNumber()))
	}
	return strings.Join(out, " ")
}

// refused proposes a command that is refused with a code and with words in this order.
func (w *world) refused(c *skeinv1.Command, code Code, words ...string) {
	w.t.Helper()
	evs, a, err := w.propose(c)
	if CodeOf(err) != code || evs != nil || a != nil {
		w.t.Fatalf("%v gives %v, %v, %v; want a refusal with %s", c, evs, a, err, code)
	}
	rest := err.Error()
	for _, word := range words {
		_, after, ok := strings.Cut(rest, word)
		if !ok {
			w.t.Fatalf("%q does not say %q in its place", err, word)
		}
		rest = after
	}
}

// later moves the leader's clock.
func (w *world) later(by time.Duration) { w.now = w.now.Add(by) }

func keep(pool, addr, namespace, pod string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ReserveAddress{ReserveAddress: &skeinv1.ReserveAddress{Pool: pool,
		Address: addr, Namespace: namespace, Pod: pod}}}
}

func claim(node, pool, addr, namespace, pod string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ClaimAddress{ClaimAddress: &skeinv1.ClaimAddress{NodeId: id(node),
		Pool: pool, Address: addr, Namespace: namespace, Pod: pod}}}
}

func giveUp(node, pool, addr string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ClaimAddress{ClaimAddress: &skeinv1.ClaimAddress{NodeId: id(node),
		Pool: pool, Address: addr, GiveUp: true}}}
}

func unkeep(pool, addr string, force bool) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ReleaseAddress{ReleaseAddress: &skeinv1.ReleaseAddress{Pool: pool,
		Address: addr, Force: force}}}
}

func grant(node, pool, namespace string, addresses uint32) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_SetGrant{SetGrant: &skeinv1.SetGrant{NodeId: id(node), Pool: pool,
		Namespace: namespace, Addresses: addresses}}}
}

func imports(dry bool, pools []*skeinv1.Pool, blocks ...*skeinv1.ImportBlock) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ImportPools{ImportPools: &skeinv1.ImportPools{Pools: pools,
		Blocks: blocks, DryRun: dry}}}
}

func importBlock(pool, ipv4, node, reason string) *skeinv1.ImportBlock {
	return &skeinv1.ImportBlock{Pool: pool, Ipv4: ipv4, Node: node, Reason: reason}
}

// poolHistory is a fixed sequence of commands that makes an event of every kind of schema 2.
// Its nodes fold schema 2, as the version that wrote its golden files did.
func poolHistory(t testing.TB) *world {
	w := newPoolsOf(t, 2)
	p := pool("default", 4, "10.64.0.0/25,fd02::/121")
	p.CooldownSeconds, p.Quotas = 30, map[string]uint32{"web": 20, "db": 5}
	w.must(withID("make", createPool(p)))
	w.must(extendPool("default", "10.65.0.0/26,fd03::/122"))
	w.must(withID("blocks", allocate("a", "default", 2)))
	w.must(allocate("b", "default", 1))
	w.must(withID("reserve", reserve("default", "10.64.0.64/28", "gateways")))
	w.must(release("a", "default", 0))
	w.must(withID("keep", keep("", "10.65.0.5", "web", "zero-0")))
	w.must(keep("default", "fd03::6", "web", "zero-1"))
	w.must(withID("claim", claim("b", "default", "10.65.0.5", "web", "zero-0")))
	w.must(claim("c", "default", "fd03::6", "web", "zero-1"))
	w.must(giveUp("c", "default", "10.65.0.6"))
	w.must(unkeep("default", "10.65.0.6", false))
	w.must(withID("grant", grant("a", "default", "web", 8)))
	w.must(grant("b", "default", "db", 5))
	w.must(createPool(pool("v6", 0, "fd05::/124")))
	w.must(drainPool("v6"))
	w.must(removePool("v6"))
	w.must(withID("import", imports(false, []*skeinv1.Pool{pool("coil", 5, "10.70.0.0/24")},
		importBlock("coil", "10.70.0.64/27", "a", ""), importBlock("coil", "10.70.0.96/27", "gone.example", ""),
		importBlock("coil", "10.70.0.224/27", "", "routers"))))
	w.must(allocate("c", "coil", 3))
	w.must(revoke(id("b")))
	return w
}
