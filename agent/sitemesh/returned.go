package sitemesh

import (
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/identity"
)

// unprovenFor is how long a peer that has come back is taken as unproven at most. One that was cut off and did not
// start again keeps its session, and the next handshake may be two minutes away.
const unprovenFor = 10 * time.Second

// returned are the peers whose path has died, or was suspected, and, as far as back is set, come back, and with which
// WireGuard has had no handshake since. If such a peer has started again, its WireGuard in user space knows nothing of
// the session that this host still sends with, and drops all that comes. Probes and relays need no session: the path is
// alive some 200 ms before there is a new one.
type returned map[identity.ID]absence

type absence struct {
	dead time.Time // when the path died, or was last seen dead or suspected; a handshake after that is a proof
	back time.Time // since when it is alive again; zero: it is not
}

// note takes what a round of the loop sees of a peer: its path, whether nothing goes by it for that, and when the last
// handshake was.
func (r *returned) note(id identity.ID, p path.Path, dead bool, handshake, now time.Time) {
	a, known := (*r)[id]
	switch {
	case !p.Alive, p.Suspect:
		a = absence{dead: now}
	case known && a.back.IsZero():
		a.back = now
	case !known && dead: // a relay carries it since the direct path died
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

// unproven reports whether it is not known that a peer takes what this host sends.
func (r returned) unproven(id identity.ID) bool { return !r[id].back.IsZero() }

// Proven reports whether there is a peer that is proven by what WireGuard now says.
func (r returned) Proven(counters map[identity.ID]path.Counters) bool {
	for id, a := range r {
		if !a.back.IsZero() && counters[id].Handshake.After(a.dead) {
			return true
		}
	}
	return false
}

// until is when the next peer counts as proven by the time alone; zero: there is none.
func (r returned) until() (first time.Time) {
	for _, a := range r {
		if end := a.back.Add(unprovenFor); !a.back.IsZero() && (first.IsZero() || end.Before(first)) {
			first = end
		}
	}
	return first
}
