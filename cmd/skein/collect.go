package main

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// How much the heap may grow before garbage is collected, in percent of what lives. An idle agent's memory
// counts more than the little it collects; one that carries packets in userspace would spend a sixth of its
// processor time on collecting so often.
const (
	gcIdle  = 30
	gcBusy  = 100
	gcWatch = 2 * time.Second
)

// gcPercent chooses by how often garbage was collected lately. Between the two limits it stays as it is: more
// room means fewer collections.
func gcPercent(now int, perSecond float64) int {
	switch {
	case perSecond >= 1:
		return gcBusy
	case perSecond <= 0.1:
		return gcIdle
	}
	return now
}

// tuneGC follows what the agent does until ctx ends.
func tuneGC(ctx context.Context) {
	cycles := []metrics.Sample{{Name: "/gc/cycles/total:gc-cycles"}}
	metrics.Read(cycles)
	last, percent := cycles[0].Value.Uint64(), gcIdle
	debug.SetGCPercent(percent)
	tick := time.NewTicker(gcWatch)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		metrics.Read(cycles)
		n := cycles[0].Value.Uint64()
		if p := gcPercent(percent, float64(n-last)/gcWatch.Seconds()); p != percent {
			percent = p
			debug.SetGCPercent(p) // collects once, which counts for the next look
			metrics.Read(cycles)
			n = cycles[0].Value.Uint64()
		}
		last = n
	}
}
