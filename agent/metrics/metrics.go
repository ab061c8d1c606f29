// Package metrics is what an agent tells Prometheus. Descriptions and names of all metrics stand here, and the port
// that answers with them. The agent brings the values: when they change, or when somebody asks.
package metrics

import (
	"net/http"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/skeinmesh/skein/dataplane/plane"
)

// Config is where values come from.
type Config struct {
	Writes func() uint64 // messages to the kernel that changed something
	Forged func() int    // what leaders passed on that no server has signed
	// Collect is called for each request. It tells what components count themselves, by this package's functions.
	Collect func(chan<- prometheus.Metric)
	Ready   func() error // why /readyz says no; nil: it says yes
}

// Metrics are those of one agent, on ports.metrics, besides /healthz and /readyz.
type Metrics struct {
	cfg      Config
	Registry *prometheus.Registry

	serving sync.Mutex   // guards what follows
	server  *http.Server // nil: none
	at      string       // where it answers
	ended   bool         // it answers nowhere any more

	Repaired   *prometheus.CounterVec // what others have changed in the kernel, by subsystem
	RPCRefused *prometheus.CounterVec // calls of other nodes that were refused for a while, by procedure and why
	Demotions  prometheus.Counter     // of leaders that live and do not forward
	CNI        CNI
	Egress     Egress

	info    *prometheus.GaugeVec
	index   prometheus.Gauge
	peers   *prometheus.GaugeVec
	leader  prometheus.Gauge
	streams prometheus.Gauge
	source  *prometheus.GaugeVec
	trouble *prometheus.GaugeVec
}

// New makes the metrics of an agent.
func New(cfg Config) *Metrics {
	m := &Metrics{cfg: cfg, Registry: prometheus.NewRegistry()}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		m.Registry.MustRegister(g)
		return g
	}
	gauges := func(name, help string, labels ...string) *prometheus.GaugeVec {
		g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
		m.Registry.MustRegister(g)
		return g
	}
	m.Repaired = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "skein_dataplane_mended_total",
		Help: "Changes by somebody else that were repaired, by subsystem."}, []string{"subsystem"})
	for _, s := range plane.Subsystems {
		m.Repaired.WithLabelValues(s) // from 0 on: a rate does not see a counter's first value
	}
	m.Registry.MustRegister(m.Repaired, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.Registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "skein_dataplane_writes_total",
		Help: "Messages to the kernel that changed something."}, func() float64 {
		return float64(cfg.Writes())
	}))
	m.info = gauges("skein_info", "Always 1; the labels say what runs.", "version", "node", "name",
		"driver", "nat", "mode")
	m.index = gauge("skein_state_index", "Last applied event.")
	m.peers = gauges("skein_peers", "Peers by path.", "path")
	m.leader = gauge("skein_is_leader", "1 on the node that leads the cluster.")
	m.streams = gauge("skein_events_streams", "Nodes of its site that have the log's events from this node, which leads "+
		"it.")
	m.source = gauges("skein_events_source",
		"1 for where this node has the log's events from: raft, server, leader, none.", "source")
	m.Registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "skein_events_forged_total",
		Help: "Times that a leader of this node's site passed on what no server has signed."}, func() float64 {
		return float64(cfg.Forged())
	}))
	m.trouble = gauges("skein_problems", "Problems that status shows, by severity.", "severity")
	m.RPCRefused = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "skein_rpc_refused_total",
		Help: "Calls of other nodes that were told to come again later, by procedure and why."}, []string{"procedure", "why"})
	m.Registry.MustRegister(m.RPCRefused)
	m.Demotions = prometheus.NewCounter(prometheus.CounterOpts{Name: "skein_leader_demotions_total",
		Help: "Times that witnesses found a leader of this node's site alive and not forwarding."})
	m.Registry.MustRegister(m.Demotions)
	m.CNI = newCNI(m.Registry)
	m.Egress = newEgress(m.Registry)
	m.Registry.MustRegister(components(cfg.Collect))
	return m
}

// Now is what the agent is and has.
type Now struct {
	Version, Node, Name, Driver, NAT, Mode string
	Index                                  uint64         // of the last applied event
	Paths                                  map[string]int // peers by path: direct, relay, down
	Leader                                 bool           // it leads the cluster
	Streams                                int            // nodes that have the log's events from it
	Source                                 string         // where it has them from
	Problems                               map[string]int // by severity
}

// Observe takes the newest values.
func (m *Metrics) Observe(now Now) {
	m.info.Reset()
	m.info.WithLabelValues(now.Version, now.Node, now.Name, now.Driver, now.NAT, now.Mode).Set(1)
	m.index.Set(float64(now.Index))
	for path, n := range now.Paths {
		m.peers.WithLabelValues(path).Set(float64(n))
	}
	m.leader.Set(one(now.Leader))
	m.streams.Set(float64(now.Streams))
	for _, s := range EventSources {
		m.source.WithLabelValues(s).Set(one(s == now.Source))
	}
	for severity, n := range now.Problems {
		m.trouble.WithLabelValues(severity).Set(float64(n))
	}
}

// Where a node has the log's events from.
const (
	FromRaft, FromServer, FromLeader, FromNobody = "raft", "server", "leader", "none"
)

// EventSources are all of these.
var EventSources = []string{FromRaft, FromServer, FromLeader, FromNobody}

// components is a collector that is unchecked, since its relays and peers come and go.
type components func(chan<- prometheus.Metric)

// Describe sends nothing.
func (components) Describe(chan<- *prometheus.Desc) {}

// Collect reads the components.
func (c components) Collect(out chan<- prometheus.Metric) { c(out) }

func gauge(out chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func counter(out chan<- prometheus.Metric, d *prometheus.Desc, v uint64, labels ...string) {
	out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}

// counters are of one metric, by its only label.
func counters(out chan<- prometheus.Metric, d *prometheus.Desc, values map[string]uint64) {
	for label, v := range values {
		counter(out, d, v, label)
	}
}

func one(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
