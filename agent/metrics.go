package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/gossip/candidate"
)

// metrics are what the agent tells Prometheus, on ports.metrics, besides /healthz and /readyz.
type metrics struct {
	a        *Agent
	registry *prometheus.Registry

	serving sync.Mutex   // guards what follows
	server  *http.Server // nil: none
	at      string       // where it answers
	ended   bool         // it answers nowhere any more

	foreign *prometheus.CounterVec
	info    *prometheus.GaugeVec
	index   prometheus.Gauge
	peers   *prometheus.GaugeVec
	leader  prometheus.Gauge
	streams prometheus.Gauge
	source  *prometheus.GaugeVec
	trouble *prometheus.GaugeVec
	// rpcRefused counts calls of other nodes that were refused for a while.
	rpcRefused *prometheus.CounterVec
	demotions  prometheus.Counter
	cni        cniMetrics
	egress     egressMetrics
}

func newMetrics(a *Agent) *metrics {
	m := &metrics{a: a, registry: prometheus.NewRegistry()}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		m.registry.MustRegister(g)
		return g
	}
	gauges := func(name, help string, labels ...string) *prometheus.GaugeVec {
		g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
		m.registry.MustRegister(g)
		return g
	}
	m.foreign = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "skein_dataplane_mended_total",
		Help: "Changes by somebody else that were repaired, by subsystem."}, []string{"subsystem"})
	for _, s := range plane.Subsystems {
		m.foreign.WithLabelValues(s) // from 0 on: a rate does not see a counter's first value
	}
	m.registry.MustRegister(m.foreign, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "skein_dataplane_writes_total",
		Help: "Messages to the kernel that changed something."}, func() float64 {
		return float64(a.writes.Load())
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
	m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "skein_events_forged_total",
		Help: "Times that a leader of this node's site passed on what no server has signed."}, func() float64 {
		return float64(a.client.Forged())
	}))
	m.trouble = gauges("skein_problems", "Problems that status shows, by severity.", "severity")
	m.rpcRefused = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "skein_rpc_refused_total",
		Help: "Calls of other nodes that were told to come again later, by procedure and why."}, []string{"procedure", "why"})
	m.registry.MustRegister(m.rpcRefused)
	m.demotions = prometheus.NewCounter(prometheus.CounterOpts{Name: "skein_leader_demotions_total",
		Help: "Times that witnesses found a leader of this node's site alive and not forwarding."})
	m.registry.MustRegister(m.demotions)
	m.cni = newCNIMetrics(m.registry)
	m.egress = newEgressMetrics(m.registry)
	m.registry.MustRegister(componentCollector{a})
	return m
}

// observe sets the gauges from the newest values.
func (m *metrics) observe() {
	a := m.a
	driver := ""
	if a.plane != nil {
		driver = a.plane.Driver()
	}
	own := a.ownRecord()
	m.info.Reset()
	m.info.WithLabelValues(a.opts.Version, a.id.String(), a.name(), driver, candidate.NATName(own.GetNatType()),
		own.GetTransportMode()).Set(1)
	m.index.Set(float64(a.replica.State().Index()))
	count := map[string]int{"direct": 0, "relay": 0, "down": 0}
	for _, p := range a.currentPaths() {
		count[transport(p)]++
	}
	for k, n := range count {
		m.peers.WithLabelValues(k).Set(float64(n))
	}
	m.leader.Set(0)
	if s := a.server.Load(); s != nil && s.IsLeader() {
		m.leader.Set(1)
	}
	m.streams.Set(float64(a.passing()))
	for _, s := range eventSources {
		m.source.WithLabelValues(s).Set(0)
	}
	m.source.WithLabelValues(a.eventSource()).Set(1)
	trouble := map[string]int{warning: 0, failure: 0}
	for _, p := range a.problems.list() {
		trouble[p.GetSeverity()]++
	}
	for k, n := range trouble {
		m.trouble.WithLabelValues(k).Set(float64(n))
	}
}

// countAlive are the members that gossip sees, and all.
func (a *Agent) countAlive() (alive, all int) {
	members := a.roster.Members()
	for _, id := range members {
		if id == a.id || a.gossip.Alive(id) {
			alive++
		}
	}
	return alive, len(members)
}

