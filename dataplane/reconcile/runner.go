package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"
)

// ErrEnded is returned by Do when Run has returned.
var ErrEnded = errors.New("the reconciler has ended")

// Target is one part of the kernel.
type Target struct {
	// Name of the part, in logs.
	Name string
	// Reconcile reads what there is, and writes what differs from what is wanted now. Without the cause Changed it may go
	// by what it remembers of the kernel. When it fails for the first time it is called once more at once, with Changed:
	// what it remembered may have been wrong, or the kernel has changed while it was read.
	Reconcile func(context.Context, Cause) Result

	schedule schedule
	pending  atomic.Uint32 // Cause that the schedule has not yet
}

// Options of New.
type Options struct {
	Policy Policy // the zero value: Default
	Log    *slog.Logger
	// Told hears of every look, on the Runner's goroutine. It may be nil.
	Told func(*Target, Outcome)
}

// Runner looks at targets when they are due. Make one with New, and call Run once.
type Runner struct {
	opts    Options
	targets []*Target
	work    chan func()
	wake    chan struct{}
	ended   chan struct{}
	ctx     context.Context // of Run
}

// New makes a Runner. Nothing is due: mark what shall be looked at first.
func New(o Options, targets ...*Target) *Runner {
	if o.Policy == (Policy{}) {
		o.Policy = Default
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Told == nil {
		o.Told = func(*Target, Outcome) {}
	}
	for _, t := range targets {
		t.schedule = newSchedule(o.Policy)
	}
	return &Runner{opts: o, targets: targets, work: make(chan func()), wake: make(chan struct{}, 1),
		ended: make(chan struct{})}
}

// Mark has a target looked at: for Wanted at once, for Changed soon. It never waits, and may be called from anywhere,
// also before Run.
func (r *Runner) Mark(c Cause, targets ...*Target) {
	for _, t := range targets {
		t.pending.Or(uint32(c))
	}
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Do runs f on the Runner's goroutine and returns when it has run, with ErrEnded when Run has returned, or with the
// error of ctx when that ended before f began.
func (r *Runner) Do(ctx context.Context, f func()) error {
	finished := make(chan struct{})
	select {
	case r.work <- func() { defer close(finished); f() }:
	case <-r.ended:
		return ErrEnded
	case <-ctx.Done():
		return ctx.Err()
	}
	<-finished
	return nil
}

// Now looks at a target at once, whenever it was due. It is for functions that Do runs. That it fails is not logged.
func (r *Runner) Now(t *Target, c Cause) Result {
	t.schedule.mark(c|Cause(t.pending.Swap(0)), time.Now())
	return r.look(t, false)
}

// Run works until ctx ends.
func (r *Runner) Run(ctx context.Context) {
	defer close(r.ended)
	r.ctx = ctx
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	resync := time.Now().Add(r.opts.Policy.Resync)
	for {
		next := r.lookAtDue()
		if every := r.opts.Policy.Resync; every > 0 {
			if wait := time.Until(resync); wait <= 0 {
				resync = time.Now().Add(every)
				r.Mark(Changed, r.targets...)
			} else {
				next = min(next, wait)
			}
		}
		timer.Reset(next)
		select {
		case <-ctx.Done():
			return
		case f := <-r.work:
			f()
		case <-r.wake:
		case <-timer.C:
		}
	}
}

// lookAtDue looks at what is due, in the order of the targets, and returns when the next is.
func (r *Runner) lookAtDue() time.Duration {
	next := time.Hour
	for _, t := range r.targets {
		now := time.Now()
		if c := Cause(t.pending.Swap(0)); c != 0 {
			t.schedule.mark(c, now)
		}
		wait, ok := t.schedule.wait(now)
		if ok && wait <= 0 && r.ctx.Err() == nil {
			r.look(t, true)
			wait, ok = t.schedule.wait(time.Now())
		}
		if ok {
			next = min(next, max(wait, time.Millisecond))
		}
	}
	return next
}

func (r *Runner) look(t *Target, logged bool) Result {
	c, failing := t.schedule.begin(time.Now()), t.schedule.backoff > 0
	result := t.Reconcile(r.ctx, c)
	if result.Err != nil && !failing && r.ctx.Err() == nil {
		before := result.Writes
		result = t.Reconcile(r.ctx, c|Changed)
		result.Writes += before
	}
	out := t.schedule.done(c, result, time.Now())
	log := r.opts.Log
	switch {
	case r.ctx.Err() != nil:
	case out.Failed && logged:
		log.Warn("reconciling the kernel failed, trying again", "part", t.Name, "error", out.Err)
	case out.Repaired:
		log.Warn("the kernel had drifted, repaired", "part", t.Name, "writes", out.Writes)
	case out.Recovered:
		log.Info("the kernel is as wanted again", "part", t.Name, "writes", out.Writes)
	}
	r.opts.Told(t, out)
	return result
}
