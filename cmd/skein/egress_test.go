package main

import (
	"errors"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

const (
	home1ID = "b33ad742981917ca"
	dc1ID   = "7ef4fee4c02da850"
)

var (
	natEgress = &skeinv1.Egress{Namespace: "internet", Name: "nat", Destinations: []string{"0.0.0.0/0", "::/0"},
		Gateways: map[string]string{"egress": "yes"}, Replicas: 2,
		Addresses: []*skeinv1.EgressAddress{{Ipv4: "192.0.2.7", Ipv6: "2001:db8::7"},
			{Ipv4: "192.0.2.8", Ipv6: "2001:db8::8"}}, Pool: "default", Probes: []string{"icmp:198.51.100.1"},
		Endpoints: []*skeinv1.EgressAddress{{Ipv4: "10.64.0.32", Ipv6: "fd01:203:405:607::20"},
			{Ipv4: "10.64.0.64", Ipv6: "fd01:203:405:607::40"}}, CreatedAt: 1795269600e9, CreatedIndex: 12, ChangedIndex: 12}
	labEgress = &skeinv1.Egress{Namespace: "default", Name: "lab", Destinations: []string{"192.168.10.0/24"},
		Gateways: map[string]string{"site": "lab", "role": "gateway"}, Replicas: 1,
		FouSourcePortAuto: true, LeaseMillis: 5000, Pool: "default",
		Endpoints: []*skeinv1.EgressAddress{{Ipv6: "fd01:203:405:607::60"}}, CreatedAt: 1795269600e9, CreatedIndex: 30,
		ChangedIndex: 30}
)

func natSlots() []*skeinv1.SlotView {
	return []*skeinv1.SlotView{
		{Slot: &skeinv1.EgressSlot{Namespace: "internet", Name: "nat", NodeId: home1ID, Epoch: 13, Since: ago(threeDays),
			Reason: "it had no owner"}, Owner: "home1", Site: "home", Alive: true},
		{Slot: &skeinv1.EgressSlot{Namespace: "internet", Name: "nat", Number: 1, NodeId: dc1ID, Epoch: 31,
			Since: ago(threeDays), FromNodeId: home1ID, Planned: true,
			Reason: "home1 is being drained"}, Owner: "dc1", Site: "dc", Alive: true},
	}
}

func summaries() []*skeinv1.EgressSummary {
	return []*skeinv1.EgressSummary{
		{Egress: labEgress, Slots: []*skeinv1.SlotView{{Slot: &skeinv1.EgressSlot{Namespace: "default", Name: "lab"}}}},
		{Egress: natEgress, Slots: natSlots(), Eligible: []string{"dc1", "home1"}},
	}
}

func TestEgressesAreShown(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.EgressesRequest{}, &skeinv1.EgressesResponse{Egresses: summaries()})
	show := &skeinv1.ShowEgressResponse{Summary: summaries()[1],
		Gateways: []*skeinv1.EgressGateway{
			{Namespace: "internet", Name: "nat", NodeId: home1ID, State: &skeinv1.GatewayState{Ready: true,
				Health: skeinv1.GatewayState_HEALTH_GOOD}, Driver: "kernel", Clients: 2, Conntrack: 17, ConntrackMax: 65536,
				Slots: []*skeinv1.EgressSlotReport{{Number: 0, Epoch: 13, Forwarding: true, Clients: 1, BytesOut: 12345,
					BytesIn: 987654}}, DroppedInvalid: 3},
			{Namespace: "internet", Name: "nat", NodeId: dc1ID,
				State: &skeinv1.GatewayState{Health: skeinv1.GatewayState_HEALTH_BAD, Reason: "icmp:198.51.100.1 has not " +
					"answered for 3s"}, Driver: "userspace",
				Slots: []*skeinv1.EgressSlotReport{{Number: 1, Epoch: 31}}},
		},
		Silent: []*skeinv1.EgressNodeError{{Node: "cloud1", Error: "it does not answer: the deadline has passed; its " +
			"clients are missing here"}},
		Clients: []*skeinv1.EgressHostClients{{Node: "home1", Clients: []*skeinv1.EgressClientReport{
			{Key: "web/nginx-1", Ipv4: "10.64.0.5", Egresses: []*skeinv1.EgressOfClient{{Namespace: "default", Name: "lab"},
				{Namespace: "internet", Name: "nat", Slot: 1, Owner: "dc1", State: "waiting",
					Reason: "dc1 has not taken it in yet"}}},
			{Key: "web/nginx-2", Ipv4: "10.64.0.6", Egresses: []*skeinv1.EgressOfClient{{Namespace: "internet", Name: "nat",
				Owner: "home1", State: "ready"}}}}}},
	}
	f.lay(&skeinv1.ShowEgressRequest{}, show)
	f.showsGolden(t, "egress-show", []string{"egress", "list"}, []string{"egress", "show", "nat"})
	if !proto.Equal(f.asked[1], &skeinv1.ShowEgressRequest{Name: "nat"}) {
		t.Errorf("asked for %v", f.asked[1])
	}
	f.lay(&skeinv1.ShowEgressRequest{}, &skeinv1.ShowEgressResponse{Summary: summaries()[0]})
	f.showsGolden(t, "egress-show-new", []string{"egress", "show", "default/lab"})
	f.lay(&skeinv1.EgressesRequest{}, &skeinv1.EgressesResponse{})
	f.showsGolden(t, "egress-list-empty", []string{"egress", "list"})
	f.lay(&skeinv1.ExplainEgressRequest{}, &skeinv1.ExplainEgressResponse{Lines: []string{"Egress internet/nat leads to " +
		"everything. " + strings.Repeat("It says why. ", 12), "  indented"}})
	f.showsGolden(t, "egress-explain", []string{"explain", "egress", "internet/nat", "--client", "web/nginx-1"})
	if want := (&skeinv1.ExplainEgressRequest{Namespace: "internet", Name: "nat",
		Client: "web/nginx-1"}); !proto.Equal(f.asked[len(f.asked)-1], want) {
		t.Errorf("asked for %v", f.asked[len(f.asked)-1])
	}
}

