package witness

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

var leader = identity.ID{7}

// step is an input of a Book, so many seconds after the start.
type step struct {
	at    int
	kind  Kind
	o     Outcome
	kinds uint32 // reported after the step
}

func TestBook(t *testing.T) {
	start := time.Unix(1000, 0)
	for name, steps := range map[string][]step{
		"one that passed on": {{1, SmallIPv4, Answered, 0}, {2, SmallIPv4, Silent, 1}, {3, LargeIPv6, Silent, 1},
			{16, LargeIPv6, Silent, 9}, {45, SmallIPv4, Answered, 9}, {46, SmallIPv4, Answered, 0}},
		"one that never did, at first": {{1, SmallIPv4, Silent, 0}, {14, SmallIPv4, Silent, 0},
			{15, SmallIPv4, Silent, 1}},
		"nothing follows from nothing": {{1, SmallIPv4, Answered, 0}, {100, SmallIPv4, Unknown, 0}},
		"alone, for long": {{1, SmallIPv4, Answered, 0}, {15, SmallIPv4, Alone, 0},
			{16, SmallIPv4, Alone, 1}},
		"alone, and it never passed on": {{1, SmallIPv4, Alone, 0}, {100, SmallIPv4, Alone, 0}},
		"as long as it is silent": {{1, SmallIPv4, Answered, 0}, {2, SmallIPv4, Silent, 1},
			{31, SmallIPv4, Silent, 1}, {60, SmallIPv4, Answered, 1}, {61, SmallIPv4, Answered, 0}},
		"again soon: twice as long": {{1, SmallIPv4, Answered, 0}, {2, SmallIPv4, Silent, 1},
			{33, SmallIPv4, Answered, 0}, {40, SmallIPv4, Silent, 1}, {99, SmallIPv4, Answered, 1},
			{100, SmallIPv4, Answered, 0}},
		"again after long: as at first": {{1, SmallIPv4, Answered, 0}, {2, SmallIPv4, Silent, 1},
			{700, SmallIPv4, Silent, 1}, {730, SmallIPv4, Answered, 0}},
		"another kind is no new statement": {{1, SmallIPv4, Answered, 0}, {1, LargeIPv4, Answered, 0},
			{2, SmallIPv4, Silent, 1}, {3, LargeIPv4, Silent, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			var b Book
			b.Watch([]identity.ID{leader}, start)
			for _, s := range steps {
				now := start.Add(time.Duration(s.at) * time.Second)
				b.Note(leader, s.kind, s.o, now)
				var kinds uint32
				for _, said := range b.Said(now) {
					kinds |= said.Kinds
				}
				if kinds != s.kinds {
					t.Fatalf("after %+v: %b is said", s, kinds)
				}
				if (kinds == 0) != b.Ends(now).IsZero() {
					t.Fatalf("after %+v it ends at %s", s, b.Ends(now))
				}
			}
		})
	}
}

func TestHoldIsBounded(t *testing.T) {
	var b Book
	now := time.Unix(1000, 0)
	b.Watch([]identity.ID{leader}, now)
	b.Note(leader, 0, Answered, now)
	for range 20 {
		b.Note(leader, 0, Silent, now)
		ends := b.Ends(now)
		if d := ends.Sub(now); d < hold || d > holdMost {
			t.Fatalf("held for %s", d)
		}
		now = ends.Add(time.Second)
	}
	if d := b.leaders[leader].hold; d != holdMost {
		t.Errorf("held for %s in the end", d)
	}
	// A node that no longer leads stays reported until the report ends, and is forgotten afterwards.
	b.Note(leader, 0, Silent, now)
	b.Watch(nil, now)
	if len(b.Said(now)) != 1 || b.Note(leader, 0, Silent, now) {
		t.Errorf("%v is said of one that is not watched", b.Said(now))
	}
	now = now.Add(holdMost)
	if b.Watch(nil, now); len(b.Said(now)) != 0 || len(b.leaders) != 1 {
		t.Errorf("%v after the hold", b.Said(now))
	}
	if b.Watch(nil, now.Add(forgetAfter)); len(b.leaders) != 0 {
		t.Error("it is not forgotten")
	}
}

