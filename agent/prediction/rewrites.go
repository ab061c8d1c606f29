package prediction

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/skeinmesh/skein/agent/birthday"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

const (
	// for a rewrite that no path uses: longer than NATs keep a mapping, so that a path can return
	rewriteRests = 3 * time.Minute
	adoptedFor   = time.Minute            // for an adopted rewrite, until its peer is known
	heardEvery   = 500 * time.Millisecond // between two repetitions of a hit because of the peer's pings
)

// rewrites are the port rewrites that the data plane should hold. It is safe for concurrent use.
type rewrites struct {
	mu  sync.Mutex
	all map[netip.AddrPort]*rewrite
}

type rewrite struct {
	dataplane.PortRewrite
	peer   identity.ID // zero: from an earlier run, peer not known yet
	used   time.Time   // last time a path used it
	event  birthday.Event
	told   bool
	pinged time.Time       // when the hit was last repeated because of a ping
	proxy  *birthday.Proxy // replaces the kernel's rule
	stale  bool            // this host's network has changed since, and perhaps its NAT
}

func (w *rewrites) adopt(have []dataplane.PortRewrite, now time.Time) {
	for _, r := range have {
		w.add(rewrite{PortRewrite: r, used: now, told: true})
	}
}

// add replaces any older rewrite to the same address, and returns that one's proxy.
func (w *rewrites) add(r rewrite) (old *birthday.Proxy) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = map[netip.AddrPort]*rewrite{}
	}
	if o := w.all[r.Remote]; o != nil {
		old = o.proxy
	}
	w.all[r.Remote] = &r
	return old
}

// list returns the rewrites that the data plane should hold.
func (w *rewrites) list() []dataplane.PortRewrite {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []dataplane.PortRewrite
	for _, r := range w.all {
		if r.proxy == nil {
			out = append(out, r.PortRewrite)
		}
	}
	return out
}

// proxied records that a proxy replaces a rewrite; false if the rewrite has been dropped.
func (w *rewrites) proxied(at netip.AddrPort, p *birthday.Proxy) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	r, ok := w.all[at]
	if ok {
		r.proxy = p
	}
	return ok
}

// through is where WireGuard must send to reach an endpoint: the endpoint itself, or a proxy for it.
func (w *rewrites) through(at netip.AddrPort) netip.AddrPort {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r, ok := w.all[at]; ok && r.proxy != nil {
		return r.proxy.Endpoint()
	}
	return at
}

// news returns the rewrites of a Spec that were not announced yet, and marks them announced. A rewrite found while
// the Spec was being applied is left out: packets to its peer would still leave by WireGuard's own port.
func (w *rewrites) news(spec []dataplane.PortRewrite) (out []rewrite) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.all {
		if !r.told && slices.Contains(spec, r.PortRewrite) {
			r.told = true
			out = append(out, *r)
		}
	}
	return out
}

// heard returns the rewrite through which a peer's ping came, at most once per heardEvery.
func (w *rewrites) heard(peer identity.ID, from netip.AddrPort, now time.Time) (rewrite, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r, ok := w.all[from]
	if !ok || !r.told || r.peer != peer || now.Sub(r.pinged) < heardEvery {
		return rewrite{}, false
	}
	r.pinged = now
	return *r, true
}

// strays are the addresses of adopted rewrites whose peer is not known yet.
func (w *rewrites) strays() (out []netip.AddrPort) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for at, r := range w.all {
		if r.peer.IsZero() {
			out = append(out, at)
		}
	}
	return out
}

// claim assigns an adopted rewrite to its peer.
func (w *rewrites) claim(at netip.AddrPort, peer identity.ID, e birthday.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r, ok := w.all[at]; ok {
		r.peer, r.event, r.told = peer, e, false
	}
}

// networkChanged marks each rewrite to be dropped as soon as no live path uses it. Behind another NAT, a rewrite
// would only make packets arrive at the peer from a port that it does not know.
func (w *rewrites) networkChanged() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.all {
		r.stale = true
	}
}

// expire drops rewrites that no path has used for long, and returns their proxies for closing.
func (w *rewrites) expire(paths map[identity.ID]path.Path, now time.Time) map[netip.AddrPort]*birthday.Proxy {
	w.mu.Lock()
	defer w.mu.Unlock()
	ended := map[netip.AddrPort]*birthday.Proxy{}
	alive := map[*rewrite]bool{}
	for _, p := range paths {
		if p.Kind == path.Direct {
			if r, ok := w.all[p.Endpoint]; ok {
				r.used, alive[r] = now, p.Alive
			}
		}
	}
	for at, r := range w.all {
		rest := rewriteRests
		if r.peer.IsZero() {
			rest = adoptedFor
		}
		if r.stale && !alive[r] {
			rest = 0
		}
		if now.Sub(r.used) >= rest {
			delete(w.all, at)
			if r.proxy != nil {
				ended[at] = r.proxy
			}
		}
	}
	return ended
}
