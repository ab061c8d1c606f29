package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/dataplane/hop"
	"github.com/skeinmesh/skein/identity"
)

// A rate of refused packets is told over ten seconds or more, whoever reads the counters how often.
func TestRefusedPacketsOfHops(t *testing.T) {
	began := time.Unix(1000, 0)
	var w hopWatch
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
		w.note(hopReading{at, hop.Counts{Refused: c.refused}}, began)
		if have, over := w.refused(); have != c.want || over != c.over {
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
		p := refusalProblem(c.packets, c.over, now, "home1")
		if (p != nil) != c.warned {
			t.Errorf("%d in %s: %v", c.packets, c.over, p)
		}
		if p != nil && (!strings.HasSuffix(p.GetMessage(), "; home1 brought the last one") || p.GetSeverity() != warning ||
			p.GetSince() != now.Add(-c.over).UnixNano()) {
			t.Errorf("%d in %s: %v", c.packets, c.over, p)
		}
	}
	if p := refusalProblem(10, 10*time.Second, now, ""); strings.Contains(p.GetMessage(), "brought") {
		t.Errorf("nobody is known: %v", p)
	}
}

func TestChangedLeaders(t *testing.T) {
	leader := func(id byte) sites.Leader { return sites.Leader{ID: identity.ID{id}, Acting: true} }
	elected, reserve := sites.Leader{ID: identity.ID{3}}, leader(3)
	reserve.Reserve = true
	plan := func(own []sites.Leader, other ...sites.Leader) *sites.Plan {
		return &sites.Plan{Site: "home", Leaders: map[string][]sites.Leader{"home": own, "dc": other}}
	}
	before := plan([]sites.Leader{leader(1), leader(2)}, leader(5))
	for what, c := range map[string]struct {
		before, now *sites.Plan
		own, other  uint64
	}{
		"the first plan":       {nil, before, 0, 0},
		"the same":             {before, before, 0, 0},
		"another order":        {before, plan([]sites.Leader{leader(2), leader(1)}, leader(5)), 0, 0},
		"one is elected":       {before, plan([]sites.Leader{leader(1), leader(2), elected}, leader(5)), 0, 0},
		"a reserve":            {before, plan([]sites.Leader{leader(1), leader(2), reserve}, leader(5)), 0, 0},
		"one is lost":          {before, plan([]sites.Leader{leader(2)}, leader(5)), 1, 0},
		"another in each site": {before, plan([]sites.Leader{leader(1), leader(3)}, leader(6)), 1, 1},
		"none is left there":   {before, plan([]sites.Leader{leader(1), leader(2)}), 0, 1},
		"a site that is new": {&sites.Plan{Site: "home", Leaders: map[string][]sites.Leader{"home": {leader(1)}}},
			plan([]sites.Leader{leader(1)}, leader(5)), 0, 0},
		"this node's site is another": {before,
			&sites.Plan{Site: "dc", Leaders: map[string][]sites.Leader{"dc": {leader(9)}}}, 0, 0},
		"from topology full": {&sites.Plan{Full: true, Site: "home"}, before, 0, 0},
		"to topology full":   {before, &sites.Plan{Full: true, Site: "home"}, 0, 0},
	} {
		if own, other := changedLeaders(c.before, c.now); own != c.own || other != c.other {
			t.Errorf("%s: %d of its own, %d of others, want %d and %d", what, own, other, c.own, c.other)
		}
	}
}
