package events

import (
	"fmt"
	"testing"
)

// BenchmarkAssignSlot is what the leader does to move one of 8,000 slots of 1,000 egresses: decide and fold, published
// and hashed every 16 commands. One egress in ten has 64 destinations.
func BenchmarkAssignSlot(b *testing.B) {
	w := newPools(b)
	w.must(createPool(pool("default", 3, "10.64.0.0/18,fd02::/114")))
	for i := range 1000 {
		e := egress(fmt.Sprintf("ns%d/out", i), "192.0.2.0/24 ::/0", 8)
		if i%10 == 0 {
			for j := range 64 {
				e.Destinations = append(e.Destinations, fmt.Sprintf("11.0.%d.0/24", j))
			}
		}
		c := define(e)
		c.Time = w.now.UnixNano()
		w.decide(c)
	}
	s, nodes := w.s.Clone(), []string{"a", "b", "c"}
	s.Hash()
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; b.Loop(); i++ {
		n := i % 8000
		name, number := fmt.Sprintf("ns%d", n/8), uint32(n%8)
		c := assign(name+"/out", number, nodes[i/8000%3], s.Slot(name, "out", number).GetEpoch())
		c.Time, c.RequestId = w.now.UnixNano()+int64(i), fmt.Sprint("r", i)
		evs, _, err := Decide(s, c)
		if err != nil || len(evs) != 2 {
			b.Fatal(evs, err)
		}
		for _, e := range evs {
			if err := s.Fold(e); err != nil {
				b.Fatal(err)
			}
		}
		if i%16 == 0 {
			s = s.Clone()
			s.Hash()
		}
	}
}
