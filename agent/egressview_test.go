package agent

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// TestObstacles: what is said of a node agrees with what the log decides by.
func TestObstacles(t *testing.T) {
	e := &skeinv1.Egress{Gateways: map[string]string{"egress": "yes", "zone": "a"}}
	drained := labelled(idGW1, "drained", "egress=yes", "zone=a")
	drained.node.Draining = true
	relay := labelled(idGW1, "relay", "egress=yes", "zone=a")
	relay.record.Role = roleRelay
	for _, c := range []struct {
		n    egressNode
		want string
	}{
		{labelled(idGW1, "good", "egress=yes", "zone=a", "more=1"), ""},
		{labelled(idGW1, "bare"), "it lacks the label egress, it lacks the label zone"},
		{labelled(idGW1, "other", "egress=yes", "zone=b"), "its label zone is b, not a"},
		{labelled(idGW1, "empty", "egress=yes", "zone="), "its label zone is , not a"},
		{drained, "it is being drained"},
		{relay, "it only relays"},
	} {
		why, _ := obstacles(e, c.n)
		if have := strings.Join(why, ", "); have != c.want {
			t.Errorf("%s: %q, want %q", c.n.name(), have, c.want)
		}
		if able := events.Eligible(e, c.n.node); able != (c.want == "") && c.n.record.GetRole() == "" {
			t.Errorf("%s: the log says %v", c.n.name(), able)
		}
	}
	if why, _ := obstacles(&skeinv1.Egress{}, labelled(idGW1, "any", "a=b")); !slices.Equal(why,
		[]string{"the egress asks for no label"}) {
		t.Errorf("an egress without labels: %q", why)
	}
}

func TestEgressWarnings(t *testing.T) {
	e := &skeinv1.Egress{Gateways: map[string]string{"egress": "yes"}, Replicas: 2}
	gw1, gw2, host := labelled(idGW1, "gw1", "egress=yes"), labelled(idGW2, "gw2", "egress=yes"), labelled(idHost, "host")
	edge := labelled(idEdge, "edge", "egress=no")
	dead := func(n egressNode) egressNode { n.alive = false; return n }
	for _, c := range []struct {
		name  string
		nodes []egressNode
		want  string
	}{
		{"enough", []egressNode{gw1, gw2, host}, ""},
		{"none", nil, "no node is eligible: a gateway needs egress=yes; until there is one, packets for these destinations " +
			"find no way out"},
		{"none with the label", []egressNode{edge, host}, "no node is eligible: a gateway needs egress=yes, and the " +
			"nearest are edge (its label egress is no, not yes), host (it lacks the label egress); " +
			"until there is one, packets for these destinations find no way out"},
		{"too few", []egressNode{gw1, host}, "1 gateway for 2 slots (gw1): some get more than one, and fail with all of " +
			"theirs; label more nodes, or have fewer replicas"},
		{"one is away", []egressNode{gw1, dead(gw2)}, "1 gateway for 2 slots (gw1): some get more than one, and fail with " +
			"all of theirs; label more nodes, or have fewer replicas"},
		{"all are away", []egressNode{dead(gw1), dead(gw2)}, "none of the eligible nodes is alive: gw1, gw2"},
	} {
		if have := strings.Join(egressWarnings(e, c.nodes), "\n"); have != c.want {
			t.Errorf("%s: %q\nwant %q", c.name, have, c.want)
		}
	}
	var many []egressNode
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		many = append(many, labelled(idHost, name, "zone=1"))
	}
	if have := nearest(&skeinv1.Egress{Gateways: map[string]string{"egress": "yes", "zone": "1"}},
		append(many, host)); len(have) != mostNear || have[0] != "a (it lacks the label egress)" {
		t.Errorf("nearest: %q", have)
	}
}

