package agent

import (
	"testing"
	"time"
)

// TestSyncPace: rounds are spaced by what they take, a changed path waits less, and what is planned is never put off.
func TestSyncPace(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	for _, c := range []struct {
		name   string
		took   time.Duration // of the last round, which ends at start
		asks   []time.Duration
		urgent []bool
		want   []time.Duration // from each ask to the round
	}{
		{"quick rounds gather what comes together", ms(1), []time.Duration{0, ms(1)}, []bool{false, false},
			[]time.Duration{ms(9), ms(8)}},
		{"long after the last one", ms(50), []time.Duration{ms(2000)}, []bool{false}, []time.Duration{syncSpacing}},
		{"a slow round is followed by rest", ms(50), []time.Duration{0, ms(100)}, []bool{false, false},
			[]time.Duration{ms(450), ms(350)}},
		{"a changed path cuts the rest short", ms(50), []time.Duration{0, ms(40)}, []bool{false, true},
			[]time.Duration{ms(450), ms(60)}},
		{"and is not put off by what is less urgent", ms(50), []time.Duration{0, ms(40)}, []bool{true, false},
			[]time.Duration{ms(100), ms(60)}},
		{"nothing waits longer than a second", ms(900), []time.Duration{0, 0}, []bool{false, true},
			[]time.Duration{syncLatest, syncUrgentBy}},
	} {
		var p syncPace
		p.ran(start.Add(-c.took), start)
		for i, at := range c.asks {
			if got := p.next(start.Add(at), c.urgent[i]); got != c.want[i] {
				t.Errorf("%s: ask %d: in %s, want %s", c.name, i, got, c.want[i])
			}
		}
	}
}
