// Package procs has Go's runtime use one processor while the process does little.
//
// A goroutine that becomes ready while another processor is idle wakes a thread for it, and a thread that finds nothing
// more to do looks around before it sleeps. An agent at rest does a little some ten times a second; with one processor
// that is done where it comes up, and the threads of the others sleep on.
//
// Source: the comments at the head of runtime/proc.go; runtime.GOMAXPROCS stops the process for some ten microseconds.
package procs

import (
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

const (
	restShare = 0.03 // of one processor: who uses no more is at rest
	busyShare = 0.08 // and who uses this much is not
	restAfter = 10 * time.Second
	lateMost  = 20 * time.Millisecond  // who wakes later than this may use little because it gets no more
	window    = 100 * time.Millisecond // over less than this, a share means nothing
)

// Tuner chooses between one processor and all, by how much of them the process uses. The nil Tuner does nothing. It is
// for one goroutine.
type Tuner struct {
	at   time.Time
	used time.Duration // processor time, at that moment
	calm time.Time     // since when the process has been at rest; zero: it is not
	one  bool
}

// New returns a Tuner, or nil where there is nothing to choose: the host has one processor, or who started the process
// said how many to use.
func New() *Tuner {
	if runtime.GOMAXPROCS(0) == 1 || os.Getenv("GOMAXPROCS") != "" {
		return nil
	}
	return &Tuner{}
}

// Look follows what was used since the last look, and by how much the process lately woke too late: on a host that is
// overloaded a thread that blocks in the kernel would hold up all others for as long as it takes the runtime to notice.
// The more often it is called, the sooner a process that begins to work has all processors.
func (t *Tuner) Look(late time.Duration) {
	if t == nil {
		return
	}
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return
	}
	one := t.one
	t.observe(time.Now(), time.Duration(u.Utime.Nano()+u.Stime.Nano()), late)
	switch {
	case t.one == one:
	case t.one:
		runtime.GOMAXPROCS(1)
	default:
		runtime.SetDefaultGOMAXPROCS()
	}
}

// observe follows a reading of the clock, of the processor time used so far, and of how late the process is.
func (t *Tuner) observe(now time.Time, used, late time.Duration) {
	passed := now.Sub(t.at)
	if !t.at.IsZero() && passed < window {
		return
	}
	share := float64(used-t.used) / float64(passed)
	first := t.at.IsZero()
	t.at, t.used = now, used
	switch {
	case late > lateMost:
		t.calm, t.one = time.Time{}, false
	case first:
	case share > restShare:
		t.calm, t.one = time.Time{}, t.one && share < busyShare
	case t.calm.IsZero():
		t.calm = now.Add(-passed)
	}
	if !t.calm.IsZero() && now.Sub(t.calm) >= restAfter {
		t.one = true
	}
}
