package clients

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/reconcile"
)

// turnMost is how long a client that is slow keeps its turn.
const turnMost = time.Second

// turns bound what changes of many clients at once take from what clients send: each of these changes some thousand
// things in the kernel, under locks that all of the host share, and flows that run need none of them. Each turn ends
// after as long a pause as the work took.
type turns chan struct{}

// newTurns is for half of the processors, which the pauses make a quarter.
func newTurns() turns { return make(turns, max(1, runtime.GOMAXPROCS(0)/2)) }

// take waits for a turn; done is to be called once after the work, and ok is false when ctx has ended before.
func (t turns) take(ctx context.Context) (done func(), ok bool) {
	select {
	case t <- struct{}{}:
	case <-ctx.Done():
		return nil, false
	}
	var once sync.Once
	free := func() { once.Do(func() { <-t }) }
	began := time.Now()
	late := time.AfterFunc(turnMost, free)
	return func() {
		if late.Stop() {
			time.AfterFunc(time.Since(began), free)
		}
	}, true
}

// resync is how often a client's namespace is read again: there are as many as pods.
const resync = 5 * time.Minute

// worker does the kernel's part for one client, so that one that is slow holds nobody else up.
type worker struct {
	c          *Clients
	key, netns string
	runner     *reconcile.Runner
	target     *reconcile.Target
	cancel     context.CancelFunc
	done       chan struct{} // closed at the end
	space      Namespace     // nil: not open yet; for the runner's goroutine

	// Clients.mu guards the rest.
	want           dataplane.ClientSpec
	asked, applied int       // counts of specs
	ns             Namespace // space, for everybody; nil at the end, too
	remove         bool      // at the end what is in the kernel goes too
	err            error
	notes          []string
	driver         string
}

// start makes a worker. The caller has mu.
func (c *Clients) start(key, netns string) *worker {
	ctx, cancel := context.WithCancel(c.ctx)
	w := &worker{c: c, key: key, netns: netns, cancel: cancel, done: make(chan struct{})}
	w.target = &reconcile.Target{Name: "egresses of " + key, Reconcile: w.reconcile}
	policy := reconcile.Default
	policy.Resync = resync
	w.runner = reconcile.New(reconcile.Options{Policy: policy, Log: c.cfg.Log}, w.target)
	c.all.Go(func() {
		defer close(w.done)
		w.runner.Run(ctx)
		w.finish()
	})
	return w
}

// apply has the worker make a spec. The caller has mu.
func (w *worker) apply(s dataplane.ClientSpec) {
	w.want = s
	w.asked++
	w.runner.Mark(reconcile.Wanted, w.target)
}

// stop ends it, with or without what is in the kernel. The caller has mu.
func (w *worker) stop(remove bool) {
	w.remove = remove
	w.cancel()
}

// settled says that the last spec was tried. The caller has mu.
func (w *worker) settled() bool { return w.applied == w.asked }

// reconcile makes the namespace what is wanted now.
func (w *worker) reconcile(ctx context.Context, c reconcile.Cause) (r reconcile.Result) {
	// What a pod waits for at its start waits for nobody, nor does a look that seldom finds anything to do.
	if w.space != nil && c&reconcile.Wanted != 0 {
		done, ok := w.c.turns.take(ctx)
		if !ok {
			return reconcile.Result{Err: ctx.Err()}
		}
		defer done()
	}
	w.c.mu.Lock()
	want, asked := w.want, w.asked
	w.c.mu.Unlock()
	var notes []string
	var driver string
	if r.Err = w.open(); r.Err == nil {
		r.Writes, notes, r.Err = w.space.Apply(want)
		driver = w.space.Driver()
	}
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	w.ns = w.space
	if w.applied == asked && r.Err == nil && w.err == nil && w.driver == driver && slices.Equal(w.notes, notes) {
		return r // there is nothing new to tell
	}
	w.applied, w.notes, w.driver, w.err = asked, notes, driver, r.Err
	w.c.broadcast()
	return r
}

// open opens the namespace, if it is not, and hears of what others change there.
func (w *worker) open() error {
	if w.space != nil {
		return nil
	}
	ns, err := w.c.cfg.Open(w.netns)
	if err != nil {
		return err
	}
	if err := ns.Watch(func() { w.runner.Mark(reconcile.Changed, w.target) }); err != nil {
		w.c.cfg.Log.Warn("a client's network namespace cannot be watched; what others change there is repaired late",
			"client", w.key, "error", err)
	}
	w.space = ns
	return nil
}

// finish is the worker's end.
func (w *worker) finish() {
	w.c.mu.Lock()
	remove := w.remove
	w.ns = nil
	w.c.mu.Unlock()
	ns := w.space
	if ns == nil && remove { // something may be left of an earlier process
		var err error
		if ns, err = w.c.cfg.Open(w.netns); err != nil {
			return // it is gone, and all with it
		}
	}
	if ns == nil {
		return
	}
	if remove {
		if err := ns.Remove(); err != nil {
			w.c.cfg.Log.Warn("cannot take egresses away from a client", "client", w.key, "error", err)
		}
	}
	if err := ns.Close(); err != nil {
		w.c.cfg.Log.Warn("cannot close a client of egresses", "client", w.key, "error", err)
	}
}
