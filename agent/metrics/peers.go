package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeinmesh/skein/agent/birthday"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/probe"
	"github.com/skeinmesh/skein/agent/witness"
)

var (
	descNodes  = prometheus.NewDesc("skein_nodes", "Members, by whether gossip sees them.", []string{"alive"}, nil)
	descEchoes = prometheus.NewDesc("skein_witness_echoes_total", "Echoes that this node, as a witness, sent "+
		"through a leader, and those of them that were lost.", []string{"leader", "outcome"}, nil)
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
	descPredictions = prometheus.NewDesc("skein_birthday_attempts_total", "Attempts at port prediction with a peer, by "+
		"outcome.", []string{"outcome"}, nil)
	descPredictionCost = prometheus.NewDesc("skein_birthday_packets_total", "What port prediction has cost: probes from "+
		"WireGuard's port, sockets opened.", []string{"kind"}, nil)
	descPredictionNow = prometheus.NewDesc("skein_birthday_mappings", "Mappings of this host's NAT that port prediction "+
		"counts as in use.", nil, nil)
	descRewrites = prometheus.NewDesc("skein_port_rewrites", "Peers whose packets nftables leads through another "+
		"UDP port.", nil, nil)
	descProbes = prometheus.NewDesc("skein_probe_packets_total", "Probe packets, by kind.", []string{"kind"}, nil)
)

// Nodes tells how many members gossip sees, of all.
func Nodes(out chan<- prometheus.Metric, alive, all int) {
	gauge(out, descNodes, float64(alive), "true")
	gauge(out, descNodes, float64(all-alive), "false")
}

// Echoes tells what a witness has sent through a leader.
func Echoes(out chan<- prometheus.Metric, leader string, n witness.Counts) {
	counter(out, descEchoes, n.Sent, leader, "sent")
	counter(out, descEchoes, n.Lost, leader, "lost")
}

// PeerBytes tells what WireGuard counted for a peer.
func PeerBytes(out chan<- prometheus.Metric, peer string, received, sent uint64) {
	counter(out, descPeerBytes, received, peer, "rx")
	counter(out, descPeerBytes, sent, peer, "tx")
}

// PeerPath tells how packets to a peer travel.
func PeerPath(out chan<- prometheus.Metric, peer, path string) {
	gauge(out, descPeerPath, 1, peer, path)
}

// Paths tells what became of peers' paths.
func Paths(out chan<- prometheus.Metric, n path.Numbers) {
	counter(out, descSuspicions, n.Suspicions)
	gauge(out, descRelayUDP, float64(n.PeersUDP))
	out <- prometheus.MustNewConstSummary(descSilence, n.Blackouts.Count, n.Blackouts.Sum.Seconds(), nil)
	counters(out, descPathChanges, map[string]uint64{
		"to_direct": n.Upgrades, "from_direct": n.Downgrades, "rerouted": n.Reroutes, "other_relay": n.RelaySwaps,
		"to_udp": n.PortsUsed, "from_udp": n.PortsLost,
	})
	counters(out, descPunches, map[string]uint64{"sent": n.PunchesSent, "received": n.PunchesReceived,
		"failed": n.PunchErrors})
}

// PortPrediction tells how attempts to find open ports fare, and how many peers' packets are led through such a port.
func PortPrediction(out chan<- prometheus.Metric, s birthday.Stats, rewrites int) {
	counters(out, descPredictions, map[string]uint64{"hit": s.Hits, "failed": s.Failed, "refused": s.Refused,
		"silent": s.Silent})
	counters(out, descPredictionCost, map[string]uint64{"probe": s.Probes, "socket": s.Sockets})
	gauge(out, descPredictionNow, float64(s.Mappings))
	gauge(out, descRewrites, float64(rewrites))
}

// Probes tells of the packets that probe paths.
func Probes(out chan<- prometheus.Metric, s probe.ProberStats) {
	counters(out, descProbes, map[string]uint64{
		"ping_sent": s.PingsSent, "pong_sent": s.PongsSent, "ping_received": s.PingsReceived,
		"pong_received": s.PongsReceived, "refused": s.Strangers + s.BadMAC + s.Replayed + s.Unsolicited,
	})
}