func TestOutcome(t *testing.T) {
	lost, got := result{sent: 5}, result{sent: 2, answered: true, lost: 1}
	for name, c := range map[string]struct {
		q    question
		want Outcome
	}{
		"answered": {question{asked: got, alive: false, reached: true}, Answered},
		"another leader passes it on": {question{asked: lost, alive: true, reached: true, others: 1,
			passed: true}, Silent},
		"nobody passes it on":                 {question{asked: lost, alive: true, reached: true, others: 2}, Unknown},
		"there is nobody else":                {question{asked: lost, alive: true, reached: true}, Alone},
		"the leader is dead, or stands still": {question{asked: lost, reached: true, others: 1, passed: true}, Unknown},
		"its path has just died":              {question{asked: lost, alive: true, others: 1, passed: true}, Unknown},
		"this process wakes late": {question{asked: lost, alive: true, reached: true, others: 1, passed: true,
			late: time.Second}, Unknown},
		"nothing could be sent": {question{alive: true, reached: true, others: 1, passed: true}, Unknown},
	} {
		if got := c.q.outcome(); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

// A leader is not reported silent because of echoes lost by chance, however many; where few are lost, a silent leader
// is found soon.
func TestPace(t *testing.T) {
	for _, c := range []struct {
		loss  float64
		rtt   time.Duration
		tries int
		most  time.Duration
	}{
		{0, 5 * time.Millisecond, 5, 600 * time.Millisecond},
		{0.04, 5 * time.Millisecond, 5, 600 * time.Millisecond},
		{0.1, 40 * time.Millisecond, 6, 600 * time.Millisecond},
		{0.34, 40 * time.Millisecond, 13, 1200 * time.Millisecond},
		{1, 40 * time.Millisecond, 16, 1400 * time.Millisecond},
		{0, 0, 5, 1200 * time.Millisecond},
		{0, 300 * time.Millisecond, 5, 1200 * time.Millisecond},
	} {
		p := paceFor(c.loss, c.rtt, 0)
		if took := time.Duration(p.tries-1)*p.spacing + p.rest; p.tries != c.tries || took > c.most || p.rest < 2*c.rtt ||
			p.first < c.rtt {
			t.Errorf("%+v: %+v, %s in all", c, p, took)
		}
	}
}

// simulated is a mesh in which leaders forward some kinds of echoes, and one may stand still: echoes that arrive
// meanwhile wait.
type simulated struct {
	mu      sync.Mutex
	broken  map[identity.ID]map[Kind]bool
	stopped identity.ID
	goesOn  time.Time // when the leader that stood still goes on
	dead    identity.ID
	lose    map[identity.ID]int // echoes through a leader that are still to be lost
	asked   int
	last    []identity.ID // the mirrors of the last echo through the leader
}

func (s *simulated) stop(leader identity.ID, long time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped, s.goesOn = leader, time.Now().Add(long)
}

func (s *simulated) set(leader identity.ID, kinds ...Kind) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = map[identity.ID]map[Kind]bool{leader: {}}
	for _, k := range kinds {
		s.broken[leader][k] = true
	}
}

func (s *simulated) echoes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

func (s *simulated) ask(ctx context.Context, via identity.ID, mirrors []identity.ID, kind Kind, p pace) result {
	most := time.Duration(p.tries-1)*p.spacing + p.rest
	wait, r := time.Millisecond, result{sent: 1, answered: true, rtt: time.Millisecond, mirror: mirrors[0]}
	s.mu.Lock()
	if s.stopped == via || s.stopped == mirrors[0] {
		wait = max(wait, time.Until(s.goesOn))
	}
	if len(mirrors) > 1 && mirrors[0] == s.dead {
		r.mirror = mirrors[1]
	}
	if s.broken[via][kind] || s.lose[via] > 0 || wait > most || len(mirrors) == 1 && mirrors[0] == s.dead {
		wait, r = most, result{sent: p.tries}
		s.lose[via] = max(s.lose[via]-1, 0)
	}
	s.asked++
	if via == leader {
		s.last = mirrors
	}
	s.mu.Unlock()
	select {
	case <-time.After(wait):
		return r
	case <-ctx.Done():
		return result{err: ctx.Err()}
	}
}

func TestWatcher(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		self, other := identity.ID{1}, identity.ID{8}
		changed := make(chan struct{}, 100)
		sim := &simulated{lose: map[identity.ID]int{}}
		w := NewWatcher(WatcherConfig{Wire: &Wire{Self: self, MTU: func(identity.ID) int {
			return 1420
		}}, Log: slog.New(slog.DiscardHandler),
			Late: func(time.Time) time.Duration { return 0 }, Changed: func() { changed <- struct{}{} },
			Name: identity.ID.String})
		defer w.Close()
		w.ask = sim.ask
		time.Sleep(time.Hour)
		if sim.echoes() != 0 {
			t.Fatalf("%d echoes without a leader to watch", sim.echoes())
		}
		target := Target{Leader: leader, Mirrors: []identity.ID{{9}}, Others: []identity.ID{other}}
		w.Watch([]Target{target})
		time.Sleep(time.Minute)
		if n := sim.echoes(); n < 4*58 || n > 4*61 {
			t.Errorf("%d echoes in a minute", n)
		}
		if len(w.Said()) != 0 || len(changed) != 0 {
			t.Fatalf("%v is said of a leader that passes on", w.Said())
		}
		began := time.Now()
		sim.set(leader, LargeIPv4)
		<-changed
		if d := time.Since(began); d > 2*time.Second {
			t.Errorf("found after %s", d)
		}
		if said := w.Said(); len(said) != 1 || said[0].Leader != leader || said[0].Kinds != 1<<LargeIPv4 {
			t.Fatalf("%+v", said)
		}
		sim.set(leader)
		<-changed
		if d := time.Since(began); len(w.Said()) != 0 || d < hold || d > hold+4*time.Second {
			t.Errorf("after %s: %v", d, w.Said())
		}
		// The node ceases to lead while it is reported silent: the report ends, and no echoes follow.
		sim.set(leader, SmallIPv4)
		<-changed
		w.Watch(nil)
		<-changed
		asked := sim.echoes()
		time.Sleep(time.Hour)
		if len(w.Said()) != 0 || sim.echoes() != asked {
			t.Errorf("%v is said, and %d echoes more were sent", w.Said(), sim.echoes()-asked)
		}
		if c := w.Counts()[leader]; c.Sent == 0 || c.Lost == 0 || c.Lost > c.Sent {
			t.Errorf("%+v", c)
		}
	})
}

