package clients

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/egressclient"
)

// How long it takes until a network namespace that could not be opened is tried again.
const (
	openFirst = 500 * time.Millisecond
	openLast  = 10 * time.Second
)

// turnMost is how long a client that is slow keeps its turn.
const turnMost = time.Second

// turns bound what changes of many clients at once take from what clients send: each of these changes some thousand
// things in the kernel, under locks that all of the host share, and flows that run need none of them. Each turn ends
// after as long a pause as the work took.
type turns chan struct{}

// newTurns is for half of the processors, which the pauses make a quarter.
func newTurns() turns { return make(turns, max(1, runtime.GOMAXPROCS(0)/2)) }

// take waits for a turn, or until now is closed; done is to be called once after the work, and ok is false when ctx has
// ended before.
func (t turns) take(ctx context.Context, now <-chan struct{}) (done func(), ok bool) {
	select {
	case t <- struct{}{}:
	case <-now:
		return func() {}, true
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

// worker does the kernel's part for one client, so that one that is slow holds nobody else up. Clients.mu guards it.
type worker struct {
	c          *Clients
	key, netns string
	wakeups    chan struct{} // has something when want is new
	ending     chan struct{} // closed when it is to end
	done       chan struct{} // closed at the end

	want           dataplane.ClientSpec
	asked, applied int // counts of specs
	ns             Namespace
	end, remove    bool

	err    error
	notes  []string
	driver string
}

// start makes a worker. The caller has mu.
func (c *Clients) start(key, netns string) *worker {
	w := &worker{c: c, key: key, netns: netns, wakeups: make(chan struct{}, 1), ending: make(chan struct{}),
		done: make(chan struct{})}
	c.all.Go(w.run)
	return w
}

// apply has the worker make a spec. The caller has mu.
func (w *worker) apply(s dataplane.ClientSpec) {
	w.want = s
	w.asked++
	w.wake()
}

// stop ends it, with or without what is in the kernel. The caller has mu.
func (w *worker) stop(remove bool) {
	if !w.end {
		close(w.ending)
	}
	w.end, w.remove = true, remove
	w.wake()
}

func (w *worker) wake() {
	select {
	case w.wakeups <- struct{}{}:
	default:
	}
}

// settled says that the last spec was tried. The caller has mu.
func (w *worker) settled() bool { return w.applied == w.asked }

func (w *worker) run() {
	defer close(w.done)
	ctx, cancel := context.WithCancel(w.c.ctx)
	defer cancel()
	var ns Namespace
	watching := make(chan struct{})
	close(watching) // nobody is
	defer func() {
		w.c.mu.Lock()
		w.ns = nil
		w.c.mu.Unlock()
		if ns != nil {
			if err := ns.Close(); err != nil {
				w.c.cfg.Log.Warn("closing a client of egresses", "client", w.key, "error", err)
			}
		}
		cancel()
		<-watching
	}()
	backoff := openFirst
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wakeups:
		case <-retry.C:
		}
		done := func() {}
		if ns != nil { // what a pod waits for at its start waits for nobody
			var ok bool
			if done, ok = w.c.turns.take(ctx, w.ending); !ok {
				return
			}
		}
		w.c.mu.Lock()
		want, asked, end, remove := w.want, w.asked, w.end, w.remove
		w.c.mu.Unlock()
		if end {
			w.finish(ns, remove)
			done()
			return
		}
		var err error
		if ns == nil {
			if ns, err = w.c.cfg.Open(w.netns); err != nil {
				ns = nil // not a nil of some type
				w.record(asked, nil, "", err)
				retry.Reset(backoff)
				backoff = min(2*backoff, openLast)
				continue
			}
			watching = w.watch(ctx, ns)
		}
		_, notes, err := ns.Apply(want)
		done()
		w.c.mu.Lock()
		w.ns = ns
		w.c.mu.Unlock()
		w.record(asked, notes, ns.Driver(), err) // what failed is tried again by Watch
	}
}

// watch repairs in the background; the channel is closed when that ends.
func (w *worker) watch(ctx context.Context, ns Namespace) chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := ns.Watch(ctx, func(m egressclient.Repaired) {
			if m.Err == nil {
				w.c.cfg.Log.Info("egresses of a client were repaired", "client", w.key, "writes", m.Writes)
			}
			w.c.mu.Lock()
			asked := w.applied
			w.c.mu.Unlock()
			w.record(asked, m.Notes, ns.Driver(), m.Err)
		})
		if err != nil && !errors.Is(err, context.Canceled) {
			w.c.cfg.Log.Warn("what others change of a client's egresses is not repaired", "client", w.key, "error", err)
		}
	}()
	return done
}

// record keeps how it went.
func (w *worker) record(asked int, notes []string, driver string, err error) {
	if err != nil {
		w.c.cfg.Log.Warn("egresses of a client, trying again", "client", w.key, "error", err)
	}
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	w.applied, w.notes, w.driver, w.err = max(w.applied, asked), notes, driver, err
	w.c.broadcast()
}

// finish is the worker's end.
func (w *worker) finish(ns Namespace, remove bool) {
	if !remove {
		return
	}
	if ns == nil { // it was not opened yet; something may be left of an earlier process
		var err error
		if ns, err = w.c.cfg.Open(w.netns); err != nil {
			return // it is gone, and all with it
		}
		defer ns.Close()
	}
	if err := ns.Remove(); err != nil {
		w.c.cfg.Log.Warn("taking egresses away from a client", "client", w.key, "error", err)
	}
}
