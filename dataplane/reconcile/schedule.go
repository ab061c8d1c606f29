package reconcile

import (
	"time"

	"golang.org/x/time/rate"
)

// Policy says when a target is looked at.
type Policy struct {
	Settle     time.Duration // from a notification to the look: it gathers those of one change
	Every      time.Duration // between repairs of one target, on average: a quarrel with another program stays cheap
	Burst      int           // so many repairs may follow each other at once
	RetryFirst time.Duration // after the first failure; then twice as long each time
	RetryLast  time.Duration // the longest
	Resync     time.Duration // between looks at everything, for notifications that were lost; 0: none
}

// looksPerRepair is how many looks that find all as wanted count as one repair. Most of them are for notifications of
// the target's own writes.
const looksPerRepair = 10

// Default is the policy of whatever has no reason for another one.
var Default = Policy{Settle: 20 * time.Millisecond, Every: 250 * time.Millisecond, Burst: 4,
	RetryFirst: 250 * time.Millisecond, RetryLast: 15 * time.Second, Resync: time.Minute}

// Cause says why a target is looked at. Several add up.
type Cause uint8

// The causes.
const (
	Again   Cause = 1 << iota // the target has asked for it
	Changed                   // somebody else may have changed it: what is remembered of the kernel may be wrong
	Wanted                    // something else is wanted, or may be
)

// Result is what became of one look.
type Result struct {
	Writes int // changes that the kernel took; 0: all was as wanted
	Err    error
	Again  time.Duration // the target wants another look after so long, also when it failed; 0: no
}

// Outcome is a Result with what it means after those before it.
type Outcome struct {
	Result
	Cause     Cause // why it was looked at
	Failed    bool  // it works no more, and did before; it is tried again
	Repaired  bool  // somebody else had changed it
	Recovered bool  // it works again, and had failed for another reason
}

// schedule is when one target is due. Its methods are pure: they are told the time.
type schedule struct {
	policy  Policy
	limit   *rate.Limiter // of looks for notifications
	cause   Cause         // Changed, Wanted or both; 0: neither
	due     time.Time     // for the cause
	again   time.Time     // zero: the target has not asked
	backoff time.Duration // after the last failure; 0: it works
	drift   bool          // what is being tried again began with somebody else's change
}

func newSchedule(p Policy) schedule {
	return schedule{policy: p, limit: rate.NewLimiter(rate.Every(p.Every/looksPerRepair), p.Burst*looksPerRepair)}
}

// mark has the target looked at for Changed, Wanted or both.
func (s *schedule) mark(c Cause, now time.Time) {
	at := now.Add(s.policy.Settle)
	if c&Wanted != 0 {
		at, s.drift = now, false
	}
	// While it fails, its own writes are among the changes: only what is wanted brings it forward.
	if s.cause == 0 || at.Before(s.due) && (s.backoff == 0 || c&Wanted != 0) {
		s.due = at
	}
	s.cause |= c
}

// wait is how long until the target is to be looked at: 0 is now, and ok is false for not at all.
func (s *schedule) wait(now time.Time) (d time.Duration, ok bool) {
	if s.cause != 0 {
		d, ok = max(0, s.due.Sub(now)), true
		if missing := 1 - s.limit.TokensAt(now.Add(d)); s.limited() && missing > 0 {
			d += time.Duration(missing * float64(s.policy.Every/looksPerRepair))
		}
	}
	if !s.again.IsZero() {
		if a := max(0, s.again.Sub(now)); !ok || a < d {
			d, ok = a, true
		}
	}
	return d, ok
}

// limited says that the limit counts for what is due: nobody wants it, and it is not another try.
func (s *schedule) limited() bool { return s.cause == Changed && s.backoff == 0 }

// begin returns why the target is looked at now; that answers all that was due.
func (s *schedule) begin(now time.Time) Cause {
	if s.limited() {
		s.limit.ReserveN(now, 1)
	}
	c := s.cause
	if !s.again.IsZero() {
		c |= Again
	}
	s.cause, s.again = 0, time.Time{}
	return c
}

// done records a look, and says what it means.
func (s *schedule) done(c Cause, r Result, now time.Time) Outcome {
	out := Outcome{Result: r, Cause: c}
	failing := s.backoff > 0
	drift := c&Changed != 0 && c&Wanted == 0 && !failing
	if drift && (r.Writes > 0 || r.Err != nil) {
		s.limit.ReserveN(now, looksPerRepair-1)
	}
	if r.Again > 0 {
		s.again = now.Add(r.Again)
	}
	if r.Err != nil {
		s.drift = s.drift || drift
		s.backoff = min(max(2*s.backoff, s.policy.RetryFirst), s.policy.RetryLast)
		s.cause, s.due = s.cause|c|Changed, now.Add(s.backoff)
		s.cause &^= Again
		out.Failed = !failing
		return out
	}
	out.Repaired = s.drift || drift && r.Writes > 0
	out.Recovered = failing && !out.Repaired
	s.backoff, s.drift = 0, false
	return out
}
