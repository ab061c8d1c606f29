package replace

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// askAgain is how long after a refused eviction it is asked for again, at least: what ends the refusal, such as a
// PodDisruptionBudget, tells nobody. It is what kubectl drain does.
const askAgain = 5 * time.Second

// Cluster is the Kubernetes side of a run.
type Cluster interface {
	// Pods gives each pod of the cluster to take, as of now, and returns the version that this was. Where reading has to
	// begin anew, restart is called first.
	Pods(ctx context.Context, restart func(), take func(Pod)) (version string, err error)
	// Watch sends what changes after a version until ctx ends, or until it cannot: then the last change has the error,
	// and the channel is closed. ErrExpired is such an error.
	Watch(ctx context.Context, version string) <-chan Change
	// Evict asks for the eviction of a pod, if it is still the one with that UID. Errors are ErrGone, *LaterError,
	// *UnheardError, *RefusedError, or any other, which would meet other pods too.
	Evict(ctx context.Context, p Pod) error
}

// Change is a pod that has changed or is gone; or, with an empty UID, that the watch stands, or why it does not.
type Change struct {
	Pod  Pod
	Gone bool
	Err  error
}

// ErrExpired is what ends a watch whose version is too old: list anew.
var ErrExpired = errors.New("the version is too old to watch from")

// ErrGone says that a pod is not there any more.
var ErrGone = errors.New("the pod is gone")

// LaterError says that a pod cannot be evicted now, such as by a PodDisruptionBudget, and can be later.
type LaterError struct {
	Cause string
	After time.Duration // that the apiserver asks for; 0: it does not say
}

func (e *LaterError) Error() string { return e.Cause }

// UnheardError says that no answer came: the pod may have been evicted or not.
type UnheardError struct{ Cause string }

func (e *UnheardError) Error() string { return e.Cause }

// RefusedError says that a pod cannot be evicted, and others can.
type RefusedError struct{ Cause string }

func (e *RefusedError) Error() string { return e.Cause }

// Replacement replaces pods and gives blocks back.
type Replacement struct {
	Cluster Cluster
	// Release gives a block back if it is still reserved by the event that it was reserved by. ErrKept says that
	// the log refuses that for this block.
	Release func(context.Context, Block) error
	// Timeout is how long one pod may take, from its eviction until another one does what it did.
	Timeout time.Duration
	Bare    bool              // pods without a controller go, too
	Tell    func(line string) // of what was done, as it is done
}

// ErrKept is what Release's error is when the log refuses to give a block back.
var ErrKept = errors.New("the block stays reserved")

// Result is what a run has done, or found done, and what it has left, a line each.
type Result struct {
	Done, Left []string
	Changed    bool // a pod was evicted or a block released
}

// Plan says what Run would do. Nothing has changed if it fails.
func (r *Replacement) Plan(ctx context.Context, blocks []Block) (Plan, error) {
	if len(blocks) == 0 {
		return Plan{}, nil
	}
	f, pods := finderOf(blocks), []Pod{}
	_, err := r.Cluster.Pods(ctx, func() { pods = pods[:0] }, func(p Pod) {
		if _, _, ok := f.find(p); ok {
			pods = append(pods, p)
		}
	})
	if err != nil {
		return Plan{}, err
	}
	return Decide(blocks, pods, r.Bare)
}

// Run does what a plan of a moment ago says. What it cannot finish of a pod or a block is in the result; an error ends
// it, and says with which pod or block.
func (r *Replacement) Run(ctx context.Context, p Plan) (Result, error) {
	run := &run{Replacement: r, view: viewOf(p)}
	if p.Nothing() {
		return run.result, nil
	}
	ctx, cancel := context.WithCancel(ctx) // ends the watch
	defer cancel()
	for _, s := range p.Steps {
		run.blocks = append(run.blocks, s.Block)
	}
	run.finder = finderOf(run.blocks)
	for _, s := range p.Steps {
		if err := run.step(ctx, s); err != nil {
			return run.result, err
		}
	}
	return run.result, nil
}

