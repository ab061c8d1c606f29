// Package lag measures how late this process wakes. On a host with too much to do, timers fire late and answers are
// seen late, and whoever takes that for the network's doing makes more work: paths are changed, sessions dialed anew.
// So those who judge by the clock note here how late they woke, and ask how late others did. There is no timer of its
// own: a process that nothing wakes is not late.
//
// A Meter is safe for concurrent use. The zero Meter is ready; a nil one measures nothing.
package lag

import (
	"math/bits"
	"sync"
	"time"
)

const (
	floor    = 20 * time.Millisecond // what any machine is late now and then
	halfLife = 4 * time.Second       // of what was measured
	step     = 50 * time.Millisecond // least level of Level
	most     = 3200 * time.Millisecond
)

// Meter keeps how late the process lately woke.
type Meter struct {
	mu    sync.Mutex
	late  time.Duration
	at    time.Time
	level time.Duration
}

// Note takes that something due at a time happens now.
func (m *Meter) Note(due, now time.Time) {
	if m == nil {
		return
	}
	late := now.Sub(due)
	if late < floor {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if late > m.decayed(now) {
		m.late, m.at = min(late, most), now
	}
}

func (m *Meter) decayed(now time.Time) time.Duration {
	halves := uint(max(now.Sub(m.at), 0) / halfLife)
	if halves > 16 {
		return 0
	}
	return m.late >> halves
}

// Late is how late the process lately woke: the worst of late, halved every four seconds.
func (m *Meter) Late(now time.Time) time.Duration {
	if m == nil {
		return 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.decayed(now)
}

// Level is Late in few steps: zero, or 50 ms doubled so often that it is not less. It rises at once and falls two steps
// late, so that those who act on each change of it have little to do.
func (m *Meter) Level(now time.Time) time.Duration {
	if m == nil {
		return 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	late := m.decayed(now)
	if late > m.level || late < m.level/4 {
		m.level = levelOf(late)
	}
	return m.level
}

func levelOf(late time.Duration) time.Duration {
	if late < floor {
		return 0
	}
	return step << bits.Len64(uint64((late-1)/step))
}
