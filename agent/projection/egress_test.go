package projection_test

import (
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// withEgress defines an egress of three slots: the first is this node's, the second a peer's, the third nobody's.
func withEgress(t *testing.T, s *events.State, ids []identity.ID) {
	t.Helper()
	do := func(c *skeinv1.Command) {
		t.Helper()
		c.Time = 3e18
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
	for _, id := range ids {
		do(&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: id.String(),
			Labels: map[string]string{"egress": "yes"}, SetLabels: true}}})
	}
	do(&skeinv1.Command{Body: &skeinv1.Command_DefineEgress{DefineEgress: &skeinv1.DefineEgress{Egress: &skeinv1.Egress{
		Namespace: "shop", Name: "nat", Destinations: []string{"0.0.0.0/0", "::/0"},
		Gateways: map[string]string{"egress": "yes"}, Replicas: 3, Pool: "default",
	}}}})
	for i := range uint32(2) {
		do(&skeinv1.Command{Body: &skeinv1.Command_AssignSlot{AssignSlot: &skeinv1.AssignSlot{Namespace: "shop", Name: "nat",
			Number: i, NodeId: ids[i].String(), Reason: "test"}}})
	}
}

// TestEgressGolden: a slot's endpoint leads to its owner; one without an owner leads nowhere, and not out of the mesh.
func TestEgressGolden(t *testing.T) {
	s, ids := mesh(t, 3)
	withBlocks(t, s, ids)
	withEgress(t, s, ids)
	in := input(s, ids)
	in.Endpoints[ids[1]] = projection.Endpoint{Addr: netip.MustParseAddrPort("198.18.0.1:51820"), Proven: true, MTU: 1380}
	in.Gateway, in.Exported = true, []netip.Addr{netip.MustParseAddr("192.0.2.7")}
	spec, refused := projection.Project(in)
	if len(refused) > 0 {
		t.Fatal(refused)
	}
	checkGolden(t, s, spec, "testdata/egress.golden")
}

// TestAMovedSlotHasAGracePeriod: a slot that has just moved by plan is led to its former owner by third nodes, until
// the new one knows.
func TestAMovedSlotHasAGracePeriod(t *testing.T) {
	s, ids := mesh(t, 3)
	withBlocks(t, s, ids)
	withEgress(t, s, ids)
	endpoint := netip.MustParsePrefix("10.64.0.193/32") // of slot 1, which is ids[1]'s
	slot := s.Slot("shop", "nat", 1)
	evs, _, err := events.Decide(s,
		&skeinv1.Command{Time: 4e18, Body: &skeinv1.Command_AssignSlot{AssignSlot: &skeinv1.AssignSlot{
			Namespace: "shop", Name: "nat", Number: 1, NodeId: ids[2].String(), Epoch: slot.GetEpoch(), Reason: "test",
			Planned: true}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range evs {
		if err := s.Fold(e); err != nil {
			t.Fatal(err)
		}
	}
	var last projection.Last // follows that, too
	for _, c := range []struct {
		inGrace bool
		want    identity.ID
	}{{true, ids[1]}, {false, ids[2]}} {
		in := input(s, ids)
		in.InGrace = map[uint64]bool{s.Slot("shop", "nat", 1).GetEpoch(): c.inGrace}
		spec, _, _ := last.Project(in)
		for key, p := range spec.WireGuard.Peers {
			leads := false
			for _, a := range p.AllowedIPs {
				leads = leads || a == endpoint
			}
			if owner := string(key[:]) == string(s.Node(c.want).GetWireguardKey()); leads != owner {
				t.Errorf("in its grace period %t: AllowedIPs of a peer %v, which is to have the slot: %t", c.inGrace,
					p.AllowedIPs, owner)
			}
		}
	}
}
