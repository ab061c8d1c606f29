package metrics

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeinmesh/skein/agent/egress"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// failoverBuckets are in seconds, from the event that gives a slot away to the new owner's first lease. What lies
// before it, until the leader missed the former owner, is the lease.
var failoverBuckets = []float64{.01, .025, .05, .1, .2, .3, .5, .75, 1, 1.5, 2, 3, 5, 10, 30}

var (
	descEgressSlots = prometheus.NewDesc("skein_egress_slots", "Slots of an egress in the whole cluster, by state: "+
		"owned, free.", []string{"egress", "state"}, nil)
	descEgressHere = prometheus.NewDesc("skein_egress_gateway_slots", "Slots that this node owns, by state: "+
		"forwarding, waiting for a lease.", []string{"egress", "state"}, nil)
	descEgressReady = prometheus.NewDesc("skein_egress_gateway_ready", "1 while this node is prepared to be a "+
		"gateway of the egress.", []string{"egress"}, nil)
	descEgressHealthy = prometheus.NewDesc("skein_egress_gateway_healthy", "1 while the egress's targets answer "+
		"through this node; absent without probes.", []string{"egress"}, nil)
	descEgressProbe = prometheus.NewDesc("skein_egress_probe_rtt_seconds", "Round-trip time of the last probe that "+
		"was answered through this gateway.", []string{"egress", "target"}, nil)
	descEgressPackets = prometheus.NewDesc("skein_egress_packets_total", "Packets that this gateway forwarded, by "+
		"slot and direction.", []string{"egress", "slot", "direction"}, nil)
	descEgressBytes = prometheus.NewDesc("skein_egress_bytes_total", "Bytes that this gateway forwarded, by slot "+
		"and direction.", []string{"egress", "slot", "direction"}, nil)
	descEgressConntrack = prometheus.NewDesc("skein_egress_conntrack_entries", "Connections that this gateway tracks "+
		"for the egress.", []string{"egress"}, nil)
	descEgressConnMax = prometheus.NewDesc("skein_egress_conntrack_limit", "Connections that it can track.",
		[]string{"egress"}, nil)
	descEgressClients = prometheus.NewDesc("skein_egress_gateway_clients", "Clients that this gateway knows.",
		[]string{"egress"}, nil)
	descEgressDropped = prometheus.NewDesc("skein_egress_dropped_total", "Packets that this gateway dropped, by kind: "+
		"stranger, invalid, lease, destination.", []string{"egress", "kind"}, nil)
	descEgressOwn = prometheus.NewDesc("skein_egress_clients", "Clients of this host, by state: ready, waiting, "+
		"unknown, refused.", []string{"egress", "state"}, nil)
)

// Egress count what passes and leaves no trace in a report.
type Egress struct {
	failover *prometheus.HistogramVec
	slots    *prometheus.CounterVec
	leases   *prometheus.CounterVec
}

func newEgress(r prometheus.Registerer) Egress {
	m := Egress{
		failover: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "skein_egress_failover_seconds",
			Buckets: failoverBuckets,
			Help: "From the event that gave this node a slot to the first moment that it forwarded, by whether the move was " +
				"planned."}, []string{"egress", "planned"}),
		slots: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "skein_egress_slot_events_total",
			Help: "What became of slots at this node: held, lost, released, denied, handed-over, taken-over, announced."},
			[]string{"egress", "what"}),
		leases: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "skein_egress_lease_renewals_total",
			Help: "Requests of this gateway for a lease, by answer: granted, denied, none."}, []string{"egress", "answer"}),
	}
	r.MustRegister(m.failover, m.slots, m.leases)
	return m
}

// SlotHeld counts what the journal is told of a slot; planned says how the slot came here.
func (m Egress) SlotHeld(h *skeinv1.SlotHeld, planned bool) {
	name := egress.RefOf(h).String()
	m.slots.WithLabelValues(name, h.GetWhat()).Inc()
	if h.GetWhat() == "held" && h.GetTookNanos() > 0 {
		m.failover.WithLabelValues(name, fmt.Sprint(planned)).Observe(float64(h.GetTookNanos()) / 1e9)
	}
}

// Renewed counts one request for a lease; answer is granted, denied or none.
func (m Egress) Renewed(namespace, name, answer string) {
	m.leases.WithLabelValues(egress.Ref{Namespace: namespace, Name: name}.String(), answer).Inc()
}

// Slots tells how many slots have an owner.
func Slots(out chan<- prometheus.Metric, st *events.State) {
	for _, e := range st.Egresses() {
		owned, free := 0, 0
		for _, s := range st.Slots(e.GetNamespace(), e.GetName()) {
			if s.GetNodeId() == "" {
				free++
			} else {
				owned++
			}
		}
		name := egress.RefOf(e).String()
		gauge(out, descEgressSlots, float64(owned), name, "owned")
		gauge(out, descEgressSlots, float64(free), name, "free")
	}
}

// EgressReport tells what this node's own report says.
func EgressReport(out chan<- prometheus.Metric, r *skeinv1.EgressReportResponse) {
	for _, g := range r.GetGateways() {
		name := egress.RefOf(g).String()
		forwarding := 0
		for _, s := range g.GetSlots() {
			slot := fmt.Sprint(s.GetNumber())
			if s.GetForwarding() {
				forwarding++
			}
			counter(out, descEgressPackets, s.GetPacketsOut(), name, slot, "out")
			counter(out, descEgressPackets, s.GetPacketsIn(), name, slot, "in")
			counter(out, descEgressBytes, s.GetBytesOut(), name, slot, "out")
			counter(out, descEgressBytes, s.GetBytesIn(), name, slot, "in")
		}
		gauge(out, descEgressHere, float64(forwarding), name, "forwarding")
		gauge(out, descEgressHere, float64(len(g.GetSlots())-forwarding), name, "waiting")
		gauge(out, descEgressReady, one(g.GetState().GetReady()), name)
		if h := g.GetState().GetHealth(); h == skeinv1.GatewayState_HEALTH_GOOD || h == skeinv1.GatewayState_HEALTH_BAD {
			gauge(out, descEgressHealthy, one(h == skeinv1.GatewayState_HEALTH_GOOD), name)
		}
		for _, p := range g.GetProbes() {
			if p.GetAnswered() {
				gauge(out, descEgressProbe, float64(p.GetRttNanos())/1e9, name, p.GetTarget())
			}
		}
		gauge(out, descEgressConntrack, float64(g.GetConntrack()), name)
		gauge(out, descEgressConnMax, float64(g.GetConntrackMax()), name)
		gauge(out, descEgressClients, float64(g.GetClients()), name)
		counter(out, descEgressDropped, g.GetDroppedStrangers(), name, "stranger")
		counter(out, descEgressDropped, g.GetDroppedInvalid(), name, "invalid")
		counter(out, descEgressDropped, g.GetDroppedLease(), name, "lease")
		counter(out, descEgressDropped, g.GetDroppedDestination(), name, "destination")
	}
	type key struct{ egress, state string }
	own := map[key]int{}
	for _, c := range r.GetClients() {
		for _, e := range c.GetEgresses() {
			name := ""
			if e.GetName() != "" { // else the annotations could not be read
				name = egress.RefOf(e).String()
			}
			own[key{name, e.GetState()}]++
		}
	}
	for k, n := range own {
		gauge(out, descEgressOwn, float64(n), k.egress, k.state)
	}
}
