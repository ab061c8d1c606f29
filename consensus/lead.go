package consensus

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

const (
	maxInFlight   = 2         // log entries on their way: while the disks work on one, commands gather for the next
	maxCommands   = 1024      // in one log entry
	maxEntryBytes = 256 << 10 // of events in one log entry, not counting what the last command adds
	queueLength   = 4096      // commands waiting to be decided
	entropyBytes  = 64
	maxCommand    = 64 << 10 // bytes of one command
	maxImport     = 4 << 20  // bytes of one that imports pools: events.MaxImportBlocks of them, with room
)

// proposal is one caller's command and, when done is closed, its outcome.
type proposal struct {
	command *skeinv1.Command
	answer  *skeinv1.Answer
	err     error
	done    chan struct{}
}

func (p *proposal) finish(a *skeinv1.Answer, err error) {
	p.answer, p.err = a, err
	close(p.done)
}

// term is one stretch of leadership. Its loop owns the speculative state.
type term struct {
	server *Server
	log    *slog.Logger
	in     chan *proposal
	cancel context.CancelFunc
	done   chan struct{} // closed when the loop has ended and nothing is in flight

	ready  chan struct{} // closed when lead is set
	lead   Lead
	rounds rounds
	pace   pace // the loop's
}

// watchLeadership takes every notification as an end and a beginning: the channel coalesces, so that
// a leadership lost and won again can show as one notification or as the same value twice.
func (s *Server) watchLeadership(ctx context.Context) {
	defer s.running.Done()
	var current *term
	stop := func() {
		if current != nil {
			s.term.Store(nil)
			current.cancel()
			<-current.done
			current = nil
		}
	}
	defer stop()
	for {
		select {
		case leads := <-s.raft.LeaderCh():
			stop()
			if leads {
				current = s.startTerm(ctx)
			}
		case <-ctx.Done():
			return
		}
	}
}

func (s *Server) startTerm(ctx context.Context) *term {
	ctx, cancel := context.WithCancel(ctx)
	t := &term{server: s, log: s.log, in: make(chan *proposal, queueLength), cancel: cancel, done: make(chan struct{}),
		ready: make(chan struct{})}
	s.health.reset()
	s.log.Info("this server leads", "raft-term", s.raft.CurrentTerm())
	s.term.Store(t)
	go func() {
		defer close(t.done)
		var care sync.WaitGroup
		care.Go(func() { t.care(ctx) })
		care.Go(func() { t.begin(ctx) })
		t.loop(ctx)
		cancel() // the loop may have noticed the end of the leadership first
		care.Wait()
		s.log.Info("this server leads no longer")
	}()
	return t
}

// propose queues a command and waits for its outcome.
func (t *term) propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	if err := checkSize(c); err != nil {
		return nil, err
	}
	c = proto.CloneOf(c)
	if c.RequestId == "" {
		c.RequestId = NewRequestID()
	}
	if c.Issuer == "" { // this server's own
		c.Issuer = t.server.cfg.ID.String()
	}
	p := &proposal{command: c, done: make(chan struct{})}
	select {
	case t.in <- p:
	case <-t.done:
		return nil, t.server.notLeader()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	select {
	case <-p.done:
		return p.answer, p.err
	case <-ctx.Done():
		return nil, fmt.Errorf("%w (%w)", ErrUncertain, ctx.Err())
	case <-t.done:
	}
	select {
	case <-p.done:
		return p.answer, p.err
	default:
		return nil, t.server.notLeader() // it stayed in the queue
	}
}

// checkSize refuses a command that is too large to be sent and decided.
func checkSize(c *skeinv1.Command) error {
	limit := maxCommand
	if c.GetImportPools() != nil {
		limit = maxImport
	}
	if n := proto.Size(c); n > limit {
		return &events.Error{Code: events.InvalidArgument, Message: fmt.Sprintf("the command has %d bytes, at most %d are "+
			"allowed: split it", n, limit)}
	}
	return nil
}

// timeFor is how long a command may take where an ordinary one takes so long: a large one needs time to get there,
// also over a line of one Mbit/s.
func timeFor(ordinary time.Duration, c *skeinv1.Command) time.Duration {
	if n := proto.Size(c); n > maxCommand {
		return ordinary + time.Duration(n)*time.Second/(128<<10)
	}
	return ordinary
}

