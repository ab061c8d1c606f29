package egressns

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane"
)

// TestFlowsStayWithTheirSlot: a client whose new flows take another slot keeps its flows by the former one. They
// leave with the former slot's address, and their answers come from the former slot's endpoint (the client's side of
// this test accepts them from no other). Each slot's flows need that slot's lease.
func TestFlowsStayWithTheirSlot(t *testing.T) {
	s := newScene(t)
	spec := aSpec()
	spec.Slots[1].Source4, spec.Slots[1].Source6 = otherSource4, otherSource6
	s.apply(spec)
	s.grant(0, time.Minute)
	s.grant(1, time.Minute)
	families := []struct{ client, target, end, otherEnd, source, otherSource netip.Addr }{
		{client4, target4, end4, otherEnd4, source4, otherSource4}, {client6, target6, end6, otherEnd6,
			source6, otherSource6}}
	var former, later []*net.UDPConn
	for _, f := range families {
		former = append(former, s.socket(f.client))
		if got := s.seen(former[len(former)-1], f.target); got != f.source.String() {
			t.Fatalf("before: the target sees %s", got)
		}
	}
	both := spec
	both.Clients = []dataplane.GatewayClient{{IPv4: client4, IPv6: client6, Slot: 1, Also: []int{0}}}
	s.apply(both)
	if writes := s.apply(both); writes != 0 {
		t.Errorf("nothing is to do, and takes %d writes", writes)
	}
	// check verifies that every flow uses its slot, one after the other.
	check := func(when string) {
		t.Helper()
		for i, f := range families {
			s.lead(f.target, f.end)
			if got := s.ask(former[i], f.target, 5*time.Second); got != f.source.String() {
				t.Errorf("%s: the target sees a flow by slot 0 come from %q, want %s\n%s", when, got, f.source, s.state())
			}
			s.lead(f.target, f.otherEnd)
			if len(later) <= i {
				later = append(later, s.socket(f.client))
			}
			if got := s.ask(later[i], f.target, 5*time.Second); got != f.otherSource.String() {
				t.Errorf("%s: the target sees a flow by slot 1 come from %q, want %s\n%s", when, got, f.otherSource, s.state())
			}
		}
	}
	check("by both")
	check("again")
	if n, err := s.n.Flows(); err != nil || n[0] != 2 || n[1] != 2 || len(n) != 2 {
		t.Errorf("flows by slot: %v (%v), want two of each", n, err)
	}
	s.open() // the agent starts again
	s.apply(both)
	check("after a start")

	if err := s.n.Drop(0); err != nil {
		t.Fatal(err)
	}
	for i, f := range families {
		s.lead(f.target, f.end)
		s.silent("slot 0 has no lease", former[i], f.target)
		s.lead(f.target, f.otherEnd)
		if got := s.ask(later[i], f.target, 5*time.Second); got != f.otherSource.String() {
			t.Errorf("slot 1, while slot 0 has no lease: the target sees %q", got)
		}
	}

	s.grant(0, time.Minute)
	one := both
	one.Clients = []dataplane.GatewayClient{{IPv4: client4, IPv6: client6, Slot: 1}}
	s.apply(one)
	for i, f := range families {
		s.lead(f.target, f.end)
		s.silent("it may use slot 0 no more", former[i], f.target)
		s.lead(f.target, f.otherEnd)
		if got := s.ask(later[i], f.target, 5*time.Second); got != f.otherSource.String() {
			t.Errorf("slot 1, by itself: the target sees %q", got)
		}
	}
	if n := len(s.n.links.cache.slots); n != 0 {
		t.Errorf("%d rules of slots are left", n)
	}
}