// run is the state of one Run. One goroutine has it.
type run struct {
	*Replacement
	view    *view
	blocks  []Block
	finder  finder        // of all blocks
	changes <-chan Change // nil: nothing watches yet
	away    error         // why the watch does not stand; nil: it does
	result  Result
}

func (r *run) done(format string, a ...any) {
	line := fmt.Sprintf(format, a...)
	r.result.Done = append(r.result.Done, line)
	if r.Tell != nil {
		r.Tell(line)
	}
}

func (r *run) leave(format string, a ...any) {
	r.result.Left = append(r.result.Left, fmt.Sprintf(format, a...))
}

// step replaces the pods of a block, and gives it back.
func (r *run) step(ctx context.Context, s Step) error {
	if len(s.Pods) > 0 && r.changes == nil {
		if err := r.follow(ctx); err != nil {
			return err
		}
	}
	for _, p := range s.Pods {
		if err := r.replace(ctx, p); err != nil {
			return err
		}
	}
	return r.release(ctx, s)
}

// follow learns which pods there are, and has all changes come from there on.
func (r *run) follow(ctx context.Context) error {
	pods := map[string]Pod{}
	version, err := r.Cluster.Pods(ctx, func() { clear(pods) }, func(p Pod) {
		if r.view.keeps(p) {
			pods[p.UID] = p
		}
	})
	if err != nil {
		return err
	}
	r.view.list(pods)
	r.changes, r.away = r.Cluster.Watch(ctx, version), nil
	return nil
}

// wait returns when something has changed, when again fires, or, with true, when the time is up.
func (r *run) wait(ctx context.Context, up, again <-chan time.Time) (bool, error) {
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-up:
		return true, nil
	case <-again:
		return false, nil
	case c, ok := <-r.changes:
		switch {
		case ok && c.Err != nil:
			r.away = c.Err
		case ok:
			r.away = nil
			if c.Gone {
				r.view.gone(c.Pod)
			} else if c.Pod.UID != "" {
				r.view.set(c.Pod)
			}
		case ctx.Err() != nil:
			return false, ctx.Err()
		case errors.Is(r.away, ErrExpired):
			return false, r.follow(ctx)
		default:
			return false, r.away
		}
		return false, nil
	}
}

// replace evicts a pod, and waits until another one does what it did.
func (r *run) replace(ctx context.Context, p Pod) error {
	if now, there := r.view.now[p.UID]; !there || !r.holds(now) {
		r.done("%s has ended by itself", p)
		return nil
	}
	before := r.view.of(p.Controller)
	up := time.NewTimer(r.Timeout)
	defer up.Stop()
	evicted, err := r.evict(ctx, p, up.C)
	if err != nil || !evicted {
		return err
	}
	r.result.Changed = true
	for {
		at := r.view.progress(p, before)
		if at.done {
			return r.came(p, at.next)
		}
		late, err := r.wait(ctx, up.C, nil)
		if err != nil {
			return fmt.Errorf("%s: %s: %w; give the command again to go on", p, at.lacks(p), err)
		}
		if late {
			return r.late(p, at)
		}
	}
}

func (r *run) holds(p Pod) bool {
	_, _, ok := r.finder.find(p)
	return ok
}

