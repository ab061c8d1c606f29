package probe

import (
	"math/rand/v2"
	"testing"
)

// slowWindow is the obvious way to do what Window does.
type slowWindow struct {
	epoch, top uint64
	seen       map[uint64]bool
}

func (w *slowWindow) accept(epoch, counter uint64) bool {
	if epoch < w.epoch || counter == 0 {
		return false
	}
	if epoch > w.epoch || w.seen == nil {
		*w = slowWindow{epoch: epoch, seen: map[uint64]bool{}}
	}
	if w.seen[counter] || w.top >= windowSize && counter <= w.top-windowSize {
		return false
	}
	w.seen[counter], w.top = true, max(w.top, counter)
	return true
}

func TestWindowAgainstReference(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		var w Window
		var slow slowWindow
		epoch, base := uint64(0), uint64(1)
		for i := range 20_000 {
			switch r.IntN(1000) {
			case 0:
				epoch++
			case 1:
				base += uint64(r.IntN(3 * windowSize))
			}
			base += uint64(r.IntN(3))
			e, c := epoch-min(epoch, uint64(r.IntN(50)/49)), base+uint64(r.IntN(8))-min(base, uint64(r.IntN(windowSize+40)))
			if got, want := w.Accept(e, c), slow.accept(e, c); got != want {
				t.Fatalf("seed %d step %d: Accept(%d, %d) = %v, reference says %v", seed, i, e, c, got, want)
			}
		}
	}
}
