package clients

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/agent/egress"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/golden"
)

func addr(s string) netip.Addr  { return netip.MustParseAddr(s) }
func pfx(s string) netip.Prefix { return netip.MustParsePrefix(s) }

var gate1, gate2 = identity.ID{1}, identity.ID{2}

// world is an agreed state: internet/nat with two slots, dc/nat with one that has no owner, six/nat with IPv6 tunnels
// only.
func world() *Agreed {
	return &Agreed{
		Names:  map[identity.ID]string{gate1: "gate1", gate2: "gate2"},
		Inside: []netip.Prefix{pfx("10.4.0.0/16"), pfx("10.68.0.0/16"), pfx("fd10::/48")},
		Egresses: map[Ref]AgreedEgress{
			{Namespace: "internet", Name: "nat"}: {
				Destinations: []netip.Prefix{pfx("0.0.0.0/0"), pfx("::/0")}, Gateways: []identity.ID{gate1, gate2},
				Slots: []egress.SlotState{{IPv4: addr("10.68.0.1"), IPv6: addr("fd10::1"), Node: gate1},
					{IPv4: addr("10.68.0.2"), IPv6: addr("fd10::2"), Node: gate2}},
			},
			{Namespace: "dc", Name: "nat"}: {
				Destinations: []netip.Prefix{pfx("192.168.10.0/24")}, SourcePortAuto: true, Gateways: []identity.ID{gate1},
				Slots: []egress.SlotState{{IPv4: addr("10.68.0.3")}},
			},
			{Namespace: "six", Name: "nat"}: {
				Destinations: []netip.Prefix{pfx("0.0.0.0/0"), pfx("2001:db8::/32")}, Gateways: []identity.ID{gate2},
				Slots: []egress.SlotState{{IPv6: addr("fd10::4"), Node: gate2}},
			},
			{Namespace: "empty", Name: "nat"}: {Destinations: []netip.Prefix{pfx("0.0.0.0/0")}},
		},
	}
}

func specLines(s dataplane.ClientSpec) []string {
	out := []string{fmt.Sprintf("%s: %v %v by %s mtu %d host %v", s.Name, s.Addr4, s.Addr6, s.Uplink, s.MTU, s.Host)}
	for _, t := range s.Tunnels {
		out = append(out, fmt.Sprintf("  tunnel %s auto %v", t.Remote, t.SourcePortAuto))
	}
	for _, r := range s.Routes {
		out = append(out, fmt.Sprintf("  %s -> %v", r.Destination, r.Remote))
	}
	return out
}

func TestPlan(t *testing.T) {
	refs := func(names ...string) (out []Ref) {
		for _, n := range names {
			r, err := egress.ParseRef(n)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, r)
		}
		return out
	}
	var lines []string
	for _, c := range []Client{
		{Key: "default/web-0", NetNS: "/n/1", IPv4: addr("10.20.30.40"), IPv6: addr("fd20::40"), Uplink: "eth0",
			Wanted: refs("dc/nat", "internet/nat")},
		{Key: "default/web-1", NetNS: "/n/2", IPv4: addr("10.20.30.41"), Uplink: "eth0",
			Wanted: refs("internet/nat", "nowhere/nat")},
		{Key: "fd20::42", NetNS: "/n/3", IPv6: addr("fd20::42"), Uplink: "eth0", Wanted: refs("internet/nat", "dc/nat")},
		{Key: "default/web-3", NetNS: "/n/4", IPv4: addr("10.20.30.43"), IPv6: addr("fd20::43"), Uplink: "eth0",
			Wanted: refs("six/nat", "internet/nat")},
		{Key: "default/web-4", NetNS: "/n/5", IPv4: addr("10.20.30.44"), Uplink: "eth0",
			Wanted: refs("six/nat", "empty/nat")},
		{Key: "10.4.0.1", IPv4: addr("10.4.0.1"), Uplink: "skein0", MTU: 1420, Host: true, Wanted: refs("internet/nat")},
	} {
		spec, choices := Plan(c, world())
		lines = append(lines, specLines(spec)...)
		for _, ch := range choices {
			lines = append(lines, fmt.Sprintf("  = %s slot %d owner %q %s: %s", ch.Ref, ch.Slot, ch.OwnerName,
				ch.State, ch.Reason))
		}
	}
	golden.Lines(t, "plan", lines)
	spec, choices := Plan(Client{Key: "a/b", IPv4: addr("10.20.30.40"), Wanted: refs("internet/nat")}, nil)
	if len(spec.Routes) != 0 || choices[0].State != Waiting {
		t.Errorf("without a state: %+v, %+v", spec, choices)
	}
}

