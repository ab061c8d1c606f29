package egress

import (
	"fmt"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// HoldMost is how long the new owner of a slot that moves by plan holds its packets when the former one never hands
// over.
const HoldMost = 2 * time.Second

// Ticket is a lease's number in the kernel. What it allows ends when its time-out is over, whoever is still running by
// then.
type Ticket uint32

// OrderKind says what an Order wants done.
type OrderKind string

// The orders of a LeaseHolder.
const (
	DoGrant    OrderKind = "grant"    // packets pass for as long as Ticket runs
	DoDrop     OrderKind = "drop"     // nothing passes from now on, whatever ticket runs
	DoHold     OrderKind = "hold"     // packets wait
	DoOpen     OrderKind = "open"     // those that waited go on in order, and new ones do not wait
	DoAnnounce OrderKind = "announce" // the slot's address is here
	DoSilence  OrderKind = "silence"  // it is not
	DoHandOver OrderKind = "handover" // the slot's connections go to node To, for Epoch
	DoRelease  OrderKind = "release"  // the leader is told that this node forwards no more in Epoch
	DoTell     OrderKind = "tell"     // Text goes into the journal
)

// Order is one thing to do. Orders are carried out one after the other; when a drop fails, the release that may follow
// later is not said until one has succeeded.
type Order struct {
	Kind   OrderKind
	Slot   Slot
	Epoch  uint64
	Ticket Ticket
	To     identity.ID
	Text   string
}

// LeaseHolderState is where a slot stands at a gateway.
type LeaseHolderState string

// The states of a LeaseHolder.
const (
	Idle    LeaseHolderState = "idle"    // another's, or nobody's
	Waiting LeaseHolderState = "waiting" // this node's, not granted yet
	Holding LeaseHolderState = "holding" // granted, and the ticket runs
	Leaving LeaseHolderState = "leaving" // another's by plan; goes on for packets under way
	Handing LeaseHolderState = "handing" // stopped; its connections are on their way to the new owner
	Lost    LeaseHolderState = "lost"    // this node's, but the ticket ran out
)

// LeaseHolder is a gateway's side of one slot. It is pure: time comes in by values of this host's monotonic clock, what
// is to be done comes out as orders. It is not safe for concurrent use.
//
// A ticket begins before its request is sent, and an answer grants the ticket of its own round only: so a lease ends at
// the gateway before the leader takes it for ended, however late an answer comes or is carried out.
type LeaseHolder struct {
	self  identity.ID
	slot  Slot
	state LeaseHolderState
	now   SlotState // as this node sees it

	rounds map[uint64]ticket // that may still be answered
	last   uint64            // newest round that granted
	until  time.Time         // the granted ticket's end, by this host's clock; the kernel's is not before
	end    time.Time         // the granted lease's, which is later where that is longer than MaxTicket
	latest Readings          // that are known
	before Readings          // that were known when the granted lease began
	mine   uint64            // epoch that the granted ticket belongs to

	fresh    bool // nothing agreed was seen yet
	leaveAt  time.Time
	left     uint64 // epoch that ends
	to       identity.ID
	toEpoch  uint64
	held     bool // packets wait
	heldAt   time.Time
	taking   bool // connections are coming in
	seen     time.Time
	failover time.Duration
	reason   string // why the last wish was refused
}

// ticket is one that was begun for a round.
type ticket struct {
	number Ticket
	epoch  uint64
	began  time.Time
	lease  time.Duration // the ticket's own; of a longer lease it is a part
	before Readings
	more   bool // it prolongs what was granted, and asks no leader
}

// prolongAfter is how long no leader has granted a lease when others are asked whether it still runs.
const prolongAfter = time.Second

const maxRounds = 256 // of one slot, that wait for an answer

// NewLeaseHolder is the lease holder of a slot at node self.
func NewLeaseHolder(self identity.ID, slot Slot) *LeaseHolder {
	return &LeaseHolder{self: self, slot: slot, state: Idle, rounds: make(map[uint64]ticket), fresh: true}
}

// Wish says whether the next request asks for the slot, in which epoch, for how long its ticket is, and whether one of
// that epoch runs.
func (h *LeaseHolder) Wish(now time.Time) (epoch uint64, ticket time.Duration, held, ok bool) {
	switch h.state {
	case Waiting, Holding, Lost:
		return h.now.Epoch, firstTicket(h.now.Lease), h.mine == h.now.Epoch && h.until.After(now), true
	}
	return 0, 0, false, false
}

// Urgent reports whether the slot waits to be granted.
func (h *LeaseHolder) Urgent() bool { return h.state == Waiting || h.state == Lost }

// Begun notes the ticket that was begun for a round. began is from before the kernel was told.
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

// Granted is the leader's yes in the answer to a round.
func (h *LeaseHolder) Granted(round, epoch uint64, now time.Time) (out []Order) {
	k, ok := h.rounds[round]
	delete(h.rounds, round)
	switch {
	case !ok || k.more || k.epoch != epoch || epoch != h.now.Epoch || h.now.Node != h.self ||
		!h.Urgent() && h.state != Holding:
		return nil // of another time
	case round < h.last || !k.began.Add(k.lease).After(now):
		return nil // a newer one counts, or it has run out on its way
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
	out = append(out, h.order(DoAnnounce), h.tell("%s: this node forwards in epoch %d, %s after it was told", h.slot,
		epoch, now.Sub(h.seen).Round(time.Millisecond)))
	return append(out, h.opened(now)...)
}

// Long reports whether the slot's lease is longer than a ticket, so that readings are of use.
func (h *LeaseHolder) Long() bool {
	_, _, _, ok := h.Wish(time.Time{})
	return ok && long(h.now.Lease)
}

// Prolong says whether the granted lease needs another ticket, because no leader has answered for a while, and how long
// that is.
func (h *LeaseHolder) Prolong(now time.Time) (epoch uint64, ticket time.Duration, ok bool) {
	if h.state != Holding || h.mine != h.now.Epoch || h.until.Sub(now) > MaxTicket-prolongAfter ||
		!h.until.After(now) || !h.end.After(h.until) {
		return 0, 0, false
	}
	return h.mine, min(MaxTicket, h.end.Sub(now)), true
}

// Prolonging notes the ticket that was begun for a round of readings, before they were asked for.
func (h *LeaseHolder) Prolonging(round, epoch uint64, t Ticket, began time.Time, life time.Duration) {
	h.begun(round, ticket{t, epoch, began, life, nil, true})
}

// Read takes the readings of a round. They prolong the lease if they prove that it has not run out elsewhere.
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

// restMargin is what the ticket for the rest of a lease is shorter than what is left: the second readings come after
// the first.
const restMargin = time.Second

// Rest says how long a ticket may be for what is left of the granted lease, as far as readings show, for an agent that
// ends: nobody prolongs it until the next one runs. Like any further ticket it is granted by readings of after it was
// begun (Prolonging, Read).
func (h *LeaseHolder) Rest(readings Readings, now time.Time) (epoch uint64, ticket time.Duration, ok bool) {
	if h.state != Holding || h.mine != h.now.Epoch || !h.until.After(now) || !h.end.After(h.until) {
		return 0, 0, false
	}
	left := min(h.end.Sub(now), TicketFor(h.now.Lease)-longestSince(h.before, readings)) - restMargin
	return h.mine, left, left > h.until.Sub(now)
}

// opened lets the packets that wait go on, when nothing has to come before.
func (h *LeaseHolder) opened(now time.Time) []Order {
	if !h.held || h.taking && now.Sub(h.heldAt) < HoldMost {
		return nil
	}
	h.held, h.taking = false, false
	return []Order{h.order(DoOpen)}
}

// Denied is the leader's no in the answer to a round.
func (h *LeaseHolder) Denied(round uint64, reason string) {
	if k, ok := h.rounds[round]; ok && k.epoch == h.now.Epoch {
		h.reason = reason
	}
	delete(h.rounds, round)
}

// Agree takes the slot as this node now sees it agreed.
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
	case s.Node == h.self && h.state == Leaving: // it came back before it was gone
		out = h.anew(h.left, now)
	case s.Node == h.self:
		h.state, h.seen, h.failover = Waiting, now, 0
		if s.Planned && !fresh && !s.From.IsZero() && s.From != h.self {
			h.held, h.heldAt, h.taking = true, now, false
			out = append(out, h.order(DoHold), h.order(DoAnnounce))
		}
	case was.Node == h.self:
		out = h.leave(was, s, now)
	case h.state == Leaving || h.state == Handing: // to somebody else now
		h.to, h.toEpoch = s.Node, s.Epoch
	}
	return out
}

