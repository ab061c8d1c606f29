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
	// that no path uses: longer than NATs keep a mapping, so that a path can come back
	rewriteRests = 3 * time.Minute
	adoptedFor   = time.Minute            // a rewrite of a former run, until its peer is known
	heardEvery   = 500 * time.Millisecond // between two hints that the peer's pings come by a rewrite
)

// rewrites are the port rewrites that the data plane shall hold. It is safe for concurrent use.
type rewrites struct {
	mu  sync.Mutex
	all map[netip.AddrPort]*rewrite
}

type rewrite struct {
	dataplane.PortRewrite
	peer   identity.ID // zero: of a former run, and not known yet
	used   time.Time   // last time a path used it
	event  birthday.Event
	told   bool
	pinged time.Time       // last time the peer's ping was passed on
	proxy  *birthday.Proxy // instead of a rule in the kernel
	stale  bool            // this host's network has changed since: its NAT may be another
}

func (w *rewrites) adopt(have []dataplane.PortRewrite, now time.Time) {
	for _, r := range have {
		w.add(rewrite{PortRewrite: r, used: now, told: true})
	}
}

// add takes a rewrite in the place of an older one to the same address, and gives that one's proxy.
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

// list is what the data plane shall hold.
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

// proxied notes that a proxy does what a rewrite should; false if nobody wants it any more.
func (w *rewrites) proxied(at netip.AddrPort, p *birthday.Proxy) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	r, ok := w.all[at]
	if ok {
		r.proxy = p
	}
	return ok
}

// through is where WireGuard sends for an endpoint: to a proxy, or there.
func (w *rewrites) through(at netip.AddrPort) netip.AddrPort {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r, ok := w.all[at]; ok && r.proxy != nil {
		return r.proxy.Endpoint()
	}
	return at
}

// news are those of a Spec that were not told yet; now they are. One that was found while the Spec was being applied is
// not among them: its peer's packets would still leave by WireGuard's own port.
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

// heard gives the rewrite by which a peer's ping came, once in a while.
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

// claim says whose an adopted rewrite is.
func (w *rewrites) claim(at netip.AddrPort, peer identity.ID, e birthday.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r, ok := w.all[at]; ok {
		r.peer, r.event, r.told = peer, e, false
	}
}

// networkChanged has each rewrite dropped as soon as no path that lives uses it: this host's network has changed, and
// behind another NAT a rewrite would only have the peer hear from a port that it does not know.
func (w *rewrites) networkChanged() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.all {
		r.stale = true
	}
}

// expire drops what no path has used for long, and gives the proxies that are not needed any more.
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
