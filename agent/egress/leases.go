package egress

import (
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// Leases are those that the leader granted in one term. It has no clock: now is the leader's monotonic time, and never
// earlier than when the request came that is decided. It is not safe for concurrent use.
//
// What it promises: while it has granted a slot to one node, and for as long as that node's kernel may go on, no other
// gets it. Nor does another slot get its source addresses, whatever is agreed meanwhile: a slot whose addresses change
// has another epoch.
type Leases struct {
	since   time.Time                               // the term began before
	guard   func(lease time.Duration) time.Duration // GuardFor
	slots   map[Slot]*lease
	sources map[netip.Addr]use
}

// use is the slot that was granted a source address last, and when certainly nobody uses it for that slot any more.
type use struct {
	slot  Slot
	epoch uint64
	until time.Time
}

// lease is who was granted a slot last.
type lease struct {
	node  identity.ID
	epoch uint64
	at    time.Time     // of the last grant
	term  time.Duration // how long it runs from there at most, as far as was known then
	over  bool          // it was let go
}

// NewLeases is the table of a term that began before since.
func NewLeases(since time.Time) *Leases {
	return &Leases{since: since, guard: GuardFor, slots: make(map[Slot]*lease), sources: make(map[netip.Addr]use)}
}

// counted is how long the leader takes a lease to run.
func (l *Leases) counted(lease time.Duration) time.Duration { return lease + l.guard(lease) }

// Verdict is the answer to one wish.
type Verdict struct {
	Granted bool
	Reason  string        // why not
	Retry   time.Duration // when it may be granted; 0: not known
}

// Renew decides a node's wish for a slot. held says that a ticket of this epoch runs at the node. The slot is given as
// it was agreed after the leader was verified.
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
		// Whoever says that it holds the present epoch was granted it, and so everybody else's lease was over then.
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

// Released notes that a node forwards no more in an epoch, and reports whether the node need not say so again. It
// counts only when a later epoch is agreed: of the present one a node may have asked for a lease again since, and
// messages overtake each other.
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

// FreeAt is when certainly nobody forwards for the slot any more unless somebody is granted it. The zero time: long
// ago.
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

// freeFor is when certainly nobody but the slot's present owner forwards for it any more. The present epoch's lease is
// that owner's own; what an earlier leader may have granted to others are leases of earlier epochs, and where there
// were none it is free at once, unless it has source addresses: those may have been another slot's, which is taken to
// have had no longer lease.
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

// Granted is when the slot was last granted in this epoch; the zero time: not in this term.
func (l *Leases) Granted(slot SlotState) time.Time {
	if have := l.slots[slot.Slot]; have != nil && have.node == slot.Node && have.epoch == slot.Epoch && !have.over {
		return have.at
	}
	return time.Time{}
}

// Prune forgets slots that exist no more, as soon as nobody can forward for them.
func (l *Leases) Prune(now time.Time, exists func(Slot) bool) {
	for s, have := range l.slots {
		if !exists(s) && (have.over || now.After(have.at.Add(l.counted(have.term)))) {
			delete(l.slots, s)
		}
	}
	maps.DeleteFunc(l.sources, func(_ netip.Addr, u use) bool { return now.After(u.until) })
}

// Len is how many slots it remembers.
func (l *Leases) Len() int { return len(l.slots) }

func nodeOrNobody(id identity.ID) string {
	if id.IsZero() {
		return "nobody"
	}
	return "node " + id.String()
}
