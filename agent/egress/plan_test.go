package egress

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
)

func TestPlanGateway(t *testing.T) {
	in := GatewayInput{
		Egress: &skeinv1.Egress{
			Namespace: "shop", Name: "nat", Destinations: []string{"0.0.0.0/0", "2001:db8:9::/48"}, FouSourcePortAuto: true,
			Endpoints: []*skeinv1.EgressAddress{{Ipv4: "10.9.0.0", Ipv6: "fd09::"}, {Ipv4: "10.9.0.1"}},
			Addresses: []*skeinv1.EgressAddress{{Ipv4: "192.0.2.7"}, {Ipv4: "192.0.2.8"}},
		},
		Number: 3, MTU: 1420, Mesh: []netip.Prefix{netip.MustParsePrefix("10.4.0.0/16"),
			netip.MustParsePrefix("10.9.0.0/16")}, Complete: true,
		Clients: []Client{
			{Key: "b", IPv4: address("10.9.1.2"), IPv6: address("fd09::12"), Slot: 1}, // its slot has no IPv6
			{Key: "a", IPv4: address("10.9.1.1"), IPv6: address("fd09::11")},
			{Key: "of a slot that is gone", IPv4: address("10.9.1.3"), Slot: 2},
			{Key: "only IPv6, where there is none", IPv6: address("fd09::13"), Slot: 1},
		},
	}
	got := PlanGateway(in)
	if got.Egress != "shop/nat" || got.Local4.String() != "169.254.101.3" ||
		got.Local6.String() != "fd73:6b65:696e:6567::3" || !got.SourcePortAuto || !got.Complete || got.MTU != 1420 {
		t.Errorf("%+v", got)
	}
	slots := []dataplane.GatewaySlot{
		{Endpoint4: address("10.9.0.0"), Endpoint6: address("fd09::"), Source4: address("192.0.2.7")},
		{Number: 1, Endpoint4: address("10.9.0.1"), Source4: address("192.0.2.8")},
	}
	if !slices.Equal(got.Slots, slots) {
		t.Errorf("slots %v", got.Slots)
	}
	clients := []dataplane.GatewayClient{{IPv4: address("10.9.1.1"), IPv6: address("fd09::11")},
		{IPv4: address("10.9.1.2"), Slot: 1}}
	if !reflect.DeepEqual(got.Clients, clients) {
		t.Errorf("clients %v", got.Clients)
	}
	for _, a := range []string{"10.4.0.1", "10.9.77.1", "127.0.0.1", "169.254.169.254", "224.0.0.1", "255.255.255.255",
		"fe80::1", "ff02::1", "::1"} {
		if !slices.ContainsFunc(got.Inside, func(p netip.Prefix) bool { return p.Contains(address(a)) }) {
			t.Errorf("packets for %s would go out", a)
		}
	}
	if len(got.Destinations) != 2 {
		t.Errorf("destinations %v", got.Destinations)
	}
}
