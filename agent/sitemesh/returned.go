package sitemesh

import (
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/identity"
)

// unprovenFor is how long a returned peer counts as unproven at most. A peer that was only cut off keeps its session,
// and its next handshake may be two minutes away.
const unprovenFor = 10 * time.Second

// returned holds the peers whose path died or was suspected, until WireGuard has had a handshake with them. If such a
// peer has restarted, its WireGuard in user space does not know the session that this host still uses, and drops all
// packets. Probes and relays need no session, so the path is alive some 200 ms before there is a new session.
type returned map[identity.ID]absence

type absence struct {
	dead time.Time // when the path died, or was last seen dead or suspected; a later handshake proves the peer
	back time.Time // since when the path is alive again; zero: it is not
}

// note takes what a round of the loop sees of a peer: its path, whether deadPath rules it out, and the time of the last
// handshake.
func (r *returned) note(id identity.ID, p path.Path, dead bool, handshake, now time.Time) {
	a, known := (*r)[id]
	switch {
	case !p.Alive, p.Suspect:
		a = absence{dead: now}
	case known && a.back.IsZero():
		a.back = now
	case !known && dead: // a relay has carried its packets since the direct path died
		a = absence{dead: p.Since, back: p.Since}
	case !known:
		return
	}
	if !a.back.IsZero() && (handshake.After(a.dead) || now.Sub(a.back) >= unprovenFor) {
		delete(*r, id)
		return
	}
	if *r == nil {
		*r = returned{}
	}
	(*r)[id] = a
}

// unproven reports whether a peer may still drop what this host sends.
func (r returned) unproven(id identity.ID) bool { return !r[id].back.IsZero() }

// Proven reports whether WireGuard's counters prove any of the peers.
func (r returned) Proven(counters map[identity.ID]path.Counters) bool {
	for id, a := range r {
		if !a.back.IsZero() && counters[id].Handshake.After(a.dead) {
			return true
		}
	}
	return false
}

// until returns when the next peer counts as proven because unprovenFor is over; zero: no peer does.
func (r returned) until() (first time.Time) {
	for _, a := range r {
		if end := a.back.Add(unprovenFor); !a.back.IsZero() && (first.IsZero() || end.Before(first)) {
			first = end
		}
	}
	return first
}
