package plainpeer

import (
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/dataplane/plainwg"
	"github.com/skeinmesh/skein/identity"
)

const (
	// Patience is how long a peer that has been heard may be without a holder until a carrier begins a session with
	// it: its own
	// first handshake takes a moment, and WireGuard tries again after five seconds.
	Patience = 6 * time.Second
	// Turn is what each carrier leaves the one before it.
	Turn = 2 * time.Second
	// Lately is how long a peer counts as heard. Its configuration has a keepalive each 25 seconds.
	Lately = 80 * time.Second
	// Again is how often a session that nobody has answered is begun anew. WireGuard itself tries each five seconds.
	Again = 30 * time.Second
)

// Holder is the carrier that holds a peer: the highest term, and among equal ones the first in order. ok: there is one.
func Holder(carriers []identity.ID, terms map[identity.ID]uint64) (holder identity.ID, ok bool) {
	best := uint64(0)
	for _, c := range carriers {
		if t := terms[c]; t > best {
			holder, best, ok = c, t, true
		}
	}
	return holder, ok
}

// Input is what a carrier sees of one peer.
type Input struct {
	Now      time.Time
	Self     identity.ID
	Carriers []identity.ID          // that are members, in order; this node is one
	Terms    map[identity.ID]uint64 // what they say in their records, and this node's own claim
	Silent   map[identity.ID]bool   // carriers that do not answer
	Session  plainwg.Seen           // under the carriers' key
	Way      plainwg.Seen           // under this node's own key
}

// Memory is what a carrier remembers of one peer between two steps.
type Memory struct {
	Handshake time.Time      // the last one that was looked at
	Top       uint64         // the highest term ever seen
	Held      bool           // this node held the peer
	Other     bool           // another carrier held it
	Missing   time.Time      // since when nobody who answers holds it; zero: somebody does
	Begun     time.Time      // when a session was begun from here; zero: none is
	At        netip.AddrPort // where
}

// Action is what to do now.
type Action struct {
	Claim uint64         // say in the record, from now on, that the peer is here; 0: as before
	Begin netip.AddrPort // begin a session there; invalid: do not
	Drop  bool           // end this node's session
}

// Step decides for one peer.
func Step(m Memory, in Input) (Memory, Action) {
	for _, t := range in.Terms {
		m.Top = max(m.Top, t)
	}
	holder, held := Holder(in.Carriers, in.Terms)
	if in.Session.Handshake.After(m.Handshake) {
		m.Handshake, m.Begun, m.Missing = in.Session.Handshake, time.Time{}, time.Time{}
		if !held || holder != in.Self {
			m.Top++
			m.Held, m.Other = true, false
			return m, Action{Claim: m.Top}
		}
	}
	if held && holder == in.Self {
		m.Held, m.Other, m.Missing = true, false, time.Time{}
		return m.follow(in)
	}
	if m.Held && held { // another has it now
		m.Held, m.Other, m.Begun = false, true, time.Time{}
		return m, Action{Drop: true}
	}
	return m.watch(in, holder, held)
}

// follow looks after a peer that is this node's: when it began anew, at another address, it may ask a carrier that is
// away.
func (m Memory) follow(in Input) (Memory, Action) {
	moved := in.Way.Endpoint.IsValid() && in.Way.Endpoint != in.Session.Endpoint &&
		in.Way.Handshake.After(in.Session.Heard) &&
		in.Way.Handshake.After(in.Session.Handshake)
	if !moved {
		return m, Action{}
	}
	return m.begin(in)
}

// watch looks after a peer that another carrier holds, or nobody.
func (m Memory) watch(in Input, holder identity.ID, held bool) (Memory, Action) {
	switch {
	case held:
		m.Other = true
		if !in.Silent[holder] {
			return m.rest()
		}
	case m.Other || m.Held: // its holder has begun anew, and knows nothing of it
	case len(in.Carriers) > 0 && in.Carriers[0] != in.Self &&
		in.Silent[in.Carriers[0]]: // that one is asked first, and is away
	case in.Way.Handshake.IsZero() || in.Now.Sub(in.Way.Handshake) < Patience:
		return m.rest()
	}
	if in.Way.Heard.IsZero() || in.Now.Sub(in.Way.Heard) > Lately {
		return m.rest()
	}
	if m.Missing.IsZero() {
		m.Missing = in.Now
	}
	before := 0 // carriers whose turn comes first
	for _, c := range in.Carriers[:max(slices.Index(in.Carriers, in.Self), 0)] {
		if !in.Silent[c] && (!held || c != holder) {
			before++
		}
	}
	if in.Now.Sub(m.Missing) < time.Duration(before)*Turn {
		return m, Action{}
	}
	return m.begin(in)
}

// rest stops an attempt that has become needless.
func (m Memory) rest() (Memory, Action) {
	begun := !m.Begun.IsZero()
	m.Missing, m.Begun = time.Time{}, time.Time{}
	return m, Action{Drop: begun}
}

func (m Memory) begin(in Input) (Memory, Action) {
	at := in.Way.Endpoint
	if !at.IsValid() || !m.Begun.IsZero() && m.At == at && in.Now.Sub(m.Begun) < Again {
		return m, Action{}
	}
	m.Begun, m.At = in.Now, at
	return m, Action{Begin: at}
}
