package agent

import (
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeinmesh/skein/agent/api/apitest"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// How full a pool is, in blocks of the whole cluster: of 32 one is a node's, and two are reserved.
func TestPoolMetrics(t *testing.T) {
	st := apitest.WithEgresses(t, func(ids []string) []*skeinv1.Event {
		return []*skeinv1.Event{
			{Body: &skeinv1.Event_PoolCreated{PoolCreated: &skeinv1.PoolCreated{Pool: &skeinv1.Pool{Name: "lan",
				BlockSizeBits: 3,
				Subnets:       []*skeinv1.PoolSubnet{{Ipv4: "10.65.0.0/24"}}}}}},
			{Body: &skeinv1.Event_BlockAllocated{BlockAllocated: &skeinv1.BlockAllocated{Block: &skeinv1.Block{Pool: "lan",
				Ipv4:   "10.65.0.0/29",
				NodeId: ids[0]}}}},
			{Body: &skeinv1.Event_BlockReserved{BlockReserved: &skeinv1.BlockReserved{Block: &skeinv1.Block{Pool: "lan",
				Number: 1,
				Ipv4:   "10.65.0.8/29", Reason: "a printer"}}}},
			{Body: &skeinv1.Event_BlockReserved{BlockReserved: &skeinv1.BlockReserved{Block: &skeinv1.Block{Pool: "lan",
				Number: 2,
				Ipv4:   "10.65.0.16/29", Reason: "another one"}}}},
		}
	})
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectorFunc(func(out chan<- prometheus.Metric) {
		collectPools(st, time.Unix(0, st.Time()), out)
	}))
	have := exposed(t, registry)
	for _, want := range []string{
		`skein_pool_blocks{pool="lan",state="owned"} 1`, `skein_pool_blocks{pool="lan",state="reserved"} 2`,
		`skein_pool_blocks{pool="lan",state="free"} 29`, `skein_pool_blocks{pool="lan",state="resting"} 0`,
	} {
		if !slices.Contains(have, want) {
			t.Errorf("%s is not among %q", want, have)
		}
	}
}
