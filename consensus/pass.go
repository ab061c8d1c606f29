package consensus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

const (
	maxPassing       = 1024                   // streams that a leader of a site serves at a time
	passedMost       = 1024                   // events that a node may be behind; beyond that it must ask a server
	passingHeartbeat = heartbeatEvery * 3 / 2 // after the last message, while there is nothing to pass on
)

// passing holds the nodes that get the events from this one: each has one stream.
type passing struct {
	mu   sync.Mutex
	open map[identity.ID]*passingStream
}

type passingStream struct{ end context.CancelCauseFunc }

var errReplaced = errors.New("the node has begun another stream here")

// enter registers a node's new stream, and ends its former one.
func (p *passing) enter(ctx context.Context, peer identity.ID) (_ context.Context, leave func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.open[peer]
	if before == nil && len(p.open) >= maxPassing {
		return nil, nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("this node passes events on to %d "+
			"nodes: ask a server", maxPassing))
	}
	if before != nil {
		before.end(errReplaced)
	}
	ctx, end := context.WithCancelCause(ctx)
	mine := &passingStream{end}
	if p.open == nil {
		p.open = make(map[identity.ID]*passingStream)
	}
	p.open[peer] = mine
	return ctx, func() {
		end(nil)
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.open[peer] == mine {
			delete(p.open, peer)
		}
	}, nil
}

// Passing returns how many nodes get the events from this one, which leads their site.
func (s *Service) Passing() int {
	s.passing.mu.Lock()
	defer s.passing.mu.Unlock()
	return len(s.passing.open)
}

// mayPass returns why a member does not get the events from this node, or stops getting them; nil: it gets them.
func (s *Service) mayPass(peer identity.ID) error {
	if s.cfg.Pass == nil || s.cfg.Proof == nil {
		return connect.NewError(connect.CodeUnavailable, errors.New("this node is not a server and passes no events on: "+
			"ask a server"))
	}
	if err := s.cfg.Pass(peer); err != nil {
		return connect.NewError(connect.CodeUnavailable, fmt.Errorf("%w: ask a server", err))
	}
	return nil
}

// pass streams to a node of this node's site what the servers have agreed on. Each part ends with a server's
// checkpoint. A node that is so far behind that it needs a state, or more than passedMost events, must ask a server.
func (s *Service) pass(ctx context.Context, peer identity.ID, at uint64,
	out func(*skeinv1.SubscribeResponse) error) error {
	if err := s.mayPass(peer); err != nil { // the caller has checked that peer is a member
		return err
	}
	ctx, leave, err := s.passing.enter(ctx, peer)
	if err != nil {
		return err
	}
	defer leave()
	beat := time.NewTimer(passingHeartbeat)
	defer beat.Stop()
	send := func(m *skeinv1.SubscribeResponse) error {
		beat.Reset(passingHeartbeat)
		return out(m)
	}
	var shown *skeinv1.Checkpoint
	for {
		c, newer := s.cfg.Proof()
		if c == nil {
			return connect.NewError(connect.CodeUnavailable, errors.New("this node hears no server at present: ask a server"))
		}
		// The event that revokes a node comes with a new gossip key, and one checkpoint covers both. So a revoked node gets
		// neither from here, and learns of its revocation from a server.
		if err := checkMember(s.cfg.Replica.State(), peer); err != nil {
			return err
		}
		if c != shown {
			at, err = s.passTo(at, c, send)
			shown = c
		} else {
			err = send(&skeinv1.SubscribeResponse{Body: &skeinv1.SubscribeResponse_Heartbeat_{
				Heartbeat: &skeinv1.SubscribeResponse_Heartbeat{Index: c.GetIndex()}}})
		}
		if err == nil {
			err = s.mayPass(peer)
		}
		if err != nil {
			return err
		}
		select {
		case <-newer:
		case <-beat.C:
		case <-ctx.Done():
			err = connect.NewError(connect.CodeAborted, context.Cause(ctx))
		}
		if err == nil && s.cfg.Replica.isClosed() {
			err = connect.NewError(connect.CodeUnavailable, errors.New("this node is stopping"))
		}
		if err != nil {
			return err
		}
	}
}

// passTo sends the events after an index up to the index of a checkpoint, with the checkpoint in the last message, and
// returns the new index.
func (s *Service) passTo(at uint64, c *skeinv1.Checkpoint,
	send func(*skeinv1.SubscribeResponse) error) (uint64, error) {
	end := c.GetIndex()
	if end > at && end-at > passedMost {
		return at, connect.NewError(connect.CodeOutOfRange,
			fmt.Errorf("index %d is %d events behind: ask a server", at, end-at))
	}
	if end <= at { // nothing is new, or the node is ahead of this one
		return at, send(&skeinv1.SubscribeResponse{Checkpoint: c,
			Body: &skeinv1.SubscribeResponse_Heartbeat_{Heartbeat: &skeinv1.SubscribeResponse_Heartbeat{Index: end}}})
	}
	for at < end {
		evs, first, _, err := s.cfg.Replica.Events(at, int(min(end-at, streamEvents)))
		if err != nil {
			return at, connect.NewError(connect.CodeInternal, err)
		}
		if first > at+1 || len(evs) == 0 {
			return at, connect.NewError(connect.CodeOutOfRange,
				fmt.Errorf("event %d is not kept here any more: ask a server", at+1))
		}
		evs = Portion(evs)
		m := &skeinv1.SubscribeResponse{Body: &skeinv1.SubscribeResponse_Batch{Batch: &skeinv1.Batch{Base: at, Events: evs}}}
		if at += uint64(len(evs)); at == end {
			m.Checkpoint = c
		}
		if err := send(m); err != nil {
			return at, err
		}
	}
	return at, nil
}
