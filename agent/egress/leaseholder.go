package egress

import (
	"fmt"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// HoldMost is how long the new owner of a slot in a planned move holds packets if the former owner never hands over.
const HoldMost = 2 * time.Second

// Ticket is the kernel's number of a permission to forward. It ends with its time-out in the kernel, whatever happens
// to this process.
type Ticket uint32

// OrderKind is the kind of an Order.
type OrderKind string

// The orders of a LeaseHolder.
const (
	DoGrant    OrderKind = "grant"    // packets pass for as long as Ticket runs
	DoDrop     OrderKind = "drop"     // nothing passes from now on, whatever tickets run
	DoHold     OrderKind = "hold"     // packets are queued
	DoOpen     OrderKind = "open"     // queued packets leave in order, and new ones are not queued
	DoAnnounce OrderKind = "announce" // the slot's address is here
	DoSilence  OrderKind = "silence"  // the slot's address is no longer here
	DoHandOver OrderKind = "handover" // send the slot's connections to node To, for Epoch
	DoRelease  OrderKind = "release"  // inform the leader that this node no longer forwards in Epoch
	DoRecord   OrderKind = "record"   // Text goes into the journal
)

// Order is one thing to do. Orders are executed one after the other. After a failed drop, later releases are withheld
// until a drop has succeeded.
type Order struct {
	Kind   OrderKind
	Slot   Slot
	Epoch  uint64
	Ticket Ticket
	To     identity.ID
	Text   string
}

// LeaseHolderState is the state of a slot at a gateway.
type LeaseHolderState string

// The states of a LeaseHolder.
const (
	Idle    LeaseHolderState = "idle"    // another node's, or without owner
	Waiting LeaseHolderState = "waiting" // this node's, not yet granted
	Holding LeaseHolderState = "holding" // granted, and the ticket runs
	Leaving LeaseHolderState = "leaving" // another node's after a planned move; continues for packets under way
	Handing LeaseHolderState = "handing" // stopped; its connections are being sent to the new owner
	Lost    LeaseHolderState = "lost"    // this node's, but the ticket has ended
)

// LeaseHolder is a gateway's side of one slot. It is pure: it receives times of this host's monotonic clock as
// values, and returns orders. It is not safe for concurrent use.
//
// A ticket begins before its request is sent, and an answer grants only the ticket of its own round. So a lease ends
// at the gateway before it ends at the leader, however late an answer arrives or is executed.
type LeaseHolder struct {
	self  identity.ID
	slot  Slot
	state LeaseHolderState
	now   SlotState // agreed state as this node knows it

	rounds map[uint64]ticket // rounds that may still be answered
	last   uint64            // newest round that was granted
	until  time.Time         // end of the granted ticket by this host's clock; the kernel's is not earlier
	end    time.Time         // end of the granted lease; later than until if the lease is longer than MaxTicket
	latest Readings          // newest readings
	before Readings          // readings known when the granted lease began
	mine   uint64            // epoch of the granted ticket

	fresh    bool // no agreed state was seen yet
	leaveAt  time.Time
	left     uint64 // epoch that this node leaves
	to       identity.ID
	toEpoch  uint64
	held     bool // packets wait
	heldAt   time.Time
	taking   bool // connections are arriving
	seen     time.Time
	failover time.Duration
	reason   string // why the leader denied the last request
}

// ticket is a ticket that was begun for a round.
type ticket struct {
	number Ticket
	epoch  uint64
	began  time.Time
	lease  time.Duration // duration of the ticket, which may be a part of its lease
	before Readings
	more   bool // it prolongs a granted lease and needs no leader's answer
}

// prolongAfter is the silence of the leaders after which other machines' clocks are asked.
const prolongAfter = time.Second

const maxRounds = 256 // unanswered rounds of one slot

// NewLeaseHolder makes the lease holder of a slot at node self.
func NewLeaseHolder(self identity.ID, slot Slot) *LeaseHolder {
	return &LeaseHolder{self: self, slot: slot, state: Idle, rounds: make(map[uint64]ticket), fresh: true}
}

// Wish returns whether the next request asks for the slot, in which epoch, the duration of its ticket, and whether a
// granted ticket of that epoch runs.
func (h *LeaseHolder) Wish(now time.Time) (epoch uint64, ticket time.Duration, held, ok bool) {
	switch h.state {
	case Waiting, Holding, Lost:
		return h.now.Epoch, firstTicket(h.now.Lease), h.mine == h.now.Epoch && h.until.After(now), true
	}
	return 0, 0, false, false
}

// Urgent reports whether the slot waits to be granted.
func (h *LeaseHolder) Urgent() bool { return h.state == Waiting || h.state == Lost }

// Begun records the ticket begun for a round. Time began must be from before the kernel's Begin.
func (h *LeaseHolder) Begun(round, epoch uint64, t Ticket, began time.Time, lease time.Duration) {
	h.begun(round, ticket{t, epoch, began, lease, h.latest, false})
}

func (h *LeaseHolder) begun(round uint64, of ticket) {
	for n, k := range h.rounds {
		if of.began.Sub(k.began) > k.lease || len(h.rounds) >= maxRounds && n+maxRounds <= round {
			delete(h.rounds, n)
		}
	}
	if len(h.rounds) < maxRounds {
		h.rounds[round] = of
	}
}

// Granted handles a grant in the leader's answer to a round.
func (h *LeaseHolder) Granted(round, epoch uint64, now time.Time) (out []Order) {
	k, ok := h.rounds[round]
	delete(h.rounds, round)
	switch {
	case !ok || k.more || k.epoch != epoch || epoch != h.now.Epoch || h.now.Node != h.self ||
		!h.Urgent() && h.state != Holding:
		return nil // outdated: another epoch, owner or state
	case round < h.last || !k.began.Add(k.lease).After(now):
		return nil // a newer grant counts, or the ticket ended meanwhile
	}
	h.last, h.until, h.mine, h.reason = round, k.began.Add(k.lease), epoch, ""
	h.end, h.before = k.began.Add(TicketFor(h.now.Lease)), k.before
	out = append(out, Order{Kind: DoGrant, Slot: h.slot, Epoch: epoch, Ticket: k.number})
	if h.state == Holding {
		return append(out, h.opened(now)...)
	}
	if h.failover == 0 {
		h.failover = now.Sub(h.seen)
	}
	h.state = Holding
	out = append(out, h.order(DoAnnounce), h.record("%s: this node forwards in epoch %d, %s after it was told", h.slot,
		epoch, now.Sub(h.seen).Round(time.Millisecond)))
	return append(out, h.opened(now)...)
}

// Long reports whether the slot's lease is longer than a ticket, so that readings are useful.
func (h *LeaseHolder) Long() bool {
	_, _, _, ok := h.Wish(time.Time{})
	return ok && long(h.now.Lease)
}

// Prolong reports whether the granted lease needs another ticket, because no leader has answered for a while, and
// that ticket's duration.
func (h *LeaseHolder) Prolong(now time.Time) (epoch uint64, ticket time.Duration, ok bool) {
	if h.state != Holding || h.mine != h.now.Epoch || h.until.Sub(now) > MaxTicket-prolongAfter ||
		!h.until.After(now) || !h.end.After(h.until) {
		return 0, 0, false
	}
	return h.mine, min(MaxTicket, h.end.Sub(now)), true
}

// Prolonging records a ticket begun for a round of readings, before other machines are asked.
func (h *LeaseHolder) Prolonging(round, epoch uint64, t Ticket, began time.Time, life time.Duration) {
	h.begun(round, ticket{t, epoch, began, life, nil, true})
}

// Read handles the readings of a round. They prolong the lease if they prove that it has not ended elsewhere.
func (h *LeaseHolder) Read(round uint64, readings Readings, now time.Time) []Order {
	h.latest = h.latest.with(readings)
	k, ok := h.rounds[round]
	if !ok || !k.more {
		return nil
	}
	delete(h.rounds, round)
	if h.state != Holding || k.epoch != h.mine || k.epoch != h.now.Epoch || round < h.last ||
		!k.began.Add(k.lease).After(now) ||
		!proves(h.self, h.before, readings, k.lease, TicketFor(h.now.Lease)) {
		return nil
	}
	h.last, h.until = round, k.began.Add(k.lease)
	return []Order{{Kind: DoGrant, Slot: h.slot, Epoch: k.epoch, Ticket: k.number}}
}

// restMargin is subtracted from the ticket for the rest of a lease, since the second readings come after the first.
const restMargin = time.Second

// Rest returns the duration of a ticket for the rest of the granted lease, as far as readings prove it. An agent that
// ends uses it, since nothing prolongs the lease until the next agent runs. Like any further ticket it must be
// granted by readings taken after it began (Prolonging, Read).
func (h *LeaseHolder) Rest(readings Readings, now time.Time) (epoch uint64, ticket time.Duration, ok bool) {
	if h.state != Holding || h.mine != h.now.Epoch || !h.until.After(now) || !h.end.After(h.until) {
		return 0, 0, false
	}
	left := min(h.end.Sub(now), TicketFor(h.now.Lease)-longestSince(h.before, readings)) - restMargin
	return h.mine, left, left > h.until.Sub(now)
}

// opened releases the queued packets unless connections must arrive first.
func (h *LeaseHolder) opened(now time.Time) []Order {
	if !h.held || h.taking && now.Sub(h.heldAt) < HoldMost {
		return nil
	}
	h.held, h.taking = false, false
	return []Order{h.order(DoOpen)}
}

// Denied handles a refusal in the leader's answer to a round.
func (h *LeaseHolder) Denied(round uint64, reason string) {
	if k, ok := h.rounds[round]; ok && k.epoch == h.now.Epoch {
		h.reason = reason
	}
	delete(h.rounds, round)
}

// Agree handles the slot's present agreed state.
func (h *LeaseHolder) Agree(s SlotState, now time.Time) (out []Order) {
	fresh := h.fresh
	h.fresh = false
	if s.Epoch == h.now.Epoch && s.Node == h.now.Node || s.Epoch < h.now.Epoch {
		return nil
	}
	was := h.now
	h.now, h.reason = s, ""
	switch {
	case s.Node == h.self && was.Node == h.self:
		out = h.anew(was.Epoch, now)
	case s.Node == h.self && h.state == Leaving: // the slot returned before it was handed over
		out = h.anew(h.left, now)
	case s.Node == h.self:
		h.state, h.seen, h.failover = Waiting, now, 0
		if s.Planned && !fresh && !s.From.IsZero() && s.From != h.self {
			h.held, h.heldAt, h.taking = true, now, false
			out = append(out, h.order(DoHold), h.order(DoAnnounce))
		}
	case was.Node == h.self:
		out = h.leave(was, s, now)
	case h.state == Leaving || h.state == Handing: // now on its way to another node
		h.to, h.toEpoch = s.Node, s.Epoch
	}
	return out
}

// anew begins an epoch that follows another epoch of this node. No ticket outlives its epoch: the slot may now use
// another source address, which the leader has not yet granted. Packets are queued meanwhile.
func (h *LeaseHolder) anew(left uint64, now time.Time) (out []Order) {
	if h.until.After(now) && !h.held {
		h.held, h.heldAt, h.taking = true, now, false
		out = append(out, h.order(DoHold))
	}
	h.state, h.until, h.seen, h.failover = Waiting, time.Time{}, now, 0
	clear(h.rounds)
	return append(out, h.order(DoDrop), h.order(DoSilence),
		h.record("%s: this node is given it anew, in epoch %d", h.slot, h.now.Epoch),
		Order{Kind: DoRelease, Slot: h.slot, Epoch: left})
}

// leave ends an epoch of this node.
func (h *LeaseHolder) leave(was, s SlotState, now time.Time) []Order {
	h.left, h.to, h.toEpoch = was.Epoch, s.Node, s.Epoch
	if h.state == Holding && h.until.After(now) && s.Planned && !s.Node.IsZero() && s.From == h.self {
		h.state, h.leaveAt = Leaving, now.Add(Handover)
		return []Order{h.order(DoSilence), h.record("%s: it goes to node %s", h.slot, s.Node)}
	}
	text := h.record("%s: it no longer belongs to this node: %s", h.slot, s.Reason)
	return append(h.stop(), text, Order{Kind: DoRelease, Slot: h.slot, Epoch: was.Epoch})
}

// stop ends forwarding.
func (h *LeaseHolder) stop() []Order {
	out := []Order{h.order(DoDrop), h.order(DoSilence)}
	if h.held {
		out = append(out, h.order(DoOpen)) // queued packets are dropped, since there is no lease
	}
	h.state, h.until, h.held, h.taking = Idle, time.Time{}, false, false
	clear(h.rounds)
	return out
}

// Gone ends the slot: it no longer exists, or this node no longer serves it.
func (h *LeaseHolder) Gone() []Order {
	h.now = SlotState{Slot: h.slot}
	return h.stop()
}

// HandedOver reports that the connections have reached the new owner, or never will.
func (h *LeaseHolder) HandedOver() []Order {
	if h.state != Handing {
		return nil
	}
	h.state = Idle
	return []Order{{Kind: DoRelease, Slot: h.slot, Epoch: h.left}}
}

// TakeOver reports that connections have arrived from the former owner for an epoch; last: all are loaded.
func (h *LeaseHolder) TakeOver(epoch uint64, last bool, now time.Time) []Order {
	if epoch != h.now.Epoch || h.now.Node != h.self || !h.held {
		return nil
	}
	h.taking = !last
	if last && h.state == Holding {
		return h.opened(now)
	}
	return nil
}

// Tick executes what is due.
func (h *LeaseHolder) Tick(now time.Time) (out []Order) {
	switch {
	case h.state == Leaving && (!h.leaveAt.After(now) || !h.until.After(now)):
		h.state, h.until = Handing, time.Time{}
		clear(h.rounds)
		out = append(out, h.order(DoDrop), Order{Kind: DoHandOver, Slot: h.slot, Epoch: h.toEpoch, To: h.to})
	case h.state == Holding && !h.until.After(now):
		h.state, h.seen, h.failover = Lost, now, 0
		out = append(out, h.order(DoSilence), h.record("%s: the lease ran out in epoch %d; the leader was not heard",
			h.slot, h.now.Epoch))
	}
	if h.held && !now.Before(h.heldAt.Add(HoldMost)) {
		out = append(out, h.order(DoOpen))
		if !h.now.From.IsZero() && h.now.From != h.self {
			out = append(out, h.record("%s: node %s handed nothing over in %s", h.slot, h.now.From, HoldMost))
		}
		h.held, h.taking = false, false
	}
	return out
}

// Due is when Tick must run next; the zero time: never.
func (h *LeaseHolder) Due() (at time.Time) {
	next := func(t time.Time) {
		if at.IsZero() || t.Before(at) {
			at = t
		}
	}
	switch h.state {
	case Leaving:
		next(h.leaveAt)
		next(h.until)
	case Holding:
		next(h.until)
	}
	if h.held {
		next(h.heldAt.Add(HoldMost))
	}
	return at
}

func (h *LeaseHolder) order(kind OrderKind) Order {
	return Order{Kind: kind, Slot: h.slot, Epoch: h.now.Epoch}
}

func (h *LeaseHolder) record(format string, a ...any) Order {
	return Order{Kind: DoRecord, Slot: h.slot, Epoch: h.now.Epoch, Text: fmt.Sprintf(format, a...)}
}

// LeaseReport is a lease holder's state, for status.
type LeaseReport struct {
	Slot     Slot
	Epoch    uint64
	State    LeaseHolderState
	Until    time.Time     // end of the granted ticket; zero: none
	End      time.Time     // end of the lease; equals Until for a lease no longer than a ticket
	Failover time.Duration // from the event to the first grant; 0: not granted yet
	Reason   string        // the leader's last refusal; empty: none
}

// Report returns the lease holder's state.
func (h *LeaseHolder) Report() LeaseReport {
	end := h.until
	if h.state == Holding && h.end.After(end) {
		end = h.end
	}
	return LeaseReport{Slot: h.slot, Epoch: h.now.Epoch, State: h.state, Until: h.until, End: end,
		Failover: h.failover, Reason: h.reason}
}
