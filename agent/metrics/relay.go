package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/udp"
)

var (
	descRelayClient = prometheus.NewDesc("skein_relay_session_bytes_total", "Bytes through relay sessions of this node.",
		[]string{"relay", "direction"}, nil)
	descRelayDrops = prometheus.NewDesc("skein_relay_session_dropped_total", "Packets for a relay that waited too "+
		"long or found the queue full.", []string{"relay"}, nil)
	descRelayRTT = prometheus.NewDesc("skein_relay_session_rtt_seconds", "Round-trip time to a relay.",
		[]string{"relay"}, nil)
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
	descUDPPairs = prometheus.NewDesc("skein_relay_udp_pairs", "Pairs of clients with ports reserved at this "+
		"relay, by state: reserved, kernel, userspace.", []string{"state"}, nil)
	descUDPPackets = prometheus.NewDesc("skein_relay_udp_packets_total", "Datagrams at this relay's reserved ports "+
		"that this process handled; those in the kernel pass it by.", []string{"outcome"}, nil)
	descUDPBytes = prometheus.NewDesc("skein_relay_udp_bytes_total", "Bytes that this process forwarded between "+
		"reserved ports.", nil, nil)
	descUDPEvents = prometheus.NewDesc("skein_relay_udp_events_total", "What happened to pairs at this relay: "+
		"reserved, ended, denied, proven, rebound, fell_back, mended.", []string{"event"}, nil)
)

// RelaySession tells how a session with a relay does.
func RelaySession(out chan<- prometheus.Metric, relay string, s client.RelayStats) {
	counter(out, descRelayClient, s.RxBytes, relay, "rx")
	counter(out, descRelayClient, s.TxBytes, relay, "tx")
	counter(out, descRelayDrops, s.Dropped, relay)
	gauge(out, descRelayRTT, s.RTT.Seconds(), relay)
	gauge(out, descSessionUp, one(s.Connected && !s.Suspect), relay, s.Need)
	gauge(out, descSessionPeers, float64(s.Peers), relay)
	counter(out, descSessionRedial, s.Reconnects, relay)
}

// RelayServer tells what this node relays; refused are handshakes at its port.
func RelayServer(out chan<- prometheus.Metric, s server.Stats, refused uint64) {
	gauge(out, descServerClients, float64(s.Sessions))
	gauge(out, descServerStreams, float64(s.Streams))
	gauge(out, descServerMemory, float64(s.Memory))
	gauge(out, descServerLimit, float64(s.MaxMemory))
	counters(out, descServerBytes, map[string]uint64{"packets": s.Bytes, "streams": s.StreamBytes})
	counters(out, descServerPackets, map[string]uint64{"forwarded": s.Packets, "dropped": s.Dropped,
		"unroutable": s.Unroutable})
	counters(out, descServerEvents, map[string]uint64{"replaced": s.Replaced, "refused": s.Refused, "limited": s.Limited,
		"handshakes_refused": refused})
}

// UDPRelay tells how this relay's reserved ports do.
func UDPRelay(out chan<- prometheus.Metric, s udp.Stats) {
	for state, n := range map[string]int{"reserved": s.Pairs - s.Ready, "kernel": s.InKernel,
		"userspace": s.Ready - s.InKernel} {
		gauge(out, descUDPPairs, float64(n), state)
	}
	counters(out, descUDPPackets, map[string]uint64{"forwarded": s.Packets, "lost": s.Lost, "refused": s.Refused})
	counter(out, descUDPBytes, s.Bytes)
	counters(out, descUDPEvents, map[string]uint64{
		"reserved": s.Reserved, "ended": s.Ended, "denied": s.Denied, "proven": s.Proven, "rebound": s.Rebound,
		"fell_back": s.FellBack, "mended": s.Repaired,
	})
}
