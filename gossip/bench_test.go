package gossip

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

// BenchmarkConvergence reports, on virtual time, how long a change takes to reach every node. The
// network has 5 to 40 ms one way and loses one packet in fifty.
func BenchmarkConvergence(b *testing.B) {
	for _, n := range []int{7, 200} {
		b.Run(fmt.Sprintf("nodes=%d", n), func(b *testing.B) {
			var times []time.Duration
			var packets, bytes int
			inBubble(b, func(t *testing.T) {
				s := newSim(t, n, 42)
				defer s.end()
				s.net.loss = 0.02
				s.formed()
				time.Sleep(10 * time.Second)
				changes := max(b.N, 2000/n)
				idle, _ := s.traffic(10 * time.Second)
				for i := range changes {
					site := fmt.Sprintf("change-%d", i)
					p, y := s.net.packets, s.net.bytes
					s.publish(i%n, site)
					took := s.within(time.Minute, "all see the change", sees(s.nodes, s.nodes[i%n].key.ID(), site))
					times = append(times, took)
					time.Sleep(3*time.Second - took)
					packets += s.net.packets - p - 3*idle/10
					bytes += s.net.bytes - y
				}
			})
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2].Milliseconds()), "p50-ms")
			b.ReportMetric(float64(times[(len(times)-1)*99/100].Milliseconds()), "p99-ms")
			b.ReportMetric(float64(packets)/float64(len(times)*n), "packets/change/node")
			b.ReportMetric(float64(bytes)/float64(3*len(times)*n), "bytes/s/node")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// traffic counts what an idle mesh sends.
func (s *sim) traffic(d time.Duration) (packets, bytes int) {
	p, y := s.net.packets, s.net.bytes
	time.Sleep(d)
	return s.net.packets - p, s.net.bytes - y
}

// inBubble runs f on virtual time, which the testing package offers to tests only.
func inBubble(b *testing.B, f func(*testing.T)) {
	all := func(_, _ string) (bool, error) { return true, nil }
	if !testing.RunTests(all, []testing.InternalTest{{Name: "bubble", F: func(t *testing.T) { simtime.Test(t, f) }}}) {
		b.Fatal("the simulation failed")
	}
}

// manyRecords is a fleet's worth of typical records, signed.
func manyRecords(tb testing.TB, n int) (*simRoster, []*skeinv1.SignedRecord) {
	roster := newRoster()
	var records []*skeinv1.SignedRecord
	for i := range n {
		k := simKey(i)
		roster.add(k)
		r := simRecord(fmt.Sprintf("site-%d", i%20))
		r.NodeId, r.Epoch, r.Seq = k.ID().String(), 1, uint64(i)
		r.Relay = &skeinv1.RelayOffer{Addresses: []string{fmt.Sprintf("203.0.113.%d:7443", i%250)}}
		r.RelayLinks = []*skeinv1.RelayLink{{NodeId: k.ID().String(), RttMicros: 1500},
			{NodeId: k.ID().String(), RttMicros: 2500}}
		s, err := Sign(k, r)
		if err != nil {
			tb.Fatal(err)
		}
		records = append(records, s)
	}
	return roster, records
}

// BenchmarkMemory reports what a running node holds for 1,000 members with a record each.
func BenchmarkMemory(b *testing.B) {
	const n = 1000
	roster, records := manyRecords(b, n)
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	var g *Gossip
	for b.Loop() {
		g = bareGossip(roster)
		g.Merge(records)
		g.Records()
		g.Hash()
	}
	used := heap() - before
	runtime.KeepAlive(records)
	if len(g.Records()) != n {
		b.Fatalf("%d records", len(g.Records()))
	}
	b.ReportMetric(float64(used)/n, "B/record")
	b.ReportMetric(float64(used)/(1<<20), "MiB/1000")
}

func BenchmarkAccept(b *testing.B) {
	roster, records := manyRecords(b, 1000)
	g := bareGossip(roster)
	i := 0
	for b.Loop() {
		if i%len(records) == 0 {
			g.table.keep(func(identity.ID) bool { return false })
		}
		if n, errs := g.Merge(records[i%len(records) : i%len(records)+1]); n != 1 {
			b.Fatal(errs)
		}
		i++
	}
}

// BenchmarkHash is what one changed record among 1,000 costs before the next comparison.
func BenchmarkHash(b *testing.B) {
	roster, records := manyRecords(b, 1000)
	g := bareGossip(roster)
	g.Merge(records)
	for b.Loop() {
		g.table.changed()
		g.Hash()
	}
}