// evict asks for an eviction until it is granted. It reports whether it was; if not, the pod has ended by itself, or is
// left.
func (r *run) evict(ctx context.Context, p Pod, up <-chan time.Time) (bool, error) {
	unheard := false // an eviction that may have been granted
	for {
		err := r.Cluster.Evict(ctx, p)
		again, why := askAgain, ""
		silent := false
		var later *LaterError
		var none *UnheardError
		var refused *RefusedError
		switch {
		case err == nil:
			return true, nil
		case errors.Is(err, ErrGone):
			if !unheard {
				r.done("%s has ended by itself", p)
			}
			return unheard, nil
		case errors.As(err, &refused):
			r.leavePod(p, refused.Cause)
			return false, nil
		case errors.As(err, &later):
			again, why = max(again, later.After), later.Cause
		case errors.As(err, &none):
			unheard, silent, why = true, true, none.Cause
		default:
			return false, fmt.Errorf("evict %s: %w", p, err)
		}
		late, err := r.pause(ctx, p, up, again)
		switch {
		case err != nil:
			return false, fmt.Errorf("evict %s: %s: %w; give the command again to go on", p, why, err)
		case late && silent:
			return false, fmt.Errorf("evict %s: %s, for %s; give the command again to go on", p, why, r.Timeout)
		case late:
			r.leavePod(p, fmt.Sprintf("%s, for %s", why, r.Timeout))
			return false, nil
		}
	}
}

// pause waits before an eviction is asked for again: as long as the pod is there.
func (r *run) pause(ctx context.Context, p Pod, up <-chan time.Time, d time.Duration) (late bool, err error) {
	t := time.NewTimer(d)
	defer t.Stop()
	for over := time.Now().Add(d); time.Now().Before(over); {
		if late, err = r.wait(ctx, up, t.C); late || err != nil {
			return late, err
		}
		if _, there := r.view.now[p.UID]; !there {
			return false, nil // the next try hears of it
		}
	}
	return false, nil
}

func (r *run) leavePod(p Pod, cause string) {
	r.leave("%s is not evicted: %s. See `kubectl -n %s get poddisruptionbudget`", p, cause, word(p.Namespace))
}

// came ends the replacement of a pod. One that has come with an address of a block shows that Coil still gives them,
// and every further eviction would be in vain.
func (r *run) came(old Pod, next *Pod) error {
	if next == nil {
		r.done("removed %s", old)
		return nil
	}
	if n, a, ok := r.finder.find(*next); ok {
		return fmt.Errorf("%s, which came for %s, has an address of %s again: Coil still starts pods there. Take that host "+
			"over with `skein import coil --takeover`, then give the command again", next.where(a), old, r.blocks[n])
	}
	where := ""
	if len(next.Addresses) > 0 && next.Node != "" {
		where = fmt.Sprintf(" (%s on %s)", next.Addresses[0], shown(next.Node))
	}
	r.done("replaced %s by %s%s", old, shown(next.Name), where)
	return nil
}

// late says what did not come in time. The run ends with it: who has one pod away shall not lose another.
func (r *run) late(p Pod, at progress) error {
	also := ""
	if r.away != nil {
		also = fmt.Sprintf(" (and the apiserver is not heard: %v)", r.away)
	}
	return fmt.Errorf("%s: %s within %s%s; no other pod was touched. `kubectl -n %s get events` may say why; give "+
		"the command again to go on, with a longer --timeout if that is usual", p, at.lacks(p), r.Timeout, also,
		word(p.Namespace))
}

// release gives a block back if nobody has an address in it, by what the apiserver says now. Of those who have, the
// ones that are left were told already.
func (r *run) release(ctx context.Context, s Step) error {
	f := finderOf([]Block{s.Block})
	var who []string
	_, err := r.Cluster.Pods(ctx, func() { who = nil }, func(p Pod) {
		if _, a, ok := f.find(p); ok {
			if len(who) < mostNamed {
				who = append(who, p.where(a))
			}
		}
	})
	if err != nil {
		return fmt.Errorf("%s: %w", s.Block, err)
	}
	if len(who) > 0 {
		r.leave("%s stays reserved: addresses of it have %s; when that has changed, give the command again",
			s.Block, named(who))
		return nil
	}
	err = r.Release(ctx, s.Block)
	switch {
	case errors.Is(err, ErrKept):
		r.leave("%s has no pods any more, and stays reserved: %v", s.Block, err)
		return nil
	case err != nil:
		return fmt.Errorf("release %s: %w", s.Block, err)
	}
	r.result.Changed = true
	r.done("released %s", s.Block)
	return nil
}
