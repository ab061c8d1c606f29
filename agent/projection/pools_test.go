package projection_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
)

// decide folds what commands are decided to be.
func decide(t *testing.T, s *events.State, commands ...*skeinv1.Command) {
	t.Helper()
	for _, c := range commands {
		c.Time, c.Entropy = 4e18, make([]byte, 64)
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
}

// way tells what table 116 does with an address: its longest prefix decides, and of two of the same length what leads
// somewhere.
func way(p dataplane.Pods, to string) string {
	addr := netip.MustParseAddr(to)
	what, bits := "passed on: no route", -1
	look := func(name string, ps ...netip.Prefix) {
		for _, q := range ps {
			if q.Contains(addr) && q.Bits() > bits {
				what, bits = name, q.Bits()
			}
		}
	}
	for _, n := range p.Remote {
		look("tunnel", n.Prefix)
	}
	look("own block", p.Blocks...)
	look("refused", p.Refused...)
	look("passed on", p.Elsewhere...)
	look("refused", p.Pools...)
	return what
}

// TestPoolAddressesOfNobodyAreRefused: an address of a pool that no node has, any more or yet, never leaves in
// plaintext.
func TestPoolAddressesOfNobodyAreRefused(t *testing.T) {
	s, ids := mesh(t, 3)
	decide(t, s, &skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{
		Name: "default", BlockSizeBits: 5, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/16",
			Ipv6: "fd64::/112"}}}}}})
	for _, id := range ids[:2] {
		decide(t, s, &skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{
			NodeId: id.String(), Pool: "default", Total: 1}}})
	}
	ways := func(want string, addrs ...string) {
		t.Helper()
		spec, _ := projection.Project(input(s, ids))
		for _, a := range addrs {
			if got := way(spec.Pods, a); got != want {
				t.Errorf("%s: %s, want %s", a, got, want)
			}
		}
	}
	ways("own block", "10.64.0.1", "fd64::1")
	ways("tunnel", "10.64.0.40", "fd64::28")
	ways("refused", "10.64.99.1", "fd64::9999")
	decide(t, s, &skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{
		NodeId: ids[1].String()}}})
	ways("refused", "10.64.0.40", "fd64::28")
	ways("own block", "10.64.0.1", "fd64::1")
}

// TestWhatIsNotTheMeshsIsPassedOn: blocks reserved for other software, networks on the host's links and addresses that
// egresses send from keep their way, static addresses and endpoints of egresses in blocks of their own are refused
// while nobody has them.
func TestWhatIsNotTheMeshsIsPassedOn(t *testing.T) {
	s, ids := mesh(t, 3)
	withBlocks(t, s, ids)
	decide(t, s,
		&skeinv1.Command{Body: &skeinv1.Command_ReserveBlock{ReserveBlock: &skeinv1.ReserveBlock{Pool: "default",
			Prefix: "10.64.2.0/27", Reason: "as Coil did, for node9"}}},
		&skeinv1.Command{Body: &skeinv1.Command_ReserveAddress{ReserveAddress: &skeinv1.ReserveAddress{Pool: "default",
			Address: "10.64.3.9", Namespace: "db", Pod: "pg-1"}}},
		&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{Name: "public",
			Subnets: []*skeinv1.PoolSubnet{{Ipv4: "192.0.2.0/28"}}}}}},
		&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{Name: "lan",
			Subnets: []*skeinv1.PoolSubnet{{Ipv4: "198.51.100.64/28"}}}}}},
		&skeinv1.Command{Body: &skeinv1.Command_DefineEgress{DefineEgress: &skeinv1.DefineEgress{Egress: &skeinv1.Egress{
			Namespace: "shop", Name: "nat", Destinations: []string{"0.0.0.0/0"},
			Gateways: map[string]string{"egress": "yes"}, Replicas: 1, Pool: "default",
			Addresses: []*skeinv1.EgressAddress{{Ipv4: "192.0.2.7"}}}}}})
	in := input(s, ids)
	in.Host.Connected = []netip.Prefix{netip.MustParsePrefix("10.64.3.64/27"), netip.MustParsePrefix("198.51.100.0/24"),
		netip.MustParsePrefix("203.0.113.0/24")}
	spec, _ := projection.Project(in)
	for _, c := range [][2]string{
		{"10.64.2.1", "passed on"}, {"fd01::201", "passed on"}, {"10.64.3.70", "passed on"}, {"192.0.2.7", "passed on"},
		{"10.64.2.33", "refused"}, {"10.64.3.9", "refused"}, {"192.0.2.8", "refused"}, {"fd01::3ff", "refused"},
		{"10.64.3.7", "tunnel"}, {"10.64.0.33", "tunnel"}, {"10.64.0.1", "own block"},
		{"198.51.100.70", "passed on: no route"}, {"203.0.113.1", "passed on: no route"},
		{"10.4.0.2", "passed on: no route"},
	} {
		if got := way(spec.Pods, c[0]); got != c[1] {
			t.Errorf("%s: %s, want %s", c[0], got, c[1])
		}
	}
	if p := netip.MustParsePrefix("203.0.113.0/24"); slices.Contains(spec.Pods.Elsewhere, p) {
		t.Errorf("%s is in no pool and needs no route", p)
	}
	checkGolden(t, s, spec, "testdata/pools.golden")
}

// TestAStaticAddressInAReservedBlockIsRefused: the block that a user has reserved is passed on, and the address in it
// that is the mesh's is not.
func TestAStaticAddressInAReservedBlockIsRefused(t *testing.T) {
	s, ids := mesh(t, 2)
	withBlocks(t, s, ids)
	decide(t, s,
		&skeinv1.Command{Body: &skeinv1.Command_ReserveBlock{ReserveBlock: &skeinv1.ReserveBlock{Pool: "default",
			Prefix: "10.64.2.0/27", Reason: "mine"}}},
		&skeinv1.Command{Body: &skeinv1.Command_ReserveAddress{ReserveAddress: &skeinv1.ReserveAddress{Pool: "default",
			Address: "10.64.2.9", Namespace: "db", Pod: "pg-1"}}})
	spec, _ := projection.Project(input(s, ids))
	for a, want := range map[string]string{"10.64.2.8": "passed on", "10.64.2.9": "refused", "fd01::209": "refused"} {
		if got := way(spec.Pods, a); got != want {
			t.Errorf("%s: %s, want %s", a, got, want)
		}
	}
}
