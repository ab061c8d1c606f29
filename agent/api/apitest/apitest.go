// Package apitest makes agreed states and reports for the tests of the API's services.
package apitest

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// IDs of nodes that are in no state.
const (
	GW1  = "1111111111111111"
	GW2  = "2222222222222222"
	Host = "3333333333333333"
	Edge = "4444444444444444"
)

// State is the agreed state of a cluster with members dc1 and gw1, whose IDs come along.
func State(t testing.TB) (st *events.State, ids []string) {
	t.Helper()
	return Members(t, "dc1", "gw1")
}

// Members is the agreed state of a cluster with members of these names, whose IDs come along. Their first letters
// differ from each other.
func Members(t testing.TB, names ...string) (st *events.State, ids []string) {
	t.Helper()
	st = events.NewState()
	node := func(name string) *skeinv1.NewNode {
		k := []byte(strings.Repeat(name[:1], 32))
		return &skeinv1.NewNode{Name: name, IdentityKey: k, WireguardKey: k, MinSchema: events.SchemaMin,
			MaxSchema: events.SchemaMax}
	}
	const cluster, token = "000102030405060708090a0b0c0d0e0f", "0f1e2d3c4b5a6978"
	secret := bytes.Repeat([]byte{7}, 32)
	Decide(t, st, &skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
		ClusterId: cluster, OverlayIpv4: "10.4.0.0/16", FirstNode: node(names[0])}}})
	Decide(t, st, &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{Id: token,
		SecretHash: secret, LifetimeNanos: int64(time.Hour), Uses: uint32(len(names))}}})
	for _, name := range names[1:] {
		Decide(t, st, &skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{Node: node(name),
			TokenId: token, TokenSecretHash: secret, ClusterId: cluster}}})
	}
	ids = make([]string, len(names))
	for _, n := range st.Nodes() {
		ids[slices.Index(names, n.GetName())] = n.GetId()
	}
	return st, ids
}

// Decide folds what a command comes to.
func Decide(t testing.TB, st *events.State, c *skeinv1.Command) {
	t.Helper()
	c.Time = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC).UnixNano()
	c.Entropy = bytes.Repeat([]byte{byte(st.Index() + 1)}, 64)
	all, _, err := events.Decide(st, c)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if err := st.Fold(e); err != nil {
			t.Fatal(err)
		}
	}
}

// WithEgresses is State with pools and blocks for NatEgress, and what more makes of the IDs of dc1 and gw1. Index, time
// and what follows from them are put in.
func WithEgresses(t testing.TB, more func(ids []string) []*skeinv1.Event) *events.State {
	t.Helper()
	st, ids := State(t)
	block := func(pool string, number uint64, prefix string) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_BlockReserved{BlockReserved: &skeinv1.BlockReserved{
			Block: &skeinv1.Block{Pool: pool, Number: number, Ipv4: prefix, Reason: "egress internet/nat"}}}}
	}
	pool := func(name, subnet string, bits uint32) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_PoolCreated{PoolCreated: &skeinv1.PoolCreated{
			Pool: &skeinv1.Pool{Name: name, BlockSizeBits: bits, Subnets: []*skeinv1.PoolSubnet{{Ipv4: subnet}}}}}}
	}
	all := []*skeinv1.Event{pool("default", "10.64.0.0/16", 5), pool("public", "192.0.2.0/28", 0),
		block("default", 1, "10.64.0.32/27"), block("default", 2, "10.64.0.64/27"),
		block("public", 7, "192.0.2.7/32"), block("public", 8, "192.0.2.8/32")}
	for _, e := range append(all, more(ids)...) {
		e.Index, e.Time = st.Index()+1, st.Time()
		if d := e.GetEgressDefined().GetEgress(); d != nil {
			d.CreatedAt, d.CreatedIndex, d.ChangedIndex = e.Time, e.Index, e.Index
		}
		for _, s := range []*skeinv1.EgressSlot{e.GetSlotAssigned().GetSlot(), e.GetSlotMoved().GetSlot(),
			e.GetSlotReleased().GetSlot()} {
			if s != nil {
				s.Namespace, s.Name, s.Epoch, s.Since = "internet", "nat", e.Index, e.Time
			}
		}
		for _, b := range []*skeinv1.Block{e.GetBlockReserved().GetBlock(), e.GetBlockAllocated().GetBlock()} {
			if b != nil {
				b.Index, b.Since = e.Index, e.Time
			}
		}
		if p := e.GetPoolCreated().GetPool(); p != nil {
			p.CreatedAt, p.CreatedIndex = e.Time, e.Index
		}
		if err := st.Fold(e); err != nil {
			t.Fatal(err)
		}
	}
	return st
}

// WithTranslations is State with one network in two sites: dc1's and the default one.
func WithTranslations(t testing.TB) (st *events.State, ids []string) {
	t.Helper()
	st, ids = State(t)
	for _, v := range []*skeinv1.SiteTranslation{{Site: "home", Prefix: "192.168.1.0/24", As: "10.201.1.0/24", Since: 5},
		{Prefix: "192.168.1.0/24", As: "10.202.1.0/24", Since: 6}} {
		v.Index = st.Index() + 1
		e := &skeinv1.Event{Index: st.Index() + 1, Schema: events.SchemaMax, Time: v.GetSince(),
			Body: &skeinv1.Event_SiteTranslationSet{SiteTranslationSet: &skeinv1.SiteTranslationSet{Translation: v}}}
		if err := st.Fold(e); err != nil {
			t.Fatal(err)
		}
	}
	if len(st.Translations()) != 2 {
		t.Fatal("the translations were not folded")
	}
	return st, ids
}

