package metrics

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeinmesh/skein/agent/ipam"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/events"
)

// cniBuckets are in seconds: an attachment takes some milliseconds, a runtime waits for minutes.
var cniBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}

var (
	descPoolBlocks = prometheus.NewDesc("skein_pool_blocks", "Blocks of an address pool in the whole cluster, by "+
		"state: owned, reserved, resting, free.", []string{"pool", "state"}, nil)
	descPodAddresses = prometheus.NewDesc("skein_pod_addresses", "Addresses in this node's blocks, by state: used, "+
		"free, resting.", []string{"pool", "state"}, nil)
)

// CNI counts what the CNI plugin asks for.
type CNI struct {
	took  *prometheus.HistogramVec
	asked *prometheus.CounterVec
}

func newCNI(r *prometheus.Registry) CNI {
	m := CNI{
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "skein_cni_request_seconds",
			Help: "How long the agent took for a request of the CNI plugin.", Buckets: cniBuckets}, []string{"verb"}),
		asked: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "skein_cni_requests_total",
			Help: "Requests of the CNI plugin, by CNI error code; 0 is success."}, []string{"verb", "code"}),
	}
	for _, code := range []uint32{0, cni.CodeTryAgain, cni.CodeUnknown, cni.CodeConfig, cni.CodeInternal,
		cni.CodeExhausted,
		cni.CodeDenied, cni.CodeExists} {
		m.asked.WithLabelValues("ADD", fmt.Sprint(code)) // from 0 on: a rate does not see a counter's first value
	}
	r.MustRegister(m.took, m.asked)
	return m
}

// Observe takes one request.
func (m CNI) Observe(verb string, code uint32, took time.Duration) {
	m.took.WithLabelValues(verb).Observe(took.Seconds())
	m.asked.WithLabelValues(verb, fmt.Sprint(code)).Inc()
}

// Pools tells how full the pools are in the cluster.
func Pools(out chan<- prometheus.Metric, st *events.State, now time.Time) {
	for _, p := range st.Pools() {
		use := st.PoolUse(p.GetName())
		resting := use.Resting(now)
		for state, n := range map[string]uint64{"owned": use.Owned, "reserved": use.Reserved, "resting": resting,
			"free": use.Free() - resting} {
			gauge(out, descPoolBlocks, float64(n), p.GetName(), state)
		}
	}
}

// PodAddresses tells how full this node's blocks of a pool are.
func PodAddresses(out chan<- prometheus.Metric, pool string, l ipam.LocalPool) {
	gauge(out, descPodAddresses, float64(l.Used), pool, "used")
	gauge(out, descPodAddresses, float64(l.Free), pool, "free")
	gauge(out, descPodAddresses, float64(l.Resting), pool, "resting")
}
