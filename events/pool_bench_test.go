package events

import (
	"fmt"
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

const manyBlocks = 100_000

// crowded is a leader whose pool is nearly full: 1,000 nodes have 100,000 of its 106,496 blocks.
func crowded(b *testing.B) *world {
	w := newPools(b)
	w.must(createToken("many", MaxTokenUses, false))
	for i := range 1000 {
		c := today(admit(fmt.Sprint("n", i), "many"))
		c.Time, c.Entropy = w.now.UnixNano(), entropy(1)
		w.decide(c)
	}
	w.must(createPool(pool("p", 4, "11.0.0.0/12,fd02::/108", "11.16.0.0/13,fd03::/109", "11.24.0.0/15,fd04::/111")))
	for total := uint32(16); total < manyBlocks/1000+16; total += 16 {
		for n := range 1000 {
			c := allocate(fmt.Sprint("n", n), "p", min(total, manyBlocks/1000))
			c.Time = w.now.UnixNano()
			w.decide(c)
		}
	}
	return w
}

// BenchmarkDecideBlock is what the leader does for one block of a pool that is nearly full: decide and fold, the
// block given back and taken again, published and hashed every 16 commands.
func BenchmarkDecideBlock(b *testing.B) {
	base := crowded(b)
	s, given := base.s.Clone(), 0
	s.Hash()
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; b.Loop(); i++ {
		node := fmt.Sprint("n", i/2%1000)
		held := s.BlocksOf(id(node))
		c := release(node, "p", held[0].GetNumber())
		if i%2 == 1 {
			c = allocate(node, "p", uint32(len(held)+1))
			given++
		}
		c.Time, c.RequestId = base.now.UnixNano()+int64(i), fmt.Sprint("r", i)
		evs, _, err := Decide(s, c)
		if err != nil {
			b.Fatal(err)
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
	b.ReportMetric(float64(given)/b.Elapsed().Seconds(), "blocks/s")
}

// BenchmarkFoldBlocks replays the log that gave 100,000 blocks.
func BenchmarkFoldBlocks(b *testing.B) {
	log := crowded(b).log
	b.ReportAllocs()
	b.ResetTimer()
	folded := 0
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
}

// BenchmarkCrowdedState is a state of 100,000 blocks: memory when it was restored, size of its snapshot, and the
// time to write, to restore and to hash it.
func BenchmarkCrowdedState(b *testing.B) {
	w := crowded(b)
	snapshot, err := proto.Marshal(w.s.Proto())
	if err != nil {
		b.Fatal(err)
	}
	restore := func() *State {
		p := &skeinv1.State{}
		if err := proto.Unmarshal(snapshot, p); err != nil {
			b.Fatal(err)
		}
		s, err := FromProto(p)
		if err != nil {
			b.Fatal(err)
		}
		return s
	}
	b.Run("write", func(b *testing.B) {
		for b.Loop() {
			if _, err := proto.Marshal(w.s.Proto()); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(len(snapshot)), "snapshot-bytes")
		b.ReportMetric(float64(len(w.s.Blocks())), "blocks")
	})
	b.Run("restore", func(b *testing.B) {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		s := restore()
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ResetTimer()
		for b.Loop() {
			restore()
		}
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc), "state-bytes")
		runtime.KeepAlive(s)
	})
	b.Run("hash", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			s := restore()
			b.StartTimer()
			s.Hash()
		}
	})
	b.Run("clone", func(b *testing.B) {
		for b.Loop() {
			w.s.Clone()
		}
	})
}
