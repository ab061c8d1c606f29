package metrics

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"

	"github.com/skeinmesh/skein/agent/api/apitest"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/hop"
	"github.com/skeinmesh/skein/internal/golden"
)

// TestEgressMetrics: what a report and the agreed state say, as Prometheus reads it.
func TestEgressMetrics(t *testing.T) {
	reports := apitest.NatReports()
	r := &skeinv1.EgressReportResponse{Gateways: reports[apitest.GW2].GetGateways(),
		Clients: reports[apitest.Host].GetClients()}
	r.Gateways[0].Probes = []*skeinv1.EgressProbe{{Target: "icmp:198.51.100.1", Answered: true, RttNanos: 2_500_000},
		{Target: "tcp:198.51.100.1:443", RttNanos: 9}}
	r.Gateways = append(r.Gateways, &skeinv1.EgressGateway{Namespace: "default", Name: "lab",
		State: &skeinv1.GatewayState{Health: skeinv1.GatewayState_HEALTH_UNKNOWN},
		Slots: []*skeinv1.EgressSlotReport{{Number: 0}, {Number: 3, BytesIn: 5}}})
	st := apitest.WithEgresses(t, func(ids []string) []*skeinv1.Event {
		return []*skeinv1.Event{apitest.NatDefined(),
			{Body: &skeinv1.Event_SlotAssigned{SlotAssigned: &skeinv1.SlotAssigned{Slot: &skeinv1.EgressSlot{NodeId: ids[0],
				Reason: "it had no owner"}}}}}
	})
	registry := prometheus.NewRegistry()
	m := newEgress(registry)
	registry.MustRegister(components(func(out chan<- prometheus.Metric) {
		Slots(out, st)
		EgressReport(out, r)
	}))
	m.SlotHeld(&skeinv1.SlotHeld{Namespace: "internet", Name: "nat", What: "held", TookNanos: 130e6}, true)
	// after a start of the agent: no failover
	m.SlotHeld(&skeinv1.SlotHeld{Namespace: "internet", Name: "nat", What: "held"}, false)
	m.SlotHeld(&skeinv1.SlotHeld{Namespace: "internet", Name: "nat", What: "denied"}, false)
	m.Renewed("internet", "nat", "granted")
	golden.Lines(t, "egress-metrics", exposed(t, registry))
}

// exposed are metrics as Prometheus reads them, without the help.
func exposed(t *testing.T, registry *prometheus.Registry) (lines []string) {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&b, f); err != nil {
			t.Fatal(err)
		}
	}
	for l := range strings.Lines(b.String()) {
		if !strings.HasPrefix(l, "# HELP") {
			lines = append(lines, strings.TrimSuffix(l, "\n"))
		}
	}
	return lines
}

// TestPlainPeerMetrics: peers that a carrier holds, may carry, or has nothing to do with, as Prometheus reads it.
func TestPlainPeerMetrics(t *testing.T) {
	const self, other = "000102030405060a", "000102030405060b"
	peer := func(name string, expires int64, carriers ...string) *skeinv1.PlainPeer {
		p := &skeinv1.PlainPeer{Name: name, ExpiresAt: expires}
		for _, c := range carriers {
			p.Carriers = append(p.Carriers, &skeinv1.PlainCarrier{NodeId: c})
		}
		return p
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(components(func(out chan<- prometheus.Metric) {
		PlainPeers(out, self, []*skeinv1.PlainPeerView{
			{Peer: peer("away", 0, other, self), Holder: other, LastHandshake: 7e9},
			{Peer: peer("elsewhere", 0, other), Holder: other},
			{Peer: peer("laptop", 0, self), Holder: self},
			{Peer: peer("nobodys", 0, self)},
			{Peer: peer("phone", 1700000000e9, other, self), Holder: self, LastHandshake: 1600000000.5e9,
				RxBytes: 11, TxBytes: 12},
		})
	}))
	golden.Lines(t, "plain-metrics", exposed(t, registry))
}

// How full a pool is, in blocks of the whole cluster: of 32 one is a node's, and two are reserved.
func TestPoolMetrics(t *testing.T) {
	st := apitest.WithEgresses(t, func(ids []string) []*skeinv1.Event {
		return []*skeinv1.Event{
			{Body: &skeinv1.Event_PoolCreated{PoolCreated: &skeinv1.PoolCreated{Pool: &skeinv1.Pool{Name: "lan",
				BlockSizeBits: 3,
				Subnets:       []*skeinv1.PoolSubnet{{Ipv4: "10.65.0.0/24"}}}}}},
			{Body: &skeinv1.Event_BlockAllocated{BlockAllocated: &skeinv1.BlockAllocated{Block: &skeinv1.Block{Pool: "lan",
				Ipv4:   "10.65.0.0/29",
				NodeId: ids[0]}}}},
			{Body: &skeinv1.Event_BlockReserved{BlockReserved: &skeinv1.BlockReserved{Block: &skeinv1.Block{Pool: "lan",
				Number: 1,
				Ipv4:   "10.65.0.8/29", Reason: "a printer"}}}},
			{Body: &skeinv1.Event_BlockReserved{BlockReserved: &skeinv1.BlockReserved{Block: &skeinv1.Block{Pool: "lan",
				Number: 2,
				Ipv4:   "10.65.0.16/29", Reason: "another one"}}}},
		}
	})
	registry := prometheus.NewRegistry()
	registry.MustRegister(components(func(out chan<- prometheus.Metric) {
		Pools(out, st, time.Unix(0, st.Time()))
	}))
	have := exposed(t, registry)
	for _, want := range []string{
		`skein_pool_blocks{pool="lan",state="owned"} 1`, `skein_pool_blocks{pool="lan",state="reserved"} 2`,
		`skein_pool_blocks{pool="lan",state="free"} 29`, `skein_pool_blocks{pool="lan",state="resting"} 0`,
	} {
		if !slices.Contains(have, want) {
			t.Errorf("%s is not among %q", want, have)
		}
	}
}

// TestSiteMetrics: a reserve of a site as Prometheus reads it, and a node in topology full.
func TestSiteMetrics(t *testing.T) {
	for want, f := range map[string]Sites{
		"site-metrics": {Tunnels: 5, Hops: 7, Apart: true, Site: "home", Leads: "reserve", Own: 2, Other: 3,
			Gossip:  &SiteGossip{false, 21, 22},
			Packets: &hop.Counts{Wrapped: 11, Unwrapped: 12, Refused: 13, Malformed: 14, Congested: 15, TooLarge: 16}},
		"site-metrics-full": {Tunnels: 12, Site: "home"},
	} {
		registry := prometheus.NewRegistry()
		registry.MustRegister(components(f.Collect))
		golden.Lines(t, want, exposed(t, registry))
	}
}

func TestUsage(t *testing.T) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(components(Usage))
	all, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range all {
		names = append(names, f.GetName())
	}
	if got, want := strings.Join(names, " "), "skein_context_switches_total skein_netlink_messages_total"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
