// Package instant keeps a time that goroutines share, with its reading of the monotonic clock, which nobody sets: who
// stores a time as a number of nanoseconds since 1970, and takes it from a later one, gets an hour too much or too
// little when the wall clock is set.
//
// An Instant is safe for concurrent use, and is not copied after its first use.
package instant

import (
	"sync/atomic"
	"time"
)

// Instant is a time, or none.
type Instant struct{ at atomic.Pointer[time.Time] }

// Set makes it t.
func (m *Instant) Set(t time.Time) { m.at.Store(&t) }

// SetOnce makes it t if it is none, and tells whether it was.
func (m *Instant) SetOnce(t time.Time) bool { return m.at.CompareAndSwap(nil, &t) }

// Clear makes it none.
func (m *Instant) Clear() { m.at.Store(nil) }

// Load returns it; the zero time is none.
func (m *Instant) Load() time.Time {
	if t := m.at.Load(); t != nil {
		return *t
	}
	return time.Time{}
}
