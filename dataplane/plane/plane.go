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

// statusEvery is how often peers are read to see what no notification tells.
const statusEvery = 600 * time.Millisecond

// ErrClosed is returned by every method after Close.
var ErrClosed = errors.New("the data plane is closed")

// Options of Open and Purge.
type Options struct {
	Numbers dataplane.Numbers // what the plane holds; the zero value: the default ones
	Driver  string            // auto, kernel or userspace
	MTU     int               // of a new TUN link until the first Spec; dataplane.MTU if 0
	Log     *slog.Logger
	// OnDrift is told that a change somebody else made to a subsystem (wireguard, nft, route, hop) was repaired.
	// It runs on the runner's goroutine: it must not block, nor call the plane.
	OnDrift func(subsystem string)
	// OnBroken is told that such a change could not be repaired at once. It is tried again; the next Apply says why it
	// fails. It must not block either.
	OnBroken func(subsystem string)
	// Namespace to work in; nil: the process's own.
	Namespace *netns.NsHandle
}

// Subsystems are the names of all reconcilers, as OnDrift, OnBroken and Report have them. The bits of touched are in
// the same order.
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
	nft        *nft.Reconciler    // nil: this host has no nftables
	hop        *hopnet.Reconciler // nil: this host cannot have it
	parts      []*part            // in the order in which they are written
	route      *reconcile.Target
	spec       *dataplane.Spec
	lastStatus time.Time
	device     <-chan struct{} // that somebody waits for

	listener rtnl.Listener
	helpers  sync.WaitGroup
	pods     atomic.Pointer[podSet] // of the Spec, for the listener
}

// part is a subsystem with what the runner knows of it.
type part struct {
	subsystem
	target *reconcile.Target
	bit    touched
	notes  []string // of the last look
}

// Open creates or adopts the link and starts to watch. Nothing else is written before the first Apply.
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

// Driver is kernel or userspace: which one runs.
func (p *Plane) Driver() string { return p.driver }

// Apply makes the kernel what the Spec says. Every subsystem is tried; the error joins theirs, and they
// are tried again by themselves until they succeed or another Spec comes.
func (p *Plane) Apply(ctx context.Context, s dataplane.Spec) (r dataplane.Report, err error) {
	s.Numbers = p.opts.Numbers
	doErr := p.do(ctx, func() { r, err = p.apply(s) })
	return r, errors.Join(doErr, err)
}

// Peers reads what the device knows of its peers, sorted by key.
func (p *Plane) Peers(ctx context.Context) (peers []dataplane.PeerStatus, err error) {
	doErr := p.do(ctx, func() { peers, err = p.status() })
	return peers, errors.Join(doErr, err)
}

// Hops counts the packets that travelled inside others, and those that were dropped, since the device was opened. With
// kernel WireGuard it knows the latter since the guards were made, and not all of them.
func (p *Plane) Hops(ctx context.Context) (c hop.Counts, err error) {
	doErr := p.do(ctx, func() {
		if c = p.wg.HopCounts(); p.hop != nil && p.driver == wireguard.Kernel {
			c, err = p.hop.Counts()
		}
	})
	return c, errors.Join(doErr, err)
}

// Rewrites reads the port rewrites that the kernel has, of a former run too.
func (p *Plane) Rewrites(ctx context.Context) (rs []dataplane.PortRewrite, err error) {
	doErr := p.do(ctx, func() {
		if p.nft != nil {
			rs, err = p.nft.Rewrites()
		}
	})
	return rs, errors.Join(doErr, err)
}

// Diff tells line by line what Apply of this Spec would change, from a fresh read of the kernel.
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

// Close stops repair and lets go of the kernel, leaving everything in place. A userspace device ends
// with it, and the table of the tunnel then refuses what was to enter the tunnel.
func (p *Plane) Close() error {
	p.end()
	<-p.done
	return nil
}

// do runs f, which is bounded since it only talks to the kernel, on the runner's goroutine.
func (p *Plane) do(ctx context.Context, f func()) error {
	err := p.runner.Do(ctx, f)
	if errors.Is(err, reconcile.ErrEnded) {
		return ErrClosed
	}
	return err
}

// enter locks the calling goroutine to a thread in the wanted namespace. The thread is not given back.
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

// broken stands for a subsystem that this host has not, so that the others work all the same.
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

// add makes a part of a subsystem.
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
