package egress

import (
	"context"
	"net/netip"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/announce"
	"github.com/skeinmesh/skein/dataplane/egresshost"
)

func (g *Gateways) wakeHost() {
	select {
	case g.host <- struct{}{}:
	default:
	}
}

// keepHost keeps the host's side as it is wanted, and repairs it once a second where there is one.
func (g *Gateways) keepHost(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		next := time.Hour
		if g.syncHost() {
			next = hostEvery
		}
		timer.Reset(next)
		select {
		case <-ctx.Done():
		case <-g.host:
		case <-timer.C:
		}
	}
}

// syncHost makes the host's side what is wanted now. It reports whether there is any, or something of it could not be
// removed.
func (g *Gateways) syncHost() bool {
	g.hostMu.Lock()
	defer g.hostMu.Unlock()
	spec := g.hostSpec()
	is := len(spec.Routes) > 0
	if !is && !g.was {
		return false
	}
	err := func() (err error) {
		if g.rec == nil {
			if g.rec, err = egresshost.New(g.cfg.Numbers); err != nil {
				return err
			}
		}
		_, err = g.rec.Reconcile(spec)
		return err
	}()
	g.was = is || err != nil
	text := ""
	if err != nil {
		text = err.Error()
	}
	g.mu.Lock()
	g.problem("host", text)
	g.mu.Unlock()
	return g.was
}

// closeHost closes what syncHost works with; what it made stays.
func (g *Gateways) closeHost() {
	g.hostMu.Lock()
	defer g.hostMu.Unlock()
	if g.rec != nil {
		g.rec.Close()
		g.rec = nil
	}
}

// hostSpec is the host's side as it is wanted now.
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
		for _, l := range g.cfg.Links() {
			s.Uplinks = append(s.Uplinks, l.Name)
		}
	}
	return s
}

// announce follows a slot that comes and goes. It is the Renewer's.
func (g *Gateways) announce(slot Slot, on bool) {
	if on { // whoever hears of the address sends at once: the way to the namespace is there before
		g.syncHost()
	}
	defer g.wakeHost()
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

// sources are the addresses that a slot's packets leave with, if it has its own.
func sources(e *skeinv1.Egress, number int) (out []netip.Addr) {
	if number >= len(e.GetAddresses()) {
		return nil
	}
	for _, text := range []string{e.GetAddresses()[number].GetIpv4(), e.GetAddresses()[number].GetIpv6()} {
		if a := address(text); a.IsValid() {
			out = append(out, a)
		}
	}
	return out
}

// answers reports whether this host may answer for an address: the lease of its slot runs, or it has just come here by
// plan and waits for that.
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
	return found && (time.Since(since) < HoldMost || g.renewer.Live(slot))
}
