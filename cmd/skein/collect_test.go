package main

import (
	"runtime"
	"testing"
	"time"
)

func TestGarbageIsCollectedLessOftenUnderLoad(t *testing.T) {
	for _, c := range []struct {
		now       int
		perSecond float64
		late      time.Duration
		want      int
	}{
		{gcIdle, 0, 0, gcRest}, {gcIdle, 0.05, 0, gcIdle}, {gcIdle, 0.5, 0, gcIdle}, {gcIdle, 3, 0, gcBusy},
		{gcBusy, 0.9, 0, gcBusy}, {gcBusy, 0.1, 0, gcIdle},
		{gcBusy, 0, 0, gcIdle}, {gcRest, 0.05, 0, gcRest}, {gcRest, 0.2, 0, gcIdle}, {gcRest, 2, 0, gcBusy},
		// a starved process gets to collect little, and that costs the others
		{gcIdle, 0.3, gcLate, gcBusy}, {gcRest, 0.01, 2 * gcLate, gcBusy}, {gcBusy, 0.1, gcLate, gcBusy},
		{gcIdle, 0.3, gcLate / 2, gcIdle},
	} {
		if got := gcPercent(c.now, c.perSecond, c.late); got != c.want {
			t.Errorf("at %d %%, %.2f collections per second and %s late: %d, want %d", c.now, c.perSecond, c.late, got, c.want)
		}
	}
}

// Each collection is told of, not the first one alone.
func TestCollectionsAreToldOf(t *testing.T) {
	told := onCollection(t.Context())
	for range 3 {
		runtime.GC()
		select {
		case <-told:
		case <-time.After(10 * time.Second):
			t.Fatal("a collection of garbage told nobody")
		}
	}
}

func TestMemoryIsGivenBackAtRest(t *testing.T) {
	for _, c := range []struct {
		before, now int
		idle        time.Duration
		done        bool
		want        bool
	}{
		{gcIdle, gcRest, gcCalm, false, true}, {gcIdle, gcRest, time.Hour, true, true}, {gcRest, gcRest, gcCalm, true, false},
		{gcIdle, gcIdle, gcCalm, false, false}, {gcIdle, gcIdle, gcSettled, false, true},
		{gcIdle, gcIdle, time.Hour, true, false}, {gcRest, gcIdle, time.Hour, true, false},
		{gcIdle, gcBusy, time.Hour, false, false}, {gcBusy, gcBusy, time.Hour, false, false},
		{gcBusy, gcIdle, gcLull, false, false},
	} {
		if got := givesBack(c.before, c.now, c.idle, c.done); got != c.want {
			t.Errorf("from %d to %d %%, idle for %s, done %v: %v", c.before, c.now, c.idle, c.done, got)
		}
	}
}