// A thousand clients are not a thousand lines.
func TestEgressClientsAreBounded(t *testing.T) {
	f := newFakeAgent(t)
	show := &skeinv1.ShowEgressResponse{Summary: summaries()[1], Clients: []*skeinv1.EgressHostClients{{Node: "home1"}}}
	for range 1000 {
		show.Clients[0].Clients = append(show.Clients[0].Clients, &skeinv1.EgressClientReport{Key: "web/a",
			Egresses: []*skeinv1.EgressOfClient{{Namespace: "internet", Name: "nat", State: "ready"}}})
	}
	f.lay(&skeinv1.ShowEgressRequest{}, show)
	out, _, err := f.skein(t, "egress", "show", "internet/nat")
	if n := strings.Count(out, "web/a"); err != nil || n != mostClients ||
		!strings.Contains(out, "… and 960 clients; -o json has all\n") {
		t.Errorf("%d clients are shown, %v:\n%s", n, err, out)
	}
}

func TestEgressesAreChanged(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.CreateEgressRequest{}, &skeinv1.EgressResponse{Egress: natEgress, Index: 12,
		Warnings: []string{"no node is eligible: none has egress=yes; dc1 and home1 lack the label egress"}})
	f.lay(&skeinv1.ChangeEgressRequest{}, &skeinv1.EgressResponse{Egress: natEgress, Index: 33,
		Moves: []string{"slot 2 begins; about one in three clients falls on it, the others stay where they are"}})
	f.lay(&skeinv1.RemoveEgressRequest{}, &skeinv1.RemoveEgressResponse{Index: 34})
	f.lay(&skeinv1.AttachEgressRequest{}, &skeinv1.AttachEgressResponse{Egresses: []*skeinv1.EgressOfClient{
		{Namespace: "internet", Name: "nat", Slot: 1, Owner: "dc1", State: "ready"}, {Namespace: "default", Name: "lab",
			State: "unknown", Reason: "there is no egress default/lab"}}})
	change := func(set *skeinv1.Egress, fields ...string) proto.Message {
		return &skeinv1.ChangeEgressRequest{Change: &skeinv1.ChangeEgress{Namespace: "default", Name: "nat", Set: set,
			Fields: fields}}
	}
	yes := map[string]string{"egress": "yes"}
	none := map[string]string{}
	var commands [][]string
	for _, c := range []struct {
		args string
		want proto.Message
	}{
		{"create nat --destination 0.0.0.0/0,::/0 --gateway-label egress=yes",
			&skeinv1.CreateEgressRequest{Egress: &skeinv1.Egress{Namespace: "default", Name: "nat", Pool: "default",
				Destinations: []string{"0.0.0.0/0", "::/0"}, Gateways: yes, Replicas: 1}}},
		{"create internet/nat --destination 192.168.10.0/24 --destination 10.9.0.0/16 --gateway-label egress=yes " +
			"--gateway-label zone=a --replicas 2 --address 192.0.2.7,2001:db8::7 --address 192.0.2.8 " +
			"--pool public --fou-source-port-auto --lease 2.5s --probe icmp:192.168.10.1 --probe tcp:[2001:db8::1]:443",
			&skeinv1.CreateEgressRequest{Egress: &skeinv1.Egress{Namespace: "internet", Name: "nat", Pool: "public",
				Destinations: []string{"192.168.10.0/24", "10.9.0.0/16"}, Gateways: map[string]string{"egress": "yes", "zone": "a"},
				Replicas: 2, FouSourcePortAuto: true, LeaseMillis: 2500,
				Addresses: []*skeinv1.EgressAddress{{Ipv4: "192.0.2.7", Ipv6: "2001:db8::7"}, {Ipv4: "192.0.2.8"}},
				Probes:    []string{"icmp:192.168.10.1", "tcp:[2001:db8::1]:443"}}}},
		{"update nat --spread flow --drain 30m", change(&skeinv1.Egress{Replicas: 1, Gateways: none, Spread: "flow",
			DrainMillis: 1_800_000}, "drain_millis", "spread")},
		{"update nat --replicas 3", change(&skeinv1.Egress{Replicas: 3, Gateways: none}, "replicas")},
		{"update nat --address  --probe  --lease 0", change(&skeinv1.Egress{Replicas: 1, Gateways: none}, "addresses",
			"lease_millis", "probes")},
		{"update nat --destination 192.0.2.0/24 --fou-source-port-auto=false --gateway-label egress=yes",
			change(&skeinv1.Egress{Replicas: 1, Destinations: []string{"192.0.2.0/24"}, Gateways: yes},
				"destinations", "gateways", "fou_source_port_auto")},
		{"remove internet/nat", &skeinv1.RemoveEgressRequest{Namespace: "internet", Name: "nat"}},
		{"attach web/nginx-1 internet/nat lab", &skeinv1.AttachEgressRequest{Namespace: "web", Pod: "nginx-1",
			Egresses: []string{"internet/nat", "default/lab"}}},
		{"detach nginx-1 nat --container 0123", &skeinv1.AttachEgressRequest{Namespace: "default", Pod: "nginx-1",
			ContainerId: "0123", Egresses: []string{"default/nat"}, Detach: true}},
	} {
		args := append([]string{"egress"}, strings.Split(c.args, " ")...)
		if _, _, err := f.skein(t, args...); err != nil {
			t.Fatalf("skein %v: %v", args, err)
		}
		if have := f.asked[len(f.asked)-1]; !proto.Equal(have, c.want) {
			t.Errorf("skein %v\nasked %v\nwant  %v", args, have, c.want)
		}
		commands = append(commands, args)
	}
	f.showsGolden(t, "egress-change", commands...)
	f.lay(&skeinv1.ChangeEgressRequest{}, &skeinv1.EgressResponse{Egress: natEgress, Index: 35})
	f.lay(&skeinv1.AttachEgressRequest{}, &skeinv1.AttachEgressResponse{})
	f.showsGolden(t, "egress-change-nothing", []string{"egress", "update", "nat", "--lease", "0"},
		[]string{"egress", "detach", "nginx-1", "nat"})
}

