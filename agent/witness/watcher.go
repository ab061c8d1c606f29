package witness

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	every = time.Second // between echoes of each kind through each leader
	// comparedWith is how many other leaders an unanswered echo is sent through.
	comparedWith = 2
	// lateAt is how late this process may wake. If it wakes later, an unanswered echo says nothing about other nodes.
	lateAt = 500 * time.Millisecond
	// lossWeight is the weight of one echo in the moving average of lost echoes.
	lossWeight = 1.0 / 32
)

// Target is a leader to watch.
type Target struct {
	Leader  identity.ID
	Mirrors []identity.ID // nodes of other sites that are alive
	Others  []identity.ID // other leaders to compare it with, the best first
}

// Counts counts echoes through one leader since the start.
type Counts struct {
	Sent uint64 // each try counts
	Lost uint64 // tries without an answer
}

// WatcherConfig is what a Watcher needs.
type WatcherConfig struct {
	Wire *Wire
	// Late returns how late this process woke recently.
	Late func(now time.Time) time.Duration
	// Changed is called when the reports have changed. It must not block.
	Changed func()
	Log     *slog.Logger
	Name    func(identity.ID) string
}

// Watcher sends echoes through leaders and reports those that are silent. It does not wake while it has neither targets
// nor reports.
type Watcher struct {
	cfg     WatcherConfig
	ctx     context.Context
	stop    context.CancelFunc
	wg      sync.WaitGroup
	wakeups chan struct{}
	ask     func(ctx context.Context, via identity.ID, mirrors []identity.ID, kind Kind, p pace) result

	mu      sync.Mutex
	targets []Target
	busy    map[round]bool
	ways    map[identity.ID]*measured
	book    Book
}

type round struct {
	leader identity.ID
	kind   Kind
}

// measured is what echoes have shown of the way through a leader.
type measured struct {
	loss   float64
	rtt    time.Duration
	counts Counts
}

// NewWatcher starts a Watcher without targets.
func NewWatcher(cfg WatcherConfig) *Watcher {
	w := &Watcher{cfg: cfg, wakeups: make(chan struct{}, 1), busy: map[round]bool{}, ways: map[identity.ID]*measured{},
		ask: cfg.Wire.ask}
	w.ctx, w.stop = context.WithCancel(context.Background())
	w.wg.Go(w.run)
	return w
}

// Close stops the Watcher, and waits for the echoes that are in progress.
func (w *Watcher) Close() {
	w.stop()
	w.wg.Wait()
}

// Watch replaces the targets.
func (w *Watcher) Watch(targets []Target) {
	w.mu.Lock()
	defer w.mu.Unlock()
	same := func(a, b Target) bool {
		return a.Leader == b.Leader && slices.Equal(a.Mirrors, b.Mirrors) && slices.Equal(a.Others, b.Others)
	}
	if slices.EqualFunc(targets, w.targets, same) {
		return
	}
	w.targets = targets
	var leaders []identity.ID
	for _, t := range targets {
		leaders = append(leaders, t.Leader)
	}
	w.book.Watch(leaders, time.Now())
	for id := range w.ways {
		if w.book.leaders[id] == nil {
			delete(w.ways, id)
		}
	}
	w.wake()
}

// Said returns this host's present reports.
func (w *Watcher) Said() []Said {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.book.Said(time.Now())
}

// Counts returns the counts of each leader that is watched now or was recently.
func (w *Watcher) Counts() map[identity.ID]Counts {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := make(map[identity.ID]Counts, len(w.ways))
	for id, m := range w.ways {
		out[id] = m.counts
	}
	return out
}

func (w *Watcher) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var echoes time.Time // when the next ones are due; zero: nobody is watched
	var said []Said
	for {
		select {
		case <-w.ctx.Done():
			return
		case <-w.wakeups:
		case <-timer.C:
		}
		now := time.Now()
		w.mu.Lock()
		watched, ends, says := len(w.targets) > 0, w.book.Ends(now), w.book.Said(now)
		w.mu.Unlock()
		if !slices.Equal(says, said) {
			said = says
			w.cfg.Changed()
		}
		switch {
		case !watched:
			echoes = time.Time{}
		case echoes.IsZero(): // delayed, since all witnesses learn of a new leader at the same moment
			echoes = now.Add(rand.N(every))
		case !now.Before(echoes):
			w.begin()
			if echoes = echoes.Add(every); echoes.Before(now) {
				echoes = now.Add(every)
			}
		}
		wake := echoes
		if !ends.IsZero() && (wake.IsZero() || ends.Before(wake)) {
			wake = ends
		}
		timer.Stop()
		if !wake.IsZero() {
			timer.Reset(time.Until(wake))
		}
	}
}

func (w *Watcher) wake() {
	select {
	case w.wakeups <- struct{}{}:
	default:
	}
}

// begin starts the echoes of one second.
func (w *Watcher) begin() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.targets {
		for kind := range Kinds {
			r := round{t.Leader, kind}
			if w.busy[r] {
				continue
			}
			w.busy[r] = true
			w.wg.Go(func() { w.look(t, kind) })
		}
	}
}

