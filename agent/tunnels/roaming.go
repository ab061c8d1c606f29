package tunnels

import (
	"maps"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/dataplane"
)

const (
	roamFor   = 200 * time.Millisecond // how long WireGuard may send elsewhere before it is put right
	roamCalm  = 10 * time.Second       // between two times
	GoneFor   = time.Second            // how long a peer that has not noticed may still send over a dead direct path
	GoneEvery = 50 * time.Millisecond  // between two readings of the counters in that time
)

// Roaming watches for peers to which WireGuard sends otherwise than it was told. It follows each authentic packet,
// also a late one that came over a path just given up, and then sends where nobody hears it. Putting it back once
// is enough for that. When both ends use different ways that both work, it would only be moved again: such a
// peer is left to the loop's regular round.
//
// A direct path that is cut in one direction only goes on bringing packets until the peer notices as well, and each
// of them moves WireGuard back to the way where nobody hears it. In that time it is put right at each look.
type Roaming map[dataplane.Key]roamer

type roamer struct {
	wanted      netip.AddrPort
	since, Last time.Time // when it was first seen elsewhere, and when it was last put back; zero: not
}

// Look compares what was applied with what the device shows, and reports whether something shall be put back now.
// The direct paths to the peers in gone were given up within goneFor.
func (r *Roaming) Look(
	want map[dataplane.Key]dataplane.Peer, have []dataplane.PeerStatus, gone map[dataplane.Key]bool, now time.Time,
) (repair bool) {
	if *r == nil {
		*r = Roaming{}
	}
	maps.DeleteFunc(*r, func(key dataplane.Key, _ roamer) bool { return !want[key].Endpoint.IsValid() })
	for _, p := range have {
		w := want[p.PublicKey].Endpoint
		if !w.IsValid() {
			continue
		}
		x := (*r)[p.PublicKey]
		if x.wanted != w {
			x = roamer{wanted: w} // a new decision
		}
		switch {
		case same(w, p.Endpoint):
			x.since = time.Time{}
		case gone[p.PublicKey]:
			repair = true
		case x.since.IsZero():
			x.since = now
		case now.Sub(x.since) >= roamFor && now.Sub(x.Last) >= roamCalm:
			x.since, x.Last = time.Time{}, now
			repair = true
		}
		(*r)[p.PublicKey] = x
	}
	return repair
}

// Lately tells whether a peer was put back so recently that only the loop's regular round would do it again.
func (r Roaming) Lately(now time.Time) bool {
	for _, x := range r {
		if !x.Last.IsZero() && now.Sub(x.Last) < roamCalm {
			return true
		}
	}
	return false
}

func same(a, b netip.AddrPort) bool {
	return a.Port() == b.Port() && a.Addr().Unmap() == b.Addr().Unmap()
}
