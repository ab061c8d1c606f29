package sites

import (
	"iter"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// Former leaders and peers are still treated as such for a while, because others may not know yet. These times are long
// compared with the seconds in which records and events arrive.
const (
	// Grace is how long packets are still accepted from a former leader or peer.
	Grace = 30 * time.Second
	// ForwardOn is how long a former leader keeps forwarding. The difference to Grace is how much later than others it
	// may learn that it has stopped to lead.
	ForwardOn = 15 * time.Second
	// HandOver is the longest time for which former leaders go on after the log has chosen others and none of these says
	// that it leads. A live elected node says so by SessionsBy.
	HandOver = 15 * time.Second
)

// Memory remembers nodes for Grace after they were last noted. It is not safe for concurrent use; the zero value is
// empty.
type Memory struct{ seen map[identity.ID]time.Time }

// Note notes nodes, and forgets those that were not noted within Grace.
func (m *Memory) Note(ids iter.Seq[identity.ID], now time.Time) {
	if m.seen == nil {
		m.seen = map[identity.ID]time.Time{}
	}
	for id := range ids {
		m.seen[id] = now
	}
	for id, at := range m.seen {
		if now.Sub(at) >= Grace {
			delete(m.seen, id)
		}
	}
}

// Recent returns the nodes that were noted within Grace, in a new map.
func (m *Memory) Recent(now time.Time) map[identity.ID]bool {
	out := make(map[identity.ID]bool, len(m.seen))
	for id := range m.seen {
		if m.Within(id, Grace, now) {
			out[id] = true
		}
	}
	return out
}

// Within reports whether a node was noted within d, which is at most Grace.
func (m *Memory) Within(id identity.ID, d time.Duration, now time.Time) bool {
	at, ok := m.seen[id]
	return ok && now.Sub(at) < d
}

// last returns when a node was last noted; false: it is not remembered.
func (m *Memory) last(id identity.ID) (at time.Time, ok bool) {
	at, ok = m.seen[id]
	return at, ok
}

// Expires returns when the next node will be forgotten; zero: there is none. Nodes that were noted at this very time do
// not count: the caller notes them again before it reads them.
func (m *Memory) Expires(now time.Time) time.Time {
	var first time.Time
	for _, at := range m.seen {
		if end := at.Add(Grace); at.Before(now) && (first.IsZero() || end.Before(first)) {
			first = end
		}
	}
	return first
}