// look sends one echo with its tries and records the outcome.
func (w *Watcher) look(t Target, kind Kind) {
	o, r := w.examine(t, kind)
	w.mu.Lock()
	delete(w.busy, round{t.Leader, kind})
	news := w.book.Note(t.Leader, kind, o, time.Now())
	w.measure(t.Leader, r)
	w.mu.Unlock()
	if !news {
		return
	}
	w.cfg.Log.Warn("a leader lives and does not forward", "leader", w.cfg.Name(t.Leader), "packets", kind.String(),
		"echoes", r.sent, "compared", o == Silent)
	w.wake()
}

// measure updates what is known of the way through a leader. The caller holds mu.
func (w *Watcher) measure(leader identity.ID, r result) {
	m := w.ways[leader]
	if m == nil {
		m = &measured{}
		w.ways[leader] = m
	}
	m.counts.Sent += uint64(r.sent)
	if !r.answered {
		m.counts.Lost += uint64(r.sent)
		return
	}
	m.counts.Lost += uint64(r.lost)
	for range r.lost {
		m.loss += (1 - m.loss) * lossWeight
	}
	m.loss -= m.loss * lossWeight
	if m.rtt == 0 || r.rtt > m.rtt {
		m.rtt = r.rtt // the longest time counts, and decays slowly
	} else {
		m.rtt -= (m.rtt - r.rtt) / 16
	}
}

// paceOf returns the pace for echoes through a leader.
func (w *Watcher) paceOf(leader identity.ID, late time.Duration) pace {
	w.mu.Lock()
	defer w.mu.Unlock()
	if m := w.ways[leader]; m != nil {
		return paceFor(m.loss, m.rtt, late)
	}
	return paceFor(0, 0, late)
}

// examine sends an echo through the leader. If no answer comes soon, it checks whether that can be the leader's fault,
// and sends the echo once more: a leader that was stopped for a moment, alone or with its host, answers late, and one
// of the mirrors may be dead.
func (w *Watcher) examine(t Target, kind Kind) (Outcome, result) {
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	late := w.cfg.Late(time.Now())
	p := w.paceOf(t.Leader, late)
	done := make(chan result, 1)
	go func() { done <- w.ask(ctx, t.Leader, t.Mirrors, kind, p) }()
	soon := time.NewTimer(p.first)
	defer soon.Stop()
	select {
	case r := <-done:
		if r.answered {
			return Answered, r
		}
		return Unknown, r // it could not be sent
	case <-soon.C:
	}
	checked := make(chan question, 1)
	go func() { checked <- w.check(ctx, t, kind, p, late) }()
	r := <-done
	if r.answered {
		return Answered, r
	}
	q := <-checked
	if q.again.answered {
		return Answered, q.again
	}
	q.asked = r
	q.late = max(late, w.cfg.Late(time.Now()))
	q.reached = w.ctx.Err() == nil && w.cfg.Wire.MTU(t.Leader) > 0
	return q.outcome(), r
}

// check asks the leader itself, and sends the echo through other leaders. If the leader lives, and another one forwards
// the echo or there is none, it sends the echo through the leader again, to the mirror that the other leader reached.
func (w *Watcher) check(ctx context.Context, t Target, kind Kind, p pace, late time.Duration) question {
	const aliveBy = SmallIPv4 // every node has an overlay IPv4 address
	lives, compared := make(chan bool, 1), make(chan result, comparedWith)
	go func() { lives <- w.ask(ctx, w.cfg.Wire.Self, []identity.ID{t.Leader}, aliveBy, p).answered }()
	others := t.Others[:min(len(t.Others), comparedWith)]
	for _, other := range others {
		p := w.paceOf(other, late)
		go func() { compared <- w.ask(ctx, other, t.Mirrors, kind, p) }()
	}
	q, mirrors := question{others: len(others)}, t.Mirrors
	for range others {
		if r := <-compared; r.answered {
			q.passed, mirrors = true, []identity.ID{r.mirror}
			break
		}
	}
	q.alive = <-lives
	if q.alive && (q.passed || q.others == 0) {
		q.again = w.ask(ctx, t.Leader, mirrors, kind, p)
	}
	return q
}

// question is an echo through a leader, with the checks made beside it.
type question struct {
	asked   result
	again   result // through the leader once more, after the checks had found nothing that excuses it
	alive   bool   // the leader itself answered
	reached bool   // the path to the leader is alive
	others  int    // number of other leaders tried
	passed  bool   // one of them got the same echo answered
	late    time.Duration
}

// outcome draws the conclusion from all answers.
func (q question) outcome() Outcome {
	switch {
	case q.asked.answered, q.again.answered:
		return Answered
	case q.asked.sent == 0, !q.alive, !q.reached, q.late >= lateAt:
		return Unknown
	case q.others == 0:
		return Alone
	case q.passed:
		return Silent
	}
	return Unknown // no leader gets an answer: the fault is with the mirrors, or on the way to them
}
