package agent

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/golden"
)

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
	registry.MustRegister(collectorFunc(func(out chan<- prometheus.Metric) {
		collectPlainPeers(self, []*skeinv1.PlainPeerView{
			{Peer: peer("away", 0, other, self), Holder: other, LastHandshake: 7e9},
			{Peer: peer("elsewhere", 0, other), Holder: other},
			{Peer: peer("laptop", 0, self), Holder: self},
			{Peer: peer("nobodys", 0, self)},
			{Peer: peer("phone", 1700000000e9, other, self), Holder: self, LastHandshake: 1600000000.5e9,
				RxBytes: 11, TxBytes: 12},
		}, out)
	}))
	golden.Lines(t, "plain-metrics", exposed(t, registry))
}