// anew begins an epoch of this node's that follows one of its own. No ticket outlives its epoch: the slot may leave
// with another source address from now on, which the leader has not granted yet. What comes meanwhile waits.
func (h *LeaseHolder) anew(left uint64, now time.Time) (out []Order) {
	if h.until.After(now) && !h.held {
		h.held, h.heldAt, h.taking = true, now, false
		out = append(out, h.order(DoHold))
	}
	h.state, h.until, h.seen, h.failover = Waiting, time.Time{}, now, 0
	clear(h.rounds)
	return append(out, h.order(DoDrop), h.order(DoSilence),
		h.tell("%s: this node is given it anew, in epoch %d", h.slot, h.now.Epoch),
		Order{Kind: DoRelease, Slot: h.slot, Epoch: left})
}

// leave ends an epoch of this node's.
func (h *LeaseHolder) leave(was, s SlotState, now time.Time) []Order {
	h.left, h.to, h.toEpoch = was.Epoch, s.Node, s.Epoch
	if h.state == Holding && h.until.After(now) && s.Planned && !s.Node.IsZero() && s.From == h.self {
		h.state, h.leaveAt = Leaving, now.Add(Handover)
		return []Order{h.order(DoSilence), h.tell("%s: it goes to node %s", h.slot, s.Node)}
	}
	text := h.tell("%s: it no longer belongs to this node: %s", h.slot, s.Reason)
	return append(h.stop(), text, Order{Kind: DoRelease, Slot: h.slot, Epoch: was.Epoch})
}