// componentCollector reads the counters that components keep themselves, when it is asked.
type componentCollector struct{ a *Agent }

var (
	descNodes       = prometheus.NewDesc("skein_nodes", "Members, by whether gossip sees them.", []string{"alive"}, nil)
	descRelayClient = prometheus.NewDesc("skein_relay_session_bytes_total", "Bytes through relay sessions of this node.",
		[]string{"relay", "direction"}, nil)
	descEchoes = prometheus.NewDesc("skein_witness_echoes_total", "Echoes that this node, as a witness, sent "+
		"through a leader, and those of them that were lost.", []string{"leader", "outcome"}, nil)
	descRelayDrops = prometheus.NewDesc("skein_relay_session_dropped_total", "Packets for a relay that waited too "+
		"long or found the queue full.", []string{"relay"}, nil)
	descRelayRTT = prometheus.NewDesc("skein_relay_session_rtt_seconds", "Round-trip time to a relay.",
		[]string{"relay"}, nil)
	descPeerBytes = prometheus.NewDesc("skein_peer_bytes_total", "Bytes that WireGuard counted for a peer.",
		[]string{"peer", "direction"}, nil)
	descPeerPath = prometheus.NewDesc("skein_peer_path", "1 for each peer of which a record is known: how packets "+
		"to it travel now, direct, relay or down.", []string{"peer", "path"}, nil)
	descPathChanges = prometheus.NewDesc("skein_path_changes_total", "Changes of peers' paths: to_direct, "+
		"from_direct, rerouted, other_relay, to_udp, from_udp.", []string{"change"}, nil)
	descSuspicions = prometheus.NewDesc("skein_path_suspicions_total", "Times that a site's leader was suspected, so "+
		"that others carried what went through it.", nil, nil)
	descSilence = prometheus.NewDesc("skein_path_silence_seconds", "How long traffic stood still when a path "+
		"died, from the last answered ping to the switch.", nil, nil)
	descPunches = prometheus.NewDesc("skein_punches_total", "Signals to probe at the same moment: sent, received, "+
		"failed.", []string{"kind"}, nil)
	descRelayUDP = prometheus.NewDesc("skein_relay_udp_peers", "Peers reached by UDP through a relay's reserved "+
		"port; skein_peers counts them as relay.", nil, nil)
	descUDPPairs = prometheus.NewDesc("skein_relay_udp_pairs", "Pairs of clients with ports reserved at this "+
		"relay, by state: reserved, kernel, userspace.", []string{"state"}, nil)
	descUDPPackets = prometheus.NewDesc("skein_relay_udp_packets_total", "Datagrams at this relay's reserved ports "+
		"that this process handled; those in the kernel pass it by.", []string{"outcome"}, nil)
	descUDPBytes = prometheus.NewDesc("skein_relay_udp_bytes_total", "Bytes that this process forwarded between "+
		"reserved ports.", nil, nil)
	descUDPEvents = prometheus.NewDesc("skein_relay_udp_events_total", "What happened to pairs at this relay: "+
		"reserved, ended, denied, proven, rebound, fell_back, mended.", []string{"event"}, nil)
	descGuesses = prometheus.NewDesc("skein_birthday_attempts_total", "Attempts at guessing ports with a peer, by "+
		"outcome.", []string{"outcome"}, nil)
	descGuessCost = prometheus.NewDesc("skein_birthday_packets_total", "What guessing ports has cost: probes from "+
		"WireGuard's port, sockets opened.", []string{"kind"}, nil)
	descGuessNow = prometheus.NewDesc("skein_birthday_mappings", "Mappings of this host's NAT that guessing ports "+
		"counts as in use.", nil, nil)
	descRewrites = prometheus.NewDesc("skein_port_rewrites", "Peers whose packets nftables leads through another "+
		"UDP port.", nil, nil)
	descProbes    = prometheus.NewDesc("skein_probe_packets_total", "Probe packets, by kind.", []string{"kind"}, nil)
	descSessionUp = prometheus.NewDesc("skein_relay_session_up", "1 while a relay session answers. need: warm, "+
		"on-demand, trial, standby.", []string{"relay", "need"}, nil)
	descSessionPeers = prometheus.NewDesc("skein_relay_session_peers", "Peers whose packets would go by this relay now.",
		[]string{"relay"}, nil)
	descSessionRedial = prometheus.NewDesc("skein_relay_session_reconnects_total", "Times that the session with a relay "+
		"was dialed again.", []string{"relay"}, nil)
	descServerClients = prometheus.NewDesc("skein_relay_server_clients", "Clients with a session at this relay.", nil, nil)
	descServerStreams = prometheus.NewDesc("skein_relay_server_streams", "Streams that this relay joins.", nil, nil)
	descServerMemory  = prometheus.NewDesc("skein_relay_server_memory_bytes",
		"What this relay's queues and sessions hold.", nil, nil)
	descServerLimit = prometheus.NewDesc("skein_relay_server_memory_limit_bytes", "What they may hold.", nil, nil)
	descServerBytes = prometheus.NewDesc("skein_relay_server_bytes_total", "Bytes of packets that this relay "+
		"forwarded in sessions, and of streams.", []string{"kind"}, nil)
	descServerPackets = prometheus.NewDesc("skein_relay_server_packets_total", "Packets at this relay, by outcome: "+
		"forwarded, dropped, unroutable.", []string{"outcome"}, nil)
	descServerEvents = prometheus.NewDesc("skein_relay_server_events_total", "At this relay: sessions replaced and "+
		"refused, clients limited, handshakes_refused.", []string{"event"}, nil)
)

