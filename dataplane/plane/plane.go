package plane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netns"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/hop"
	"github.com/skeinmesh/skein/dataplane/hopnet"
	"github.com/skeinmesh/skein/dataplane/nft"
	"github.com/skeinmesh/skein/dataplane/reconcile"
	"github.com/skeinmesh/skein/dataplane/route"
	"github.com/skeinmesh/skein/dataplane/rtnl"
	"github.com/skeinmesh/skein/dataplane/wireguard"
)

// statusEvery is the interval of reading peers, whose changes cause no notification.
const statusEvery = 600 * time.Millisecond

// ErrClosed is returned by every method after Close.
var ErrClosed = errors.New("the data plane is closed")

// Options of Open and Purge.
type Options struct {
	Numbers dataplane.Numbers // numbers that the plane uses; the zero value: the defaults
	Driver  string            // auto, kernel or userspace
	MTU     int               // of a new TUN link until the first Spec; dataplane.MTU if 0
	Log     *slog.Logger
	// OnDrift is called after a repaired change of another program to a subsystem (wireguard, nft, route, hop). It runs
	// on the runner's goroutine: it must not block or call the plane.
	OnDrift func(subsystem string)
	// OnBroken is called when such a change could not be repaired at once. The repair is retried; the next Apply
	// returns the error. It must not block or call the plane.
	OnBroken func(subsystem string)
	// Namespace to work in; nil: the process's own.
	Namespace *netns.NsHandle
}

// Subsystems are the names of all reconcilers, as in OnDrift, OnBroken and Report. The bits of touched have the same
// order.
var Subsystems = []string{"wireguard", "route", "hop", "nft"}

// subsystem is one reconciler.
type subsystem interface {
	Name() string
	Reconcile(dataplane.Spec) (writes int, notes []string, err error)
	Repair(dataplane.Spec) (writes int, notes []string, err error)
	Diff(dataplane.Spec) ([]string, error)
	Forget()
	Close() error
}

// Plane is the running data plane.
type Plane struct {
	opts   Options
	runner *reconcile.Runner
	end    context.CancelFunc
	done   chan struct{}
	driver string

	// Owned by the runner's goroutine.
	wg         *wireguard.Reconciler
	nft        *nft.Reconciler    // nil: nftables is not available
	hop        *hopnet.Reconciler // nil: not available
	parts      []*part            // in the order of writing
	route      *reconcile.Target
	spec       *dataplane.Spec
	lastStatus time.Time
	device     <-chan struct{} // the device whose end a goroutine awaits

	listener rtnl.Listener
	helpers  sync.WaitGroup
	pods     atomic.Pointer[podSet] // of the Spec, for the notifications
}

// part is a subsystem with its target in the runner.
type part struct {
	subsystem
	target *reconcile.Target
	bit    touched
	notes  []string // of the last reconciliation
}

// Open creates or adopts the link and begins to watch. It writes nothing else before the first Apply.
func Open(ctx context.Context, o Options) (*Plane, error) {
	run, end := context.WithCancel(context.Background())
	p := &Plane{opts: o.filled(), end: end, done: make(chan struct{})}
	started := make(chan error, 1)
	go p.run(run, started)
	if err := <-started; err != nil {
		end()
		return nil, err
	}
	return p, nil
}

