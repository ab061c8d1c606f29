package path

import (
	"net/netip"
	"slices"
	"time"
)

// A member can write any address into its record, or send packets with any source address. So that nobody can direct
// a flood at a third party, pings to each address that has not answered are counted, whatever causes them and however
// the record has changed since.

// Spent is the budget of an address that has not answered.
type Spent struct {
	Endpoint netip.AddrPort
	Left     uint8     // of the first pings, or of those that a ping of the peer has earned
	Own      Refill    // for attempts that this host begins
	Invited  Refill    // for attempts that the peer's punches request: without them both ends might never meet
	Heard    time.Time // last authenticated ping from there that renewed Left
	Last     time.Time // last ping sent to it
	Refunded time.Time // when the whole budget was last renewed
	Refunds  uint8     // consecutive renewals
}

// Refill grants single pings at growing intervals.
type Refill struct {
	N      uint8
	At     time.Time // when the last was granted
	Grants uint8
}

const (
	unprovenPings = 3               // pings to an address before it answers
	unprovenPerIP = 4               // addresses that differ only in their port
	spentMax      = 64              // addresses counted per peer; further ones get no ping
	refillMax     = 2               // granted pings that may accumulate
	refillGap     = 4 * time.Second // between two single pings, and between the first refunds
	// refunds at intervals of refillGap before these grow: hosts that start or roam learn their networks step by step
	refundsSoon = 3
	refundCalm  = 10 * time.Minute // without a refund, after which the intervals are short again
)

// take spends a granted ping. Pings are granted after 5, 10, 20 … s, up to last, the interval of regular attempts;
// each is granted an eighth early, since attempts are jittered.
func (r *Refill) take(now time.Time, last time.Duration) bool {
	for r.N < refillMax {
		d := min(retryFirst<<min(r.Grants, 10), last)
		if d -= d / 8; now.Sub(r.At) < d {
			break
		}
		r.N, r.At, r.Grants = r.N+1, r.At.Add(d), min(r.Grants+1, 100)
	}
	if r.N == 0 {
		return false
	}
	if r.N == refillMax {
		r.At = later(r.At, now.Add(-last)) // no further accumulation
	}
	r.N--
	return true
}

// mayPing spends a ping to an endpoint that is not the path in use; false: the budget does not allow it.
func (s *step) mayPing(i int) bool {
	p := &s.Probes[i]
	if p.Type == relayC || p.proven(s.now) {
		if s.now.Sub(p.WindowAt) >= windowFor || p.WindowAt.IsZero() {
			p.WindowAt, p.WindowSent = s.now, 0
		}
		if p.WindowSent >= windowPings {
			return false
		}
		p.WindowSent++
		return true
	}
	b := s.spent(p.Endpoint)
	switch {
	case b == nil:
		return false
	case b.Left > 0:
		b.Left--
	case !p.Known || s.now.Sub(b.Last) < refillGap:
		return false
	case s.now.Sub(s.InvitedAt) < burstFor && b.Invited.take(s.now, s.directRetry()):
	case !b.Own.take(s.now, s.directRetry()):
		return false
	}
	b.Last = s.now
	return true
}

// spent returns an address's budget, or nil when there is no room for another.
func (s *step) spent(e netip.AddrPort) *Spent {
	if i := slices.IndexFunc(s.Spent, func(b Spent) bool { return b.Endpoint == e }); i >= 0 {
		return &s.Spent[i]
	}
	sameIP := 0
	s.Spent = slices.DeleteFunc(s.Spent, func(b Spent) bool {
		old := s.now.Sub(b.Last) > learnedFor && !s.known(b.Endpoint)
		if !old && b.Endpoint.Addr() == e.Addr() {
			sameIP++
		}
		return old
	})
	if sameIP >= unprovenPerIP || len(s.Spent) >= spentMax {
		return nil
	}
	s.Spent = append(s.Spent, Spent{Endpoint: e, Left: unprovenPings, Own: Refill{At: s.now},
		Invited: Refill{At: s.now}, Last: s.now})
	return &s.Spent[len(s.Spent)-1]
}

func (s *step) known(e netip.AddrPort) bool {
	i := s.find(e)
	return i >= 0 && s.Probes[i].Known
}

// credit renews the first pings of an address in the record after an authenticated ping from it, since the peer may
// have been away before. That is a hint and no proof: the peer can forge a packet's source address.
func (s *step) credit(e netip.AddrPort) {
	if i := s.find(e); i < 0 || !s.Probes[i].Known || s.Probes[i].proven(s.now) {
		return
	}
	if b := s.spent(e); b != nil && s.now.Sub(b.Heard) >= learnedFor {
		b.Left, b.Heard = unprovenPings, s.now
	}
}

// refund renews the first pings of every address in the record when this host's own addresses or network have
// changed. Earlier pings may have been in vain, before this host knew its own address and the peer whom to let in.
// Other hosts report that address and may lie, so the intervals between refunds grow while changes continue.
func (s *step) refund() {
	for i := range s.Spent {
		b := &s.Spent[i]
		since := s.now.Sub(b.Refunded)
		if since >= refundCalm {
			b.Refunds = 0
		}
		if !s.known(b.Endpoint) || b.Refunds > 0 && since < min(refillGap<<min(max(b.Refunds, refundsSoon)-refundsSoon, 10),
			s.directRetry()) {
			continue
		}
		b.Left, b.Own, b.Invited = unprovenPings, Refill{At: s.now}, Refill{At: s.now}
		b.Refunded, b.Refunds = s.now, min(b.Refunds+1, 100)
	}
}
