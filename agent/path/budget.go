package path

import (
	"net/netip"
	"slices"
	"time"
)

// A member can write any address into its record, or send a packet that claims to come from there. What goes to an
// address that has not answered is therefore counted, whatever made it go there, and whatever has become of the record
// since.

// Spent is what an address without proof may still get.
type Spent struct {
	Endpoint netip.AddrPort
	Left     uint8     // of its first pings, or of those that one of the peer's has earned
	Own      Refill    // for this host's own attempts
	Invited  Refill    // for those that the peer's punches ask for: else both ends' attempts would never meet
	Heard    time.Time // when an authenticated ping from there was last heeded
	Last     time.Time // ping to it
	Refunded time.Time // when all was granted again
	Refunds  uint8     // how often in a row
}

// Refill grants single pings, ever more rarely.
type Refill struct {
	N      uint8
	At     time.Time // when the last was granted
	Grants uint8
}

const (
	unprovenPings = 3               // pings to an address before it answers
	unprovenPerIP = 4               // addresses that differ in their port alone
	spentMax      = 64              // addresses counted per peer at a time: no more get anything
	refillMax     = 2               // granted and not used
	refillGap     = 4 * time.Second // between two single pings, and between the first refunds
	// refunds no further apart than that: hosts that start or roam learn of their networks bit by bit
	refundsSoon = 3
	refundCalm  = 10 * time.Minute // without a refund: they begin anew
)

// take takes a ping that is granted after 5, 10, 20 … s, up to the interval of regular attempts, which are a little
// apart.
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
		r.At = later(r.At, now.Add(-last)) // no more is saved up
	}
	r.N--
	return true
}

// mayPing spends a ping to an endpoint that is not the path in use.
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

// spent is an address's account, nil when there is no room for one.
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

// credit lets an address of the record have its pings again once an authenticated one has come from there: the peer may
// have been away before. That is a hint and no proof: who has the key can write any address on a packet.
func (s *step) credit(e netip.AddrPort) {
	if i := s.find(e); i < 0 || !s.Probes[i].Known || s.Probes[i].proven(s.now) {
		return
	}
	if b := s.spent(e); b != nil && s.now.Sub(b.Heard) >= learnedFor {
		b.Left, b.Heard = unprovenPings, s.now
	}
}

// refund grants every address of the record its first pings again, when this host's own situation has changed.
// They may have been spent a moment ago and in vain, before this host knew its own address and the peer whom to let in.
// What this host holds for its address it has from others, who may lie: so ever more rarely, while it goes on changing.
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
