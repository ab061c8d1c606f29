package egress

import (
	"net/netip"
	"reflect"
	"testing"
	"time"
)

var (
	self, other = nodeID(1), nodeID(2)
	slotA       = Slot{refA, 0}
)

func kinds(orders []Order) (out []OrderKind) {
	for _, o := range orders {
		if o.Kind != DoRecord {
			out = append(out, o.Kind)
		}
	}
	return out
}

// held is a lease holder that was granted the slot in epoch 5 by ticket 50 of round 1, begun at t0.
func held(t *testing.T) *LeaseHolder {
	t.Helper()
	h := NewLeaseHolder(self, slotA)
	h.Agree(SlotState{Slot: slotA, Node: self, Epoch: 5, Lease: 1200 * time.Millisecond}, t0)
	epoch, lease, running, ok := h.Wish(t0)
	if epoch != 5 || lease != 1200*time.Millisecond || running || !ok || !h.Urgent() {
		t.Fatalf("wish %d %s %t %t", epoch, lease, running, ok)
	}
	h.Begun(1, 5, 50, t0, lease)
	got := h.Granted(1, 5, t0.Add(10*time.Millisecond))
	if !reflect.DeepEqual(kinds(got), []OrderKind{DoGrant, DoAnnounce}) || got[0].Ticket != 50 {
		t.Fatalf("granted: %+v", got)
	}
	if _, _, running, _ := h.Wish(t0.Add(time.Second)); !running || h.Urgent() {
		t.Fatal("it does not say that its ticket runs")
	}
	return h
}

