package kube

import (
	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the part's.
type metrics struct {
	writes  *prometheus.CounterVec
	records *prometheus.CounterVec
	heard   prometheus.Gauge
}

func newMetrics() metrics {
	return metrics{
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "skein_kubernetes_writes_total",
			Help: "Writes to the apiserver, by what was written and how it went: ok, failed."}, []string{"object", "outcome"}),
		records: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "skein_kubernetes_records_total",
			Help: "Records in annotations of other Nodes: taken, refused, unknown (of a node that is not a member)."},
			[]string{"outcome"}),
		heard: prometheus.NewGauge(prometheus.GaugeOpts{Name: "skein_kubernetes_heard_timestamp_seconds",
			Help: "When the apiserver last brought something, Unix time; bookmarks of a watch count."}),
	}
}

func (m metrics) wrote(object string, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "failed"
	}
	m.writes.WithLabelValues(object, outcome).Inc()
}

func (m metrics) collectors(p *Part) []prometheus.Collector {
	return []prometheus.Collector{m.writes, m.records, m.heard, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "skein_kubernetes_nodes", Help: "Nodes that the apiserver has, as far as is known.",
	}, func() float64 { n, _ := p.nodes.count(); return float64(n) })}
}
