package ipam

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/skeinmesh/skein/dataplane/podnet"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

const (
	decideWithin  = 3 * time.Second        // limit of a proposal
	followWithin  = 3 * time.Second        // limit until a decision is in this node's state
	failFast      = 3 * time.Second        // after an undecided proposal, requests fail at once for this long
	leaderlessFor = 2 * time.Second        // more than two elections: requests then fail at once
	probeWithin   = 500 * time.Millisecond // how long a request waits when the last proposal was undecided
	refusedFor    = time.Second            // how long a refusal applies to later requests
	maxRounds     = 32                     // of waiting, per request

	backoffMin = time.Second
	backoffMax = 30 * time.Second
	refusedMin = 30 * time.Second // for a background task that was refused
	refusedMax = 5 * time.Minute
	planEvery  = 5 * time.Second
)

var errBehind = errors.New("it is decided, but this node does not see it yet")

// flight is a running proposal that requests wait for.
type flight struct {
	done chan struct{}
	err  error // after done
}

type backoff struct {
	until time.Time
	delay time.Duration
}

type refusal struct {
	err *Error
	at  time.Time
}

// waiter is a request that waits for the log, perhaps several times.
type waiter struct {
	ctx    context.Context
	cancel context.CancelFunc
}

func (m *Manager) newWaiter(ctx context.Context, k podnet.Key) *waiter {
	w := &waiter{}
	w.ctx, w.cancel = context.WithCancel(ctx)
	m.pending[k] = &pendingAssign{cancel: w.cancel}
	return w
}

func (n need) key() taskKey {
	switch n.kind {
	case needGrant:
		return taskKey{kind: taskGrant, pool: n.pool, namespace: n.namespace}
	case needClaim:
		return taskKey{kind: taskClaim, pool: n.pool, addr: n.static.addr()}
	}
	return taskKey{kind: taskAllocate, pool: n.pool}
}

// await joins or begins the proposal that a request needs, and waits for its end without the lock.
func (m *Manager) await(w *waiter, n need) error {
	k, what := n.key(), func() task { return m.needed(n) }
	if n.kind == needClaim && m.core.leaving[n.static.addr()] != "" {
		// The pending give-up must be decided first.
		t := m.core.givingUp(n.static)
		k, what = t.taskKey, func() task { return t }
	}
	if err := m.hopeless(n, k, m.cfg.Now()); err != nil {
		return err
	}
	m.waiting[k]++
	f := m.flights[k]
	if f == nil {
		f = m.launch(k, what)
	}
	var probe <-chan time.Time
	if m.failure != nil {
		t := time.NewTimer(probeWithin)
		defer t.Stop()
		probe = t.C
	}
	m.unlock()
	var err error
	select {
	case <-f.done:
		err = f.err
	case <-probe:
		err = errors.New("no server has decided the last request or this one yet")
	case <-w.ctx.Done():
		err = w.ctx.Err()
	}
	m.mu.Lock()
	if m.waiting[k]--; m.waiting[k] == 0 {
		delete(m.waiting, k)
	}
	if err == nil {
		return nil
	}
	return m.refused(n, err)
}

// hopeless is the reason why a proposal would be useless now; nil: none.
func (m *Manager) hopeless(n need, k taskKey, now time.Time) error {
	if r, ok := m.refusals[k]; ok && now.Sub(r.at) < refusedFor && now.Sub(r.at) >= 0 {
		return r.err
	}
	if n.kind == needBlock {
		s, have := m.core.view.Pools[n.pool], len(m.core.byPool[n.pool])
		if s.MaxBlocks > 0 && have >= int(s.MaxBlocks) {
			return &Error{Exhausted, fmt.Sprintf("all addresses of this node's %d blocks of pool %s are used or rest, and the "+
				"pool allows no more blocks per node", have, n.pool),
				"raise max_blocks_per_node of the pool, or move pods to other nodes"}
		}
	}
	if m.cfg.Leaderless != nil {
		if d := m.cfg.Leaderless(); d > leaderlessFor {
			return m.refused(n, fmt.Errorf("no server has led the cluster for %s", d.Round(time.Second)))
		}
	}
	if since := now.Sub(m.failed); m.failure != nil && since < failFast {
		return m.refused(n, m.failure)
	}
	return nil
}