// entry is one group of commands on its way through the log.
type entry struct {
	proposals []*proposal
	batch     *skeinv1.Batch
	before    *entry        // the one appended before it
	settled   chan struct{} // closed when err is known
	err       error
}

// loop decides and appends until the leadership ends.
func (t *term) loop(ctx context.Context) {
	var spec *events.State // nil: to be taken anew from the replica
	var newest *entry
	inFlight, settled := 0, make(chan *entry, maxInFlight)
	defer func() {
		for ; inFlight > 0; inFlight-- {
			<-settled
		}
	}()
	for {
		if spec == nil && inFlight == 0 {
			newest = nil
			if spec = t.fresh(ctx); spec == nil {
				return
			}
			t.keepPace(spec.Time())
		}
		in := t.in
		if inFlight == maxInFlight || spec == nil {
			in = nil
		}
		select {
		case p := <-in:
			if err := t.clockRefusal(); err != nil {
				p.finish(nil, err)
				continue
			}
			e, next, err := t.decide(spec, p)
			e.before, newest = newest, e
			if spec = next; err != nil {
				t.log.Error("a decision cannot be folded; the speculative state is taken anew", "error", err)
				spec = nil
			}
			inFlight++
			t.append(ctx, e, settled)
		case e := <-settled:
			inFlight--
			e.before = nil // let go of the chain
			if e.err != nil {
				spec = nil
			}
		case <-ctx.Done():
			return
		}
	}
}

// fresh waits for everything in the log to be folded and takes that state. It returns nil when the
// leadership has ended.
func (t *term) fresh(ctx context.Context) *events.State {
	for ctx.Err() == nil {
		err := t.server.wait(t.server.raft.Barrier(0))
		if err == nil {
			state, at := t.server.cfg.Replica.State(), t.server.fsm.at.Load()
			if state.Index() == at {
				return state.Clone()
			}
			t.log.Error("this server leads but its replica is ahead of the log: it takes no commands", "replica", state.Index(),
				"log", at, "next", divergedNext)
		} else if errors.Is(err, raft.ErrRaftShutdown) || t.server.raft.State() != raft.Leader {
			return nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(t.server.cfg.Election / 5):
		}
	}
	return nil
}

// decide takes the first command and all that wait behind it into one entry, and moves the
// speculative state. Its error means that the state must be taken anew.
func (t *term) decide(spec *events.State, first *proposal) (*entry, *events.State, error) {
	e := &entry{batch: &skeinv1.Batch{Base: spec.Index()}, settled: make(chan struct{})}
	size, clock := 0, t.server.clockVerdict()
	for p := first; p != nil; {
		e.proposals = append(e.proposals, p)
		var evs []*skeinv1.Event
		t.stamp(p.command, spec.Time(), clock)
		if p.err = events.Authorise(spec, p.command); p.err == nil {
			evs, p.answer, p.err = events.Decide(spec, p.command)
		}
		if p.err == nil {
			for _, ev := range evs {
				if err := spec.Fold(ev); err != nil {
					p.answer, p.err = nil, fmt.Errorf("decide: %w", err)
					return e, nil, p.err
				}
				size += proto.Size(ev)
			}
			e.batch.Events = append(e.batch.Events, evs...)
			if p.command.GetRepairClock() != nil || t.pace.base == 0 {
				t.pace = pace{base: spec.Time(), at: time.Now(), slack: clockBound}
			}
		}
		if p = nil; len(e.proposals) < maxCommands && size < maxEntryBytes {
			select {
			case p = <-t.in:
			default:
			}
		}
	}
	return e, spec, nil
}

// stamp sets what Decide may not look up itself: time and entropy. Time never runs backwards in the log, so that a
// leader whose clock is behind cannot revive what has expired. It follows the leader's clock within bounds: see pace. A
// repair of the clock sets it to the clock.
func (t *term) stamp(c *skeinv1.Command, newest int64, v verdict) {
	clock := t.server.cfg.Now().UnixNano()
	if c.Time = clock; c.GetRepairClock() == nil {
		c.Time = t.pace.next(newest, clock, v, time.Now())
	}
	c.Entropy = entropy()
}

