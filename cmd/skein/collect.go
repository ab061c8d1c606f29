package main

import (
	"context"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/skeinmesh/skein/internal/lag"
	"github.com/skeinmesh/skein/internal/rss"
)

// How much the heap may grow before garbage is collected, in percent of what lives. The memory of an agent at rest
// counts more than the little it collects; one that carries packets in userspace would spend a sixth of its processor
// time on collecting so often.
const (
	gcRest  = 10
	gcIdle  = 30
	gcBusy  = 100
	gcWatch = 2 * time.Second  // over which collections are counted, at least
	gcLull  = 2 * time.Second  // after which a busy process that collects no more is idle
	gcCalm  = 30 * time.Second // and an idle one at rest
	// gcLate is how late a process wakes at least whose host has no time for collecting often, whatever it does.
	gcLate = 50 * time.Millisecond
)

// gcPercent chooses by how often garbage was collected lately, and by how late the process wakes. More room means fewer
// collections, so between the limits it stays as it is.
func gcPercent(now int, perSecond float64, late time.Duration) int {
	switch {
	case perSecond >= 1, late >= gcLate:
		return gcBusy
	case now == gcBusy && perSecond <= 0.2, now == gcRest && perSecond >= 0.1:
		return gcIdle
	case now == gcIdle && perSecond <= 0.02:
		return gcRest
	}
	return now
}

// tuneGC follows what the agent does until ctx ends. Collections themselves wake it, and a timer until it is at rest.
// What is free then goes back to the kernel, and so do pages of files that were needed for the start alone. An
// agent that is merely idle may be busy in a moment: what it gave back it would fault in again, which took a twentieth
// of the processors of a crowd that had no time anyway.
func tuneGC(ctx context.Context, late *lag.Meter) {
	percent := gcIdle
	debug.SetGCPercent(percent)
	collected := onCollection(ctx)
	again := time.NewTimer(gcCalm)
	defer again.Stop()
	since, cycles := time.Now(), 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-collected:
			cycles++
		case <-again.C:
		}
		if d := time.Since(since); d >= gcWatch {
			p := gcPercent(percent, float64(cycles)/d.Seconds(), late.Late(time.Now()))
			if p != percent {
				debug.SetGCPercent(p)
			}
			if p < percent && p == gcRest {
				debug.FreeOSMemory()
				_ = rss.ForgetFiles() // without /proc all stays as it is
			}
			percent, since, cycles = p, time.Now(), 0
		}
		switch percent {
		case gcBusy:
			again.Reset(gcLull)
		case gcIdle:
			again.Reset(gcCalm)
		}
	}
}

// onCollection tells of collections of garbage until ctx ends; several in quick succession may come as one.
func onCollection(ctx context.Context) <-chan struct{} {
	told := make(chan struct{}, 1)
	type garbage struct{ _ *byte }
	var tell func(*garbage)
	tell = func(g *garbage) {
		if ctx.Err() != nil {
			return
		}
		select {
		case told <- struct{}{}:
		default:
		}
		runtime.SetFinalizer(g, tell) // and is found again by the next one
	}
	runtime.SetFinalizer(&garbage{}, tell)
	return told
}
