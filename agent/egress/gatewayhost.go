package egress

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/announce"
	"github.com/skeinmesh/skein/dataplane/egresshost"
	"github.com/skeinmesh/skein/dataplane/reconcile"
)

// host is the host's side of the gateways, outside their network namespaces.
type host struct {
	runner *reconcile.Runner
	target *reconcile.Target

	// For the runner's goroutine only.
	rec *egresshost.Reconciler // nil: not needed yet
	was bool                   // the kernel may contain something from this reconciler
}

func (g *Gateways) newHost() {
	g.host.target = &reconcile.Target{Name: "host of gateways", Reconcile: g.reconcileHost}
	g.host.runner = reconcile.New(reconcile.Options{Log: g.cfg.Log}, g.host.target)
}

// hostWanted requests a reconciliation of the host's side. It never blocks.
func (g *Gateways) hostWanted() { g.host.runner.Mark(reconcile.Wanted, g.host.target) }

// hostNow reconciles the host's side before it returns.
func (g *Gateways) hostNow(ctx context.Context) {
	_ = g.host.runner.Do(ctx, func() { g.host.runner.Now(g.host.target, reconcile.Wanted) })
}

func (g *Gateways) runHost(ctx context.Context) {
	g.host.runner.Run(ctx)
	if g.host.rec != nil { // what it made in the kernel stays
		g.host.rec.Close()
	}
}

// reconcileHost brings the host's side to the wanted state.
func (g *Gateways) reconcileHost(context.Context, reconcile.Cause) (r reconcile.Result) {
	spec := g.hostSpec()
	is := len(spec.Routes) > 0
	if !is && !g.host.was {
		return r
	}
	if g.host.rec == nil {
		g.host.rec, r.Err = g.openHost()
	}
	if g.host.rec != nil {
		r.Writes, r.Err = g.host.rec.Reconcile(spec)
	}
	g.host.was = is || r.Err != nil
	text := ""
	if r.Err != nil {
		text = r.Err.Error()
	}
	g.mu.Lock()
	g.problem("host", text)
	g.mu.Unlock()
	return r
}

func (g *Gateways) openHost() (*egresshost.Reconciler, error) {
	rec, err := egresshost.New(g.cfg.Numbers)
	if err != nil {
		return nil, err
	}
	changed := func() { g.host.runner.Mark(reconcile.Changed, g.host.target) }
	if err := rec.Watch(changed); err != nil {
		g.cfg.Log.Warn("the host of gateways cannot be watched; what others change there is repaired late", "error", err)
	}
	return rec, nil
}

// hostSpec is the wanted state of the host's side.
func (g *Gateways) hostSpec() egresshost.Spec {
	served := g.serves()
	g.mu.Lock()
	defer g.mu.Unlock()
	s := egresshost.Spec{Tunnel: g.cfg.Tunnel}
	add := func(link string, addrs ...netip.Addr) {
		for _, a := range addrs {
			if a.IsValid() {
				s.Routes = append(s.Routes, dataplane.PodRoute{Addr: a, Link: link})
			}
		}
	}
	for _, r := range g.served {
		link := r.link()
		if link == "" {
			continue
		}
		four, six := Locals(g.cfg.Numbers, r.number)
		add(link, four, six)
	}
	for _, slot := range served {
		r := g.served[slot.Ref]
		e := g.state.Egress(slot.Namespace, slot.Name)
		if r == nil || r.link() == "" || slot.Number >= len(e.GetEndpoints()) {
			continue
		}
		at := e.GetEndpoints()[slot.Number]
		add(r.link(), address(at.GetIpv4()), address(at.GetIpv6()))
		add(r.link(), sources(e, slot.Number)...)
	}
	slices.SortFunc(s.Routes, func(a, b dataplane.PodRoute) int { return a.Addr.Compare(b.Addr) })
	if len(s.Routes) > 0 {
		s.Uplinks = g.uplinks()
	}
	return s
}

// uplinks are the names of the host's links, except skein's.
func (g *Gateways) uplinks() (names []string) {
	for _, l := range g.cfg.Links() {
		names = append(names, l.Name)
	}
	return names
}

// announce begins or ends announcing a slot's addresses, for the LeaseClient.
func (g *Gateways) announce(slot Slot, on bool) {
	if on { // others send as soon as they learn the address, so the route must exist before
		g.hostNow(context.Background())
	}
	defer g.hostWanted()
	g.mu.Lock()
	defer g.mu.Unlock()
	if on {
		a := announcement{addrs: map[netip.Addr]string{}, since: time.Now()}
		links := g.cfg.Links()
		for _, addr := range sources(g.state.Egress(slot.Namespace, slot.Name), slot.Number) {
			a.addrs[addr], _ = announce.LinkFor(addr, links)
		}
		g.announced[slot] = a
	} else {
		delete(g.announced, slot)
	}
	want := map[netip.Addr]string{}
	for _, a := range g.announced {
		for addr, link := range a.addrs {
			if link != "" {
				want[addr] = link
			}
		}
	}
	if g.announcer != nil {
		g.announcer.Set(want)
	}
	g.cfg.Changed()
}

// answers reports whether this host may answer for an address: its slot's lease runs, or the slot has just moved here
// by plan and waits for its lease.
func (g *Gateways) answers(addr netip.Addr) bool {
	g.mu.Lock()
	var slot Slot
	var since time.Time
	found := false
	for s, a := range g.announced {
		if _, ok := a.addrs[addr]; ok {
			slot, since, found = s, a.since, true
		}
	}
	g.mu.Unlock()
	return found && (time.Since(since) < HoldMost || g.leaseClient.Live(slot))
}
