package projection_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// withBlocks gives each node of a mesh two blocks, in turns, and one node a reserved address.
func withBlocks(t *testing.T, s *events.State, ids []identity.ID) {
	t.Helper()
	do := func(c *skeinv1.Command) {
		t.Helper()
		c.Time = 2e18
		evs, _, err := events.Decide(s, c)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range evs {
			if err := s.Fold(e); err != nil {
				t.Fatal(err)
			}
		}
	}
	do(&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{
		Name: "default", BlockSizeBits: 5, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/22", Ipv6: "fd01::/118"}}}}}})
	for total := range uint32(2) {
		for _, id := range ids {
			do(&skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{NodeId: id.String(), Pool: "default", Total: total + 1}}})
		}
	}
	do(&skeinv1.Command{Body: &skeinv1.Command_ReserveAddress{ReserveAddress: &skeinv1.ReserveAddress{Pool: "default", Address: "10.64.3.7", Namespace: "db", Pod: "pg-0"}}})
	do(&skeinv1.Command{Body: &skeinv1.Command_ClaimAddress{ClaimAddress: &skeinv1.ClaimAddress{NodeId: ids[1].String(), Pool: "default", Address: "10.64.3.7", Namespace: "db", Pod: "pg-0"}}})
}

// TestBlocksGolden: a node's blocks are its peers' business, its own are routes; only what is remote is marked.
func TestBlocksGolden(t *testing.T) {
	s, ids := mesh(t, 3)
	withBlocks(t, s, ids)
	in := input(s, ids)
	in.Pods = []dataplane.PodRoute{{Addr: netip.MustParseAddr("fd01::1"), Link: "skb"}, {Addr: netip.MustParseAddr("10.64.0.1"), Link: "skb"}, {Addr: netip.MustParseAddr("10.64.0.0"), Link: "ska"}}
	spec, refused := projection.Project(in)
	if len(refused) > 0 {
		t.Fatal(refused)
	}
	checkGolden(t, s, spec, "testdata/blocks.golden")
	for _, b := range spec.Pods.Blocks {
		if slices.ContainsFunc(spec.Targets, b.Overlaps) {
			t.Errorf("block %s is this node's own and marked for the tunnel", b)
		}
	}
}

// TestBlocksSpareTheHostsNetwork: a block that covers what is on this host's own link would take its traffic into the tunnel.
func TestBlocksSpareTheHostsNetwork(t *testing.T) {
	s, ids := mesh(t, 3)
	withBlocks(t, s, ids)
	in := input(s, ids)
	in.Host.Connected = []netip.Prefix{netip.MustParsePrefix("10.64.0.32/28")}
	spec, refused := projection.Project(in)
	if len(refused) != 1 || refused[0].Peer != ids[1] || refused[0].Block != netip.MustParsePrefix("10.64.0.32/27") || !strings.Contains(refused[0].Reason, "10.64.0.32/28") {
		t.Fatalf("refused: %v", refused)
	}
	if slices.ContainsFunc(spec.Targets, in.Host.Connected[0].Overlaps) {
		t.Errorf("the host's own network is marked: %s", spec.Targets)
	}
}

// TestNodeAddressesMayNotTakePools: what a member says of its own network never draws the traffic of pods.
func TestNodeAddressesMayNotTakePools(t *testing.T) {
	s, ids := mesh(t, 2)
	withBlocks(t, s, ids)
	in := input(s, ids)
	in.Host.RouteNodeAddresses = true
	in.Records[ids[1]] = &skeinv1.Record{NodeAddresses: []string{"10.64.1.0/24"}}
	if _, refused := projection.Project(in); len(refused) != 1 || refused[0].Block.IsValid() {
		t.Fatalf("refused: %v", refused)
	}
}