// TestCheckEgress: what the log cannot know, since members say it themselves.
func TestCheckEgress(t *testing.T) {
	dc1 := labelled(idGW1, "dc1")
	dc1.record = &skeinv1.Record{Candidates: []*skeinv1.Candidate{{Address: "198.18.1.11:51820"},
		{Address: "[2001:db8:1::b]:51820"}, {Address: "nonsense"}},
		InternalIp: "10.9.8.7", NodeAddresses: []string{"192.168.7.0/24"}}
	nodes := []egressNode{labelled(idHost, "host"), dc1}
	const advice = ": clients would lose it through a tunnel; choose smaller networks, or 0.0.0.0/0, which leaves the " +
		"mesh's own ways alone"
	for dest, want := range map[string]string{
		"0.0.0.0/0": "", "::/0": "", "203.0.113.0/24": "", "192.168.10.0/24": "", "not a network": "",
		"198.18.0.0/15":    "destination 198.18.0.0/15 covers the address 198.18.1.11 of node dc1" + advice,
		"198.18.1.11/32":   "destination 198.18.1.11/32 covers the address 198.18.1.11 of node dc1" + advice,
		"2001:db8::/32":    "destination 2001:db8::/32 covers the address 2001:db8:1::b of node dc1" + advice,
		"10.0.0.0/8":       "destination 10.0.0.0/8 covers the internal address 10.9.8.7 of node dc1" + advice,
		"192.168.7.128/25": "destination 192.168.7.128/25 covers the network 192.168.7.0/24 of node dc1" + advice,
	} {
		if have := checkEgress(&skeinv1.Egress{Destinations: []string{dest}}, nodes); have != want {
			t.Errorf("%s: %q\nwant %q", dest, have, want)
		}
	}
	const answer = " is node dc1's own: two hosts would answer for it; choose another, or none, and packets leave with " +
		"the gateway node's own address"
	for addr, want := range map[string]string{
		"192.168.7.9": "", "192.0.2.7": "", "": "", "nonsense": "", "198.18.1.11": "address 198.18.1.11" + answer,
		"10.9.8.7": "address 10.9.8.7" + answer,
	} {
		if have := checkEgress(&skeinv1.Egress{Addresses: []*skeinv1.EgressAddress{{Ipv4: addr}}}, nodes); have != want {
			t.Errorf("%s: %q\nwant %q", addr, have, want)
		}
	}
	if have := checkEgress(&skeinv1.Egress{Addresses: []*skeinv1.EgressAddress{{Ipv6: "2001:db8:1::b"}}},
		nodes); have != "address 2001:db8:1::b"+answer {
		t.Errorf("IPv6: %q", have)
	}
}

func TestEgressMoves(t *testing.T) {
	nodes := []egressNode{labelled(idGW1, "gw1", "egress=yes"), labelled(idGW2, "gw2", "egress=yes", "zone=a")}
	slots := []*skeinv1.EgressSlot{{NodeId: idGW1}, {Number: 1, NodeId: idGW2}, {Number: 2}}
	for _, c := range []struct {
		name   string
		change func(e *skeinv1.Egress)
		want   []string
	}{
		{"nothing", func(*skeinv1.Egress) {}, nil},
		{"one slot more", func(e *skeinv1.Egress) { e.Replicas = 3 }, []string{"slot 2 begins: about 33 of 100 clients " +
			"fall on what is new, the others stay where they are"}},
		{"many more", func(e *skeinv1.Egress) { e.Replicas = 8 }, []string{"slots 2 to 7 begin: about 75 of 100 clients " +
			"fall on what is new, the others stay where they are"}},
		{"one less", func(e *skeinv1.Egress) { e.Replicas = 1 }, []string{"slot 1 ends: clients of it spread over the " +
			"others, whose own clients stay"}},
		{"other gateways", func(e *skeinv1.Egress) { e.Gateways = map[string]string{"zone": "a"} },
			[]string{"slot 0 leaves gw1: it lacks the label zone; its connections go along"}},
		{"other gateways, masquerade", func(e *skeinv1.Egress) {
			e.Addresses, e.Gateways = nil, map[string]string{"zone": "b"}
		}, []string{
			"slot 0 leaves gw1: it lacks the label zone; its connections end, since they have that node's own address",
			"slot 1 leaves gw2: its label zone is a, not b; its connections end, since they have that node's own address",
			"slot 0 sends with the gateway node's own address instead of 192.0.2.7: connections through it end",
			"slot 1 sends with the gateway node's own address instead of 192.0.2.8: connections through it end"}},
		{"destinations", func(e *skeinv1.Egress) { e.Destinations = []string{"0.0.0.0/0", "10.9.0.0/16"} }, []string{
			"clients that run lead 10.9.0.0/16 into their tunnels, and no longer lead 192.168.10.0/24, ::/0 there"}},
		{"ports and lease", func(e *skeinv1.Egress) { e.FouSourcePortAuto, e.LeaseMillis = true, 5000 }, []string{
			"the source port of running tunnels follows from the flow", "the lease is 5s instead of 1.2s for slots that get " +
				"an owner from now on; those that have one keep theirs"}},
		{"the default lease, said", func(e *skeinv1.Egress) { e.LeaseMillis = 1200 }, nil},
	} {
		after := natEgress()
		c.change(after)
		if have := egressMoves(natEgress(), after, slots, nodes); !slices.Equal(have, c.want) {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, strings.Join(have, "\n"), strings.Join(c.want, "\n"))
		}
	}
	if have := addressText(&skeinv1.EgressAddress{Ipv6: "2001:db8::add"}); have != "2001:db8::add" {
		t.Errorf("an address loses letters: %s", have)
	}
}

