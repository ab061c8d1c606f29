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

// turnMost is how long a slow client keeps its turn.
const turnMost = time.Second

// turns limit how many clients change at once. Each change makes some thousand kernel objects, under locks that the
// whole host shares, and would slow the clients' traffic. After each turn comes a pause as long as its work took.
type turns chan struct{}

// newTurns allows half of the processors; the pauses reduce that to a quarter.
func newTurns() turns { return make(turns, max(1, runtime.GOMAXPROCS(0)/2)) }

// acquire waits for a turn. Call done once after the work; ok is false if ctx ended first.
func (t turns) acquire(ctx context.Context) (done func(), ok bool) {
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

// resync is the interval of re-reading a client's namespace. It is long since there are as many as pods.
const resync = 5 * time.Minute

// worker maintains the kernel's side of one client, so that a slow client does not delay others.
type worker struct {
	c          *Clients
	key, netns string
	runner     *reconcile.Runner
	target     *reconcile.Target
	cancel     context.CancelFunc
	done       chan struct{} // closed at the end
	space      Namespace     // nil: not open yet; only for the runner's goroutine

	// Clients.mu guards the rest.
	want           dataplane.ClientSpec
	asked, applied int       // number of specs requested, and tried
	ns             Namespace // space for other goroutines; nil after the end, too
	remove         bool      // whether the end removes what is in the kernel
	err            error
	notes          []string
	driver         string
}

// start makes a worker. The caller holds mu.
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

// apply gives the worker a new spec. The caller holds mu.
func (w *worker) apply(s dataplane.ClientSpec) {
	w.want = s
	w.asked++
	w.runner.Mark(reconcile.Wanted, w.target)
}

// stop ends the worker; remove: also what it made in the kernel. The caller holds mu.
func (w *worker) stop(remove bool) {
	w.remove = remove
	w.cancel()
}

// tried reports whether the last spec was tried. The caller holds mu.
func (w *worker) tried() bool { return w.applied == w.asked }

// reconcile brings the namespace to the wanted state.
func (w *worker) reconcile(ctx context.Context, c reconcile.Cause) (r reconcile.Result) {
	// Two cases need no turn: a pod's first spec, for which its start waits, and a check, which seldom finds a change.
	if w.space != nil && c&reconcile.Wanted != 0 {
		done, ok := w.c.turns.acquire(ctx)
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
		return r // the outcome is unchanged
	}
	w.applied, w.notes, w.driver, w.err = asked, notes, driver, r.Err
	w.c.broadcast()
	return r
}

// open opens the namespace if necessary, and watches it for changes by others.
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

// finish ends the worker, after its runner.
func (w *worker) finish() {
	w.c.mu.Lock()
	remove := w.remove
	w.ns = nil
	w.c.mu.Unlock()
	ns := w.space
	if ns == nil && remove { // an earlier process may have left something
		var err error
		if ns, err = w.c.cfg.Open(w.netns); err != nil {
			return // the namespace is gone, with everything in it
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
