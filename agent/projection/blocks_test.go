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
			do(&skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{
				NodeId: id.String(), Pool: "default", Total: total + 1}}})
		}
	}
	do(&skeinv1.Command{Body: &skeinv1.Command_ReserveAddress{ReserveAddress: &skeinv1.ReserveAddress{Pool: "default",
		Address: "10.64.3.7", Namespace: "db", Pod: "pg-0"}}})
	do(&skeinv1.Command{Body: &skeinv1.Command_ClaimAddress{ClaimAddress: &skeinv1.ClaimAddress{NodeId: ids[1].String(),
		Pool: "default", Address: "10.64.3.7", Namespace: "db", Pod: "pg-0"}}})
}

// TestBlocksGolden: a node's blocks are its peers' business, its own are routes; only what is remote is marked.
func TestBlocksGolden(t *testing.T) {
	s, ids := mesh(t, 3)
	withBlocks(t, s, ids)
	in := input(s, ids)
	in.Pods = []dataplane.PodRoute{{Addr: netip.MustParseAddr("fd01::1"), Link: "skb"},
		{Addr: netip.MustParseAddr("10.64.0.1"), Link: "skb"}, {Addr: netip.MustParseAddr("10.64.0.0"), Link: "ska"}}
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

// TestBlocksSpareTheHostsNetwork: a block that covers what is on this host's own link would take its traffic into the
// tunnel.
func TestBlocksSpareTheHostsNetwork(t *testing.T) {
	s, ids := mesh(t, 3)
	withBlocks(t, s, ids)
	in := input(s, ids)
	in.Host.Connected = []netip.Prefix{netip.MustParsePrefix("10.64.0.32/28")}
	spec, refused := projection.Project(in)
	if len(refused) != 1 || refused[0].Peer != ids[1] || refused[0].Block != netip.MustParsePrefix("10.64.0.32/27") ||
		!strings.Contains(refused[0].Reason, "10.64.0.32/28") {
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

// withPodCIDRs gives each node of a mesh the networks of another CNI's pods.
func withPodCIDRs(t *testing.T, s *events.State, ids []identity.ID) {
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
	do(&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
		Settings: &skeinv1.Settings{PodRanges: []string{"10.244.0.0/16", "fd44::/48"}}, Fields: []string{"pod_ranges"}}}})
	for i, id := range ids {
		do(&skeinv1.Command{Body: &skeinv1.Command_SetPodCidrs{SetPodCidrs: &skeinv1.SetPodCidrs{NodeId: id.String(),
			PodCidrs: &skeinv1.PodCidrs{KubernetesNode: "node" + itoa(i),
				Cidrs: []string{"10.244." + itoa(i) + ".0/24", "fd44:0:0:" + itoa(i) + "::/64"}}}}})
	}
}

// TestPodCIDRsGolden: the pods of another CNI are reached by the tunnel on other hosts, and as they are on this one.
func TestPodCIDRsGolden(t *testing.T) {
	s, ids := mesh(t, 3)
	withPodCIDRs(t, s, ids)
	in := input(s, ids)
	in.Host.Connected = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/24")} // its own bridge
	spec, refused := projection.Project(in)
	if len(refused) > 0 {
		t.Fatal(refused)
	}
	checkGolden(t, s, spec, "testdata/podcidrs.golden")
	own := netip.MustParsePrefix("10.244.0.0/24")
	if slices.ContainsFunc(spec.Targets, own.Overlaps) {
		t.Errorf("this host's own pods are marked for the tunnel: %s", spec.Targets)
	}
	in.Host.Connected = []netip.Prefix{netip.MustParsePrefix("10.244.2.0/25")}
	if _, refused := projection.Project(in); len(refused) != 1 || refused[0].Peer != ids[2] {
		t.Errorf("a peer's pods that would take this host's own network away: %v", refused)
	}
	in.Host.Connected, in.Host.RouteNodeAddresses = nil, true
	in.Records[ids[1]] = &skeinv1.Record{NodeAddresses: []string{"10.244.2.0/26"}}
	if _, refused := projection.Project(in); len(refused) != 1 || refused[0].Peer != ids[1] {
		t.Errorf("a member that says the pods of another are its own network: %v", refused)
	}
}
