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
		want      int
	}{
		{gcIdle, 0, gcRest}, {gcIdle, 0.05, gcIdle}, {gcIdle, 0.5, gcIdle}, {gcIdle, 3, gcBusy}, {gcBusy, 0.9, gcBusy}, {gcBusy, 0.1, gcIdle},
		{gcBusy, 0, gcIdle}, {gcRest, 0.05, gcRest}, {gcRest, 0.2, gcIdle}, {gcRest, 2, gcBusy},
	} {
		if got := gcPercent(c.now, c.perSecond); got != c.want {
			t.Errorf("at %d %% and %.2f collections per second: %d, want %d", c.now, c.perSecond, got, c.want)
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