// WithPlainPeer is State with the plain peer office, which dc1 may carry.
func WithPlainPeer(t testing.TB) *events.State {
	t.Helper()
	st, ids := State(t)
	Decide(t, st, &skeinv1.Command{Body: &skeinv1.Command_SetPlainPeer{SetPlainPeer: &skeinv1.SetPlainPeer{
		PlainPeer: &skeinv1.PlainPeer{Name: "office", PublicKey: bytes.Repeat([]byte("p"), 32),
			CarrierKey: bytes.Repeat([]byte("c"), 32), AllowedIps: []string{"192.168.8.0/24"},
			Carriers: []*skeinv1.PlainCarrier{{NodeId: ids[0], Sealed: []byte("sealed")}}}}}})
	return st
}

// NatEgress is an egress of two slots.
func NatEgress() *skeinv1.Egress {
	return &skeinv1.Egress{
		Namespace: "internet", Name: "nat", Destinations: []string{"0.0.0.0/0", "192.168.10.0/24", "::/0"},
		Gateways: map[string]string{"egress": "yes"}, Replicas: 2,
		Addresses: []*skeinv1.EgressAddress{{Ipv4: "192.0.2.7"}, {Ipv4: "192.0.2.8"}}, Pool: "default",
		Endpoints: []*skeinv1.EgressAddress{{Ipv4: "10.64.0.32"}, {Ipv4: "10.64.0.64", Ipv6: "fd00:64::d"}},
		CreatedAt: 1795269600e9, CreatedIndex: 12, ChangedIndex: 30,
	}
}

// NatDefined is the event that defines it, with endpoints of IPv4 alone.
func NatDefined() *skeinv1.Event {
	e := NatEgress()
	e.Endpoints[1].Ipv6 = ""
	return &skeinv1.Event{Body: &skeinv1.Event_EgressDefined{EgressDefined: &skeinv1.EgressDefined{Egress: e}}}
}

// NatReports are what GW1, GW2 and Host tell of it. Clients are those of KeysOf(2).
func NatReports() map[string]*skeinv1.EgressReportResponse {
	nat := func(s *skeinv1.EgressOfClient) *skeinv1.EgressOfClient {
		s.Namespace, s.Name = "internet", "nat"
		return s
	}
	keys := KeysOf(2)
	return map[string]*skeinv1.EgressReportResponse{
		GW2: {Gateways: []*skeinv1.EgressGateway{{Namespace: "internet", Name: "nat", NodeId: GW2,
			State: &skeinv1.GatewayState{Ready: true, Health: skeinv1.GatewayState_HEALTH_GOOD}, Driver: "kernel",
			Clients: 2, Conntrack: 17, ConntrackMax: 65536, DroppedStrangers: 3, DroppedLease: 1,
			Slots: []*skeinv1.EgressSlotReport{{Number: 0, Epoch: 31, Forwarding: true, PacketsOut: 1200, PacketsIn: 3400,
				Clients: 1, TakenOver: 17, FailoverNanos: 130e6, Announced: "eth1"}}}}},
		GW1: {Gateways: []*skeinv1.EgressGateway{{Namespace: "internet", Name: "nat", NodeId: GW1, Driver: "userspace",
			State: &skeinv1.GatewayState{Ready: true, Health: skeinv1.GatewayState_HEALTH_BAD,
				Reason: "icmp:198.51.100.1 has not answered for 3s"},
			Slots: []*skeinv1.EgressSlotReport{{Number: 1, Epoch: 40}}}}},
		Host: {Clients: []*skeinv1.EgressClientReport{
			{Key: keys[0], Ipv4: "10.64.1.5", Ipv6: "fd00:64::105",
				Egresses: []*skeinv1.EgressOfClient{{Namespace: "default", Name: "lab", State: "ready"},
					nat(&skeinv1.EgressOfClient{Slot: 0, Owner: "gw2", State: "ready"})}},
			{Key: keys[1], Ipv4: "10.64.1.6",
				Egresses: []*skeinv1.EgressOfClient{nat(&skeinv1.EgressOfClient{Slot: 1, State: "waiting",
					Reason: "gw1 has no lease"})}},
			{Key: "web/other", Ipv4: "10.64.1.7",
				Egresses: []*skeinv1.EgressOfClient{{Namespace: "default", Name: "lab", State: "ready"}}},
		}},
	}
}

// KeysOf is a client for each slot of an egress, by the slot's number.
func KeysOf(replicas uint32) []string {
	out := make([]string, replicas)
	for c, left := 'a', replicas; left > 0; c++ {
		key := "web/" + string(c)
		if n := events.SlotFor(key, replicas); out[n] == "" {
			out[n], left = key, left-1
		}
	}
	return out
}