func TestAnswerGrantsOnlyItsOwnLivingTicket(t *testing.T) {
	lease := 1200 * time.Millisecond
	for name, c := range map[string]struct {
		do   func(h *LeaseHolder) []Order
		want []OrderKind
	}{
		"the next round": {func(h *LeaseHolder) []Order {
			h.Begun(2, 5, 51, t0.Add(200*time.Millisecond), lease)
			return h.Granted(2, 5, t0.Add(300*time.Millisecond))
		}, []OrderKind{DoGrant}},
		"a round that never was": {func(h *LeaseHolder) []Order { return h.Granted(9, 5, t0) }, nil},
		"the same answer again":  {func(h *LeaseHolder) []Order { return h.Granted(1, 5, t0) }, nil},
		"an older round after a newer": {func(h *LeaseHolder) []Order {
			h.Begun(2, 5, 51, t0, lease)
			h.Begun(3, 5, 52, t0, lease)
			h.Granted(3, 5, t0)
			return h.Granted(2, 5, t0)
		}, nil},
		"another epoch": {func(h *LeaseHolder) []Order {
			h.Begun(2, 5, 51, t0, lease)
			return h.Granted(2, 6, t0)
		}, nil},
		"the ticket has run out on the way": {func(h *LeaseHolder) []Order {
			h.Begun(2, 5, 51, t0, lease)
			return h.Granted(2, 5, t0.Add(lease))
		}, nil},
		"the slot has moved": {func(h *LeaseHolder) []Order {
			h.Begun(2, 5, 51, t0, lease)
			h.Agree(SlotState{Slot: slotA, Node: other, Epoch: 6, From: self, Lease: lease}, t0)
			return h.Granted(2, 5, t0)
		}, nil},
		"it leaves by plan": {func(h *LeaseHolder) []Order {
			h.Begun(2, 5, 51, t0, lease)
			h.Agree(SlotState{Slot: slotA, Node: other, Epoch: 6, From: self, Planned: true, Lease: lease}, t0)
			return h.Granted(2, 5, t0)
		}, nil},
		"lost and found": {func(h *LeaseHolder) []Order {
			out := h.Tick(t0.Add(lease))
			h.Begun(2, 5, 51, t0.Add(lease), lease)
			return append(out, h.Granted(2, 5, t0.Add(lease))...)
		}, []OrderKind{DoSilence, DoGrant, DoAnnounce}},
	} {
		if got := kinds(c.do(held(t))); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestFormerOwnerGoesOnThenDropsThenSaysSo(t *testing.T) {
	h, now := held(t), t0.Add(100*time.Millisecond)
	next := SlotState{Slot: slotA, Node: other, Epoch: 6, From: self, Planned: true, Lease: 1200 * time.Millisecond}
	if got := kinds(h.Agree(next, now)); !reflect.DeepEqual(got, []OrderKind{DoSilence}) || h.Due() != now.Add(Handover) {
		t.Fatalf("told: %v, due %s", got, h.Due().Sub(now))
	}
	if _, _, _, ok := h.Wish(now); ok || len(h.Tick(now.Add(Handover-1))) > 0 {
		t.Error("it asks for more, or stops too early")
	}
	got := h.Tick(now.Add(Handover))
	if !reflect.DeepEqual(kinds(got), []OrderKind{DoDrop, DoHandOver}) || got[1].To != other || got[1].Epoch != 6 {
		t.Errorf("after that: %+v", got)
	}
	got = h.HandedOver()
	if len(got) != 1 || got[0].Kind != DoRelease || got[0].Epoch != 5 || len(h.HandedOver()) > 0 {
		t.Errorf("at last: %+v", got)
	}
	h = held(t) // not by plan: at once
	next.Planned = false
	if got := kinds(h.Agree(next, now)); !reflect.DeepEqual(got, []OrderKind{DoDrop, DoSilence, DoRelease}) {
		t.Errorf("not by plan: %v", got)
	}
}

func TestNewOwnerHoldsPacketsUntilItIsGranted(t *testing.T) {
	lease := 1200 * time.Millisecond
	begin := func() *LeaseHolder {
		h := NewLeaseHolder(self, slotA)
		h.Agree(SlotState{Slot: slotA, Node: other, Epoch: 5, Lease: lease}, t0)
		got := kinds(h.Agree(SlotState{Slot: slotA, Node: self, Epoch: 6, From: other, Planned: true, Lease: lease}, t0))
		if !reflect.DeepEqual(got, []OrderKind{DoHold, DoAnnounce}) {
			t.Fatalf("told: %v", got)
		}
		h.Begun(1, 6, 60, t0, lease)
		return h
	}
	h := begin()
	h.TakeOver(6, false, t0)
	h.TakeOver(6, true, t0)
	if got := kinds(h.Granted(1, 6, t0)); !reflect.DeepEqual(got, []OrderKind{DoGrant, DoAnnounce, DoOpen}) {
		t.Errorf("connections, then the grant: %v", got)
	}
	h = begin()
	if got := kinds(h.Granted(1, 6, t0)); !reflect.DeepEqual(got, []OrderKind{DoGrant, DoAnnounce, DoOpen}) {
		t.Errorf("nothing comes: %v", got)
	}
	h = begin()
	h.TakeOver(6, false, t0)
	h.TakeOver(5, true, t0) // of another move
	if got := kinds(h.Granted(1, 6, t0)); !reflect.DeepEqual(got, []OrderKind{DoGrant, DoAnnounce}) {
		t.Errorf("the grant amid the connections: %v", got)
	}
	if got := kinds(h.TakeOver(6, true, t0)); !reflect.DeepEqual(got, []OrderKind{DoOpen}) {
		t.Errorf("then the rest: %v", got)
	}
	h = begin()
	if got := kinds(h.Tick(t0.Add(HoldMost))); !reflect.DeepEqual(got, []OrderKind{DoOpen}) {
		t.Errorf("nobody hands over: %v", got)
	}
	h = NewLeaseHolder(self, slotA) // an agent that starts anew holds nothing
	if got := kinds(h.Agree(SlotState{Slot: slotA, Node: self, Epoch: 6, From: other, Planned: true, Lease: lease},
		t0)); len(got) > 0 {
		t.Errorf("after a start: %v", got)
	}
	if got := kinds(h.Gone()); !reflect.DeepEqual(got, []OrderKind{DoDrop, DoSilence}) {
		t.Errorf("gone: %v", got)
	}
}

func TestLeases(t *testing.T) {
	const lease = 1200 * time.Millisecond
	at := func(d time.Duration) time.Time { return t0.Add(d) }
	l := NewLeases(t0)
	mine := SlotState{Slot: slotA, Node: self, Epoch: 5, From: other, Lease: lease, Former: lease}
	first := SlotState{Slot: Slot{slotA.Ref, 9}, Node: self, Epoch: 3, Lease: time.Hour}
	next := SlotState{Slot: slotA, Node: other, Epoch: 6, From: self, Lease: lease, Former: 5 * time.Second}
	back := SlotState{Slot: slotA, Node: self, Epoch: 7, Lease: lease}
	for i, c := range []struct {
		granted, want bool
		what          string
	}{
		{l.Renew(at(0), other, 5, false, mine).Granted, false, "to who does not own it"},
		{l.Renew(at(0), self, 4, true, mine).Granted, false, "in an older epoch"},
		{l.Renew(at(0), self, 5, false, mine).Granted, false, "in the silence"},
		{l.Renew(at(1299*time.Millisecond), self, 5, false, mine).Granted, false, "in the silence"},
		{l.Renew(at(0), self, 3, false, first).Granted, true, "that nobody can have from an earlier epoch"},
		{l.Renew(at(10*time.Millisecond), self, 5, true, mine).Granted, true, "to who holds it"},
		{l.Renew(at(time.Second), self, 5, false, mine).Granted, true, "to the same again"},
		{l.Released(self, 5, mine), false, "a release of the present epoch"},
		{l.Renew(at(2*time.Second), other, 6, true, next).Granted, false, "though it says that it holds it"},
		{l.Renew(at(5*time.Second), other, 6, false, next).Granted, false, "before the longest lease is over"},
		{l.Renew(at(6*time.Second), other, 6, false, next).Granted, false, "before the guard"},
		{l.Renew(at(6100*time.Millisecond), other, 6, false, next).Granted, true, "when it is over"},
		{l.Renew(at(6100*time.Millisecond), self, 5, true, mine).Granted, false, "to the former, by an older state"},
		{l.Released(other, 6, back), true, "a release"},
		{l.Renew(at(6101*time.Millisecond), self, 7, false, back).Granted, true, "after it was released"},
	} {
		if c.granted != c.want {
			t.Errorf("%d: %s: %t", i, c.what, c.granted)
		}
	}
	l.Prune(at(7*time.Second), func(Slot) bool { return false })
	if l.Len() != 2 {
		t.Error("a lease that may run was forgotten")
	}
	l.Prune(at(2*time.Hour), func(Slot) bool { return false })
	if l.Len() != 0 {
		t.Error("a slot that is gone is remembered")
	}
}

// A source address that moves from one slot to another is never used by both: the former slot's gateway may not have
// learned of the move.
func TestASourceAddressIsOneSlots(t *testing.T) {
	const lease = 1200 * time.Millisecond
	x, y := netip.MustParseAddr("203.0.113.4"), netip.MustParseAddr("203.0.113.5")
	slotB := Slot{Ref{"web", "other"}, 0}
	l := NewLeases(t0)
	at := func(d time.Duration) time.Time { return t0.Add(time.Minute + d) }
	a := SlotState{Slot: slotA, Node: self, Epoch: 5, Lease: lease, Sources: []netip.Addr{x}}
	b := SlotState{Slot: slotB, Node: other, Epoch: 6, Lease: lease, Sources: []netip.Addr{y}}
	for _, s := range []SlotState{a, b} {
		if v := l.Renew(at(0), s.Node, s.Epoch, false, s); !v.Granted {
			t.Fatalf("%s: %+v", s.Slot, v)
		}
	}
	// The slots exchange their addresses: both are released, and assigned again.
	a.Epoch, a.Sources, a.Former, b.Epoch, b.Sources, b.Former = 9, []netip.Addr{y}, lease, 10, []netip.Addr{x}, lease
	v := l.Renew(at(time.Second), other, 10, false, b)
	if v.Granted || v.Retry != 300*time.Millisecond || v.Reason != "slot "+slotA.String()+
		", whose source address was 203.0.113.4, may still send" {
		t.Errorf("before its former gateway's lease is over: %+v", v)
	}
	l.Released(self, 5, a)
	if v := l.Renew(at(time.Second), other, 10, false, b); !v.Granted {
		t.Errorf("when that has stopped: %+v", v)
	}
	if v := l.Renew(at(1299*time.Millisecond), self, 9, false, a); v.Granted {
		t.Error("the other one does not wait for the lease")
	}
	if v := l.Renew(at(1300*time.Millisecond), self, 9, false, a); !v.Granted {
		t.Errorf("the other one, after the lease: %+v", v)
	}
	l.Prune(at(time.Hour), func(Slot) bool { return false })
	if len(l.sources) > 0 {
		t.Errorf("remembered: %v", l.sources)
	}
	// A new leader does not know which slot had the address.
	l, fresh := NewLeases(t0), SlotState{Slot: slotB, Node: other, Epoch: 10, Lease: lease, Sources: []netip.Addr{x}}
	if l.Renew(t0.Add(1299*time.Millisecond), other, 10, false, fresh).Granted || !l.Renew(t0.Add(1300*time.Millisecond),
		other, 10, false, fresh).Granted {
		t.Error("a slot's first owner in a new term is not granted its address just when every lease is over")
	}
}

// A ticket does not outlive its epoch, even if the next epoch is the same node's: the slot may then have another
// source address. Packets are queued meanwhile, and released by the first ticket of the new epoch.
func TestEveryChangeOfEpochEndsTheTicket(t *testing.T) {
	lease, now := 1200*time.Millisecond, t0.Add(50*time.Millisecond)
	anew := SlotState{Slot: slotA, Node: self, Epoch: 9, Lease: lease, Former: lease}
	away := SlotState{Slot: slotA, Node: other, Epoch: 6, From: self, Planned: true, Lease: lease}
	for name, c := range map[string]struct {
		do   func(h *LeaseHolder) []Order
		want []OrderKind
	}{
		"released and given anew, seen at once": {func(h *LeaseHolder) []Order { return h.Agree(anew, now) },
			[]OrderKind{DoHold, DoDrop, DoSilence, DoRelease}},
		"it comes back before it is gone": {func(h *LeaseHolder) []Order {
			h.Agree(away, now)
			return h.Agree(anew, now)
		}, []OrderKind{DoHold, DoDrop, DoSilence, DoRelease}},
		"its ticket has run out": {func(h *LeaseHolder) []Order {
			h.Tick(t0.Add(lease))
			return h.Agree(anew, t0.Add(lease))
		}, []OrderKind{DoDrop, DoSilence, DoRelease}},
	} {
		h := held(t)
		h.Begun(2, 5, 51, now, lease)
		got := c.do(h)
		if !reflect.DeepEqual(kinds(got), c.want) || got[len(got)-1].Epoch != 5 {
			t.Errorf("%s: %+v, want %v and the release of epoch 5", name, got, c.want)
		}
		if r := h.Report(); r.State != Waiting || !r.Until.IsZero() || !h.Urgent() {
			t.Errorf("%s: it is %+v", name, r)
		}
		if _, _, running, ok := h.Wish(now); running || !ok {
			t.Errorf("%s: it asks with a ticket of before: %t, %t", name, running, ok)
		}
		if late := h.Granted(2, 5, now); len(late) > 0 {
			t.Errorf("%s: an answer to before grants %v", name, late)
		}
		at := t0.Add(2 * time.Second)
		h.Begun(3, 9, 90, at, lease)
		want := []OrderKind{DoGrant, DoAnnounce}
		if c.want[0] == DoHold {
			want = append(want, DoOpen)
		}
		if got := kinds(h.Granted(3, 9, at)); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: the first ticket: %v, want %v", name, got, want)
		}
	}
	h := NewLeaseHolder(self, slotA) // an agent that starts anew does not know what a former run was granted in epoch 5
	h.Agree(SlotState{Slot: slotA, Node: self, Epoch: 5, Lease: lease}, t0)
	if got := kinds(h.Agree(anew, now)); !reflect.DeepEqual(got, []OrderKind{DoDrop, DoSilence, DoRelease}) {
		t.Errorf("after a start: %v", got)
	}
}
