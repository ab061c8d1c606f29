package consensus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// Lead is one term of this server's leadership, for what runs only while it leads.
type Lead struct {
	Term  uint64    // Raft's
	Since time.Time // monotonic; after everything of earlier terms was folded, so after the term began
	t     *term
}

// Propose is Server.Propose, and fails with ErrNotLeader when the term is over.
func (l Lead) Propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	return l.t.propose(ctx, c)
}

// State is the agreed state. It has everything that earlier terms agreed on.
func (l Lead) State() *events.State { return l.t.server.cfg.Replica.State() }

// Verify is Server.VerifyLeader for this term and no other.
func (l Lead) Verify(ctx context.Context) error {
	if err := l.t.rounds.join(ctx, l.t.confirm); err != nil {
		return l.t.server.unverified(ctx, err)
	}
	return nil
}

// VerifyLeader returns when it is certain that this server led at a moment after the call began: a majority of the
// voters answered, in its term, requests that were sent since then. Callers share rounds: one is in progress, and
// callers that come meanwhile wait for the next. term is Raft's; since is monotonic and not before the term began, see
// Lead.Since. The error is ErrNotLeader or the context's.
//
// The library's VerifyLeader alone does not prove that. It counts answers that were already on their way at the call,
// and answers of servers without a vote: a leader that was stopped for a while finds such an answer in its socket and
// takes it for a new one. See acks.
func (s *Server) VerifyLeader(ctx context.Context) (term uint64, since time.Time, err error) {
	t := s.term.Load()
	if t == nil {
		return 0, time.Time{}, s.notLeader()
	}
	select {
	case <-t.ready:
	case <-t.done:
		return 0, time.Time{}, s.notLeader()
	case <-ctx.Done():
		return 0, time.Time{}, s.unverified(ctx, ctx.Err())
	}
	if err := t.lead.Verify(ctx); err != nil {
		return 0, time.Time{}, err
	}
	return t.lead.Term, t.lead.Since, nil
}

func (s *Server) unverified(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("no majority of the servers has confirmed in time that this one leads: %w", ctx.Err())
	}
	return fmt.Errorf("%w (%w)", s.notLeader(), err)
}

// verified is Verify for the term's own use, even before begin has ended.
func (t *term) verified(ctx context.Context) error {
	select {
	case <-t.ready:
		return t.lead.Verify(ctx)
	case <-ctx.Done():
		return raft.ErrLeadershipLost
	}
}

// begin finds out which term of Raft this is, and runs OnLead. The term is certain if Raft's term was the same before
// and after an entry of this leadership was committed.
func (t *term) begin(ctx context.Context) {
	r := t.server.raft
	for {
		before := r.CurrentTerm()
		if t.fresh(ctx) == nil {
			return
		}
		if r.CurrentTerm() == before {
			t.lead = Lead{Term: before, Since: time.Now(), t: t}
			break
		}
	}
	close(t.ready)
	if on := t.server.cfg.OnLead; on != nil {
		on(ctx, t.lead)
	}
}

// confirm runs one round of requests until a majority has answered.
func (t *term) confirm() error {
	s, began := t.server, t.server.acks.begin()
	for {
		if err := s.wait(s.raft.VerifyLeader()); err != nil { // it also makes the library ask every follower at once
			return err
		}
		news := s.acks.news()
		if now := s.raft.CurrentTerm(); now != t.lead.Term {
			return fmt.Errorf("term %d has ended, this is term %d", t.lead.Term, now)
		}
		if s.acks.majority(raft.ServerID(s.cfg.ID.String()), s.raft.GetConfiguration().Configuration().Servers,
			t.lead.Term, began) {
			return nil
		}
		select {
		case <-t.done:
			return raft.ErrLeadershipLost
		case <-news: // answers to older requests were counted; the new ones are on their way
		case <-time.After(s.cfg.Election / 10):
		}
	}
}

// rounds lets many callers wait for one proof. A caller gets the result of the first round that begins after its call.
type rounds struct {
	mu      sync.Mutex
	running bool
	next    *round
}

type round struct {
	done chan struct{}
	err  error
}

func (r *rounds) join(ctx context.Context, prove func() error) error {
	r.mu.Lock()
	if r.next == nil {
		r.next = &round{done: make(chan struct{})}
	}
	mine := r.next
	if !r.running {
		r.running = true
		go r.run(prove)
	}
	r.mu.Unlock()
	select {
	case <-mine.done:
		return mine.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *rounds) run(prove func() error) {
	for {
		r.mu.Lock()
		now := r.next
		r.next = nil
		r.running = now != nil
		r.mu.Unlock()
		if now == nil {
			return
		}
		now.err = prove()
		close(now.done)
	}
}

// acks keeps, for each follower, the newest request that it answered in the term of the request. Requests are ordered
// by when they were sent, so that an answer proves something about the time since then, however late it comes.
type acks struct {
	mu      sync.Mutex
	clock   uint64
	by      map[raft.ServerID]ack
	changed chan struct{}
}

type ack struct{ term, sent uint64 }

func newAcks() *acks { return &acks{by: make(map[raft.ServerID]ack), changed: make(chan struct{})} }

// begin returns a mark: requests that are sent from now on have greater ones.
func (a *acks) begin() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.clock++
	return a.clock
}

func (a *acks) note(id raft.ServerID, k ack) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if k.term < a.by[id].term || k.term == a.by[id].term && k.sent < a.by[id].sent {
		return
	}
	a.by[id] = k
	close(a.changed)
	a.changed = make(chan struct{})
}

// news returns a channel that is closed when the next answer comes.
func (a *acks) news() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changed
}

// majority reports whether a majority of the voters confirms: self, and those that answered in the term a request that
// was sent after began.
func (a *acks) majority(self raft.ServerID, servers []raft.Server, term, began uint64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	voters, have := 0, 0
	for _, v := range servers {
		if v.Suffrage != raft.Voter {
			continue
		}
		voters++
		if k := a.by[v.ID]; v.ID == self || k.term == term && k.sent > began {
			have++
		}
	}
	return have > voters/2
}

// serverTransport is Raft's transport. It notes followers' answers, and accepts only requests that their senders may
// send.
type serverTransport struct {
	*raft.NetworkTransport // for sending
	acks                   *acks
	in                     *inbound
	out                    *outgoing
}

// AppendEntries sends entries or a heartbeat.
func (t *serverTransport) AppendEntries(id raft.ServerID, to raft.ServerAddress, r *raft.AppendEntriesRequest,
	a *raft.AppendEntriesResponse) error {
	sent := t.acks.begin()
	err := t.NetworkTransport.AppendEntries(id, to, r, a)
	if err == nil && a.Success && a.Term == r.Term {
		t.acks.note(id, ack{r.Term, sent})
	}
	return err
}

// Consumer returns the channel of other servers' requests.
func (t *serverTransport) Consumer() <-chan raft.RPC { return t.in.rpcs }

// SetHeartbeatHandler sets the handler of other servers' heartbeats.
func (t *serverTransport) SetHeartbeatHandler(f func(raft.RPC)) { t.in.setHeartbeat(f) }

// Close ends both directions.
func (t *serverTransport) Close() error {
	err := t.NetworkTransport.Close()
	return errors.Join(err, t.in.Close())
}
