package events

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// traffic is a log of a cluster that grows to the given size and then changes: admissions, labels,
// tokens, keys, and an answer to every command.
func traffic(t testing.TB, nodes, changes int) []*skeinv1.Event {
	w := newWorld(t)
	w.must(createCluster("10.4.0.0/16", "n0"))
	w.must(createToken("1", MaxTokenUses, false))
	w.must(createToken("2", MaxTokenUses, false))
	for i := 1; i < nodes; i++ {
		c := admit(fmt.Sprintf("n%d", i), fmt.Sprint(1+i%2))
		c.Time, c.RequestId = w.now.UnixNano(), fmt.Sprintf("join-%d", i)
		w.decide(c)
	}
	for i := range changes {
		id := idOf(fmt.Sprintf("n%d", i%nodes)).String()
		var c *skeinv1.Command
		if i%4 == 0 {
			c = &skeinv1.Command{Body: &skeinv1.Command_RotateNodeKey{RotateNodeKey: &skeinv1.RotateNodeKey{NodeId: id,
				WireguardKey: key("fresh", fmt.Sprint(i))}}}
		} else {
			c = &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: id, SetLabels: true,
				Labels: map[string]string{"site": "dc", "turn": fmt.Sprint(i)}}}}
		}
		c.Time, c.RequestId = w.now.UnixNano(), fmt.Sprintf("change-%d", i)
		w.decide(c)
	}
	return w.log
}

// decide is must without the checks that cost time.
func (w *world) decide(c *skeinv1.Command) {
	evs, _, err := Decide(w.s, c)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, e := range evs {
		if err := w.s.Fold(e); err != nil {
			w.t.Fatal(err)
		}
	}
	w.log = append(w.log, evs...)
}

// BenchmarkFold replays a mixed log of 1,000 nodes; events/s is the figure of the design (≥ 500,000).
func BenchmarkFold(b *testing.B) {
	log := traffic(b, 1000, 20_000)
	b.ReportAllocs()
	b.ResetTimer()
	folded, before := 0, cpu(b)
	for b.Loop() {
		s := NewState()
		for _, e := range log {
			if err := s.Fold(e); err != nil {
				b.Fatal(err)
			}
		}
		folded += len(log)
	}
	b.ReportMetric(float64(folded)/b.Elapsed().Seconds(), "events/s")
	b.ReportMetric(float64(folded)/(cpu(b)-before).Seconds(), "events/cpu-s")
}

// cpu is the processor time of this process, garbage collection included: on a busy machine it says
// more than the clock.
func cpu(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkBatch is what a replica does with each log entry of 100 events: clone, fold, hash.
func BenchmarkBatch(b *testing.B) {
	log := traffic(b, 1000, 20_000)
	warm := len(log) / 2
	base := NewState()
	for _, e := range log[:warm] {
		if err := base.Fold(e); err != nil {
			b.Fatal(err)
		}
	}
	base.Hash()
	for _, hash := range []bool{false, true} {
		b.Run(fmt.Sprintf("hash=%v", hash), func(b *testing.B) {
			b.ReportAllocs()
			s, at := base, warm
			folded := 0
			for b.Loop() {
				if at+100 > len(log) {
					s, at = base, warm
				}
				s = s.Clone()
				for _, e := range log[at : at+100] {
					if err := s.Fold(e); err != nil {
						b.Fatal(err)
					}
				}
				if hash {
					s.Hash()
				}
				at += 100
				folded += 100
			}
			b.ReportMetric(float64(folded)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

func BenchmarkHashFromScratch(b *testing.B) {
	log := traffic(b, 1000, 5000)
	s := NewState()
	for _, e := range log {
		if err := s.Fold(e); err != nil {
			b.Fatal(err)
		}
	}
	p := s.Proto()
	b.ReportAllocs()
	for b.Loop() {
		s, err := FromProto(p)
		if err != nil {
			b.Fatal(err)
		}
		s.Hash()
	}
}

func BenchmarkDecideAdmit(b *testing.B) {
	w := newCluster(b)
	for i := range 999 {
		w.must(admit(fmt.Sprint("n", i), "1"))
	}
	c := withID("r", admit("new", "1"))
	c.Time = w.now.UnixNano()
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := Decide(w.s, c); err != nil {
			b.Fatal(err)
		}
	}
}
