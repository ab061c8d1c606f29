package addresses

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/skeinmesh/skein/agent/api/apitest"
	"github.com/skeinmesh/skein/agent/ipam"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/events"
)

func podEntry(at int64, what, pod string) *skeinv1.JournalEntry {
	return &skeinv1.JournalEntry{Time: at, Body: &skeinv1.JournalEntry_PodAddress{PodAddress: &skeinv1.PodAddress{
		What: what, Ipv4: "10.64.0.5", Namespace: "web", Pod: pod, ContainerId: "c-" + pod, Interface: "eth0",
	}}}
}

// TestHolders: one address went from pod to pod; journal and what is held now are put together without a pod being
// there twice.
func TestHolders(t *testing.T) {
	entries := []*skeinv1.JournalEntry{
		podEntry(10, "given", "a"), podEntry(20, "taken-back", "a"), podEntry(25, "taken-back", "a"),
		podEntry(30, "given", "b"), podEntry(40, "leaked", "b"), podEntry(50, "given", "c"),
	}
	lease := func(pod string, since, until int64) ipam.Lease {
		l := ipam.Lease{Since: time.Unix(0, since), Attachment: podnet.Attachment{
			Key: podnet.Key{ContainerID: "c-" + pod, Interface: "eth0"}, Namespace: "web", Pod: pod,
			IPv4: netip.MustParseAddr("10.64.0.5")}}
		if until != 0 {
			l.Until = time.Unix(0, until)
		}
		return l
	}
	want := func(pod string, since, until int64, state string) *skeinv1.Holder {
		return &skeinv1.Holder{Namespace: "web", Pod: pod, ContainerId: "c-" + pod, Interface: "eth0", Ipv4: "10.64.0.5",
			Since: since, Until: until, State: state}
	}
	got := holders(entries, []ipam.Lease{lease("b", 30, 40), lease("c", 50, 0)})
	if d := cmp.Diff([]*skeinv1.Holder{want("a", 10, 20, "resting"), want("b", 30, 40, "resting"),
		want("c", 50, 0, "used")}, got, protocmp.Transform()); d != "" {
		t.Error(d)
	}
	// The journal is bounded: what is held is told without it.
	got = holders(nil, []ipam.Lease{lease("c", 50, 0)})
	if d := cmp.Diff([]*skeinv1.Holder{want("c", 50, 0, "used")}, got, protocmp.Transform()); d != "" {
		t.Error(d)
	}
}

// TestWhoOfPodCIDR: an address that another CNI gives is of the pods of a node, by the event that said so last.
func TestWhoOfPodCIDR(t *testing.T) {
	s := events.NewState()
	key := []byte(strings.Repeat("k", 32))
	for i, c := range []*skeinv1.Command{
		{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
			ClusterId: "000102030405060708090a0b0c0d0e0f",
			FirstNode: &skeinv1.NewNode{Name: "dc1", IdentityKey: key, WireguardKey: key, MinSchema: events.SchemaMin,
				MaxSchema: events.SchemaMax},
			Settings: &skeinv1.Settings{PodRanges: []string{"10.244.0.0/16"}}}}},
		nil,
	} {
		if c == nil {
			c = &skeinv1.Command{Body: &skeinv1.Command_SetPodCidrs{SetPodCidrs: &skeinv1.SetPodCidrs{
				NodeId:   s.Nodes()[0].GetId(),
				PodCidrs: &skeinv1.PodCidrs{KubernetesNode: "node1", Cidrs: []string{"10.244.1.0/24"}}}}}
		}
		c.Time, c.Entropy = int64(i+1), make([]byte, 64)
		evs, _, err := events.Decide(s, c)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range evs {
			if err := s.Fold(e); err != nil {
				t.Fatal(err)
			}
			w := who(s, netip.MustParseAddr("10.244.1.7"))
			name, line := concerns(s, e, w, 0)
			if set := e.GetPodCidrsSet() != nil; (name == "pod_cidrs_set") != set || set &&
				line != "10.244.1.0/24 became the pod CIDR of node dc1" {
				t.Errorf("%v is told as %q %q", e, name, line)
			}
		}
	}
	w := who(s, netip.MustParseAddr("10.244.1.7"))
	if w.GetKind() != "pod-cidr" || w.GetNode() != "dc1" || !strings.Contains(w.GetSays(), "10.244.1.0/24, the pod CIDR "+
		"of dc1 (Kubernetes Node node1)") {
		t.Errorf("it is %v", w)
	}
	if w := who(s, netip.MustParseAddr("10.244.2.7")); w.GetKind() != "unknown" {
		t.Errorf("an address beside it is %v", w)
	}
}