// What the agent refuses is shown as it says it; what is mistyped never gets to it.
func TestEgressCommandsRefuse(t *testing.T) {
	f := newFakeAgent(t)
	const made = "egress create nat --destination 0.0.0.0/0 --gateway-label egress=yes "
	for _, c := range []struct{ args, want string }{
		{"egress", "needs a subcommand"},
		{"egress create", "takes one egress's name, such as nat or internet/nat"},
		{"egress create a/b/c --destination 0.0.0.0/0", `egress "a/b/c": want NAME or NAMESPACE/NAME`},
		{"egress create /nat", `egress "/nat": want`},
		{"egress show internet/", `egress "internet/": want`},
		{"egress create nat --gateway-label egress=yes", "--destination is missing"},
		{"egress create nat --destination 0.0.0.0/0", "--gateway-label is missing"},
		{"egress create nat --destination everything", "--destination everything: this is not a network"},
		{"egress create nat --destination 192.0.2.1", "--destination 192.0.2.1: this is not a network; write one such as " +
			"192.0.2.0/24"},
		{"egress create nat --destination ::ffff:192.0.2.0/120", "this is not a network"},
		{"egress create nat --destination 0.0.0.0/0 --gateway-label egress", "--gateway-label egress: want KEY=VALUE, such " +
			"as egress=yes"},
		{"egress create nat --destination 0.0.0.0/0 --gateway-label =yes", "--gateway-label =yes: want KEY=VALUE"},
		{"egress create nat --destination 0.0.0.0/0 --gateway-label a=b,a=c", "label a is given twice"},
		{made + "--replicas 0", "--replicas 0: an egress has at least one slot"},
		{made + "--replicas -1", "invalid argument \"-1\" for \"--replicas\""},
		{made + "--address 192.0.2.300", `"192.0.2.300" is not an IP address; write one such as 192.0.2.7`},
		{made + "--address 192.0.2.0/24", `is not an IP address`},
		{made + "--address 192.0.2.7,192.0.2.8", "repeat --address for the next"},
		{made + "--address fe80::1%eth0", "is not an IP address"},
		{made + "--lease 1.2", "--lease"},
		{made + "--lease 100us", "--lease 100µs: want whole milliseconds"},
		{made + "--lease -1s", "--lease -1s: want whole milliseconds"},
		{made + "--probe 192.0.2.1", "--probe 192.0.2.1: want icmp:ADDRESS or tcp:ADDRESS:PORT"},
		{made + "--probe icmp:example.org", "--probe icmp:example.org: want"},
		{made + "--probe tcp:192.0.2.1", "--probe tcp:192.0.2.1: want"},
		{made + "--probe tcp:2001:db8::1:443", "--probe tcp:2001:db8::1:443: want"},
		{made + "--probe udp:192.0.2.1:53", "--probe udp:192.0.2.1:53: want"},
		{"egress update nat", "nothing to change"},
		{"egress update nat --pool b", "unknown flag: --pool"},
		{"egress list nat", "unknown command or argument"},
		{"egress attach web/nginx-1", "takes a pod and one or more egresses"},
		{"egress attach web/nginx-1 a/b/c", `egress "a/b/c": want`},
		{"egress detach a/b/c nat", `pod "a/b/c": want NAME or NAMESPACE/NAME`},
		{"explain egress", "takes one egress's name"},
		{"explain egress nat --client nginx-1", "--client nginx-1: want a pod as NAMESPACE/POD, or an IP address"},
		{"node drain", "takes one node's name or ID"},
		{"node drain gw1 --undo --dry-run", "--undo and --dry-run cannot be used together"},
		{"node drain gw1 --wait -5s", "--wait -5s: want a time such as 60s"},
		{"egress list -o yaml", "-o yaml: allowed: table, json"},
	} {
		_, _, err := f.skein(t, strings.Fields(c.args)...)
		var u cli.UsageError
		if !errors.As(err, &u) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("skein %s: %v; want a mistake in usage: %s", c.args, err, c.want)
		}
	}
	if len(f.asked) > 0 {
		t.Errorf("the agent was asked: %v", f.asked)
	}
	f.err = connect.NewError(connect.CodeNotFound, errors.New("there is no egress default/nat: `skein egress list` "+
		"shows all"))
	for _, args := range []string{made, "egress list", "egress show nat", "egress update nat --replicas 2",
		"egress remove nat", "egress attach a nat", "egress detach a nat", "explain egress nat", "node drain gw1"} {
		_, _, err := f.skein(t, strings.Fields(args)...)
		var u cli.UsageError
		if err == nil || errors.As(err, &u) ||
			err.Error() != "there is no egress default/nat: `skein egress list` shows all" {
			t.Errorf("skein %s: %v", args, err)
		}
	}
}

