package main

import "testing"

func TestGarbageIsCollectedLessOftenUnderLoad(t *testing.T) {
	for _, c := range []struct {
		now       int
		perSecond float64
		want      int
	}{{gcIdle, 0, gcIdle}, {gcIdle, 0.5, gcIdle}, {gcIdle, 3, gcBusy}, {gcBusy, 0.9, gcBusy}, {gcBusy, 0.05, gcIdle}} {
		if got := gcPercent(c.now, c.perSecond); got != c.want {
			t.Errorf("at %d %% and %.2f collections per second: %d, want %d", c.now, c.perSecond, got, c.want)
		}
	}
}
