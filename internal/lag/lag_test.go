package lag

import (
	"testing"
	"time"
)

func TestMeter(t *testing.T) {
	var m Meter
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, c := range []struct {
		after       time.Duration // since the case before
		note        time.Duration // late by; 0: nothing
		late, level time.Duration
	}{
		{0, 0, 0, 0},
		{time.Second, 10 * time.Millisecond, 0, 0}, // any machine is
		{time.Second, 30 * time.Millisecond, 30 * time.Millisecond, 50 * time.Millisecond},
		{100 * time.Millisecond, 400 * time.Millisecond, 400 * time.Millisecond, 400 * time.Millisecond},
		{200 * time.Millisecond, 60 * time.Millisecond, 400 * time.Millisecond, 400 * time.Millisecond}, // the worst counts
		// seen once, and once is over
		{time.Second, 0, 60 * time.Millisecond, 100 * time.Millisecond},
		{time.Second, 500 * time.Millisecond, 500 * time.Millisecond, 800 * time.Millisecond},
		{onceCounts, 0, 400 * time.Millisecond, 800 * time.Millisecond}, // seen twice
		{halfLife, 0, 200 * time.Millisecond, 800 * time.Millisecond},
		{halfLife, 0, 100 * time.Millisecond, 100 * time.Millisecond}, // falls two steps late
		{20 * halfLife, time.Hour, most, most},
		{onceCounts, 0, 0, 0},
		{time.Second, time.Hour, most, most},
		{onceCounts, 0, most, most}, // twice
		{20 * halfLife, 0, 0, 0},
	} {
		at = at.Add(c.after)
		if c.note > 0 {
			m.Note(at.Add(-c.note), at)
		}
		if late, level := m.Late(at), m.Level(at); late != c.late || level != c.level {
			t.Errorf("after %s and %s late: %s, level %s; want %s, level %s", c.after, c.note, late, level, c.late, c.level)
		}
	}
	var none *Meter
	none.Note(at, at.Add(time.Hour))
	if none.Late(at) != 0 || none.Level(at) != 0 {
		t.Error("a nil meter measures")
	}
}
