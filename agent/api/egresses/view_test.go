package egresses

import (
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/api/apitest"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
)

// TestObstacles: what is said of a node agrees with what the log decides by.
func TestObstacles(t *testing.T) {
	e := &skeinv1.Egress{Gateways: map[string]string{"egress": "yes", "zone": "a"}}
	drained := labelled(apitest.GW1, "drained", "egress=yes", "zone=a")
	drained.node.Draining = true
	relay := labelled(apitest.GW1, "relay", "egress=yes", "zone=a")
	relay.record.Role = gossip.RoleRelay
	for _, c := range []struct {
		n    member
		want string
	}{
		{labelled(apitest.GW1, "good", "egress=yes", "zone=a", "more=1"), ""},
		{labelled(apitest.GW1, "bare"), "it lacks the label egress, it lacks the label zone"},
		{labelled(apitest.GW1, "other", "egress=yes", "zone=b"), "its label zone is b, not a"},
		{labelled(apitest.GW1, "empty", "egress=yes", "zone="), "its label zone is , not a"},
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
	if why, _ := obstacles(&skeinv1.Egress{}, labelled(apitest.GW1, "any", "a=b")); !slices.Equal(why,
		[]string{"the egress asks for no label"}) {
		t.Errorf("an egress without labels: %q", why)
	}
}

func TestEgressWarnings(t *testing.T) {
	e := &skeinv1.Egress{Gateways: map[string]string{"egress": "yes"}, Replicas: 2}
	gw1, gw2 := labelled(apitest.GW1, "gw1", "egress=yes"), labelled(apitest.GW2, "gw2", "egress=yes")
	host := labelled(apitest.Host, "host")
	edge := labelled(apitest.Edge, "edge", "egress=no")
	dead := func(n member) member { n.alive = false; return n }
	for _, c := range []struct {
		name  string
		nodes []member
		want  string
	}{
		{"enough", []member{gw1, gw2, host}, ""},
		{"none", nil, "no node is eligible: a gateway needs egress=yes; until there is one, packets for these destinations " +
			"find no way out"},
		{"none with the label", []member{edge, host}, "no node is eligible: a gateway needs egress=yes, and the " +
			"nearest are edge (its label egress is no, not yes), host (it lacks the label egress); " +
			"until there is one, packets for these destinations find no way out"},
		{"too few", []member{gw1, host}, "1 gateway for 2 slots (gw1): some hold several slots, and lose all of them " +
			"when they fail; label more nodes, or have fewer replicas"},
		{"one is away", []member{gw1, dead(gw2)}, "1 gateway for 2 slots (gw1): some hold several slots, and lose " +
			"all of them when they fail; label more nodes, or have fewer replicas"},
		{"all are away", []member{dead(gw1), dead(gw2)}, "none of the eligible nodes is alive: gw1, gw2"},
	} {
		if have := strings.Join(warnings(e, c.nodes), "\n"); have != c.want {
			t.Errorf("%s: %q\nwant %q", c.name, have, c.want)
		}
	}
	var many []member
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		many = append(many, labelled(apitest.Host, name, "zone=1"))
	}
	if have := nearest(&skeinv1.Egress{Gateways: map[string]string{"egress": "yes", "zone": "1"}},
		append(many, host)); len(have) != mostNear || have[0] != "a (it lacks the label egress)" {
		t.Errorf("nearest: %q", have)
	}
}

