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
	gcIdle  = 25
	gcBusy  = 100
	gcWatch = 2 * time.Second  // over which collections are counted, at least
	gcLull  = 2 * time.Second  // after which a busy process that collects no more is idle
	gcCalm  = 30 * time.Second // and an idle one at rest
	// gcSettled is how long one is idle that is never at rest before it gives memory back all the same: of a large mesh
	// there is always some news.
	gcSettled = 2 * time.Minute
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

// givesBack decides whether memory that is free goes back to the kernel, and pages of files that were needed for the
// start alone: when the agent comes to rest, and once when it has been idle for long. One that is idle for a moment may
// be busy in the next: what it gave back it would fault in again, which took a twentieth of the processors of a crowd
// that had no time anyway.
func givesBack(before, now int, idle time.Duration, done bool) bool {
	return now == gcRest && before != gcRest || now != gcBusy && idle >= gcSettled && !done
}

// tuneGC follows what the agent does until ctx ends. Collections themselves wake it, and a timer until it is at rest.
func tuneGC(ctx context.Context, late *lag.Meter) {
	percent := gcIdle
	debug.SetGCPercent(percent)
	collected := onCollection(ctx)
	again := time.NewTimer(gcCalm)
	defer again.Stop()
	since, cycles := time.Now(), 0
	idleSince, done := since, false // when it was busy last, and whether it has given memory back since then
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
			if p == gcBusy {
				idleSince, done = time.Now(), false
			}
			if givesBack(percent, p, time.Since(idleSince), done) {
				debug.FreeOSMemory()
				_ = rss.ForgetFiles() // without /proc all stays as it is
				done = true
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
