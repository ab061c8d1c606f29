package consensus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// largestImport is as many blocks as one import may have, spread over nodes by name.
func largestImport(nodes ...string) *skeinv1.Command {
	c := &skeinv1.ImportPools{Pools: []*skeinv1.Pool{{
		Name: "default", BlockSizeBits: 5, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/13", Ipv6: "fd02::/109"}},
	}}}
	ipv4, ipv6 := netip.MustParseAddr("10.64.0.0").As4(), netip.MustParseAddr("fd02::").As16()
	for i := range events.MaxImportBlocks {
		at := i * 32
		ipv4[1], ipv4[2], ipv4[3] = 64+byte(at>>16), byte(at>>8), byte(at)
		ipv6[13], ipv6[14], ipv6[15] = byte(at>>16), byte(at>>8), byte(at)
		c.Blocks = append(c.Blocks, &skeinv1.ImportBlock{
			Pool: "default", Ipv4: netip.PrefixFrom(netip.AddrFrom4(ipv4), 27).String(),
			Ipv6: netip.PrefixFrom(netip.AddrFrom16(ipv6), 123).String(),
			Node: nodes[i%len(nodes)],
		})
	}
	return &skeinv1.Command{Body: &skeinv1.Command_ImportPools{ImportPools: c}}
}

// The largest import passes every limit on its way: from an agent to a server, from there to the leader, through the
// log to all servers, by subscription to the agent, and over restarts. A node that has most of it can be revoked.
func TestLargestImport(t *testing.T) {
	if testing.Short() {
		t.Skip("millions of bytes to decide and fold: run without -short")
	}
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		agent := c.add("agent", false)
		c.join(agent)
		victim := c.add("victim", false)
		c.join(victim)
		cmd := largestImport("victim", "victim", "victim", "agent", "not-a-member.example")
		dry := proto.CloneOf(cmd)
		dry.GetImportPools().DryRun = true
		if n := len(c.propose(agent, dry).GetPlan()); n != 2+events.MaxImportBlocks {
			t.Fatalf("the plan has %d lines", n)
		}
		if n := len(agent.replica.State().Pools()); n != 0 {
			t.Fatalf("a dry run made %d pools", n)
		}
		follower := c.nodes[0]
		if follower == c.leader() {
			follower = c.nodes[1]
		}
		c.propose(follower, cmd) // is forwarded
		c.agree()
		if n := len(agent.replica.State().Blocks()); n != events.MaxImportBlocks {
			t.Fatalf("the agent knows %d blocks", n)
		}
		index := agent.replica.State().Index()
		if plan := c.propose(agent, proto.CloneOf(cmd)).GetPlan(); len(plan) != 1 ||
			!strings.HasPrefix(plan[0], "0 changes, 16385 are there") {
			t.Fatalf("the second run gives %q", plan)
		}
		c.agree()
		if have := agent.replica.State().Index(); have != index+1 {
			t.Fatalf("the second run made %d events, want its answer alone", have-index)
		}
		late := c.add("late", false)
		c.join(late)
		c.propose(agent,
			&skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{NodeId: victim.id.String(),
				Reason: "gone"}}})
		victim.close()
		c.agree()
		if n := len(late.replica.State().BlocksOf(victim.id.String())); n != 0 {
			t.Fatalf("the revoked node has %d blocks", n)
		}
		for _, n := range c.nodes[:3] {
			n.close()
			n.start(false)
		}
		c.propose(agent, token(1))
		c.agree()
	})
}

// What is larger than an import may be is refused with a reason, by the way from an agent, too.
func TestTooLargeCommands(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		agent := c.add("agent", false)
		c.join(agent)
		more := largestImport("agent")
		more.GetImportPools().Blocks = append(more.GetImportPools().Blocks, more.GetImportPools().Blocks[0])
		wide := largestImport("agent")
		for _, b := range wide.GetImportPools().Blocks {
			b.Reason = strings.Repeat("x", 255)
		}
		long := &skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{
			Pool: &skeinv1.Pool{Name: strings.Repeat("x", maxCommand)}}}}
		for want, cmd := range map[string]*skeinv1.Command{"at most 1024 and 16384 are allowed at once": more,
			"at most 4194304 are allowed": wide, "at most 65536 are allowed": long} {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			_, err := agent.client.Propose(ctx, cmd)
			cancel()
			var refusal *events.Error
			if !errors.As(err, &refusal) || !strings.Contains(err.Error(), want) {
				t.Errorf("answered %v, want %q", err, want)
			}
		}
	})
}

// TestPackedBatch: a large batch shrinks, and comes back as it was; a small one is written as servers of the
// first version read it.
func TestPackedBatch(t *testing.T) {
	batch := &skeinv1.Batch{Base: 7}
	for i := range events.MaxImportBlocks {
		batch.Events = append(batch.Events, &skeinv1.Event{Index: 8 + uint64(i), Time: 1772366406000000000,
			RequestId: strings.Repeat("ab", 16), Schema: 2,
			Body: &skeinv1.Event_BlockAllocated{BlockAllocated: &skeinv1.BlockAllocated{Block: &skeinv1.Block{Pool: "default",
				Number: uint64(i),
				Ipv4:   fmt.Sprintf("10.64.%d.%d/27", i>>3&255, i&7*32), NodeId: fmt.Sprintf("%016x", i%7),
				Since: 1772366406000000000, Index: 8 + uint64(i)}}}})
	}
	packed, err := EncodeBatch(batch)
	if err != nil {
		t.Fatal(err)
	}
	if n := proto.Size(batch); packed[0] != packFormat || len(packed) > n/5 {
		t.Errorf("%d bytes become %d", n, len(packed))
	}
	if again, err := DecodeBatch(packed); err != nil || !proto.Equal(batch, again) {
		t.Fatalf("comes back with %v", err)
	}
	for _, at := range []int{1, 5, len(packed) / 2, len(packed) - 1} {
		bad := bytes.Clone(packed)
		bad[at] ^= 1
		if _, err := DecodeBatch(bad); err == nil {
			t.Errorf("a flipped bit at %d passes", at)
		}
	}
	batch.Events = batch.Events[:1000]
	if small, err := EncodeBatch(batch); err != nil || small[0] != sealFormat {
		t.Errorf("a small batch has format %d, %v", small[0], err)
	}
	bomb, err := packBatch(make([]byte, maxBatchBytes+1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := DecodeBatch(bomb); err == nil || !strings.Contains(err.Error(), "larger than 33554432 bytes") {
		t.Errorf("a bomb gives %v", err)
	}
	batch.Events = make([]*skeinv1.Event, maxBatchEvents+1)
	if _, err := EncodeBatch(batch); err == nil {
		t.Error("too many events are written")
	}
}
