package consensus

import (
	"sync"
	"time"
)

// commitBounds are the upper bounds by which Stats counts commits.
var commitBounds = [...]time.Duration{
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond,
	50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second,
	2500 * time.Millisecond, 5 * time.Second,
}

// Durations tells how long something took, as a Prometheus histogram does.
type Durations struct {
	Count uint64                   `json:"count"`
	Sum   time.Duration            `json:"sum"`
	Under map[time.Duration]uint64 `json:"under"` // by upper bound, each with all that took less
}

// timing counts durations.
type timing struct {
	mu    sync.Mutex
	count [len(commitBounds) + 1]uint64 // the last took longer than all bounds
	sum   time.Duration
}

func (t *timing) add(d time.Duration) {
	i := 0
	for i < len(commitBounds) && d > commitBounds[i] {
		i++
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count[i]++
	t.sum += d
}

func (t *timing) read() Durations {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := Durations{Sum: t.sum, Under: make(map[time.Duration]uint64, len(commitBounds))}
	for i, n := range t.count {
		out.Count += n
		if i < len(commitBounds) {
			out.Under[commitBounds[i]] = out.Count
		}
	}
	return out
}