// A leader that stood still for some time, whenever that began and ended, is not reported. A leader that no longer
// forwards afterwards is.
func TestLeaderThatStoodStill(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		sim := &simulated{lose: map[identity.ID]int{}}
		w := NewWatcher(WatcherConfig{Wire: &Wire{Self: identity.ID{1}, MTU: func(identity.ID) int { return 1420 }},
			Late: func(time.Time) time.Duration { return 0 }, Changed: func() {}, Name: identity.ID.String,
			Log: slog.New(slog.DiscardHandler)})
		defer w.Close()
		w.ask = sim.ask
		w.Watch([]Target{{Leader: leader, Mirrors: []identity.ID{{9}}, Others: []identity.ID{{8}}}})
		time.Sleep(time.Minute)
		for long := 50 * time.Millisecond; long < 5*time.Second; long += 37 * time.Millisecond {
			sim.stop(leader, long)
			time.Sleep(long + 3*time.Second)
			if said := w.Said(); len(said) > 0 {
				t.Fatalf("after %s: %+v", long, said)
			}
		}
		sim.stop(leader, 4*time.Second)
		sim.set(leader, SmallIPv4)
		time.Sleep(4*time.Second + 3*time.Second)
		if said := w.Said(); len(said) != 1 || said[0].Kinds != 1<<SmallIPv4 {
			t.Errorf("%+v is said of one that forwards no more", said)
		}
	})
}

// A leader that loses one echo, with all its tries, is not reported, although it lives and another one forwards the
// echo at the same time. The echo that decides goes to a mirror that the other leader has just reached.
func TestOneLostEchoProvesNothing(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		dead, mirror, other := identity.ID{6}, identity.ID{9}, identity.ID{8}
		sim := &simulated{lose: map[identity.ID]int{}, dead: dead}
		w := NewWatcher(WatcherConfig{Wire: &Wire{Self: identity.ID{1}, MTU: func(identity.ID) int { return 1420 }},
			Late: func(time.Time) time.Duration { return 0 }, Changed: func() {}, Name: identity.ID.String,
			Log: slog.New(slog.DiscardHandler)})
		defer w.Close()
		w.ask = sim.ask
		target := Target{Leader: leader, Mirrors: []identity.ID{dead, mirror}, Others: []identity.ID{other}}
		for lost, want := range []Outcome{Answered, Answered, Silent} {
			sim.lose[leader] = lost
			if o, _ := w.examine(target, SmallIPv4); o != want {
				t.Errorf("outcome %d after %d lost echoes, want %d", o, lost, want)
			}
			if to := sim.last; lost > 0 && (len(to) != 1 || to[0] != mirror) {
				t.Errorf("the echo that decides went to %v", to)
			}
		}
	})
}
