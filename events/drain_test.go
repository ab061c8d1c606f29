package events

import (
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// endDraining ends slots that drain, as of an index.
func endDraining(name string, n uint32, at uint64) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangeEgress{ChangeEgress: &skeinv1.ChangeEgress{
		Namespace: "web", Name: name, EndDraining: n, AtChangedIndex: at}}}
}

// TestSlotsDrain: slots that an egress has no more keep endpoint, source address, owner and epoch, and end when the
// leader says so on the present state; more replicas take them back as they are.
func TestSlotsDrain(t *testing.T) {
	w := newEgresses(t)
	all := []string{"203.0.113.0", "203.0.113.1", "203.0.113.2"}
	first := w.must(define(egress("web/out", "192.0.2.0/24", 3, all...))).GetEgress()
	for i := range uint32(3) {
		w.assign("web/out", i, "a")
	}
	is := func(what string, replicas, draining uint32, slots int) *skeinv1.Egress {
		t.Helper()
		e := w.s.Egress("web", "out")
		if Replicas(e) != replicas || e.GetDraining() != draining || len(w.s.Slots("web", "out")) != slots ||
			len(e.GetAddresses()) != slots {
			t.Fatalf("%s: %v", what, e)
		}
		if addressesOf(e.GetEndpoints()) != addressesOf(first.GetEndpoints()[:slots]) ||
			addressesOf(e.GetAddresses()) != addressesOf(first.GetAddresses()[:slots]) {
			t.Errorf("%s: other addresses: %v", what, e)
		}
		for _, s := range w.s.Slots("web", "out") {
			if s.GetNodeId() != id("a") {
				t.Errorf("%s: slot %v", what, s)
			}
		}
		return e
	}
	fewer := egress("web/out", "", 2, all[:2]...)
	w.must(setEgress(fewer, "replicas", "addresses"))
	e := is("3 to 2", 2, 1, 3)
	at, ok := DrainedAt(e)
	if want := time.Unix(0, e.GetDrainingSince()).Add(10 * time.Minute); !ok || !at.Equal(want) {
		t.Errorf("it drains until %v, want %v", at, want)
	}
	if evs, _, err := w.propose(setEgress(fewer, "replicas", "addresses")); err != nil || len(evs) != 0 {
		t.Errorf("the same again: %v, %v", evs, err)
	}
	if evs, _, err := w.propose(define(egress("web/out", "192.0.2.0/24", 2, all[:2]...))); err != nil || len(evs) != 0 {
		t.Errorf("defined as it shall be: %v, %v", evs, err)
	}
	w.must(setEgress(&skeinv1.Egress{Namespace: "web", Name: "out", DrainMillis: 5000}, "drain_millis"))
	e = is("another bound", 2, 1, 3)
	if at, _ := DrainedAt(e); at.Sub(time.Unix(0, e.GetDrainingSince())) != 5*time.Second {
		t.Errorf("it drains until %v", at)
	}
	w.refused(setEgress(&skeinv1.Egress{Namespace: "web", Name: "out", DrainMillis: 999}, "drain_millis"), InvalidArgument,
		"a drain of at most 999 ms")

	w.must(setEgress(egress("web/out", "", 1, all[0]), "replicas", "addresses"))
	e = is("2 to 1", 1, 2, 3)
	w.refused(endDraining("out", 3, 0), FailedPrecondition, "ends the drain of 3 slots, and only 2 are draining")
	w.refused(endDraining("out", 1, e.GetChangedIndex()-1), FailedPrecondition, "decide again")
	w.must(endDraining("out", 1, e.GetChangedIndex()))
	next := is("the highest has ended", 1, 1, 2)
	if next.GetDrainingSince() != e.GetDrainingSince() {
		t.Error("the end of one slot puts off that of the other")
	}
	w.must(setEgress(egress("web/out", "", 2, all[:2]...), "replicas", "addresses"))
	is("1 to 2: taken back", 2, 0, 2)
	w.refused(endDraining("out", 1, 0), FailedPrecondition, "ends the drain of 1 slots")

	// The address of a slot that is to drain goes to another: it cannot wait.
	w.must(setEgress(egress("web/out", "", 1, all[1]), "replicas", "addresses"))
	if e := w.s.Egress("web", "out"); e.GetDraining() != 0 || e.GetReplicas() != 1 {
		t.Errorf("two slots would send with one address: %v", e)
	}
}

// TestNoSlotDrainsBeforeAllKnowIt: a member of an older version would count a slot that drains among those for new
// flows, so slots end at once as long as there is one.
func TestNoSlotDrainsBeforeAllKnowIt(t *testing.T) {
	for schema, want := range map[uint32]uint32{drainSchema - 1: 0, drainSchema: 1} {
		w := newPoolsOf(t, schema)
		w.must(createPool(pool("default", 2, "10.64.0.0/26,fd02::/122")))
		w.must(define(egress("web/out", "192.0.2.0/24", 2)))
		w.assign("web/out", 1, "a")
		w.must(setEgress(egress("web/out", "", 1), "replicas"))
		e := w.s.Egress("web", "out")
		if e.GetDraining() != want || e.GetReplicas() != 1+want {
			t.Errorf("members fold schema %d: %v", schema, e)
		}
		changed := &skeinv1.Event{Body: &skeinv1.Event_EgressChanged{EgressChanged: &skeinv1.EgressChanged{Egress: e}}}
		if have := schemaOf(changed); (have == drainSchema) != (want > 0) {
			t.Errorf("members fold schema %d: the event is of schema %d", schema, have)
		}
	}
}

// TestSpread: what is spread is one of two, and the default is not written.
func TestSpread(t *testing.T) {
	w := newEgresses(t)
	e := egress("web/out", "192.0.2.0/24", 2)
	e.Spread = SpreadClient
	if have := w.must(define(e)).GetEgress(); have.GetSpread() != "" || schemaOfEgress(have) != 3 {
		t.Errorf("the default: %v", have)
	}
	flow := &skeinv1.Egress{Namespace: "web", Name: "out", Spread: SpreadFlow}
	if have := w.must(setEgress(flow, "spread")).GetEgress(); have.GetSpread() != SpreadFlow ||
		schemaOfEgress(have) != drainSchema {
		t.Errorf("by flow: %v", have)
	}
	flow.Spread = "packet"
	w.refused(setEgress(flow, "spread"), InvalidArgument, `spread "packet" is unknown; use client, the default, or flow`)
}
