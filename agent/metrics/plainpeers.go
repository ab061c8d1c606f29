package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

var (
	descPlainPeers = prometheus.NewDesc("skein_plain_peers",
		"Plain peers that this node may carry: held by it, or standby while another node holds them, or none does.",
		[]string{"state"}, nil)
	descPlainHandshake = prometheus.NewDesc("skein_plain_peer_handshake_timestamp_seconds",
		"Last handshake with a plain peer that this node holds, Unix time. Absent before the first one.",
		[]string{"peer"}, nil)
	descPlainBytes = prometheus.NewDesc("skein_plain_peer_bytes_total",
		"Bytes that WireGuard counted for a plain peer that this node holds.", []string{"peer", "direction"}, nil)
	descPlainExpiry = prometheus.NewDesc("skein_plain_peer_expiry_timestamp_seconds",
		"When a plain peer that this node holds expires, Unix time. Absent if it never does.", []string{"peer"}, nil)
)

// PlainPeers tells of the plain peers that this node may carry, of all that it knows.
func PlainPeers(out chan<- prometheus.Metric, self string, all []*skeinv1.PlainPeerView) {
	const ns = 1e9
	held, standby := 0, 0
	for _, v := range all {
		name := v.GetPeer().GetName()
		switch {
		case v.GetHolder() == self:
			held++
		case slices.ContainsFunc(v.GetPeer().GetCarriers(),
			func(c *skeinv1.PlainCarrier) bool { return c.GetNodeId() == self }):
			standby++
			continue
		default:
			continue
		}
		if at := v.GetLastHandshake(); at != 0 {
			gauge(out, descPlainHandshake, float64(at)/ns, name)
		}
		if at := v.GetPeer().GetExpiresAt(); at != 0 {
			gauge(out, descPlainExpiry, float64(at)/ns, name)
		}
		counter(out, descPlainBytes, v.GetRxBytes(), name, "rx")
		counter(out, descPlainBytes, v.GetTxBytes(), name, "tx")
	}
	gauge(out, descPlainPeers, float64(held), "held")
	gauge(out, descPlainPeers, float64(standby), "standby")
}
