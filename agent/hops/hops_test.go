package hops

import (
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/dataplane/hop"
)

// A rate of refused packets is told over ten seconds or more, whoever reads the counters how often.
func TestRefusedPacketsOfHops(t *testing.T) {
	began := time.Unix(1000, 0)
	var w Watch
	for _, c := range []struct {
		at      int // seconds after the agent's start
		refused uint64
		want    uint64
		over    time.Duration
	}{
		{5, 40, 0, 0}, // too early
		{12, 40, 40, 12 * time.Second},
		{13, 41, 41, 13 * time.Second},
		{22, 50, 10, 10 * time.Second}, // since 12
		{23, 52, 12, 11 * time.Second},
		{31, 52, 12, 19 * time.Second},
		{33, 52, 2, 11 * time.Second}, // since 22
		{43, 52, 0, 10 * time.Second}, // since 33
		{54, 7, 7, 11 * time.Second},  // the kernel's counters began anew
		{1054, 2007, 2000, 1000 * time.Second},
	} {
		at := began.Add(time.Duration(c.at) * time.Second)
		w.Note(Reading{at, hop.Counts{Refused: c.refused}}, began)
		if have, over := w.Refused(); have != c.want || over != c.over {
			t.Errorf("after %d s: %d in %s, want %d in %s", c.at, have, over, c.want, c.over)
		}
	}
}

func TestRefusalsThatMatter(t *testing.T) {
	now := time.Unix(1000, 0)
	for _, c := range []struct {
		packets uint64
		over    time.Duration
		warned  bool
	}{{0, 0, false}, {9, 10 * time.Second, false}, {10, 10 * time.Second, true}, {100, time.Minute, true},
		{59, time.Minute, false}} {
		p := RefusalProblem(c.packets, c.over, now, "home1")
		if (p != nil) != c.warned {
			t.Errorf("%d in %s: %v", c.packets, c.over, p)
		}
		if p != nil && (!strings.HasSuffix(p.GetMessage(), "; home1 brought the last one") ||
			p.GetSeverity() != string(part.Warns) || p.GetSince() != now.Add(-c.over).UnixNano()) {
			t.Errorf("%d in %s: %v", c.packets, c.over, p)
		}
	}
	if p := RefusalProblem(10, 10*time.Second, now, ""); strings.Contains(p.GetMessage(), "brought") {
		t.Errorf("nobody is known: %v", p)
	}
}
