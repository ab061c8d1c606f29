package plane

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/hopnet"
	"github.com/skeinmesh/skein/dataplane/nft"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/reconcile"
	"github.com/skeinmesh/skein/dataplane/route"
	"github.com/skeinmesh/skein/dataplane/wireguard"
)

// run is the goroutine of the runner, locked to a thread in the plane's network namespace.
func (p *Plane) run(ctx context.Context, started chan<- error) {
	defer close(p.done)
	if err := p.open(); err != nil {
		started <- err
		return
	}
	var targets []*reconcile.Target
	for _, x := range p.parts {
		targets = append(targets, x.target)
	}
	p.runner = reconcile.New(reconcile.Options{Log: p.opts.Log, Told: p.report}, targets...)
	p.listen()
	p.awaitDevice(ctx)
	if p.driver == wireguard.Kernel { // other programs cannot reach a userspace device, which is inside this process
		p.helpers.Go(func() { p.readPeers(ctx) })
	}
	started <- nil
	p.runner.Run(ctx)
	if err := p.closeParts(); err != nil {
		p.opts.Log.Warn("closing the data plane", "error", err)
	}
	p.helpers.Wait()
}

// reconcile brings one part to the Spec.
func (p *Plane) reconcile(ctx context.Context, x *part, c reconcile.Cause) (r reconcile.Result) {
	if p.spec == nil {
		return r
	}
	if c&reconcile.Changed != 0 {
		x.Forget()
	}
	act := x.Repair
	if c&reconcile.Wanted != 0 {
		act = x.Reconcile
	}
	r.Writes, x.notes, r.Err = act(*p.spec)
	if x.bit == ofWireGuard {
		p.awaitDevice(ctx)
		if r.Writes > 0 && c&reconcile.Wanted == 0 { // the link may be new
			p.runner.Mark(reconcile.Changed|reconcile.Wanted, p.route)
		}
	}
	return r
}

// report reports the outcome of a reconciliation.
func (p *Plane) report(t *reconcile.Target, o reconcile.Outcome) {
	switch {
	case o.Repaired:
		p.opts.OnDrift(t.Name)
	case o.Failed && o.Cause&reconcile.Wanted == 0:
		p.opts.OnBroken(t.Name)
	}
}

// mark records that other programs may have changed subsystems.
func (p *Plane) mark(t touched) {
	if t&ofRoute != 0 { // routes of hops use the tunnel's addresses as sources, and vanish with them
		t |= ofHop
	}
	for _, x := range p.parts {
		if t&x.bit != 0 {
			p.runner.Mark(reconcile.Changed, x.target)
		}
	}
}

// readPeers checks regularly for changes of peers by other programs, which cause no notification.
func (p *Plane) readPeers(ctx context.Context) {
	tick := time.NewTicker(statusEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			_ = p.do(ctx, p.checkPeers)
		}
	}
}

// awaitDevice requests a reconciliation when the device ends.
func (p *Plane) awaitDevice(ctx context.Context) {
	died := p.wg.Done()
	if died == nil || died == p.device {
		return
	}
	p.device = died
	p.helpers.Go(func() {
		select {
		case <-died:
			p.mark(ofWireGuard)
		case <-ctx.Done():
		}
	})
}

func (p *Plane) apply(s dataplane.Spec) (dataplane.Report, error) {
	p.spec = &s
	p.pods.Store(newPodSet(s.Pods)) // before anything is written
	r := dataplane.Report{Writes: map[string]int{}, Errors: map[string]error{}}
	var errs []error
	for _, x := range p.parts {
		result := p.runner.Now(x.target, reconcile.Wanted)
		r.Writes[x.Name()] = result.Writes
		r.Notes = append(r.Notes, x.notes...)
		if result.Err != nil {
			r.Errors[x.Name()] = result.Err
			errs = append(errs, fmt.Errorf("%s: %w", x.Name(), result.Err))
		}
	}
	return r, errors.Join(errs...)
}

// status reads the peers, and marks the device if another program has changed it.
func (p *Plane) status() ([]dataplane.PeerStatus, error) {
	p.lastStatus = time.Now()
	peers, changed, err := p.wg.Status()
	if changed {
		p.mark(ofWireGuard)
	}
	if errors.Is(err, wireguard.ErrGone) {
		return nil, nil // the device is being reopened: no peers for now
	}
	return peers, err
}

// checkPeers checks for changes of peers by other programs, unless the peers were read recently.
func (p *Plane) checkPeers() {
	if p.spec == nil || time.Since(p.lastStatus) < statusEvery/2 {
		return
	}
	if _, err := p.status(); err != nil {
		p.opts.Log.Debug("reading peers", "error", err)
	}
}

// Purge removes everything of skein and nothing else: links including those of pods, tables, rules and routes.
// Missing objects are no error.
func Purge(ctx context.Context, o Options) error {
	o = o.filled()
	return o.aside(ctx, func() error { return purge(o) })
}

// aside runs f in the options' network namespace, and returns at the latest when ctx ends.
func (o Options) aside(ctx context.Context, f func() error) error {
	result := make(chan error, 1)
	go func() {
		err := enter(o.Namespace)
		if err == nil {
			err = f()
		}
		result <- err
	}()
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func purge(o Options) error {
	var errs []error
	// First the tables that mark packets for the tunnel, so that none is sent to a missing tunnel.
	if n, err := nft.NewReconciler(o.Numbers); err != nil {
		errs = append(errs, err)
	} else {
		_, err := n.Purge()
		errs = append(errs, err, n.Close())
	}
	if r, err := hopnet.NewReconciler(false, o.Numbers); err != nil {
		errs = append(errs, err)
	} else {
		errs = append(errs, r.Purge(), r.Close())
	}
	errs = append(errs, podnet.Purge(o.Numbers.PodTable())) // first, since the pods' host routes keep the rule
	if r, err := route.NewReconciler(o.Numbers.Link, o.Numbers); err != nil {
		errs = append(errs, err)
	} else {
		_, err := r.Purge()
		errs = append(errs, err, r.Close())
	}
	_, err := wireguard.DeleteLink(o.Numbers.Link)
	return errors.Join(append(errs, err)...)
}
