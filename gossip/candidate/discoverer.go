package candidate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/skeinmesh/skein/internal/pause"
)

const (
	gather       = 10 * time.Millisecond  // what steps find at the same time is told at once
	settle       = 200 * time.Millisecond // changes of addresses come in flocks
	resubscribe  = time.Second
	releaseTime  = 2 * time.Second
	watchBacklog = 1
)

// Config makes a Discoverer.
type Config struct {
	// Steps are taken side by side. Where two find the same address, it is the earlier one's.
	Steps []Step
	// First are those of Steps without which nothing is told, at the start and when the network has changed: the one
	// that looks at the NAT, since what others make of an address depends on it, and the one that has the host's own
	// addresses, since a host without any offers nothing to others.
	First    []Step
	Network  Network
	OnResult func(Result) // called from Run's goroutine when something changed; must not block
	Log      *slog.Logger
}

// Discoverer keeps finding out how this host can be reached. Its methods are safe for concurrent use.
type Discoverer struct {
	c       Config
	changed chan struct{}      // the host may have changed
	checks  chan chan<- Result // somebody waits for a look at everything
	wakes   chan wish          // a step asks to look
	reports chan report
	stopped chan struct{} // closed when Run returns

	mu   sync.Mutex // guards what follows
	last Result
}

// order tells a worker to look.
type order struct {
	host        Host
	full, fresh bool
	number      uint64 // counts orders to look at everything
}

// wish is a step's own.
type wish struct {
	step int
	full bool
}

// report is what a worker brings.
type report struct {
	step   int
	found  Found
	early  bool
	number uint64
}

// ErrStopped is returned when a check is asked for after Run has ended.
var ErrStopped = errors.New("discovery of endpoints has stopped")

// New makes a Discoverer; nothing happens before Run.
func New(c Config) *Discoverer {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.OnResult == nil {
		c.OnResult = func(Result) {}
	}
	return &Discoverer{
		c: c, changed: make(chan struct{}, watchBacklog), checks: make(chan chan<- Result),
		wakes: make(chan wish), reports: make(chan report), stopped: make(chan struct{}),
	}
}

// Result is the newest one; its At is zero before the first.
func (d *Discoverer) Result() Result {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.last
}

// Check has every step look anew and returns what they found.
func (d *Discoverer) Check(ctx context.Context) (Result, error) {
	answer := make(chan Result, 1)
	for request := d.checks; ; {
		select {
		case request <- answer:
			request = nil
		case r := <-answer:
			return r, nil
		case <-d.stopped:
			return Result{}, ErrStopped
		case <-ctx.Done():
			return Result{}, fmt.Errorf("check the network: %w", ctx.Err())
		}
	}
}

// Run discovers until ctx ends, then has the steps give back what they hold. It is called once.
func (d *Discoverer) Run(ctx context.Context) error {
	defer close(d.stopped)
	var running sync.WaitGroup
	inner, cancel := context.WithCancel(ctx)
	running.Go(func() { d.watch(inner) })
	orders := make([]chan order, len(d.c.Steps))
	for i, s := range d.c.Steps {
		orders[i] = make(chan order, 1)
		running.Go(func() { d.work(inner, i, s, orders[i]) })
	}
	d.coordinate(ctx, orders)
	cancel()
	running.Wait()
	d.release()
	return nil
}

func (d *Discoverer) release() {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTime)
	defer cancel()
	var running sync.WaitGroup
	for _, s := range d.c.Steps {
		if r, ok := s.(Releaser); ok {
			running.Go(func() { r.Release(ctx) })
		}
	}
	running.Wait()
}

// round is what the coordinator keeps.
type round struct {
	host    Host
	number  uint64   // of the newest order to look at everything
	found   []Found  // by step
	done    []uint64 // by step, the number of the last order it has finished
	first   []bool   // by step, it has to speak before anything is told of this network
	waiting map[uint64][]chan<- Result
}

// coordinate owns what is known and tells the workers when to look.
func (d *Discoverer) coordinate(ctx context.Context, orders []chan order) {
	n := len(d.c.Steps)
	c := &round{found: make([]Found, n), done: make([]uint64, n), first: make([]bool, n),
		waiting: map[uint64][]chan<- Result{}}
	d.readHost(c)
	d.orderAll(c, orders, true)
	news := time.NewTimer(0)
	news.Stop()
	defer news.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-news.C:
			d.publish(merge(c.host, d.c.Steps, c.found))
			d.answer(c)
		case <-d.changed:
			if !pause.For(ctx, settle) {
				return
			}
			if d.readHost(c) {
				news.Stop() // what was found on the old network
				d.orderAll(c, orders, true)
			}
		case answer := <-d.checks:
			d.readHost(c)
			d.orderAll(c, orders, false)
			c.waiting[c.number] = append(c.waiting[c.number], answer)
		case w := <-d.wakes:
			place(orders[w.step], order{host: c.host, full: w.full, number: c.number})
		case r := <-d.reports:
			if d.store(c, r) {
				news.Reset(gather)
			}
		}
	}
}

