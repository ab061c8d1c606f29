package lag

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestTheLongestStopCounts(t *testing.T) {
	const every = 20 * time.Millisecond
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	s := stops{every: every, last: start}
	for _, c := range []struct {
		after   time.Duration // since the start
		longest time.Duration
	}{
		{20 * time.Millisecond, 0},
		{45 * time.Millisecond, 5 * time.Millisecond},
		{60 * time.Millisecond, 5 * time.Millisecond}, // the ticker catches up
		{400 * time.Millisecond, 320 * time.Millisecond},
		{500 * time.Millisecond, 320 * time.Millisecond},
	} {
		if s.woke(start.Add(c.after)); s.longest != c.longest {
			t.Errorf("after %s: it stood for %s, want %s", c.after, s.longest, c.longest)
		}
	}
}

func TestWhoRunsAllTheTimeDoesNotStand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		longest := Stood(20 * time.Millisecond)
		time.Sleep(time.Second)
		if got := longest(); got != 0 {
			t.Errorf("it stood for %s", got)
		}
		if got := longest(); got != 0 {
			t.Errorf("asked again, it stood for %s", got)
		}
	})
}
