package egresses

import (
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/api/apitest"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/internal/golden"
)

// utc makes times look the same everywhere.
func utc(t *testing.T) {
	t.Helper()
	was := time.Local
	time.Local = time.UTC
	t.Cleanup(func() { time.Local = was })
}

func labelled(id, name string, labels ...string) member {
	n := member{node: &skeinv1.Node{Id: id, Name: name, Labels: map[string]string{}},
		record: &skeinv1.Record{}, alive: true}
	for _, l := range labels {
		k, v, _ := strings.Cut(l, "=")
		n.node.Labels[k] = v
	}
	return n
}

// natPicture is an egress as it stands after gw1 was drained and came back.
func natPicture() picture {
	edge := labelled(apitest.Edge, "edge", "egress=no")
	relay := labelled("5555555555555555", "relay", "egress=yes")
	relay.record.Role = gossip.RoleRelay
	return picture{
		egress: apitest.NatEgress(), leader: "dc1",
		slots: []*skeinv1.EgressSlot{
			{Namespace: "internet", Name: "nat", NodeId: apitest.GW2, FromNodeId: apitest.GW1, Epoch: 31, Since: 1795269660e9,
				Reason: "gw1 is being drained", Planned: true},
			{Namespace: "internet", Name: "nat", Number: 1, NodeId: apitest.GW1, Epoch: 40, Since: 1795269720e9,
				Reason: "it had no owner"},
		},
		nodes: []member{edge, labelled(apitest.GW1, "gw1", "egress=yes"), labelled(apitest.GW2, "gw2", "egress=yes"),
			labelled(apitest.Host, "host"), relay},
		reports: apitest.NatReports(),
		silent:  map[string]string{},
		news: []occurrence{{1795269600e9, "event 12: defined."}, {1795269660e9, "event 31: slot 0 from gw1 to gw2: gw1 is " +
			"being drained."},
			{1795269661e9, slotHeldText("gw2", &skeinv1.SlotHeld{What: "held", Epoch: 31, TookNanos: 130e6})}},
	}
}

func TestExplainEgress(t *testing.T) {
	utc(t)
	show := func(name string, change func(*picture)) {
		t.Run(name, func(t *testing.T) {
			p := natPicture()
			change(&p)
			golden.Lines(t, "explain-egress-"+name, explain(p))
		})
	}
	show("client", func(p *picture) { p.client = "10.64.1.5" })
	show("waiting-client", func(p *picture) {
		p.client = apitest.KeysOf(2)[1]
		p.reports[apitest.Host].Clients[1].Egresses[0].Slot = 0 // not heard of the newest change
	})
	show("unknown-client", func(p *picture) { p.client, p.reports[apitest.Host] = "web/nobody", nil })
	show("no-gateway", func(p *picture) {
		p.egress.Addresses, p.egress.Gateways = nil, map[string]string{"egress": "yes", "zone": "a"}
		p.slots = []*skeinv1.EgressSlot{{}, {Number: 1, FromNodeId: apitest.GW1, Epoch: 44, Since: 1795269720e9,
			Reason: "gw1 was revoked"}}
		p.reports = nil
	})
	show("no-leader", func(p *picture) {
		p.slots[0].LeaseMillis = 5000
		p.leader, p.slots[1] = "", &skeinv1.EgressSlot{Number: 1, FromNodeId: apitest.GW1, Epoch: 44, Since: 1795269720e9,
			Reason: "gw1 was revoked"}
	})
	show("silent-owner", func(p *picture) {
		p.silent[apitest.GW1], p.reports[apitest.GW1] = "it has not been heard from lately", nil
		p.reports[apitest.GW2].Gateways[0].Slots[0].Epoch = 20
		for range 12 {
			p.nodes = append(p.nodes, labelled("9999999999999999", "spare"))
		}
	})
}

