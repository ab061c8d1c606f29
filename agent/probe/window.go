package probe

// windowSize is how far, in pings, a late one may lag behind the newest and still count.
const windowSize = 1024

// Window remembers which pings of one sender were seen, so that a copy sent again by somebody else
// does nothing. A ping is named by the epoch of its sender's agent and a counter within it.
// The zero Window has seen nothing. It is not safe for concurrent use.
type Window struct {
	epoch uint64
	top   uint64 // highest counter seen in epoch; counters start at 1
	seen  [windowSize / 64]uint64
}

// Accept reports whether the ping is new, and remembers it.
func (w *Window) Accept(epoch, counter uint64) bool {
	if epoch < w.epoch || counter == 0 {
		return false
	}
	if epoch > w.epoch {
		*w = Window{epoch: epoch}
	}
	switch {
	case counter > w.top:
		if counter-w.top >= windowSize {
			w.seen = [windowSize / 64]uint64{}
		} else {
			for c := w.top + 1; c < counter; c++ {
				w.seen[c%windowSize/64] &^= 1 << (c % 64)
			}
		}
		w.top = counter
	case w.top-counter >= windowSize:
		return false
	case w.seen[counter%windowSize/64]&(1<<(counter%64)) != 0:
		return false
	}
	w.seen[counter%windowSize/64] |= 1 << (counter % 64)
	return true
}
