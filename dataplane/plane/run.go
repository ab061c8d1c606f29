package plane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/hopnet"
	"github.com/skeinmesh/skein/dataplane/nft"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/route"
	"github.com/skeinmesh/skein/dataplane/wireguard"
)

// run is the plane's goroutine.
func (p *Plane) run(started chan<- error) {
	defer close(p.done)
	if err := p.open(); err != nil {
		started <- err
		return
	}
	index := 0
	if l, err := netlink.LinkByName(p.opts.Numbers.Link); err == nil {
		index = l.Attrs().Index
	}
	p.startWatching(index)
	started <- nil
	defer func() {
		if err := p.closeParts(); err != nil {
			p.opts.Log.Warn("closing the data plane", "error", err)
		}
		p.watchers.Wait()
	}()
	p.loop()
}

func (p *Plane) loop() {
	var status <-chan time.Time // in userspace the device is inside this process, and nobody else can reach it
	if p.driver == wireguard.Kernel {
		ticker := time.NewTicker(statusEvery)
		defer ticker.Stop()
		status = ticker.C
	}
	resync := time.NewTicker(resyncEvery)
	defer resync.Stop()
	repair := time.NewTimer(time.Hour)
	defer repair.Stop()
	died := p.wg.Done()
	for {
		select {
		case <-p.quit:
			return
		case f := <-p.work:
			f()
		case t := <-p.dirty:
			p.mark(t, settle)
		case <-died:
			p.mark(touched{wireguard: true}, 0)
		case <-status:
			p.checkPeers()
		case <-resync.C:
			p.mark(everything, 0)
		case <-repair.C:
		}
		next := p.repairDue()
		repair.Reset(next)
		died = p.wg.Done()
		if died != nil && p.part("wireguard").dirty { // already known; the timer has it
			died = nil
		}
	}
}

func (p *Plane) part(name string) *part {
	return p.parts[slices.IndexFunc(p.parts, func(x *part) bool { return x.Name() == name })]
}

// mark notes that subsystems may differ from the Spec, to be looked at after a while.
func (p *Plane) mark(t touched, after time.Duration) {
	for _, part := range p.parts {
		hop := t.hop || t.route // with the tunnel's addresses the ways go that have them as sources
		if hit := map[string]bool{"wireguard": t.wireguard, "route": t.route, "nft": t.nft, "hop": hop}[part.Name()]; !hit {
			continue
		}
		part.Forget()
		if !part.dirty {
			part.dirty, part.due = true, time.Now().Add(after)
		}
	}
}

// repairDue repairs what is due, and returns when the next is.
func (p *Plane) repairDue() time.Duration {
	next := time.Hour
	if p.spec == nil {
		return next
	}
	for _, part := range p.parts {
		if !part.dirty {
			continue
		}
		now := time.Now()
		if wait := part.due.Sub(now); wait > 0 {
			next = min(next, wait)
			continue
		}
		if r := part.repairs.ReserveN(now, 1); r.DelayFrom(now) > 0 {
			wait := r.DelayFrom(now)
			r.CancelAt(now)
			next = min(next, wait)
			continue
		}
		p.repair(part)
		if part.dirty {
			next = min(next, time.Until(part.due))
		}
	}
	return max(next, time.Millisecond)
}

func (p *Plane) repair(part *part) {
	retry := part.backoff > 0
	writes, _, err := part.Repair(*p.spec)
	if err != nil && !retry { // it may have changed while it was read
		var more int
		more, _, err = part.Repair(*p.spec)
		writes += more
	}
	p.settled(part, err)
	if writes > 0 && part == p.part("wireguard") { // the link may be a new one
		p.mark(touched{route: true}, 0)
		p.part("route").due = time.Now()
	}
	part.foreign = part.foreign || !retry && (writes > 0 || err != nil)
	switch {
	case err != nil && !retry:
		p.opts.Log.Warn("cannot repair the data plane, trying again", "subsystem", part.Name(), "error", err)
		p.opts.OnBroken(part.Name())
	case err != nil:
	case part.foreign:
		part.foreign = false
		p.opts.Log.Warn("somebody changed what is ours, repaired", "subsystem", part.Name(), "writes", writes)
		p.opts.OnForeign(part.Name())
	case retry:
		p.opts.Log.Info("data plane works again", "subsystem", part.Name(), "writes", writes)
	}
}

// settled records how a reconciliation went, and when to try again.
func (p *Plane) settled(part *part, err error) {
	if err == nil {
		part.dirty, part.backoff = false, 0
		return
	}
	part.backoff = min(max(2*part.backoff, retryFirst), retryLast)
	part.dirty, part.due = true, time.Now().Add(part.backoff)
}

func (p *Plane) apply(s dataplane.Spec) (dataplane.Report, error) {
	p.spec = &s
	p.pods.Store(newPodSet(s.Pods)) // before anything is written
	r := dataplane.Report{Writes: map[string]int{}, Errors: map[string]error{}}
	var errs []error
	for _, part := range p.parts {
		writes, notes, err := part.Reconcile(s)
		if err != nil { // what it remembered may have been stale: once more from a fresh read
			var more int
			more, notes, err = part.Reconcile(s)
			writes += more
		}
		p.settled(part, err)
		part.foreign = false
		r.Writes[part.Name()] = writes
		r.Notes = append(r.Notes, notes...)
		if err != nil {
			r.Errors[part.Name()] = err
			errs = append(errs, fmt.Errorf("%s: %w", part.Name(), err))
		}
	}
	return r, errors.Join(errs...)
}

// status reads the peers, and marks the device when somebody changed it.
func (p *Plane) status() ([]dataplane.PeerStatus, error) {
	p.lastStatus = time.Now()
	peers, changed, err := p.wg.Status()
	if changed {
		p.mark(touched{wireguard: true}, 0)
	}
	if errors.Is(err, wireguard.ErrGone) {
		return nil, nil // being opened again: no peers for now
	}
	return peers, err
}

// checkPeers looks for foreign changes of peers, if nobody has read them lately.
func (p *Plane) checkPeers() {
	if p.spec == nil || time.Since(p.lastStatus) < statusEvery/2 {
		return
	}
	if _, err := p.status(); err != nil {
		p.opts.Log.Debug("reading peers", "error", err)
	}
}

// Purge removes everything of ours and nothing else: links, also those of pods, table, rules and routes. What is not
// there is no error.
func Purge(ctx context.Context, o Options) error {
	o = o.filled()
	result := make(chan error, 1)
	go func() { result <- purge(o) }()
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func purge(o Options) error {
	if err := enter(o.Namespace); err != nil {
		return err
	}
	var errs []error
	// First what leads packets to the tunnel, so that none finds it missing.
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
	errs = append(errs, podnet.Purge(o.Numbers.PodTable())) // their host routes hold the rule
	if r, err := route.NewReconciler(o.Numbers.Link, o.Numbers); err != nil {
		errs = append(errs, err)
	} else {
		_, err := r.Purge()
		errs = append(errs, err, r.Close())
	}
	_, err := wireguard.DeleteLink(o.Numbers.Link)
	return errors.Join(append(errs, err)...)
}
