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

	oneStop     = 200 * time.Millisecond // late wakes within this time are of one stop
	onceCounts  = time.Second            // how long a stop counts that is the only one
	againWithin = 15 * time.Second       // how soon another one has to follow to be the same trouble
)

// Meter keeps how late the process lately woke. A process that was stopped for once, alone or with its host, is not
// late for long; what happens again within fifteen seconds is taken for the host's way.
type Meter struct {
	mu    sync.Mutex
	late  time.Duration // seen at least twice
	at    time.Time     // then
	stop  time.Duration // the worst of a stop, which may stay the only one
	since time.Time     // when it was seen
	level time.Duration
}

// Note takes that something due at a time happens now.
func (m *Meter) Note(due, now time.Time) {
	if m == nil {
		return
	}
	late := min(now.Sub(due), most)
	if late < floor {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch past := now.Sub(m.since); {
	case past < 0, past > againWithin:
		m.stop, m.since = late, now
	case past < oneStop:
		m.stop = max(m.stop, late)
	default:
		if twice := min(late, m.stop); twice > m.decayed(now) {
			m.late, m.at = twice, now
		}
		if late >= m.stop {
			m.stop, m.since = late, now
		}
	}
}

func (m *Meter) decayed(now time.Time) time.Duration {
	halves := uint(max(now.Sub(m.at), 0) / halfLife)
	if halves > 16 {
		return 0
	}
	return m.late >> halves
}

// now is what counts at a time.
func (m *Meter) now(at time.Time) time.Duration {
	late := m.decayed(at)
	if past := at.Sub(m.since); past >= 0 && past < onceCounts {
		late = max(late, m.stop)
	}
	return late
}

// Late is how late the process lately woke: the worst of the last second, or what was seen twice, halved every four
// seconds.
func (m *Meter) Late(now time.Time) time.Duration {
	if m == nil {
		return 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now(now)
}

// Level is Late in few steps: zero, or 50 ms doubled so often that it is not less. It rises at once and falls two steps
// late, so that those who act on each change of it have little to do.
func (m *Meter) Level(now time.Time) time.Duration {
	if m == nil {
		return 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	late := m.now(now)
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
