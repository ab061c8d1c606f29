package agent

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

// collectPlain tells of the plain peers that this node may carry, as its last look at their sessions has it.
func (a *Agent) collectPlain(out chan<- prometheus.Metric) {
	if a.plain == nil || a.replica == nil || a.gossip == nil {
		return
	}
	collectPlainPeers(a.id.String(), a.plainPeerService().Views(), out)
}

func collectPlainPeers(self string, all []*skeinv1.PlainPeerView, out chan<- prometheus.Metric) {
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
			out <- prometheus.MustNewConstMetric(descPlainHandshake, prometheus.GaugeValue, float64(at)/ns, name)
		}
		if at := v.GetPeer().GetExpiresAt(); at != 0 {
			out <- prometheus.MustNewConstMetric(descPlainExpiry, prometheus.GaugeValue, float64(at)/ns, name)
		}
		out <- prometheus.MustNewConstMetric(descPlainBytes, prometheus.CounterValue, float64(v.GetRxBytes()), name, "rx")
		out <- prometheus.MustNewConstMetric(descPlainBytes, prometheus.CounterValue, float64(v.GetTxBytes()), name, "tx")
	}
	out <- prometheus.MustNewConstMetric(descPlainPeers, prometheus.GaugeValue, float64(held), "held")
	out <- prometheus.MustNewConstMetric(descPlainPeers, prometheus.GaugeValue, float64(standby), "standby")
}

// heldPlain are the plain peers that this node holds.
func (a *Agent) heldPlain() []*skeinv1.PlainPeerView {
	if !a.plain.View().Carrying {
		return nil
	}
	return slices.DeleteFunc(a.plainPeerService().Views(), func(v *skeinv1.PlainPeerView) bool {
		return v.GetHolder() != a.id.String()
	})
}