func TestLists(t *testing.T) {
	nat := Ref{Namespace: "internet", Name: "nat"}
	client := func(key, ipv4 string, wanted ...Ref) Client {
		return Client{Key: key, NetNS: "/n/" + ipv4, IPv4: addr(ipv4), Wanted: wanted}
	}
	got := Lists([]Client{
		client("b/b", "10.0.0.2", nat), client("a/a", "10.0.0.1", nat, Ref{Namespace: "nowhere", Name: "nat"}),
		client("b/b", "10.0.0.3", nat, Ref{Namespace: "six", Name: "nat"}),
	}, world())
	if len(got) != 1 || len(got[nat]) != 2 || got[nat][0].GetKey() != "a/a" || got[nat][1].GetIpv4() != "10.0.0.3" {
		t.Errorf("%v", got)
	}
	for _, e := range got[nat] {
		if e.GetSlot() != events.SlotFor(e.GetKey(), 2) {
			t.Errorf("%v is not on its slot", e)
		}
	}
	if len(Lists([]Client{client("a/a", "10.0.0.1", nat)}, nil)) != 0 {
		t.Error("lists without a state")
	}
}

// TestKeepFlows: former slots of a client stay recorded as long as they exist; its present slot is not recorded.
func TestKeepFlows(t *testing.T) {
	nat := Ref{Namespace: "internet", Name: "nat"}
	world := func(slots int) *Agreed {
		e := AgreedEgress{Destinations: []netip.Prefix{pfx("0.0.0.0/0")}}
		for i := range slots {
			at := egress.SlotState{IPv4: addr(fmt.Sprintf("10.68.0.%d", i+1)), Node: gate1}
			e.Slots = append(e.Slots, at)
		}
		return &Agreed{Egresses: map[Ref]AgreedEgress{nat: e}}
	}
	c := Client{Key: "default/web-0", IPv4: addr("10.20.30.40"), Wanted: []Ref{nat}}
	for i := 0; events.SlotFor(c.Key, 3) != 2; i++ { // it begins by slot 0, and three slots take it to 2
		c.Key = fmt.Sprintf("default/web-%d", i)
	}
	var choices []Choice
	step := func(a *Agreed) dataplane.ClientSpec {
		c.Flows = KeepFlows(c.Flows, choices, c, a)
		var spec dataplane.ClientSpec
		spec, choices = Plan(c, a)
		return spec
	}
	if s := step(world(1)); len(s.Flows) != 0 || len(s.Tunnels) != 1 {
		t.Fatalf("one slot: %+v", s)
	}
	three := world(3)
	for range 2 { // it does not matter how often the state is looked at
		s := step(three)
		if fmt.Sprint(choices[0].Slot, choices[0].Also) != "2 [0]" || len(s.Tunnels) != 2 || len(s.Flows) != 1 ||
			s.Flows[0].Slot != 0 {
			t.Fatalf("three slots: slot %d, also %v, %+v", choices[0].Slot, choices[0].Also, s)
		}
		if s.Routes[0].Remote != three.Egresses[nat].Slots[2].IPv4 ||
			s.Flows[0].Routes[0].Remote != three.Egresses[nat].Slots[0].IPv4 {
			t.Errorf("new flows are led to %s, those of slot 0 to %s", s.Routes[0].Remote, s.Flows[0].Routes[0].Remote)
		}
		if e := entry(c, choices[0]); fmt.Sprint(e.GetSlot(), e.GetAlso()) != "2 [0]" {
			t.Errorf("gateways are told %v", e)
		}
	}
	lost := world(3)
	lost.Egresses[nat].Slots[0] = egress.SlotState{IPv4: addr("10.68.0.1")}
	if s := step(lost); len(s.Flows) != 0 || len(c.Flows[nat]) != 1 {
		t.Errorf("slot 0 has no owner: %+v, kept %v", s.Flows, c.Flows)
	}
	if step(three); fmt.Sprint(choices[0].Also) != "[0]" {
		t.Errorf("slot 0 has an owner again: also %v", choices[0].Also)
	}
	if s := step(world(1)); len(s.Flows) != 0 || len(c.Flows) != 0 {
		t.Errorf("one slot again: %+v, kept %v", s, c.Flows)
	}
}

