package birthday

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"
)

var (
	t0     = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	target = netip.MustParseAddr("198.51.100.1")
)

func TestBudget(t *testing.T) {
	other := netip.MustParseAddr("198.51.100.2")
	many := func(id uint64) Ask { return Ask{ID: id, Many: true, Cost: MaxSockets, Target: target} }
	one := func(id uint64) Ask { return Ask{ID: id, Cost: probesReserved, Target: other} }
	refused := func(want string, retry time.Duration) func(*testing.T, error) {
		return func(t *testing.T, err error) {
			t.Helper()
			var r *Refusal
			if !errors.As(err, &r) || r.Text != want || r.Retry != retry {
				t.Errorf("got %v, want a refusal: %s; for %s", err, want, retry)
			}
		}
	}
	allowed := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("refused: %v", err)
		}
	}
	cases := []struct {
		name string
		do   func(*Budget)
		ask  Ask
		at   time.Duration
		want func(*testing.T, error)
	}{
		{"the first", func(*Budget) {}, many(1), 0, allowed},
		{"two with many sockets are enough", func(b *Budget) { b.Begin(many(1), t0); b.Begin(many(2), t0) }, many(3), 0,
			refused("other attempts are under way", busyRetry)},
		{"beside which others may try from one port", func(b *Budget) { b.Begin(many(1), t0); b.Begin(many(2), t0) },
			one(3), 0, allowed},
		{"two from one port are enough", func(b *Budget) { b.Begin(one(1), t0); b.Begin(one(2), t0) }, one(3), 0,
			refused("other attempts are under way", busyRetry)},
		{"one that predicts waits for others", func(b *Budget) { b.Begin(many(1), t0) }, Ask{ID: 2, Many: true, Alone: true,
			Cost: 64, Target: target}, 0, refused("other attempts are under way", busyRetry)},
		{"and others for it", func(b *Budget) { b.Begin(Ask{ID: 1, Many: true, Alone: true, Cost: 64, Target: target}, t0) },
			many(2), 0, refused("other attempts are under way", busyRetry)},
		{"until it is over", func(b *Budget) {
			a := Ask{ID: 1, Many: true, Alone: true, Cost: 64, Target: target}
			b.Begin(a, t0)
			b.End(a, t0, 64, true)
		}, many(2), 0, allowed},
		{"neighbours use it up", func(*Budget) {}, Ask{ID: 1, Many: true, Cost: MaxSockets, Others: MaxMappings - 100,
			Target: target}, 0,
			refused("3996 mappings of the 4096 for this public address are in use", sharedRetry)},
		{"what was used counts for a minute", func(b *Budget) {
			b.Begin(one(1), t0)
			b.End(one(1), t0, MaxMappings-100, true)
		}, many(2), 20 * time.Second, refused("3996 mappings of the 4096 for this public address are in use",
			40*time.Second)},
		{"and no longer", func(b *Budget) {
			b.Begin(one(1), t0)
			b.End(one(1), t0, MaxMappings-100, true)
		}, many(2), time.Minute, allowed},
		{"what was reserved and not used does not count", func(b *Budget) {
			b.Begin(Ask{ID: 1, Many: true, Cost: MaxMappings, Target: target}, t0)
			b.End(Ask{ID: 1, Many: true, Target: target}, t0, 10, true)
		}, many(2), 0, allowed},
		{"three attempts towards an address that nobody has proven", fail(3, target), many(9), time.Minute,
			refused(fmt.Sprintf("3 attempts towards %s have failed lately", target), 9*time.Minute)},
		{"another address", fail(3, target), one(9), time.Minute, allowed},
		{"ten minutes later", fail(3, target), many(9), 10 * time.Minute, allowed},
		{"a hit proves it", func(b *Budget) {
			fail(2, target)(b)
			b.Begin(many(5), t0)
			b.End(many(5), t0, 1, true)
			b.Begin(many(6), t0)
			b.End(many(6), t0, 1, false)
		}, many(9), 0, allowed},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			b := NewBudget()
			c.do(b)
			c.want(t, b.Begin(c.ask, t0.Add(c.at)))
		})
	}
}

func fail(n int, at netip.Addr) func(*Budget) {
	return func(b *Budget) {
		for i := range n {
			a := Ask{ID: uint64(100 + i), Many: true, Cost: 1, Target: at}
			b.Begin(a, t0)
			b.End(a, t0, 1, false)
		}
	}
}

func TestBudgetGrowsWithAnAttempt(t *testing.T) {
	b := NewBudget()
	a := Ask{ID: 1, Cost: probesReserved, Target: target}
	if err := b.Begin(a, t0); err != nil {
		t.Fatal(err)
	}
	parts := 1
	for b.More(1, t0, probesReserved, 1024) {
		parts++
	}
	if want := (MaxMappings - 1024) / probesReserved; parts != want {
		t.Errorf("%d parts beside 1,024 mappings of others, want %d", parts, want)
	}
	b.End(a, t0, 700, true)
	if n := b.Used(t0); n != 700 {
		t.Errorf("%d are used after the end, want 700", n)
	}
	if b.More(1, t0, 1, 0) {
		t.Error("an attempt that is over got more")
	}
	b.End(a, t0, 9999, true) // a second end changes nothing
	if n := b.Used(t0.Add(mappingFor)); n != 0 {
		t.Errorf("%d are used a minute later", n)
	}
}

// However many addresses are named, what is remembered of them is bounded.
func TestBudgetOfManyTargets(t *testing.T) {
	b := NewBudget()
	for i := range targetsKept + 50 {
		a := Ask{ID: uint64(i), Many: true, Cost: 0, Target: netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})}
		if b.Begin(a, t0) == nil {
			b.End(a, t0, 1, false)
			b.spent = nil
		}
	}
	if len(b.targets) > targetsKept {
		t.Errorf("%d targets are remembered", len(b.targets))
	}
}
