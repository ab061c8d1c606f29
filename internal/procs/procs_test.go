package procs

import (
	"runtime"
	"testing"
	"time"
)

func TestOneProcessorAtRest(t *testing.T) {
	var p Tuner
	now, used := time.Unix(1e9, 0), time.Duration(0)
	reading := func(every time.Duration, share float64, late time.Duration) bool {
		now, used = now.Add(every), used+time.Duration(share*float64(every))
		p.observe(now, used, late)
		return p.one
	}
	for i, s := range []struct {
		every time.Duration
		times int
		share float64
		late  time.Duration
		one   bool
	}{
		{time.Second, 20, 0.5, 0, false},
		{time.Second, 9, 0.01, 0, false},
		{time.Second, 2, 0.01, 0, true},
		{time.Second, 60, 0.05, 0, true}, // between the limits it stays
		{10 * time.Millisecond, 5, 1, 0, true},
		{250 * time.Millisecond, 1, 0.2, 0, false}, // the packets begin
		{time.Second, 60, 0.05, 0, false},
		{4 * time.Second, 2, 0.02, 0, false},
		{4 * time.Second, 1, 0.02, 0, true},
		{time.Second, 1, 0.01, 2 * lateMost, false}, // starved: it would use more
		{time.Second, 60, 0.01, 2 * lateMost, false},
		{time.Second, 12, 0.01, lateMost / 2, true},
	} {
		for range s.times - 1 {
			reading(s.every, s.share, s.late)
		}
		if got := reading(s.every, s.share, s.late); got != s.one {
			t.Errorf("phase %d (%d readings of %g): one processor %t, want %t", i, s.times, s.share, got, s.one)
		}
	}
}

// What was chosen is what the runtime has, and all processors come back.
func TestRuntimeFollows(t *testing.T) {
	all := runtime.GOMAXPROCS(0)
	t.Cleanup(runtime.SetDefaultGOMAXPROCS)
	t.Setenv("GOMAXPROCS", "")
	runtime.GOMAXPROCS(2)
	p := New()
	p.Look(0)
	p.at, p.calm = time.Now().Add(-time.Hour), time.Now().Add(-time.Hour) // what it has used in an hour is little
	if p.Look(0); runtime.GOMAXPROCS(0) != 1 {
		t.Errorf("at rest there are %d processors, want 1", runtime.GOMAXPROCS(0))
	}
	p.at, p.used = time.Now().Add(-time.Second), p.used-time.Second // a second of work in a second
	if p.Look(0); runtime.GOMAXPROCS(0) != all {
		t.Errorf("at work there are %d processors, want %d", runtime.GOMAXPROCS(0), all)
	}
	runtime.GOMAXPROCS(1)
	if New() != nil {
		t.Error("there is nothing to choose, and yet a Tuner")
	}
	runtime.GOMAXPROCS(2)
	t.Setenv("GOMAXPROCS", "3")
	if New() != nil {
		t.Error("whoever started the process has chosen, and yet a Tuner")
	}
	var none *Tuner
	none.Look(0)
}