// TestFlowsOfOneEgressLeaveOthersAlone: routes for flows by a former slot of one egress leave the routes of other
// egresses unchanged.
func TestFlowsOfOneEgressLeaveOthersAlone(t *testing.T) {
	nat, dc := Ref{Namespace: "internet", Name: "nat"}, Ref{Namespace: "dc", Name: "nat"}
	c := Client{Key: "default/web-0", IPv4: addr("10.20.30.40"), Wanted: []Ref{dc, nat}}
	own := events.SlotFor(c.Key, 2)
	c.Flows = map[Ref][]uint32{nat: {1 - own}}
	spec, _ := Plan(c, world())
	if len(spec.Flows) != 1 || spec.Flows[0].Slot != int(1-own) || len(spec.Flows[0].Routes) != 2 {
		t.Fatalf("%+v", spec.Flows)
	}
	slots := world().Egresses[nat].Slots
	for _, r := range spec.Flows[0].Routes {
		want := slots[1-own].IPv4
		if r.Destination == pfx("192.168.10.0/24") {
			want = addr("10.68.0.3")
		}
		if r.Remote != want {
			t.Errorf("%s leads to %s, want %s", r.Destination, r.Remote, want)
		}
	}
}

// TestSpreadFlows: new flows of one client take all slots that have an owner and do not drain, and gateways are
// informed of these slots.
func TestSpreadFlows(t *testing.T) {
	nat := Ref{Namespace: "internet", Name: "nat"}
	e := AgreedEgress{Destinations: []netip.Prefix{pfx("0.0.0.0/0")}, SpreadFlows: true, Draining: 1}
	for i := range 4 {
		e.Slots = append(e.Slots, egress.SlotState{IPv4: addr(fmt.Sprintf("10.68.0.%d", i+1)), Node: gate1})
	}
	c := Client{Key: "default/web-0", IPv4: addr("10.20.30.40"), Wanted: []Ref{nat}}
	own := events.SlotFor(c.Key, 3)
	without := (own + 1) % 3
	e.Slots[without].Node = identity.ID{}
	third := 3 - own - without
	c.Flows = map[Ref][]uint32{nat: {3}} // it has flows by the slot that drains
	spec, choices := Plan(c, &Agreed{Egresses: map[Ref]AgreedEgress{nat: e}})
	want := fmt.Sprint([]uint32{min(own, third), max(own, third)})
	if fmt.Sprint(choices[0].Also) != fmt.Sprint([]uint32{third, 3}) || fmt.Sprint(spec.Tunnels[0].Spread) != want {
		t.Errorf("own slot %d, none at %d: also %v, new flows take %v, want %s", own, without, choices[0].Also,
			spec.Tunnels[0].Spread, want)
	}
	if len(spec.Tunnels) != 3 || len(spec.Flows) != 2 || spec.Tunnels[1].Spread != nil {
		t.Errorf("%+v", spec)
	}
}
