package agent

import (
	"bytes"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"

	"github.com/skeinmesh/skein/agent/api/apitest"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/golden"
)

// collectorFunc is a collector that nobody checks beforehand, as componentCollector is.
type collectorFunc func(chan<- prometheus.Metric)

func (f collectorFunc) Describe(chan<- *prometheus.Desc)     {}
func (f collectorFunc) Collect(out chan<- prometheus.Metric) { f(out) }

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
	m := newEgressMetrics(registry)
	registry.MustRegister(collectorFunc(func(out chan<- prometheus.Metric) {
		collectSlots(st, out)
		collectReport(r, out)
	}))
	m.slotHeld(&skeinv1.SlotHeld{Namespace: "internet", Name: "nat", What: "held", TookNanos: 130e6}, true)
	// after a start of the agent: no failover
	m.slotHeld(&skeinv1.SlotHeld{Namespace: "internet", Name: "nat", What: "held"}, false)
	m.slotHeld(&skeinv1.SlotHeld{Namespace: "internet", Name: "nat", What: "denied"}, false)
	m.renewed("internet", "nat", "granted")
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
