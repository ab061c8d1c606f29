package egress

import (
	"testing"
	"time"
)

// Clocks that differ by the allowed amount, and half as much again, never cause two owners: the ticket ends in the
// gateway's kernel before the leader reassigns the slot. That also holds if one side is of a version that added 100
// ms to every lease.
func TestGuardIsAShareOfTheLease(t *testing.T) {
	const ppm = 750
	by := func(d time.Duration, ppm int64) time.Duration { return d + d*time.Duration(ppm)/1_000_000 }
	former := func(lease time.Duration) time.Duration { return lease + Guard }
	for _, lease := range []time.Duration{500 * time.Millisecond, 1200 * time.Millisecond, 10 * time.Second,
		100 * time.Second, 101 * time.Second, 5 * time.Minute, time.Hour,
		24 * time.Hour} {
		if g := GuardFor(lease); g < Guard || g < lease*500/1_000_000 {
			t.Errorf("a lease of %s has a guard of %s", lease, g)
		}
		if k := TicketFor(lease); k > lease || k < lease*99/100 {
			t.Errorf("a lease of %s has a ticket of %s", lease, k)
		}
		counted := NewLeases(t0).counted(lease)
		for name, c := range map[string]struct{ ticket, counted time.Duration }{
			"both count so": {TicketFor(lease), counted}, "a former gateway": {lease, counted},
			"a former leader": {TicketFor(lease), former(lease)},
		} {
			// The gateway's kernel is slow, or the leader's clock is fast.
			if end, free := by(c.ticket, ppm), c.counted; end >= free {
				t.Errorf("lease of %s, %s: the kernel has stopped after %s of the leader's time, which gives the slot on after %s",
					lease, name, end, free)
			}
		}
		if lease > 3*time.Minute && by(lease, ppm) < former(lease) {
			t.Errorf("lease of %s: two of a former version would have done: no test", lease)
		}
	}
	if GuardFor(1200*time.Millisecond) != Guard || TicketFor(1200*time.Millisecond) != 1200*time.Millisecond {
		t.Error("the default lease is another than before")
	}
}

// A gateway whose kernel's clock is slow, and a leader, over a lease of a day.
func TestADaysLeaseOnASlowClock(t *testing.T) {
	const day = 24 * time.Hour
	// of the leader's time while d passes at the gateway
	slow := func(d time.Duration) time.Duration { return d + d*7/10_000 }
	slot := SlotState{Slot: slotA, Node: self, Epoch: 5, Lease: day}
	h, l := NewLeaseHolder(self, slotA), NewLeases(t0)
	h.Agree(slot, t0)
	epoch, ticket, _, _ := h.Wish(t0)
	h.Begun(1, epoch, 50, t0, ticket)
	if v := l.Renew(t0, self, 5, false, slot); !v.Granted {
		t.Fatalf("%+v", v)
	}
	h.Granted(1, 5, t0)
	next := SlotState{Slot: slotA, Node: other, Epoch: 6, From: self, Lease: day, Former: day}
	at := t0.Add(slow(h.Report().Until.Sub(t0)))
	if v := l.Renew(at, other, 6, false, next); v.Granted {
		t.Errorf("another is granted the slot at the very moment when the first one's ticket ends, %s after it began",
			at.Sub(t0))
	}
	if v := l.Renew(t0.Add(day+GuardFor(day)), other, 6, false, next); !v.Granted {
		t.Errorf("it is never given on: %+v", v)
	}
}
