package reconcile

import (
	"errors"
	"testing"
	"time"
)

var (
	start  = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	policy = Policy{Settle: 20 * time.Millisecond, Every: time.Second, Burst: 2, RetryFirst: 100 * time.Millisecond,
		RetryLast: 300 * time.Millisecond, Resync: time.Minute}
	errBroken = errors.New("broken")
)

// clocked is a schedule with the time that its test moves.
type clocked struct {
	schedule
	t   *testing.T
	now time.Time
}

func newClocked(t *testing.T) *clocked {
	return &clocked{schedule: newSchedule(policy), t: t, now: start}
}

func (c *clocked) marked(cause Cause) { c.mark(cause, c.now) }

// due wants the next look after so long, and moves the time there.
func (c *clocked) due(after time.Duration) Cause {
	c.t.Helper()
	d, ok := c.wait(c.now)
	if !ok || (d-after).Abs() > 10*time.Microsecond {
		c.t.Fatalf("due after %s (%t), want %s", d, ok, after)
	}
	c.now = c.now.Add(d + time.Microsecond) // the limiter counts in floating point
	if d, ok := c.wait(c.now); d != 0 || !ok {
		c.t.Fatalf("when it is due there are %s more (%t)", d, ok)
	}
	return c.begin(c.now)
}

func (c *clocked) idle() {
	c.t.Helper()
	if d, ok := c.wait(c.now); ok {
		c.t.Fatalf("something is due after %s", d)
	}
}

func TestWhatIsWantedIsDueAtOnce(t *testing.T) {
	c := newClocked(t)
	c.idle()
	c.marked(Changed)
	c.marked(Wanted)
	if got := c.due(0); got != Wanted|Changed {
		t.Errorf("cause %b: what was remembered may be wrong, too", got)
	}
	if out := c.done(Wanted|Changed, Result{Writes: 3}, c.now); out.Repaired || out.Failed || out.Recovered {
		t.Errorf("%+v: what was wanted is no repair", out)
	}
	c.idle()
}

func TestNotificationsOfOneChangeAreOneLook(t *testing.T) {
	c := newClocked(t)
	c.marked(Changed)
	c.now = c.now.Add(15 * time.Millisecond)
	c.marked(Changed)
	if got := c.due(5 * time.Millisecond); got != Changed {
		t.Errorf("cause %b", got)
	}
	if out := c.done(Changed, Result{}, c.now); out.Repaired {
		t.Error("nothing was written, and it counts as a repair")
	}
	c.idle()
}

// TestAQuarrelIsLimited: however often others change something, repairs follow each other as far as Burst goes, and
// then at the rate. Looks that find nothing to do are cheaper, and limited as well. What is wanted does not wait.
func TestAQuarrelIsLimited(t *testing.T) {
	const seconds = 10
	for what, c := range map[string]struct{ writes, least, most int }{
		"repairs": {1, seconds, policy.Burst + 1 + seconds},
		"looks":   {0, seconds * looksPerRepair, (policy.Burst+1)*looksPerRepair + seconds*looksPerRepair},
	} {
		q, n := newClocked(t), 0
		for ; q.now.Sub(start) < seconds*time.Second; n++ {
			q.marked(Changed)
			wait, ok := q.wait(q.now)
			if !ok {
				t.Fatal("what was changed is not due")
			}
			q.now = q.now.Add(wait)
			if out := q.done(q.begin(q.now), Result{Writes: c.writes}, q.now); out.Repaired != (c.writes > 0) {
				t.Fatalf("%s: %+v", what, out)
			}
		}
		if n < c.least || n > c.most {
			t.Errorf("%d %s in %d s, want %d to %d", n, what, seconds, c.least, c.most)
		}
		q.marked(Changed)
		q.marked(Wanted)
		q.due(0)
	}
}

func TestFailuresAreRetriedLaterAndLater(t *testing.T) {
	c := newClocked(t)
	c.marked(Wanted)
	cause := c.due(0)
	for i, after := range []time.Duration{100, 200, 300, 300} {
		out := c.done(cause, Result{Err: errBroken}, c.now)
		if out.Failed != (i == 0) {
			t.Errorf("failure %d: %+v", i, out)
		}
		c.marked(Changed) // its own writes do not bring it forward
		if cause = c.due(after * time.Millisecond); cause != Wanted|Changed {
			t.Errorf("try %d has the cause %b: what was wanted is forgotten", i, cause)
		}
	}
	out := c.done(cause, Result{Writes: 1}, c.now)
	if !out.Recovered || out.Repaired {
		t.Errorf("%+v", out)
	}
	c.idle()
	c.marked(Changed)
	c.done(c.due(policy.Settle), Result{Err: errBroken}, c.now)
	c.due(policy.RetryFirst) // the long pause is forgotten
}

func TestWhatIsWantedDoesNotWaitForARetry(t *testing.T) {
	c := newClocked(t)
	c.marked(Changed)
	c.done(c.due(policy.Settle), Result{Err: errBroken}, c.now)
	c.marked(Wanted)
	c.due(0)
}

// TestADriftThatWasRepairedLateIsOne: the first tries fail, the last one repairs what somebody changed.
func TestADriftThatWasRepairedLateIsOne(t *testing.T) {
	c := newClocked(t)
	c.marked(Changed)
	c.done(c.due(policy.Settle), Result{Err: errBroken}, c.now)
	if out := c.done(c.due(policy.RetryFirst), Result{Writes: 1}, c.now); !out.Repaired || out.Recovered {
		t.Errorf("%+v", out)
	}
}

// TestATargetMayAsk: what it asks for has no limit and is kept beside what others cause.
func TestATargetMayAsk(t *testing.T) {
	c := newClocked(t)
	c.marked(Wanted)
	c.due(0)
	for range 10 {
		c.done(Again, Result{Again: 7 * time.Millisecond}, c.now)
		if got := c.due(7 * time.Millisecond); got != Again {
			t.Fatalf("cause %b", got)
		}
	}
	c.done(Again, Result{Again: time.Hour}, c.now)
	c.marked(Changed)
	if got := c.due(policy.Settle); got != Again|Changed {
		t.Errorf("cause %b", got)
	}
	c.done(Again|Changed, Result{}, c.now)
	c.idle()
}
