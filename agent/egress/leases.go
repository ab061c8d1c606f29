package egress

import (
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// Leases is the table of leases that the leader granted in one term. It has no clock: now is the leader's monotonic
// time, and not earlier than the arrival of the request being decided. It is not safe for concurrent use.
//
// Invariant: while a slot is granted to one node, and for as long as that node's kernel may forward, no other node
// gets the slot, and no other slot gets its source addresses, whatever is agreed meanwhile. A slot whose addresses
// change gets another epoch.
type Leases struct {
	since   time.Time                               // a time after the term began
	guard   func(lease time.Duration) time.Duration // GuardFor
	slots   map[Slot]*lease
	sources map[netip.Addr]use
}

// use is the slot that was last granted a source address, and when that use has certainly ended.
type use struct {
	slot  Slot
	epoch uint64
	until time.Time
}

// lease is the last grant of a slot.
type lease struct {
	node  identity.ID
	epoch uint64
	at    time.Time     // of the last grant
	term  time.Duration // longest time that it runs from at, as far as known then
	over  bool          // the node has released it
}

// NewLeases returns the table of a term that began before since.
func NewLeases(since time.Time) *Leases {
	return &Leases{since: since, guard: GuardFor, slots: make(map[Slot]*lease), sources: make(map[netip.Addr]use)}
}

// counted is how long the leader assumes that a lease runs.
func (l *Leases) counted(lease time.Duration) time.Duration { return lease + l.guard(lease) }

// Verdict is the answer to one request for a slot.
type Verdict struct {
	Granted bool
	Reason  string        // why not
	Retry   time.Duration // when it may be granted; 0: not known
}

// Renew decides a node's request for a slot. Argument held: a granted ticket of this epoch runs at the node. The slot
// must be read from the agreed state after the leader was verified.
func (l *Leases) Renew(now time.Time, from identity.ID, epoch uint64, held bool, slot SlotState) Verdict {
	switch {
	case slot.Node != from:
		return Verdict{Reason: "the slot belongs to " + nodeOrNobody(slot.Node)}
	case slot.Epoch != epoch:
		return Verdict{Reason: fmt.Sprintf("the slot is at epoch %d", slot.Epoch)}
	}
	have := l.slots[slot.Slot]
	if have != nil && epoch < have.epoch {
		return Verdict{Reason: fmt.Sprintf("a later epoch, %d, has been granted already", have.epoch)}
	}
	if have == nil || have.node != from {
		// A node that holds the present epoch was granted it, so all other leases had ended by then.
		if free := l.freeFor(slot); free.After(now) && (have != nil || !held) {
			return Verdict{Reason: "the former owner's lease may still run", Retry: free.Sub(now)}
		}
	}
	for _, a := range slot.Sources {
		if u := l.sources[a]; u.slot != slot.Slot && u.until.After(now) {
			return Verdict{Reason: fmt.Sprintf("slot %s, whose source address was %s, may still send", u.slot, a),
				Retry: u.until.Sub(now)}
		}
	}
	l.slots[slot.Slot] = &lease{node: from, epoch: epoch, at: now, term: slot.longest()}
	for _, a := range slot.Sources {
		l.sources[a] = use{slot.Slot, epoch, now.Add(l.counted(slot.longest()))}
	}
	return Verdict{Granted: true}
}

// Released records that a node no longer forwards in an epoch, and reports whether the node may stop repeating this.
// It counts only when a later epoch is agreed: in the present epoch the node may have requested a lease again since,
// and messages overtake each other.
func (l *Leases) Released(from identity.ID, epoch uint64, slot SlotState) bool {
	if slot.Epoch <= epoch {
		return false
	}
	if have := l.slots[slot.Slot]; have != nil && have.node == from && have.epoch == epoch {
		have.over = true
		maps.DeleteFunc(l.sources, func(_ netip.Addr, u use) bool { return u.slot == slot.Slot && u.epoch == epoch })
	}
	return true
}

// FreeAt is when certainly no node forwards for the slot unless it is granted again. The zero time: long ago.
func (l *Leases) FreeAt(slot SlotState) time.Time {
	have := l.slots[slot.Slot]
	switch {
	case have == nil: // an earlier leader may have granted it until the term began
		return l.since.Add(l.counted(slot.longest()))
	case have.over:
		return time.Time{}
	}
	return have.at.Add(l.counted(max(have.term, slot.longest())))
}

// freeFor is when certainly no node but the slot's present owner forwards for it. A lease of the present epoch is
// that owner's own; earlier leaders granted other nodes leases of earlier epochs only. Without an earlier epoch the
// slot is free at once, unless it has source addresses: another slot may have had those, with a lease assumed to be
// no longer.
func (l *Leases) freeFor(slot SlotState) time.Time {
	if l.slots[slot.Slot] != nil {
		return l.FreeAt(slot)
	}
	switch {
	case slot.Former > 0:
		return l.since.Add(l.counted(slot.Former))
	case len(slot.Sources) > 0:
		return l.since.Add(l.counted(slot.Lease))
	}
	return time.Time{}
}

// Granted is the slot's last grant in this epoch; the zero time: none in this term.
func (l *Leases) Granted(slot SlotState) time.Time {
	if have := l.slots[slot.Slot]; have != nil && have.node == slot.Node && have.epoch == slot.Epoch && !have.over {
		return have.at
	}
	return time.Time{}
}

// Prune forgets slots that no longer exist, once no node can forward for them.
func (l *Leases) Prune(now time.Time, exists func(Slot) bool) {
	for s, have := range l.slots {
		if !exists(s) && (have.over || now.After(have.at.Add(l.counted(have.term)))) {
			delete(l.slots, s)
		}
	}
	maps.DeleteFunc(l.sources, func(_ netip.Addr, u use) bool { return now.After(u.until) })
}

// Len is the number of remembered slots.
func (l *Leases) Len() int { return len(l.slots) }

func nodeOrNobody(id identity.ID) string {
	if id.IsZero() {
		return "nobody"
	}
	return "node " + id.String()
}