// Of a moment of the past the log's word is told, and nothing that only gateways knew.
func TestExplainEgressThen(t *testing.T) {
	utc(t)
	p := natPicture()
	p.then, p.reports, p.silent, p.leader = events.NewState(), nil, nil, ""
	p.client = apitest.KeysOf(2)[1]
	p.slots = []*skeinv1.EgressSlot{
		{NodeId: apitest.GW2, FromNodeId: apitest.GW1, Epoch: 31, Since: 1795269660e9,
			Reason: "gw1 is being drained", Planned: true},
		{Number: 1, FromNodeId: apitest.GW1, Epoch: 44, Since: 1795269720e9, Reason: "gw1 was revoked"},
	}
	text := strings.Join(explainThen(p), "\n")
	for _, want := range []string{
		"As of event 0, at ", "Egress internet/nat leads to", "Gateways were nodes with egress=yes: gw1, gw2.",
		"Slot 0 belongs to gw2 by event 31, at 2026-11-21 14:01:00: gw1 is being drained. It came from gw1, as planned",
		"Slot 1 has no owner by event 44, at 2026-11-21 14:02:00: gw1 was revoked. Before, gw1 had it.",
		"It falls on slot 1 of 2, which nobody owns", "Lately:", "event 12: defined.",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("it lacks %q:\n%s", want, text)
		}
	}
	for _, unknown := range []string{"lease of", "leader", "forwards for 1 client", "alive"} {
		if strings.Contains(text, unknown) {
			t.Errorf("it tells of %q:\n%s", unknown, text)
		}
	}
}

func TestSlotHeldText(t *testing.T) {
	for want, h := range map[string]*skeinv1.SlotHeld{
		"gw1 forwards for slot 2, 131ms after event 40.": {What: "held", Number: 2, Epoch: 40,
			TookNanos: 131_200_000},
		"gw1 forwards for slot 0.": {What: "held"},
		"gw1 lost the lease of slot 1: no leader answered.": {What: "lost", Number: 1,
			Reason: "no leader answered"},
		"gw1 let slot 0 go.": {What: "released"},
		"gw1 was denied the lease of slot 0: gw2 may still forward.": {What: "denied", Reason: "gw2 may still forward"},
		"gw1 handed over slot 0 with 12 connections.":                {What: "handed-over", Connections: 12},
		"gw1 took over slot 0 with 1 connection: 2 entries did not load.": {What: "taken-over", Connections: 1,
			Reason: "2 entries did not load"},
		"gw1 announced the address of slot 0: on eth1.": {What: "announced", Reason: "on eth1"},
		"gw1: slot 0 turned.":                           {What: "turned"},
	} {
		if have := slotHeldText("gw1", h); have != want {
			t.Errorf("have %s\nwant %s", have, want)
		}
	}
}

func TestEgressEventText(t *testing.T) {
	slot := &skeinv1.EgressSlot{Namespace: "internet", Name: "nat", Number: 1, NodeId: "b", FromNodeId: "a",
		Reason: "a is being drained"}
	lower := func(id string) string { return "node " + id }
	for _, c := range []struct {
		e    *skeinv1.Event
		want string
	}{
		{&skeinv1.Event{Body: &skeinv1.Event_EgressDefined{EgressDefined: &skeinv1.EgressDefined{
			Egress: apitest.NatEgress()}}},
			"event 7: defined."},
		{&skeinv1.Event{Body: &skeinv1.Event_EgressChanged{EgressChanged: &skeinv1.EgressChanged{Egress: apitest.NatEgress(),
			Change: "replicas"}}}, "event 7: changed (replicas)."},
		{&skeinv1.Event{Body: &skeinv1.Event_EgressRemoved{EgressRemoved: &skeinv1.EgressRemoved{Namespace: "internet",
			Name: "nat"}}}, "event 7: removed."},
		{&skeinv1.Event{Body: &skeinv1.Event_EgressRemoved{EgressRemoved: &skeinv1.EgressRemoved{Namespace: "other",
			Name: "nat"}}}, ""},
		{&skeinv1.Event{Body: &skeinv1.Event_SlotAssigned{SlotAssigned: &skeinv1.SlotAssigned{Slot: slot}}},
			"event 7: slot 1 to node b: a is being drained."},
		{&skeinv1.Event{Body: &skeinv1.Event_SlotMoved{SlotMoved: &skeinv1.SlotMoved{Slot: slot}}}, "event 7: slot 1 from " +
			"node a to node b: a is being drained."},
		{&skeinv1.Event{Body: &skeinv1.Event_SlotReleased{SlotReleased: &skeinv1.SlotReleased{Slot: slot}}},
			"event 7: slot 1 taken from node a: a is being drained."},
		{&skeinv1.Event{Body: &skeinv1.Event_SlotReleased{SlotReleased: &skeinv1.SlotReleased{
			Slot: &skeinv1.EgressSlot{Namespace: "internet", Name: "other"}}}}, ""},
		{&skeinv1.Event{Body: &skeinv1.Event_PoolRemoved{PoolRemoved: &skeinv1.PoolRemoved{Name: "nat"}}}, ""},
	} {
		c.e.Index = 7
		if have := eventText(c.e, "internet", "nat", lower); have != c.want {
			t.Errorf("have %q\nwant %q", have, c.want)
		}
	}
}
