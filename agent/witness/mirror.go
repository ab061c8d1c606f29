package witness

import (
	"net/netip"
	"sync"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// Limits for a mirror's answers. Requests beyond them stay unanswered.
const (
	answersPerMember = 200 // a second: sixteen leaders with four kinds each, some of which are tried again
	answersBurst     = 400
	answersInAll     = 2000
	membersKnown     = 4096 // when so many members are known, all are forgotten
)

// Mirror answers other nodes' echoes. No answer is longer than its echo.
type Mirror struct {
	Wire *Wire
	// Admit reports whether a member may send echoes through a leader, or directly as a peer if via is zero.
	Admit func(from, via identity.ID) bool

	mu      sync.Mutex
	members map[identity.ID]*bucket
	all     bucket
}

type bucket struct {
	tokens float64
	at     time.Time
}

// take takes a token; rate are added each second, up to burst.
func (b *bucket) take(now time.Time, rate, burst float64) bool {
	if b.at.IsZero() {
		b.tokens = burst
	} else {
		b.tokens = min(b.tokens+now.Sub(b.at).Seconds()*rate, burst)
	}
	b.at = now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

// mayAnswer reports whether the limits allow an answer to a member now.
func (m *Mirror) mayAnswer(from identity.ID, now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.members[from]
	if b == nil {
		if m.members == nil || len(m.members) >= membersKnown {
			m.members = map[identity.ID]*bucket{}
		}
		b = &bucket{}
		m.members[from] = b
	}
	return b.take(now, answersPerMember, answersBurst) && m.all.take(now, answersInAll, answersInAll)
}

// Take answers an echo that a member sent from one of its overlay addresses to one of this host's. It does not block.
func (m *Mirror) Take(from identity.ID, at netip.AddrPort, self netip.AddrPort, content []byte) error {
	q, err := decode(content)
	if err != nil || q.kind != request || !m.mayAnswer(from, time.Now()) {
		return err
	}
	hop, via := from, identity.ID{}
	if q.via.IsValid() {
		var known bool
		if via, known = m.Wire.Owner(q.via); !known {
			return nil
		}
		hop = via
	}
	if !m.Admit(from, via) {
		return nil
	}
	size := len(content)
	if size > messageBytes {
		f, err := openFlow(self.Addr(), at) // the kernel knows the MTU of the way back
		if err != nil {
			return err
		}
		mtu, err := f.mtu()
		f.Close()
		if err != nil {
			return err
		}
		size = min(size, m.Wire.messageSize(hop, q.via.IsValid(), mtu, at.Addr().Is6()))
	}
	q.kind = answer
	sealed, ok := m.Wire.Seal(from, q.encode(size))
	if !ok {
		return nil
	}
	if err := m.Wire.emit(q.via, datagram(self, at, sealed)); err != nil {
		return err
	}
	m.Wire.count(hop, true, len(sealed), at.Addr())
	return nil
}