// refused converts the end of a proposal into a request's error.
func (m *Manager) refused(n need, err error) *Error {
	what := "nothing is free in this node's blocks of pool " + n.pool
	switch n.kind {
	case needGrant:
		what = fmt.Sprintf("this node may use no more addresses of pool %s for namespace %s", n.pool, n.namespace)
	case needClaim:
		what = fmt.Sprintf("%s is reserved for pod %s/%s, and this node does not hold it", n.static.addr(),
			n.static.Namespace, n.static.Pod)
	}
	var e *events.Error
	switch {
	case errors.As(err, &e):
		return &Error{codeOf(e.Code), what + ": " + e.Message, ""}
	case errors.Is(err, context.Canceled):
		return &Error{Unavailable, what + ", and the request was ended while a server was asked", "try again later"}
	}
	return &Error{Unavailable, fmt.Sprintf("%s, and no server decides about more: %v", what, err),
		"try again later; see that a majority of the servers is up with skein status"}
}

func codeOf(c events.Code) Code {
	switch c {
	case events.ResourceExhausted:
		return Exhausted
	case events.PermissionDenied:
		return Denied
	case events.InvalidArgument:
		return Invalid
	}
	return Unavailable
}

// needed is the task that serves all requests waiting for the same need. It is computed when the proposal begins.
func (m *Manager) needed(n need) task {
	k := n.key()
	t := task{taskKey: k, static: n.static}
	switch n.kind {
	case needBlock:
		t.total = m.core.wanted(n.pool, m.waiting[k], m.cfg.Now())
	case needGrant:
		t.grant = m.core.quota[quotaKey{n.pool, n.namespace}] + uint32(max(m.waiting[k], 1)) + grantAhead
	}
	return t
}

// launch begins a proposal. Its goroutine computes the task, so that requests made at the same time are counted.
func (m *Manager) launch(k taskKey, what func() task) *flight {
	f := &flight{done: make(chan struct{})}
	m.flights[k] = f
	m.wg.Go(func() {
		m.mu.Lock()
		t := what()
		m.unlock()
		err := m.propose(t)
		m.mu.Lock()
		defer m.unlock()
		delete(m.flights, k)
		m.end(t, err)
		f.err = err
		close(f.done)
		m.wake()
	})
	return f
}

// begin fences what is being returned: it is no longer used.
func (m *Manager) begin(t task) {
	switch {
	case t.kind == taskRelease:
		m.core.leave(t)
	case t.kind == taskGiveUp:
		m.core.leaving[t.static.addr()] = t.id
	case t.kind == taskGrant && t.lowered:
		m.core.caps[quotaKey{t.pool, t.namespace}] = t.grant
	}
}

// propose proposes a task and waits until the answer is in the state.
func (m *Manager) propose(t task) error {
	ctx, cancel := context.WithTimeout(m.ctx, decideWithin+followWithin)
	defer cancel()
	asks := []task{t}
	if t.kind == taskGrant && !t.lowered {
		asks = m.lessAndLess(t)
	}
	var err error
	for _, t := range asks {
		var a *skeinv1.Answer
		try, cancel := context.WithTimeout(ctx, decideWithin)
		a, err = m.cfg.Propose(try, t.command(m.self))
		cancel()
		if events.CodeOf(err) == events.ResourceExhausted {
			continue
		}
		if err == nil {
			err = m.until(ctx, a.GetIndex())
		}
		return err
	}
	return err
}

// lessAndLess lists grants to ask for: more than needed, then what is needed, then one address.
func (m *Manager) lessAndLess(t task) []task {
	m.mu.Lock()
	defer m.unlock()
	used := m.core.quota[quotaKey{t.pool, t.namespace}]
	asks := []task{t}
	for _, n := range []uint32{t.grant - min(t.grant, grantAhead), used + 1} {
		if n > used && n < asks[len(asks)-1].grant {
			less := t
			less.grant = n
			asks = append(asks, less)
		}
	}
	return asks
}