// Describe sends nothing: the collector is unchecked, since its relays and peers come and go.
func (c componentCollector) Describe(chan<- *prometheus.Desc) {}

// Collect reads the components.
func (c componentCollector) Collect(out chan<- prometheus.Metric) {
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	if c.a.gossip != nil {
		alive, all := c.a.countAlive()
		out <- prometheus.MustNewConstMetric(descNodes, prometheus.GaugeValue, float64(alive), "true")
		out <- prometheus.MustNewConstMetric(descNodes, prometheus.GaugeValue, float64(all-alive), "false")
	}
	for id, n := range c.a.witnesses.counts() {
		counter(descEchoes, n.Sent, c.a.roster.Name(id), "sent")
		counter(descEchoes, n.Lost, c.a.roster.Name(id), "lost")
	}
	for _, s := range c.a.pool.Stats() {
		name := c.a.roster.Name(s.Relay)
		counter(descRelayClient, s.RxBytes, name, "rx")
		counter(descRelayClient, s.TxBytes, name, "tx")
		counter(descRelayDrops, s.Dropped, name)
		out <- prometheus.MustNewConstMetric(descRelayRTT, prometheus.GaugeValue, s.RTT.Seconds(), name)
	}
	all := c.a.stats.Load()
	for _, id := range c.a.roster.Members() {
		m, _ := c.a.roster.get(id)
		if p, ok := all.of(c.a.deviceKey(id, m.wg)); ok {
			counter(descPeerBytes, p.RxBytes, m.name, "rx")
			counter(descPeerBytes, p.TxBytes, m.name, "tx")
		}
	}
	if c.a.paths != nil {
		c.a.collectPaths(out)
	}
	c.a.collectRelay(out)
	c.a.collectUDPRelay(out)
	c.a.collectPods(out)
	c.a.collectEgresses(out)
	c.a.collectUsage(out)
	c.a.collectRaft(out)
	c.a.collectGossip(out)
	c.a.collectSites(out)
	c.a.collectPlain(out)
	if c.a.guess != nil {
		s := c.a.guess.Stats()
		for outcome, n := range map[string]uint64{"hit": s.Hits, "failed": s.Failed, "refused": s.Refused,
			"silent": s.Silent} {
			counter(descGuesses, n, outcome)
		}
		counter(descGuessCost, s.Probes, "probe")
		counter(descGuessCost, s.Sockets, "socket")
		out <- prometheus.MustNewConstMetric(descGuessNow, prometheus.GaugeValue, float64(s.Mappings))
		out <- prometheus.MustNewConstMetric(descRewrites, prometheus.GaugeValue, float64(len(c.a.rewrites.list())))
	}
	if c.a.prober != nil {
		s := c.a.prober.Stats()
		counter(descProbes, s.PingsSent, "ping_sent")
		counter(descProbes, s.PongsSent, "pong_sent")
		counter(descProbes, s.PingsReceived, "ping_received")
		counter(descProbes, s.PongsReceived, "pong_received")
		counter(descProbes, s.Strangers+s.BadMAC+s.Replayed+s.Unsolicited, "refused")
	}
}

