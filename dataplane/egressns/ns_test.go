package egressns

import (
	"net/netip"
	"testing"
	"time"
)

func TestPacketsLeaveWithTheSlotsSource(t *testing.T) {
	s := newScene(t)
	if w := s.apply(aSpec()); w == 0 {
		t.Error("nothing was written")
	}
	if w := s.apply(aSpec()); w != 0 {
		t.Errorf("the same again took %d messages", w)
	}
	for _, x := range []struct{ client, target, source netip.Addr }{{client4, target4, source4}, {client6, target6, source6}} {
		c := s.socket(x.client)
		s.silent("before the lease", c, x.target)
		s.grant(0, 10*time.Second)
		if got := s.seen(c, x.target); got != x.source.String() {
			t.Errorf("the target sees %s, want %s", got, x.source)
		}
		if err := s.n.Drop(0); err != nil {
			t.Fatal(err)
		}
		s.silent("after the lease", c, x.target)
	}
	c := s.counters()
	if k := c.Slots[0]; k.SentPackets == 0 || k.ReceivedPackets == 0 || k.SentBytes == 0 || k.ReceivedBytes == 0 || c.Slots[1].SentPackets != 0 {
		t.Errorf("counters of the slots: %+v", c.Slots)
	}
	if c.Dropped.Lease == 0 || c.Conntrack == 0 || c.ConntrackMax == 0 {
		t.Errorf("counters: %+v", c)
	}
}