// until waits for a state that includes the index.
func (m *Manager) until(ctx context.Context, index uint64) error {
	for {
		m.mu.Lock()
		moved, have := m.moved, m.state.Index()
		m.mu.Unlock()
		if have >= index {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return errBehind
		}
	}
}

// end records a proposal's result: failure, refusal and backoff.
func (m *Manager) end(t task, err error) {
	now := m.cfg.Now()
	var e *events.Error
	decided := err == nil || errors.As(err, &e)
	m.failed, m.failure = time.Time{}, nil
	if !decided {
		m.failed, m.failure = now, err
	}
	if m.ctx.Err() != nil {
		return
	}
	if decided {
		m.applyOutcome(t)
	}
	if err == nil {
		delete(m.refusals, t.taskKey)
		delete(m.backoffs, t.taskKey)
		return
	}
	b := m.backoffs[t.taskKey]
	low, high := backoffMin, backoffMax
	if e != nil {
		low, high = refusedMin, refusedMax
		m.refusals[t.taskKey] = refusal{err: m.refused(t.need(), err), at: now}
	}
	b.delay = min(max(2*b.delay, low), high)
	b.until = now.Add(b.delay/2 + rand.N(b.delay/2))
	m.backoffs[t.taskKey] = b
	m.log.Warn("the servers did not carry out what this node asked for; it will ask again", "pool", t.pool, "namespace",
		t.namespace, "error", err, "again_in", b.until.Sub(now))
}

// need is the need that a task serves, for messages.
func (t task) need() need {
	n := need{kind: needBlock, pool: t.pool, namespace: t.namespace, static: t.static}
	switch t.kind {
	case taskGrant:
		n.kind = needGrant
	case taskClaim, taskGiveUp:
		n.kind = needClaim
	}
	return n
}

// applyOutcome lifts the fences of a decided task. What the log took is no longer in the state; what it refused to take
// is used again.
func (m *Manager) applyOutcome(t task) {
	switch t.kind {
	case taskRelease:
		m.core.stay(t)
	case taskGiveUp:
		delete(m.core.leaving, t.static.addr())
		delete(m.core.statics, t.static.addr())
	case taskGrant:
		delete(m.core.caps, quotaKey{t.pool, t.namespace})
	}
}

// Run requests spare blocks, returns unneeded ones, and compacts the file, until ctx ends.
func (m *Manager) Run(ctx context.Context) {
	for {
		next := m.round()
		t := time.NewTimer(next)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		case <-m.kick:
			t.Stop()
		}
	}
}

// round launches the tasks that are due, and returns the time until the next round.
func (m *Manager) round() time.Duration {
	m.mu.Lock()
	defer m.unlock()
	next := planEvery*3/4 + rand.N(planEvery/2)
	if m.blind() != nil {
		return next
	}
	now := m.now()
	m.compact(now)
	waiting := map[string]bool{}
	for k := range m.waiting {
		waiting[k.pool] = true
	}
	tasks := m.core.plan(now.at, waiting)
	if len(m.core.statics) > 0 {
		next = min(next, giveUpAfter/2)
	}
	sortTasks(tasks)
	for _, t := range tasks {
		if wait := m.backoffs[t.taskKey].until.Sub(now.at); wait > 0 {
			next = min(next, wait)
			continue
		}
		if m.flights[t.taskKey] == nil && !m.clash(t) {
			m.begin(t)
			m.launch(t.taskKey, func() task { return t })
		}
	}
	return max(next, time.Millisecond)
}

// clash reports whether requests are claiming the static address that the task would give up.
func (m *Manager) clash(t task) bool {
	k := t.taskKey
	k.kind = taskClaim
	return t.kind == taskGiveUp && (m.flights[k] != nil || m.waiting[k] > 0)
}

// compact rewrites the file when most of it is history.
func (m *Manager) compact(now moment) {
	if m.file.records < compactAfter+2*(len(m.core.leases)+len(m.core.past)+len(m.core.cursors)) {
		return
	}
	m.core.forget(now.at)
	if err := m.file.rewrite(m.core.snapshot(m.cfg.BootID, now)); err != nil {
		m.fileErr = err
		m.log.Warn("the file of pod addresses could not be shortened", "file", m.cfg.File, "error", err)
	}
}