// stop ends forwarding.
func (h *LeaseHolder) stop() []Order {
	out := []Order{h.order(DoDrop), h.order(DoSilence)}
	if h.held {
		out = append(out, h.order(DoOpen)) // they find no lease
	}
	h.state, h.until, h.held, h.taking = Idle, time.Time{}, false, false
	clear(h.rounds)
	return out
}

// Gone ends the slot: it exists no more, or this node serves it no more.
func (h *LeaseHolder) Gone() []Order {
	h.now = SlotState{Slot: h.slot}
	return h.stop()
}

// HandedOver tells that the connections are with the new owner, or will not get there.
func (h *LeaseHolder) HandedOver() []Order {
	if h.state != Handing {
		return nil
	}
	h.state = Idle
	return []Order{{Kind: DoRelease, Slot: h.slot, Epoch: h.left}}
}

// TakeOver tells that connections come from the former owner, for an epoch. last: all have been loaded.
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

// Tick does what is due.
func (h *LeaseHolder) Tick(now time.Time) (out []Order) {
	switch {
	case h.state == Leaving && (!h.leaveAt.After(now) || !h.until.After(now)):
		h.state, h.until = Handing, time.Time{}
		clear(h.rounds)
		out = append(out, h.order(DoDrop), Order{Kind: DoHandOver, Slot: h.slot, Epoch: h.toEpoch, To: h.to})
	case h.state == Holding && !h.until.After(now):
		h.state, h.seen, h.failover = Lost, now, 0
		out = append(out, h.order(DoSilence), h.tell("%s: the lease ran out in epoch %d; the leader was not heard",
			h.slot, h.now.Epoch))
	}
	if h.held && !now.Before(h.heldAt.Add(HoldMost)) {
		out = append(out, h.order(DoOpen))
		if !h.now.From.IsZero() && h.now.From != h.self {
			out = append(out, h.tell("%s: node %s handed nothing over in %s", h.slot, h.now.From, HoldMost))
		}
		h.held, h.taking = false, false
	}
	return out
}

// Due is when Tick has something to do; the zero time: never.
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

func (h *LeaseHolder) tell(format string, a ...any) Order {
	return Order{Kind: DoTell, Slot: h.slot, Epoch: h.now.Epoch, Text: fmt.Sprintf(format, a...)}
}

// LeaseReport is what a lease holder knows, for status.
type LeaseReport struct {
	Slot     Slot
	Epoch    uint64
	State    LeaseHolderState
	Until    time.Time     // of the ticket; zero: none was granted
	End      time.Time     // of the lease; the ticket's where it is as short as that
	Failover time.Duration // from the event to the first grant; 0: not yet
	Reason   string        // why the leader refused last; empty: it did not
}

// Report reads the lease holder.
func (h *LeaseHolder) Report() LeaseReport {
	end := h.until
	if h.state == Holding && h.end.After(end) {
		end = h.end
	}
	return LeaseReport{Slot: h.slot, Epoch: h.now.Epoch, State: h.state, Until: h.until, End: end,
		Failover: h.failover, Reason: h.reason}
}
