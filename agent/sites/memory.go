package sites

import (
	"iter"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// Those that have stopped to be leaders or peers are still treated as such for a while: others may not know yet. Both
// times are long beside the seconds in which records and events arrive.
const (
	// Grace is how long packets are still taken from them.
	Grace = 30 * time.Second
	// ForwardOn is how long a host that has stopped to lead passes packets on. The difference to Grace is how much
	// later than others it may learn that it has stopped.
	ForwardOn = 15 * time.Second
	// HandOver is how long those that led go on at most when the log has chosen others, and none of these says that it
	// leads. By SessionsBy an elected node that lives does.
	HandOver = 15 * time.Second
)

// Memory remembers nodes for Grace after they were noted last. It is not safe for concurrent use; the zero value is
// empty.
type Memory struct{ seen map[identity.ID]time.Time }

// Note notes nodes and forgets those that were not noted for Grace.
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

// Recent are the nodes that were noted within Grace, as a set of its own.
func (m *Memory) Recent(now time.Time) map[identity.ID]bool {
	out := make(map[identity.ID]bool, len(m.seen))
	for id := range m.seen {
		if m.Within(id, Grace, now) {
			out[id] = true
		}
	}
	return out
}

// Within reports whether a node was noted within a time, which is Grace at most.
func (m *Memory) Within(id identity.ID, d time.Duration, now time.Time) bool {
	at, ok := m.seen[id]
	return ok && now.Sub(at) < d
}

// last is when a node was noted last; false: it is not remembered.
func (m *Memory) last(id identity.ID) (at time.Time, ok bool) {
	at, ok = m.seen[id]
	return at, ok
}

// Expires is when the next of them is to be forgotten that was not noted just now; zero: there are none. Those that
// were are to be noted again before they are asked for.
func (m *Memory) Expires(now time.Time) time.Time {
	var first time.Time
	for _, at := range m.seen {
		if end := at.Add(Grace); at.Before(now) && (first.IsZero() || end.Before(first)) {
			first = end
		}
	}
	return first
}
