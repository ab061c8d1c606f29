package wire

import (
	"testing"
	"time"
)

func TestMeter(t *testing.T) {
	var m meter
	for _, c := range []struct {
		at    time.Duration
		bytes int
		rate  float64
		ok    bool
	}{
		{10 * time.Second, 1000, 0, false}, // idle before
		{10*time.Second + 20*time.Millisecond, 1000, 0, false},
		{10*time.Second + 100*time.Millisecond, 9000, 100_000, true},
		{10*time.Second + 110*time.Millisecond, 5000, 0, false},
		{10*time.Second + 200*time.Millisecond, 5000, 100_000, true},
	} {
		rate, ok := m.add(c.at, c.bytes)
		if ok != c.ok || ok && rate != c.rate {
			t.Errorf("%d bytes at %s: rate %.0f, %t; want %.0f, %t", c.bytes, c.at, rate, ok, c.rate, c.ok)
		}
	}
}

func TestWindow(t *testing.T) {
	const rate, share, rtt = 2e6, 1e6, 10 * time.Millisecond // bytes per second
	var w window
	step := func(unread, want int) {
		t.Helper()
		if w.step(rate, share, unread, rtt); w.size != want {
			t.Fatalf("with %d bytes unread the window is %d, want %d", unread, w.size, want)
		}
	}
	step(1<<20, 0) // once may be a burst
	step(100_000, 0)
	step(1<<20, 0)
	step(1<<20, 120_000) // the fair share of 100 ms, and what is under way
	step(100_000, 120_000)
	step(0, 150_000)
	for range 20 {
		w.step(rate, share, 0, rtt)
	}
	if w.size != 0 {
		t.Errorf("a reader that keeps up still grants only %d", w.size)
	}
	w.step(1000, 500, 1<<20, rtt)
	w.step(1000, 500, 1<<20, rtt)
	if w.size != minWindow {
		t.Errorf("the smallest window is %d, want %d", w.size, minWindow)
	}
}

// A sender may be waiting with whichever window it was told last: a change must never make it wait for ever.
func TestWindowIsToldInTime(t *testing.T) {
	w := window{size: 100_000, total: 1}
	tell := func() { w.told, w.granted = w.total, w.size }
	due := func(want bool) {
		t.Helper()
		if w.due() != want {
			t.Fatalf("due %t, want %t: %+v", !want, want, w)
		}
	}
	due(true) // the first
	tell()
	w.total += 49_999
	due(false)
	w.total++
	due(true)
	tell()
	w.size = 1 << 20 // it grew, and the sender sends what it may and waits
	w.total += 100_000
	due(true)
	tell()
	w.size = 64_000
	w.total += 32_000
	due(true)
	tell()
	w.size = 0
	due(true)
	tell()
	due(false)
}

func TestLoadShare(t *testing.T) {
	var l Load
	for i := range 6 {
		now := time.Second + time.Duration(i)*2*meterPeriod
		for j := range 4 {
			got := l.add(now, float64(100*(j+1)))
			if want := 250.0; i > 1 && got != want && j > 0 {
				t.Errorf("period %d: share %.0f, want %.0f", i, got, want)
			}
		}
	}
	if got := l.add(time.Minute, 7); got != 0 {
		t.Errorf("a share of %.0f from long ago", got)
	}
}