func TestNodeDrain(t *testing.T) {
	f := newFakeAgent(t)
	home1 := &skeinv1.Node{Id: home1ID, Name: "home1", Draining: true}
	slots := natSlots()
	lab := &skeinv1.SlotView{Slot: &skeinv1.EgressSlot{Namespace: "default", Name: "lab", NodeId: home1ID}, Owner: "home1"}
	f.lay(&skeinv1.EgressesRequest{}, &skeinv1.EgressesResponse{Egresses: summaries()})
	f.drains = []*skeinv1.DrainNodeResponse{{Node: home1, Slots: []*skeinv1.SlotView{slots[0], lab}, Index: 40}}
	f.showsGolden(t, "node-drain-dry", []string{"node", "drain", "home1", "--dry-run"}, []string{"node", "drain", "home1",
		"--wait", "0"}, []string{"node", "drain", "home1", "--undo"})
	for i, want := range []*skeinv1.DrainNodeRequest{{Node: "home1", DryRun: true}, nil, {Node: "home1"}, nil,
		{Node: "home1", Undo: true}} {
		if want != nil && !proto.Equal(f.asked[i], want) {
			t.Errorf("call %d: asked %v, want %v", i, f.asked[i], want)
		}
	}
	f.drains = []*skeinv1.DrainNodeResponse{{Node: home1, Index: 41}}
	f.showsGolden(t, "node-drain-none", []string{"node", "drain", "home1"},
		[]string{"node", "drain", "home1", "--dry-run"})

	moved := summaries()
	moved[1].Slots[0].Owner = "dc1"
	f.lay(&skeinv1.EgressesRequest{}, &skeinv1.EgressesResponse{Egresses: moved})
	f.drains = []*skeinv1.DrainNodeResponse{{Node: home1, Slots: slots[:1], Index: 42},
		{Node: home1, Slots: slots[:1]}, {Node: home1}}
	out, beside, err := f.skein(t, "node", "drain", "home1")
	if want := "node home1 gives away 1 egress slot, as of event 42\nslot 0 of internet/nat moved to dc1\n"; err != nil ||
		beside != want {
		t.Errorf("%v, says\n%s\nwant\n%s", err, beside, want)
	}
	if !strings.HasPrefix(out, "node home1 has no egress slot any more, after ") {
		t.Errorf("says %s", out)
	}

	f.drains = []*skeinv1.DrainNodeResponse{{Node: home1, Slots: []*skeinv1.SlotView{lab}, Index: 43}}
	_, _, err = f.skein(t, "node", "drain", "home1", "--wait", "1ms")
	if want := "node home1 still has 1 egress slot after 1ms (slot 0 of default/lab: no other node is eligible: see " +
		"`skein explain egress default/lab`); the node stays draining: " +
		"wait longer, or end the drain with `skein node drain home1 --undo`"; err == nil || err.Error() != want {
		t.Errorf("%v\nwant %s", err, want)
	}
}

