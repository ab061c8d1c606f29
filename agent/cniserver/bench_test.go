package cniserver

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/internal/testns"
)

// BenchmarkAdd is an ADD by a client of the socket, with its address, link and routes, but without the plugin's
// process: `skein-dev bench --only pods` measures that.
func BenchmarkAdd(b *testing.B) {
	r := newRig(b, dual())
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		pod, name := testns.New(b, "cb"), fmt.Sprint("c", i)
		b.StartTimer()
		began := time.Now()
		r.add(name, pod)
		took = append(took, time.Since(began))
		b.StopTimer()
		r.del(name)
		b.StartTimer()
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
}