// collectPaths tells how peers are reached, and what became of their paths.
func (a *Agent) collectPaths(out chan<- prometheus.Metric) {
	for id, p := range a.currentPaths() {
		out <- prometheus.MustNewConstMetric(descPeerPath, prometheus.GaugeValue, 1, a.roster.Name(id), transport(p))
	}
	n := a.paths.Metrics()
	out <- prometheus.MustNewConstMetric(descSuspicions, prometheus.CounterValue, float64(n.Suspicions))
	out <- prometheus.MustNewConstMetric(descRelayUDP, prometheus.GaugeValue, float64(n.PeersUDP))
	out <- prometheus.MustNewConstSummary(descSilence, n.Blackouts.Count, n.Blackouts.Sum.Seconds(), nil)
	for change, v := range map[string]uint64{
		"to_direct": n.Upgrades, "from_direct": n.Downgrades, "rerouted": n.Reroutes, "other_relay": n.RelaySwaps,
		"to_udp": n.PortsUsed, "from_udp": n.PortsLost,
	} {
		out <- prometheus.MustNewConstMetric(descPathChanges, prometheus.CounterValue, float64(v), change)
	}
	for kind, v := range map[string]uint64{"sent": n.PunchesSent, "received": n.PunchesReceived, "failed": n.PunchErrors} {
		out <- prometheus.MustNewConstMetric(descPunches, prometheus.CounterValue, float64(v), kind)
	}
}

// listenMetrics takes the port for metrics and health, nil if none is wanted. It comes before anything is
// decided about this node, so that a port that is taken leaves nothing half done.
func listenMetrics(addr string) (net.Listener, error) {
	if addr == "off" {
		return nil, nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("metrics and health: %w (set ports.metrics to another address, or to off)", err)
	}
	return l, nil
}

// serve answers /metrics, /healthz and /readyz until ctx ends. at is what listens there: listenMetrics' argument.
func (m *metrics) serve(ctx context.Context, at string, l net.Listener) {
	m.serving.Lock()
	defer m.serving.Unlock()
	m.use(at, l)
	context.AfterFunc(ctx, func() {
		m.serving.Lock()
		defer m.serving.Unlock()
		m.use("off", nil)
		m.ended = true
	})
}

// use goes over to another listener; nil: none. The caller holds serving.
func (m *metrics) use(at string, l net.Listener) {
	if m.server != nil {
		m.server.Close()
	}
	m.at, m.server = at, nil
	if l != nil {
		m.server = &http.Server{Handler: m.handler(), ReadHeaderTimeout: 5 * time.Second}
		go m.server.Serve(l)
	}
}

// move answers at another address, or nowhere at "off". After an error it answers where it did.
func (m *metrics) move(to string) error {
	m.serving.Lock()
	defer m.serving.Unlock()
	if m.ended {
		return errors.New("the agent is stopping")
	}
	l, err := listenMetrics(to)
	if errors.Is(err, syscall.EADDRINUSE) && m.server != nil { // perhaps by ourselves, at an address that covers both
		before := m.at
		m.use("off", nil)
		if l, err = listenMetrics(to); err != nil {
			back, e := listenMetrics(before)
			m.use(before, back)
			err = errors.Join(err, e)
		}
	}
	if err != nil {
		return err
	}
	m.use(to, l)
	return nil
}

// handler answers these three and nothing else. Never net/http's default mux: packages register profiles and variables
// there.
func (m *metrics) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("/readyz", m.ready)
	return mux
}

// ready: the data plane holds what it should, and nothing is known to be broken. It does not ask for a
// leader or a quorum: forwarding goes on without.
func (m *metrics) ready(w http.ResponseWriter, _ *http.Request) {
	a := m.a
	switch p := a.problems.failing(); {
	case !a.applied.Load() && !a.relayOnly():
		http.Error(w, "the data plane has not been set up yet", http.StatusServiceUnavailable)
	case p != nil:
		http.Error(w, p.GetSubject()+": "+p.GetMessage(), http.StatusServiceUnavailable)
	default:
		fmt.Fprintln(w, "ok")
	}
}
