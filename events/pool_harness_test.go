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
func newPools(t testing.TB) *world {
	w := newWorld(t)
	w.must(today(createCluster("10.4.0.0/16", "a")))
	w.must(createToken("1", 1000, false))
	w.must(today(admit("b", "1")))
	w.must(today(admit("c", "1")))
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
	return &skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: &skeinv1.ChangePool{Name: name, AddSubnets: subnetsOf(subnets...)}}}
}

func setPool(name string, set *skeinv1.Pool, fields ...string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: &skeinv1.ChangePool{Name: name, Set: set, Fields: fields}}}
}

func drainPool(name string) *skeinv1.Command {
	return setPool(name, &skeinv1.Pool{Draining: true}, "draining")
}

func removePool(name string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RemovePool{RemovePool: &skeinv1.RemovePool{Name: name}}}
}

func allocate(node, pool string, total uint32) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{NodeId: id(node), Pool: pool, Total: total}}}
}

func reserve(pool, prefix, reason string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ReserveBlock{ReserveBlock: &skeinv1.ReserveBlock{Pool: pool, Prefix: prefix, Reason: reason}}}
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