// TestWhoKnowsEgresses: an address of an egress belongs to the owner of its slot.
func TestWhoKnowsEgresses(t *testing.T) {
	assigned := func(s *skeinv1.EgressSlot) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_SlotAssigned{SlotAssigned: &skeinv1.SlotAssigned{Slot: s}}}
	}
	st := apitest.WithEgresses(t, func([]string) []*skeinv1.Event { return []*skeinv1.Event{apitest.NatDefined()} })
	nobody := who(st, netip.MustParseAddr("10.64.0.32"))
	st = apitest.WithEgresses(t, func(ids []string) []*skeinv1.Event {
		return []*skeinv1.Event{apitest.NatDefined(),
			assigned(&skeinv1.EgressSlot{NodeId: ids[0], Reason: "it had no owner"}),
			assigned(&skeinv1.EgressSlot{Number: 1, NodeId: ids[0], Reason: "it had no owner"}),
			{Body: &skeinv1.Event_SlotMoved{SlotMoved: &skeinv1.SlotMoved{Slot: &skeinv1.EgressSlot{NodeId: ids[1],
				FromNodeId: ids[0], Reason: "dc1 is being drained", Planned: true}}}},
			{Body: &skeinv1.Event_SlotReleased{SlotReleased: &skeinv1.SlotReleased{Slot: &skeinv1.EgressSlot{Number: 1,
				FromNodeId: ids[0], Reason: "dc1 was revoked"}}}}}
	})
	at := func(s string) *skeinv1.WhoResponse { return who(st, netip.MustParseAddr(s)) }
	for _, c := range []struct {
		r                       *skeinv1.WhoResponse
		kind, says, node, event string
	}{
		{nobody, "egress", "Tunnels lead to it: it is the endpoint of slot 0 of egress internet/nat, which nobody owns", "",
			"egress_defined"},
		{at("10.64.0.32"), "egress", "Tunnels lead to it: it is the endpoint of slot 0 of egress internet/nat, which node " +
			"gw1 owns", "gw1", "slot_moved"},
		{at("192.0.2.7"), "egress", "Packets leave with it: it is the source address of slot 0 of egress internet/nat, " +
			"which node gw1 owns", "gw1", "slot_moved"},
		{at("192.0.2.8"), "egress", "Packets leave with it: it is the source address of slot 1 of egress internet/nat, " +
			"which nobody owns", "", "slot_released"},
		{at("10.64.0.33"), "reserved", "It lies in block 10.64.0.32/27 of pool default, which is reserved: egress " +
			"internet/nat", "", "block_reserved"},
	} {
		if c.r.GetKind() != c.kind || c.r.GetSays() != c.says || c.r.GetNode() != c.node || c.r.GetEvent() != c.event {
			t.Errorf("%s is %s: %s; node %q, event %s", c.r.GetAddress(), c.r.GetKind(), c.r.GetSays(),
				c.r.GetNode(), c.r.GetEvent())
		}
	}
	if r := at("192.0.2.7"); r.GetEventIndex() != st.Slot("internet", "nat", 0).GetEpoch() {
		t.Errorf("by event %d, not by that which gave the slot", r.GetEventIndex())
	}
	use, _ := st.EgressAddressAt(netip.MustParseAddr("10.64.0.32"))
	moved := &skeinv1.Event{Body: &skeinv1.Event_SlotMoved{
		SlotMoved: &skeinv1.SlotMoved{Slot: &skeinv1.EgressSlot{Namespace: "internet", Name: "nat", NodeId: "b",
			FromNodeId: "a", Reason: "a is being drained"}}}}
	if name, line := concernsEgress(st, moved, use); name != "slot_moved" ||
		line != "slot 0 of egress internet/nat moved from node a to b: a is being drained" {
		t.Errorf("%s: %s", name, line)
	}
	moved.GetSlotMoved().Slot.Number = 1
	if name, _ := concernsEgress(st, moved, use); name != "" {
		t.Error("another slot's event concerns it")
	}
}

// An address of a plain peer, or behind one, is its own, and the log says since when.
func TestWhoOfPlainPeer(t *testing.T) {
	s := apitest.WithPlainPeer(t)
	p := s.PlainPeer("office")
	for at, want := range map[string]string{
		p.GetIpv4(): "It is the address of plain peer office", p.GetIpv6(): "It is the address of plain peer office",
		"192.168.8.7": "It lies in 192.168.8.0/24, a network behind plain peer office",
	} {
		w := who(s, netip.MustParseAddr(at))
		if w.GetKind() != "plain-peer" || !strings.HasPrefix(w.GetSays(), want) ||
			w.GetEventIndex() != p.GetCreatedIndex() || w.GetEvent() != "plain_peer_set" {
			t.Errorf("%s: %v", at, w)
		}
		set := &skeinv1.Event{Index: p.GetCreatedIndex(),
			Body: &skeinv1.Event_PlainPeerSet{PlainPeerSet: &skeinv1.PlainPeerSet{PlainPeer: p}}}
		if name, line := concerns(s, set, w, 0); name != "plain_peer_set" || line != "given to plain peer office" {
			t.Errorf("%s: its history says %q %q", at, name, line)
		}
	}
	if w := who(s, netip.MustParseAddr("192.168.9.7")); w.GetKind() == "plain-peer" {
		t.Errorf("another address: %v", w)
	}
}