func (o Options) filled() Options {
	o.Numbers = o.Numbers.Filled()
	if o.MTU == 0 {
		o.MTU = dataplane.MTU
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.OnDrift == nil {
		o.OnDrift = func(string) {}
	}
	if o.OnBroken == nil {
		o.OnBroken = func(string) {}
	}
	return o
}

// Driver is the WireGuard driver in use: kernel or userspace.
func (p *Plane) Driver() string { return p.driver }

// Apply brings the kernel to the Spec. Every subsystem is tried, and the error joins theirs. Failed subsystems are
// retried until they succeed or another Spec is applied.
func (p *Plane) Apply(ctx context.Context, s dataplane.Spec) (r dataplane.Report, err error) {
	s.Numbers = p.opts.Numbers
	doErr := p.do(ctx, func() { r, err = p.apply(s) })
	return r, errors.Join(doErr, err)
}

// Peers reads the peers' status from the device, sorted by key.
func (p *Plane) Peers(ctx context.Context) (peers []dataplane.PeerStatus, err error) {
	doErr := p.do(ctx, func() { peers, err = p.status() })
	return peers, errors.Join(doErr, err)
}

// Hops counts packets that travelled inside others, and dropped ones, since the device was opened. With kernel
// WireGuard the dropped ones are counted since the guards were made, and only in part.
func (p *Plane) Hops(ctx context.Context) (c hop.Counts, err error) {
	doErr := p.do(ctx, func() {
		if c = p.wg.HopCounts(); p.hop != nil && p.driver == wireguard.Kernel {
			c, err = p.hop.Counts()
		}
	})
	return c, errors.Join(doErr, err)
}

// Rewrites reads the port rewrites in the kernel, including those of an earlier run.
func (p *Plane) Rewrites(ctx context.Context) (rs []dataplane.PortRewrite, err error) {
	doErr := p.do(ctx, func() {
		if p.nft != nil {
			rs, err = p.nft.Rewrites()
		}
	})
	return rs, errors.Join(doErr, err)
}

// Diff lists line by line what Apply of this Spec would change, from a fresh read of the kernel.
func (p *Plane) Diff(ctx context.Context, s dataplane.Spec) (lines []string, err error) {
	s.Numbers = p.opts.Numbers
	doErr := p.do(ctx, func() {
		for _, x := range p.parts {
			ls, e := x.Diff(s)
			err = errors.Join(err, e)
			for _, l := range ls {
				lines = append(lines, x.Name()+": "+l)
			}
		}
	})
	return lines, errors.Join(doErr, err)
}

// Close stops repairs and leaves the kernel's state in place. A userspace device ends with it; the tunnel's routing
// table then rejects packets that would have entered the tunnel.
func (p *Plane) Close() error {
	p.end()
	<-p.done
	return nil
}

// do runs f on the runner's goroutine. f only talks to the kernel, so its duration is limited.
func (p *Plane) do(ctx context.Context, f func()) error {
	err := p.runner.Do(ctx, f)
	if errors.Is(err, reconcile.ErrEnded) {
		return ErrClosed
	}
	return err
}

// enter locks the calling goroutine to a thread in the given namespace. The thread is not reused afterwards.
func enter(ns *netns.NsHandle) error {
	if ns == nil {
		return nil
	}
	runtime.LockOSThread()
	if err := netns.Set(*ns); err != nil {
		return fmt.Errorf("entering network namespace: %w", err)
	}
	return nil
}

func (p *Plane) open() (err error) {
	if err := enter(p.opts.Namespace); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = p.closeParts()
		}
	}()
	o := p.opts
	if p.wg, err = wireguard.NewReconciler(wireguard.OpenConfig{Link: o.Numbers.Link, MTU: o.MTU, Driver: o.Driver,
		Log: o.Log}); err != nil {
		return err
	}
	p.driver = p.wg.Driver()
	p.add(p.wg)
	if r, err := route.NewReconciler(o.Numbers.Link, o.Numbers); err != nil {
		p.add(broken{"route", err})
	} else {
		p.add(r)
	}
	kernel := p.driver == wireguard.Kernel
	switch r, err := hopnet.NewReconciler(kernel, o.Numbers); {
	case err == nil:
		p.hop = r
		p.add(r)
	case kernel:
		p.add(broken{"hop", err})
	}
	if r, err := nft.NewReconciler(o.Numbers); err != nil {
		p.add(broken{"nft", err})
	} else {
		p.nft = r
		p.add(r)
	}
	return nil
}

// broken replaces a subsystem that is not available on this host, so that the others still work.
type broken struct {
	name string
	err  error
}

func (b broken) Name() string                                    { return b.name }
func (b broken) Reconcile(dataplane.Spec) (int, []string, error) { return 0, nil, b.err }
func (b broken) Repair(dataplane.Spec) (int, []string, error)    { return 0, nil, b.err }
func (b broken) Diff(dataplane.Spec) ([]string, error)           { return nil, b.err }
func (b broken) Forget()                                         {}
func (b broken) Close() error                                    { return nil }

// add makes a subsystem a part.
func (p *Plane) add(s subsystem) {
	x := &part{subsystem: s, bit: 1 << slices.Index(Subsystems, s.Name())}
	x.target = &reconcile.Target{Name: s.Name(), Reconcile: func(ctx context.Context, c reconcile.Cause) reconcile.Result {
		return p.reconcile(ctx, x, c)
	}}
	if x.bit == ofRoute {
		p.route = x.target
	}
	p.parts = append(p.parts, x)
}

func (p *Plane) closeParts() error {
	errs := []error{p.listener.Close()}
	for _, x := range p.parts {
		errs = append(errs, x.Close())
	}
	return errors.Join(errs...)
}
