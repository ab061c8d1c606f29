package consensus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	streamSilence = 3 * time.Second // three missed heartbeats: another server is asked
	leaderless    = 5 * time.Second // a server without a leader for so long is left if others are there
	followMin     = 100 * time.Millisecond
	followMax     = 5 * time.Second
	compareEvery  = 10 * time.Second // with the history of a server that is behind
	raftSilence   = 5 * time.Second  // a server that heard no leader for so long follows like an agent
)

// FollowStatus is where a following node stands.
type FollowStatus struct {
	Server    identity.ID // the server followed, or the leader of this node's site; zero while none is
	Passed    bool        // it is such a leader, and no server
	LastHeard time.Time   // last message; of a leader: the last that shows that it is where its server is
	Index     uint64      // the server's index then
	Err       error       // why the last stream ended, nil once a new one works
	// Unconfirmed is why no server itself could be asked lately whether a leader passes on all there is; nil: one was.
	Unconfirmed error
}

// Status is where Follow stands.
func (c *Client) Status() FollowStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.status
}

// Follow keeps the replica up to date from a leader of this node's site or any server until the context ends, and
// changes the source when one falls silent. On a server it rests while Raft brings the log; it steps in when no leader
// is heard, because a server that was away may not know the servers that lead now. It returns an error only when this
// node cannot go on by itself: an event it does not know, or a damaged file.
func (c *Client) Follow(ctx context.Context) error {
	wait := followMin
	for ctx.Err() == nil {
		if !c.raftIsSilent() {
			if !pause(ctx, time.Second) {
				break
			}
			continue
		}
		progress, moved := false, false
		for _, s := range c.sources() {
			began := time.Now()
			heard, err := c.followFrom(ctx, s)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if errors.Is(err, events.ErrUnknownEvent) || errors.Is(err, ErrCorrupt) || errors.Is(err, ErrClosed) {
				return fmt.Errorf("follow node %s: %w", s.id, err)
			}
			if moved = errors.Is(err, errMoved); moved {
				break
			}
			if s.passed || slices.Contains(c.leaders(), s.id) {
				c.backOff(s.id, err, time.Since(began))
			}
			c.ended(s, err)
			heard = heard && !errors.Is(err, ErrDiverged) // it will say so again
			if progress = heard; heard {
				break // choose anew among all
			}
		}
		if progress {
			wait = followMin
		}
		if moved {
			continue
		}
		select {
		case <-time.After(wait/2 + rand.N(wait)):
			wait = min(2*wait, followMax)
		case <-c.hurry:
			wait = followMin
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}

func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// raftIsSilent reports whether the log must come by subscription.
func (c *Client) raftIsSilent() bool {
	s := c.local()
	return s == nil || time.Since(s.LastContact()) > raftSilence
}

// sources are whom to follow, the best first.
func (c *Client) sources() []source {
	leaders, servers := c.leaders(), c.followOrder()
	c.mu.Lock()
	defer c.mu.Unlock()
	return order(leaders, servers, c.backoffs, time.Now())
}

func (c *Client) followFrom(ctx context.Context, s source) (heard bool, err error) {
	if s.passed {
		return c.followPassed(ctx, s.id)
	}
	return c.followOne(ctx, s.id)
}

// followOrder is random, without preference for the leader, so that the load spreads; the server that
// failed last comes last.
func (c *Client) followOrder() []identity.ID {
	ids := c.servers()
	rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, id := range ids {
		if id == c.status.Server {
			ids[i], ids[len(ids)-1] = ids[len(ids)-1], ids[i]
			break
		}
	}
	return ids
}

func (c *Client) ended(s source, err error) {
	id := s.id
	c.mu.Lock()
	repeated := c.status.Err != nil // with whichever server: all of them may be away for hours
	c.status.Server, c.status.Passed, c.status.Err = id, s.passed, err
	c.mu.Unlock()
	switch {
	case errors.Is(err, errForged):
		c.log.Error("a leader of this site passed on events that no server has signed; it is not followed for a while",
			"leader", id, "error", err)
	case errors.Is(err, ErrDiverged):
		c.log.Error("this node's agreed history differs from a server's", "server", id, "error", err, "next", divergedNext)
		c.tellDiverged(fmt.Errorf("this node's agreed history differs from that of server %s: %w", id, err))
	case !repeated:
		c.log.Info("a subscription ended", "server", id, "error", err)
	}
}

// followOne follows one server until its stream ends, and reports whether anything came.
func (c *Client) followOne(ctx context.Context, id identity.ID) (heard bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	checkpoints := c.passes()
	c.following(cancel, source{id, false}, checkpoints)
	defer c.following(nil, source{}, false)
	watchdog := time.AfterFunc(streamSilence, func() { cancel(fmt.Errorf("nothing heard for %s", streamSilence)) })
	defer watchdog.Stop()
	request := subscription(c.cfg.Replica.State())
	request.Checkpoints = checkpoints
	stream, err := c.cfg.Conns.Cluster(id).Subscribe(ctx, request)
	if err != nil {
		return false, followError(ctx, err)
	}
	defer stream.Close()
	led, compared := time.Now(), time.Time{}
	for stream.Receive() {
		watchdog.Reset(streamSilence)
		m := stream.Msg()
		if err := c.take(m); err != nil {
			return heard, err
		}
		if h := m.GetHeartbeat(); h != nil {
			c.mu.Lock()
			c.fresh.heard(id, h.GetTime(), c.sinceStart())
			c.mu.Unlock()
			if behind := h.GetIndex() < c.cfg.Replica.State().Index(); !behind || time.Since(compared) > compareEvery {
				if err := c.compare(h); err != nil {
					return heard, err
				}
				compared = time.Now()
			}
			if c.cfg.OnHeartbeat != nil {
				c.cfg.OnHeartbeat(id, h)
			}
			leader, _ := identity.ParseID(h.GetLeader())
			if c.heardLeader(leader); !leader.IsZero() {
				led = time.Now()
			}
		}
		if checkpoints {
			c.prove(id, m.GetCheckpoint())
		}
		if heard { // a refusal comes after the first message
			c.tellDiverged(nil)
		} else {
			c.log.Info("following the agreed state", "server", id, "index", c.cfg.Replica.State().Index())
		}
		heard = true
		c.mu.Lock()
		c.status = FollowStatus{Server: id, LastHeard: time.Now(), Index: max(c.status.Index, indexOf(m))}
		c.mu.Unlock()
		switch {
		case !c.raftIsSilent():
			return heard, errors.New("the log comes by Raft again")
		case time.Since(led) > leaderless && len(c.servers()) > 1:
			return heard, errors.New("it has no leader")
		}
	}
	return heard, followError(ctx, stream.Err())
}

func (c *Client) tellDiverged(err error) {
	if c.cfg.OnDiverged != nil {
		c.cfg.OnDiverged(err)
	}
}

// following notes the subscription under way; nil: it is over.
func (c *Client) following(leave context.CancelCauseFunc, s source, checkpoints bool) {
	leaders, passes := c.leaders(), c.passes()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leave, c.current, c.asked = leave, s, checkpoints
	switch {
	case leave == nil:
		if c.move != nil {
			c.move.Stop()
			c.move = nil
		}
	case passes != checkpoints && !s.passed: // it has changed since the subscription was planned
		leave(errMoved)
	default:
		c.planMove(leaders)
	}
}

// subscription asks for what comes after a state.
func subscription(s *events.State) *skeinv1.SubscribeRequest {
	hash := s.Hash()
	return &skeinv1.SubscribeRequest{After: s.Index(), Hash: hash[:]}
}

func followError(ctx context.Context, err error) error {
	if connect.CodeOf(err) == connect.CodeAborted {
		return fmt.Errorf("%w: %s", ErrDiverged, connectMessage(err))
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err == nil {
		return errors.New("the server ended the stream")
	}
	return err
}

func indexOf(m *skeinv1.SubscribeResponse) uint64 {
	switch b := m.GetBody().(type) {
	case *skeinv1.SubscribeResponse_Snapshot:
		return b.Snapshot.GetIndex()
	case *skeinv1.SubscribeResponse_Batch:
		return last(b.Batch)
	case *skeinv1.SubscribeResponse_Heartbeat_:
		return b.Heartbeat.GetIndex()
	}
	return 0
}

// take applies one message. Raft may have brought some of it meanwhile, on a server.
func (c *Client) take(m *skeinv1.SubscribeResponse) error {
	r := c.cfg.Replica
	switch b := m.GetBody().(type) {
	case *skeinv1.SubscribeResponse_Snapshot:
		if b.Snapshot.GetIndex() <= r.State().Index() {
			return nil
		}
		return r.Reset(b.Snapshot)
	case *skeinv1.SubscribeResponse_Batch:
		if err := checkBatch(b.Batch); err != nil {
			return err
		}
		return r.catchUp(b.Batch)
	}
	return nil
}

// compare finds out whether the server has the same history. Servers that were recovered from too
// little are behind at first, so that their index is looked up in the own archive.
func (c *Client) compare(h *skeinv1.SubscribeResponse_Heartbeat) error {
	if len(h.GetHash()) != 32 || h.GetIndex() == 0 || h.GetIndex() > c.cfg.Replica.State().Index() {
		return nil
	}
	state, err := c.cfg.Replica.At(h.GetIndex())
	if err != nil || state.Hash() == [32]byte(h.GetHash()) {
		return nil // an index that the archive does not hold tells nothing
	}
	return fmt.Errorf("index %d: %w", h.GetIndex(), ErrDiverged)
}