// TestCheckEgress: what the log cannot know, since members say it themselves.
func TestCheckEgress(t *testing.T) {
	dc1 := labelled(apitest.GW1, "dc1")
	dc1.record = &skeinv1.Record{Candidates: []*skeinv1.Candidate{{Address: "198.18.1.11:51820"},
		{Address: "[2001:db8:1::b]:51820"}, {Address: "nonsense"}},
		InternalIp: "10.9.8.7", NodeAddresses: []string{"192.168.7.0/24"}}
	nodes := []member{labelled(apitest.Host, "host"), dc1}
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
		if have := check(&skeinv1.Egress{Destinations: []string{dest}}, nodes); have != want {
			t.Errorf("%s: %q\nwant %q", dest, have, want)
		}
	}
	const answer = " is node dc1's own: two hosts would answer for it; choose another, or none, and packets leave with " +
		"the gateway node's own address"
	for addr, want := range map[string]string{
		"192.168.7.9": "", "192.0.2.7": "", "": "", "nonsense": "", "198.18.1.11": "address 198.18.1.11" + answer,
		"10.9.8.7": "address 10.9.8.7" + answer,
	} {
		if have := check(&skeinv1.Egress{Addresses: []*skeinv1.EgressAddress{{Ipv4: addr}}}, nodes); have != want {
			t.Errorf("%s: %q\nwant %q", addr, have, want)
		}
	}
	if have := check(&skeinv1.Egress{Addresses: []*skeinv1.EgressAddress{{Ipv6: "2001:db8:1::b"}}},
		nodes); have != "address 2001:db8:1::b"+answer {
		t.Errorf("IPv6: %q", have)
	}
}

func TestEgressMoves(t *testing.T) {
	nodes := []member{labelled(apitest.GW1, "gw1", "egress=yes"), labelled(apitest.GW2, "gw2", "egress=yes", "zone=a")}
	slots := []*skeinv1.EgressSlot{{NodeId: apitest.GW1}, {Number: 1, NodeId: apitest.GW2}, {Number: 2}}
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
		after := apitest.NatEgress()
		c.change(after)
		if have := moves(apitest.NatEgress(), after, slots, nodes); !slices.Equal(have, c.want) {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, strings.Join(have, "\n"), strings.Join(c.want, "\n"))
		}
	}
	if have := addressText(&skeinv1.EgressAddress{Ipv6: "2001:db8::add"}); have != "2001:db8::add" {
		t.Errorf("an address loses letters: %s", have)
	}
}

func TestWhomToAsk(t *testing.T) {
	e := apitest.NatEgress()
	away := labelled(apitest.GW2, "gw2", "egress=yes")
	away.alive = false
	relay := labelled("5555555555555555", "relay", "egress=yes")
	relay.record.Role = gossip.RoleRelay
	gone := labelled(apitest.Edge, "edge")
	gone.alive = false
	owner := labelled("6666666666666666", "owner")
	nodes := []member{labelled(apitest.GW1, "gw1", "egress=yes"), away, labelled(apitest.Host, "host"), relay, gone, owner}
	slots := []*skeinv1.EgressSlot{{NodeId: "6666666666666666"}}
	ask, silent := whomToAsk(e, slots, nodes, apitest.Host)
	if want := []string{apitest.GW1, apitest.Host, "6666666666666666"}; !slices.Equal(ask, want) || len(silent) != 1 ||
		silent[apitest.GW2] != "it has not been heard from lately" {
		t.Errorf("asks %v, silent %v", ask, silent)
	}
	for range askedAll { // a fleet: only those that matter
		nodes = append(nodes, labelled("7777777777777777", "many"))
	}
	ask, silent = whomToAsk(e, slots, nodes, apitest.Host)
	if want := []string{apitest.GW1, apitest.Host, "6666666666666666"}; !slices.Equal(ask, want) ||
		!strings.HasPrefix(silent[""],
			"of 262 members only gateways and this node were asked") {
		t.Errorf("of a fleet asks %v, silent %v", ask, silent)
	}
}

// TestFindEgress: a name alone is enough where it is the only one.
func TestFindEgress(t *testing.T) {
	st := apitest.WithEgresses(t, func([]string) []*skeinv1.Event { return []*skeinv1.Event{apitest.NatDefined()} })
	for _, c := range []struct{ namespace, name, want string }{
		{"internet", "nat", ""}, {"", "nat", ""},
		{"default", "nat", "there is no egress default/nat; `skein egress list` shows those there are"},
		{"", "nut", "there is no egress nut in any namespace; `skein egress list` shows those there are"},
	} {
		e, err := find(st, c.namespace, c.name)
		if c.want == "" && (err != nil || e.GetNamespace() != "internet") {
			t.Errorf("%s/%s: %v, %v", c.namespace, c.name, e, err)
		}
		if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s/%s: %v", c.namespace, c.name, err)
		}
	}
}