// The new families as `skein events` and `skein state` show them.
func TestEgressEventsAreShown(t *testing.T) {
	slot := &skeinv1.EgressSlot{Namespace: "internet", Name: "nat", Number: 0, NodeId: home1ID, Epoch: 14, Since: 9,
		Reason: "it had no owner", LeaseMillis: 1200}
	moved := &skeinv1.EgressSlot{Namespace: "internet", Name: "nat", Number: 1, NodeId: dc1ID, FromNodeId: home1ID,
		Epoch: 15, Since: 9, Reason: "home1 is being drained", Planned: true, LeaseMillis: 1200, FormerLeaseMillis: 1200}
	names := strings.NewReplacer(home1ID, "home1", dc1ID, "dc1")
	var b strings.Builder
	for i, e := range []*skeinv1.Event{
		{Body: &skeinv1.Event_EgressDefined{EgressDefined: &skeinv1.EgressDefined{Egress: natEgress}}},
		{Body: &skeinv1.Event_EgressDefined{EgressDefined: &skeinv1.EgressDefined{Egress: labEgress}}},
		{Body: &skeinv1.Event_EgressChanged{EgressChanged: &skeinv1.EgressChanged{Egress: labEgress,
			Change: "destinations, replicas"}}},
		{Body: &skeinv1.Event_SlotAssigned{SlotAssigned: &skeinv1.SlotAssigned{Slot: slot}}},
		{Body: &skeinv1.Event_SlotMoved{SlotMoved: &skeinv1.SlotMoved{Slot: moved}}},
		{Body: &skeinv1.Event_SlotReleased{SlotReleased: &skeinv1.SlotReleased{
			Slot: &skeinv1.EgressSlot{Namespace: "internet", Name: "nat", FromNodeId: home1ID, Epoch: 16,
				Reason: "home1 was revoked"}}}},
		{Body: &skeinv1.Event_EgressRemoved{EgressRemoved: &skeinv1.EgressRemoved{Namespace: "internet", Name: "nat"}}},
	} {
		e.Index, e.Time = uint64(i+12), 1795269600e9
		b.WriteString(eventLine(e, names) + "\n")
	}
	for _, s := range []*skeinv1.EgressSlot{slot, moved} {
		s.Since = ago(threeDays)
	}
	printState(&b, &skeinv1.StateResponse{State: &skeinv1.State{Index: 30,
		Cluster:  &skeinv1.Cluster{Id: "65229d4b83746f6b433e05d56d8bc612", OverlayIpv4: "10.4.0.0/16"},
		Nodes:    []*skeinv1.Node{{Id: home1ID, Name: "home1", Ipv4: "10.4.0.1"}, {Id: dc1ID, Name: "dc1", Ipv4: "10.4.0.2"}},
		Egresses: []*skeinv1.Egress{labEgress, natEgress}, Slots: []*skeinv1.EgressSlot{{Namespace: "default", Name: "lab"},
			slot, moved}}, Hash: "a8faac1c"})
	fits(t, b.String())
	goldenText(t, "egress-events", b.String())
}