// readHost reports whether the host's network is another one than before.
func (d *Discoverer) readHost(c *round) bool {
	host, err := d.c.Network.Read()
	if err != nil {
		d.c.Log.Warn("interface addresses could not be read; those of the last time are used", "error", err)
		return false
	}
	if host.Equal(c.host) {
		return false
	}
	c.host = host
	return true
}

func (d *Discoverer) orderAll(c *round, orders []chan order, fresh bool) {
	c.number++
	for i, o := range orders {
		if fresh {
			c.first[i] = slices.Contains(d.c.First, d.c.Steps[i])
		}
		place(o, order{host: c.host, full: true, fresh: fresh, number: c.number})
	}
}

// place puts an order where its worker finds it, in the stead of an older one. Only the coordinator does so.
func place(orders chan order, o order) {
	select {
	case old := <-orders:
		o.full, o.fresh = o.full || old.full, o.fresh || old.fresh
		o.number = max(o.number, old.number)
	default:
	}
	orders <- o
}

// store stores what a worker brought and reports whether it may be told.
func (d *Discoverer) store(c *round, r report) bool {
	c.found[r.step] = r.found
	if !r.early {
		c.done[r.step] = max(c.done[r.step], r.number)
	}
	if r.number == c.number {
		c.first[r.step] = false
	}
	return !slices.Contains(c.first, true)
}

// answer serves those who wait for all steps to have looked.
func (d *Discoverer) answer(c *round) {
	least := c.number
	for _, n := range c.done {
		least = min(least, n)
	}
	for number, answers := range c.waiting {
		if number <= least {
			for _, a := range answers {
				a <- d.Result()
			}
			delete(c.waiting, number)
		}
	}
}

func (d *Discoverer) publish(r Result) {
	d.mu.Lock()
	news := d.last.At.IsZero() || !r.Equal(d.last)
	d.last = r
	d.mu.Unlock()
	if news {
		d.c.OnResult(r)
	}
}

// work looks at one step: when it is told to, and when the step's own time has come. A look that has begun on a network
// that is gone is cut short.
func (d *Discoverer) work(ctx context.Context, i int, s Step, orders <-chan order) {
	var o order
	timer := time.NewTimer(0)
	timer.Stop()
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case o = <-orders:
		case <-timer.C:
			o.full, o.fresh = false, false
		}
		for {
			again, next := d.look(ctx, i, s, o, orders)
			if next == nil {
				timer.Stop()
				if again > 0 {
					timer.Reset(again*9/10 + rand.N(again/5+1)) // so that a mesh started at once does not ask at once
				}
				break
			}
			o = *next
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// look has one step look. It returns when to look again, or the order that came in its way.
func (d *Discoverer) look(ctx context.Context, i int, s Step, o order, orders <-chan order) (time.Duration, *order) {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	send := func(f Found, early bool) {
		select {
		case d.reports <- report{step: i, found: f, early: early, number: o.number}:
		case <-inner.Done():
		}
	}
	done := make(chan Found, 1)
	go func() {
		done <- s.Look(inner, Request{
			Host: o.host, Full: o.full, Fresh: o.fresh, Early: func(f Found) { send(f, true) },
			Wake: func() { d.wake(wish{i, true}) }, Soon: func() { d.wake(wish{i, false}) },
		})
	}()
	var next *order
	for {
		select {
		case f := <-done:
			if inner.Err() != nil {
				return 0, next
			}
			send(f, false)
			return f.Again, next
		case n := <-orders:
			if next != nil {
				n.full, n.fresh = n.full || next.full, n.fresh || next.fresh
			}
			if next = &n; n.fresh {
				cancel()
			}
		}
	}
}

func (d *Discoverer) wake(w wish) {
	go func() { // the caller may be the coordinator's own OnResult
		select {
		case d.wakes <- w:
		case <-d.stopped:
		}
	}()
}

// watch follows the kernel's notifications, and subscribes again when they were cut off.
func (d *Discoverer) watch(ctx context.Context) {
	for ctx.Err() == nil {
		err := d.c.Network.Watch(ctx, d.notify)
		if ctx.Err() != nil {
			return
		}
		d.c.Log.Warn("address changes are not being followed; trying again", "error", err)
		d.notify()
		pause.For(ctx, resubscribe)
	}
}

func (d *Discoverer) notify() {
	select {
	case d.changed <- struct{}{}:
	default: // one is waiting already
	}
}