func entropy() []byte {
	b := make([]byte, entropyBytes)
	rand.Read(b)
	return b
}

// append gives the entry to Raft, and ends its proposals when the outcome is known.
func (t *term) append(ctx context.Context, e *entry, settled chan<- *entry) {
	var future raft.Future
	began := time.Now()
	if len(e.batch.Events) > 0 {
		if data, err := EncodeBatch(e.batch); err != nil {
			e.err = err
		} else {
			future = t.server.raft.Apply(data, peerTimeout)
		}
	}
	before := e.before
	go func() {
		if before != nil {
			<-before.settled
			if e.err == nil && before.err != nil {
				e.err = before.err
			}
		}
		if e.err == nil || future != nil {
			if err := t.outcome(ctx, future); e.err == nil {
				e.err = err
			}
		}
		if e.err == nil && future != nil {
			t.server.commits.add(time.Since(began))
		}
		for _, p := range e.proposals {
			if e.err != nil {
				p.finish(nil, fmt.Errorf("%w: %w", ErrUncertain, e.err))
				continue
			}
			t.logOutcome(p)
			p.finish(p.answer, p.err)
		}
		close(e.settled)
		settled <- e
		if e.err == nil && urgent(e.batch) {
			t.server.raft.Barrier(0)
		}
	}()
}

// urgent reports whether all servers must fold a batch at once. The library tells followers of a commit by the next
// entry, or 50 to 100 ms later. A slot's owners and its clients' hosts follow different servers, and must learn of a
// move at the same time. A barrier is such a next entry.
func urgent(b *skeinv1.Batch) bool {
	return slices.ContainsFunc(b.GetEvents(), func(e *skeinv1.Event) bool {
		switch e.GetBody().(type) {
		case *skeinv1.Event_SlotAssigned, *skeinv1.Event_SlotMoved, *skeinv1.Event_SlotReleased:
			return true
		}
		return false
	})
}

// logOutcome logs which command was committed or refused, and its issuer. Neither line has secrets.
func (t *term) logOutcome(p *proposal) {
	if !t.log.Enabled(context.Background(), slog.LevelInfo) {
		return
	}
	m := p.command.ProtoReflect()
	kind := "none"
	if f := m.WhichOneof(m.Descriptor().Oneofs().ByName("body")); f != nil {
		kind = string(f.Name())
	}
	if p.err != nil {
		t.log.Info("command refused", "command", kind, "issuer", p.command.GetIssuer(), "request",
			p.command.GetRequestId(), "error", p.err)
		return
	}
	t.log.Info("command committed", "command", kind, "issuer", p.command.GetIssuer(), "request", p.command.GetRequestId(),
		"index", p.answer.GetIndex())
}

// outcome waits until an entry is committed and folded. An entry without events waits for proof that this server led
// after its commands were decided, since its answers were read from the state. The library's VerifyLeader is no such
// proof: see acks.
func (t *term) outcome(ctx context.Context, future raft.Future) error {
	if future == nil {
		return t.verified(ctx)
	}
	if err := t.server.wait(future); err != nil {
		return err
	}
	if apply, ok := future.(raft.ApplyFuture); ok {
		if err, ok := apply.Response().(error); ok {
			return err
		}
	}
	return nil
}

// wait returns the outcome of a future. The library forgets some futures when it shuts down.
func (s *Server) wait(f raft.Future) error {
	endAtShutdown(f, s.stopped)
	done := make(chan error, 1)
	go func() { done <- f.Error() }()
	select {
	case err := <-done:
		return err
	case <-s.stopped:
		return raft.ErrRaftShutdown
	}
}

// endAtShutdown ends the goroutine that waits for a future when Raft ends. The library's futures have a channel for
// that, but the library sets it only in some of them, and no method gives access to it. Without it each forgotten
// future keeps a goroutine for good.
func endAtShutdown(f raft.Future, stopped chan struct{}) {
	v := reflect.ValueOf(f)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		return
	}
	if end := v.Elem().FieldByName("ShutdownCh"); end.IsValid() && end.CanSet() &&
		end.Type() == reflect.TypeOf(stopped) && end.IsNil() {
		end.Set(reflect.ValueOf(stopped))
	}
}
