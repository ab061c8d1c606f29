// Package reflection finds out by pongs how peers see this host.
package reflection

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/addr"
)

// A pong tells where the peer saw the ping come from. An address of this host that no STUN server has told, and that
// peers at different addresses go on seeing alike, works for others too: it goes into the record as a candidate of type
// prflx. A symmetric NAT shows each peer another port, so that none of these is ever confirmed; and a single member
// cannot make this host name an address that is not its own. In a mesh of two the one peer's word is enough: nobody
// else reads the record that it could mislead, and when a third member comes, its word alone counts no more. Such an
// address may hold for that peer only, so it comes last.

const (
	reflectFor     = 10 * time.Second // how long an address must have been seen
	reflectPongs   = 3                // by each of two peers so many times
	reflectStale   = 2 * time.Minute  // after which a sighting counts no more
	reflectMax     = 2                // addresses told
	reflectTracked = 64               // pairs of address and peer remembered
)

// Reflection remembers how peers see this host. Its methods may be called from anywhere.
type Reflection struct {
	mu   sync.Mutex
	seen []sighting
}

type sighting struct {
	observed    netip.AddrPort
	by          netip.Addr
	first, last time.Time
	pongs       int
}

// Saw takes what a pong of a peer at an address tells.
func (r *Reflection) Saw(observed netip.AddrPort, by netip.Addr, at time.Time) {
	by = by.Unmap()
	if !addr.Public(observed.Addr()) || !addr.Public(by) || observed.Port() == 0 {
		return // inside a LAN each host is seen as it is
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.IndexFunc(r.seen, func(s sighting) bool { return s.observed == observed && s.by == by })
	if i < 0 {
		r.seen = slices.DeleteFunc(r.seen, func(s sighting) bool { return at.Sub(s.last) > reflectStale })
		if len(r.seen) >= reflectTracked {
			r.seen = slices.Delete(r.seen, 0, 1)
		}
		r.seen = append(r.seen, sighting{observed: observed, by: by, first: at})
		i = len(r.seen) - 1
	}
	r.seen[i].last = at
	r.seen[i].pongs++
}

// Forget begins anew, after this host's addresses have changed.
func (r *Reflection) Forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen = nil
}

// Stable lists the addresses that are confirmed and not known already, in a fixed order; alone: there is one peer in
// the whole mesh, whose word is enough.
func (r *Reflection) Stable(known []*skeinv1.Candidate, alone bool, now time.Time) []*skeinv1.Candidate {
	need, priority := 2, uint32(candidate.PriorityReflexive)
	if alone {
		need, priority = 1, candidate.PrioritySymmetric
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	peers := map[netip.AddrPort]int{}
	for _, s := range r.seen {
		if s.pongs >= reflectPongs && s.last.Sub(s.first) >= reflectFor && now.Sub(s.last) <= reflectStale {
			peers[s.observed]++
		}
	}
	var out []netip.AddrPort
	for a, n := range peers {
		if n >= need && !slices.ContainsFunc(known, func(c *skeinv1.Candidate) bool { return c.GetAddress() == a.String() }) {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	var cs []*skeinv1.Candidate
	for _, a := range out[:min(len(out), reflectMax)] {
		cs = append(cs, candidate.Make(skeinv1.CandidateType_CANDIDATE_TYPE_PRFLX, a, priority, "probe"))
	}
	return cs
}

// Strange tells whether a pong shows a mapping of this host's NAT that discovery has not found: the NAT may have given
// out another one. A NAT that maps by destination shows each peer another, and what comes by a relay's port shows the
// relay's.
func Strange(observed, from netip.AddrPort, r *candidate.Result) bool {
	observed, by := netip.AddrPortFrom(observed.Addr().Unmap(), observed.Port()), from.Addr().Unmap()
	if r == nil || r.Mapping != candidate.EndpointIndependent || !observed.Addr().Is4() || observed.Addr() == by ||
		!addr.Public(observed.Addr()) || !addr.Public(by) {
		return false
	}
	return !slices.ContainsFunc(r.Candidates, func(c *skeinv1.Candidate) bool {
		return c.GetAddress() == observed.String()
	})
}