func TestWhomToAsk(t *testing.T) {
	e := natEgress()
	away := labelled(idGW2, "gw2", "egress=yes")
	away.alive = false
	relay := labelled("5555555555555555", "relay", "egress=yes")
	relay.record.Role = roleRelay
	gone := labelled(idEdge, "edge")
	gone.alive = false
	owner := labelled("6666666666666666", "owner")
	nodes := []egressNode{labelled(idGW1, "gw1", "egress=yes"), away, labelled(idHost, "host"), relay, gone, owner}
	slots := []*skeinv1.EgressSlot{{NodeId: "6666666666666666"}}
	ask, silent := whomToAsk(e, slots, nodes, idHost)
	if want := []string{idGW1, idHost, "6666666666666666"}; !slices.Equal(ask, want) || len(silent) != 1 ||
		silent[idGW2] != "it was not heard of lately" {
		t.Errorf("asks %v, silent %v", ask, silent)
	}
	for range egressAsked { // a fleet: only those that matter
		nodes = append(nodes, labelled("7777777777777777", "many"))
	}
	ask, silent = whomToAsk(e, slots, nodes, idHost)
	if want := []string{idGW1, idHost, "6666666666666666"}; !slices.Equal(ask, want) || !strings.HasPrefix(silent[""],
		"of 262 members only gateways and this node were asked") {
		t.Errorf("of a fleet asks %v, silent %v", ask, silent)
	}
}

// folded is the agreed state of a cluster after an egress of two slots was defined, and some more.
func folded(t *testing.T, more func(ids []string) []*skeinv1.Event) *events.State {
	t.Helper()
	w := newWorld(t, newHost(t, "dc1"), newHost(t, "gw1"))
	ids := make([]string, 2)
	for _, n := range w.state.Nodes() {
		ids[map[string]int{"dc1": 0, "gw1": 1}[n.GetName()]] = n.GetId()
	}
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
		e.Index, e.Time = w.state.Index()+1, w.now.UnixNano()
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
		if err := w.state.Fold(e); err != nil {
			t.Fatal(err)
		}
	}
	return w.state
}

func definedNat() *skeinv1.Event {
	e := natEgress()
	e.Endpoints[1].Ipv6 = ""
	return &skeinv1.Event{Body: &skeinv1.Event_EgressDefined{EgressDefined: &skeinv1.EgressDefined{Egress: e}}}
}

// TestWhoKnowsEgresses: an address of an egress belongs to the owner of its slot.
func TestWhoKnowsEgresses(t *testing.T) {
	assigned := func(s *skeinv1.EgressSlot) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_SlotAssigned{SlotAssigned: &skeinv1.SlotAssigned{Slot: s}}}
	}
	st := folded(t, func([]string) []*skeinv1.Event { return []*skeinv1.Event{definedNat()} })
	nobody := who(st, netip.MustParseAddr("10.64.0.32"))
	st = folded(t, func(ids []string) []*skeinv1.Event {
		return []*skeinv1.Event{definedNat(), assigned(&skeinv1.EgressSlot{NodeId: ids[0], Reason: "it had no owner"}),
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

// TestFindEgress: a name alone is enough where it is the only one.
func TestFindEgress(t *testing.T) {
	st := folded(t, func([]string) []*skeinv1.Event { return []*skeinv1.Event{definedNat()} })
	for _, c := range []struct{ namespace, name, want string }{
		{"internet", "nat", ""}, {"", "nat", ""},
		{"default", "nat", "there is no egress default/nat; `skein egress list` shows those there are"},
		{"", "nut", "there is no egress nut in any namespace; `skein egress list` shows those there are"},
	} {
		e, err := findEgress(st, c.namespace, c.name)
		if c.want == "" && (err != nil || e.GetNamespace() != "internet") {
			t.Errorf("%s/%s: %v, %v", c.namespace, c.name, e, err)
		}
		if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s/%s: %v", c.namespace, c.name, err)
		}
	}
}
