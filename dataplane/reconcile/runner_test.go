package reconcile

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"
)

// looked is what a target was asked, and what it answers.
type looked struct {
	mu      sync.Mutex
	causes  []Cause
	answers []Result // the last one is given for ever
	seen    chan Cause
}

func (l *looked) target(name string) *Target {
	l.seen = make(chan Cause, 100)
	return &Target{Name: name, Reconcile: func(_ context.Context, c Cause) Result {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.causes = append(l.causes, c)
		l.seen <- c
		var r Result
		if len(l.answers) > 0 {
			r = l.answers[0]
		}
		if len(l.answers) > 1 {
			l.answers = l.answers[1:]
		}
		return r
	}}
}

func (l *looked) await(t *testing.T, want Cause) {
	t.Helper()
	select {
	case got := <-l.seen:
		if got != want {
			t.Fatalf("looked at for %b, want %b", got, want)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("nobody looked")
	}
}

func run(t *testing.T, r *Runner) context.CancelFunc {
	ctx, cancel := context.WithCancel(context.Background())
	go r.Run(ctx)
	t.Cleanup(func() { cancel(); <-r.ended })
	return cancel
}

func TestRunnerLooksAtWhatIsMarked(t *testing.T) {
	var a, b looked
	one, two := a.target("one"), b.target("two")
	r := New(Options{}, one, two)
	r.Mark(Wanted, one) // before it runs
	run(t, r)
	a.await(t, Wanted)
	r.Mark(Changed, two)
	b.await(t, Changed)
	r.Mark(Changed, one, two)
	a.await(t, Changed)
	b.await(t, Changed)
	if err := r.Do(t.Context(), func() {}); err != nil {
		t.Fatal(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if want := []Cause{Wanted, Changed}; !slices.Equal(a.causes, want) {
		t.Errorf("one was looked at for %v, want %v", a.causes, want)
	}
}

// TestNowAnswersAllThatWasDue: what was marked before goes with it, and what is remembered does not count then.
func TestNowAnswersAllThatWasDue(t *testing.T) {
	var l looked
	l.answers = []Result{{Writes: 2}}
	target := l.target("one")
	r := New(Options{}, target)
	run(t, r)
	var got Result
	if err := r.Do(t.Context(), func() {
		r.Mark(Changed, target)
		got = r.Now(target, Wanted)
	}); err != nil {
		t.Fatal(err)
	}
	if got.Writes != 2 {
		t.Errorf("%+v", got)
	}
	l.await(t, Wanted|Changed)
	if err := r.Do(t.Context(), func() {
		if wait, ok := target.schedule.wait(time.Now()); ok {
			t.Errorf("it is due once more, after %s", wait)
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// TestTheFirstFailureIsTriedAgainAtOnce, later ones are not; what is told counts both tries' writes.
func TestTheFirstFailureIsTriedAgainAtOnce(t *testing.T) {
	var l looked
	broken := errors.New("broken")
	l.answers = []Result{{Writes: 1, Err: broken}, {Writes: 2, Err: broken}, {Err: broken}, {Writes: 5}}
	target := l.target("one")
	told := make(chan Outcome, 10)
	r := New(Options{Policy: Policy{RetryFirst: time.Millisecond, RetryLast: time.Millisecond},
		Told: func(_ *Target, o Outcome) { told <- o }}, target)
	r.Mark(Wanted, target)
	run(t, r)
	for _, want := range []Cause{Wanted, Wanted | Changed, Wanted | Changed, Wanted | Changed} {
		l.await(t, want)
	}
	for i, want := range []Outcome{
		{Result: Result{Writes: 3, Err: broken}, Cause: Wanted, Failed: true},
		{Result: Result{Err: broken}, Cause: Wanted | Changed},
		{Result: Result{Writes: 5}, Cause: Wanted | Changed, Recovered: true},
	} {
		if got := <-told; got != want {
			t.Errorf("outcome %d is %+v, want %+v", i, got, want)
		}
	}
}

func TestEverythingIsLookedAtNowAndThen(t *testing.T) {
	var l looked
	r := New(Options{Policy: Policy{Resync: 5 * time.Millisecond, Burst: 1000, Every: time.Millisecond}}, l.target("one"))
	run(t, r)
	l.await(t, Changed)
	l.await(t, Changed)
}

func TestNothingRunsAfterTheEnd(t *testing.T) {
	var l looked
	target := l.target("one")
	r := New(Options{}, target)
	run(t, r)()
	<-r.ended
	r.Mark(Wanted, target)
	if err := r.Do(t.Context(), func() { t.Error("it ran") }); !errors.Is(err, ErrEnded) {
		t.Errorf("Do: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := New(Options{}).Do(ctx, func() { t.Error("it ran") }); !errors.Is(err, context.Canceled) {
		t.Errorf("Do before Run: %v", err)
	}
	if len(l.causes) != 0 {
		t.Errorf("it was looked at for %v", l.causes)
	}
}
