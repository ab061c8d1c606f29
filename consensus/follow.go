package consensus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	streamSilence = 3 * time.Second // three missed heartbeats: the next server is followed
	leaderless    = 5 * time.Second // a server that knows no leader for so long is left if there are others
	followMin     = 100 * time.Millisecond
	followMax     = 5 * time.Second
	compareEvery  = 10 * time.Second // between two comparisons with the history of a server that is behind
	raftSilence   = 5 * time.Second  // a server that has heard no leader for so long follows like an agent
)

// FollowStatus is the state of Follow.
type FollowStatus struct {
	Server    identity.ID // the followed server, or the followed leader of this node's site; zero: none
	Passed    bool        // Server is such a leader
	LastHeard time.Time   // last message; from a leader, the last one that showed that it keeps up with its server
	Index     uint64      // the server's index then
	Err       error       // why the last stream ended, nil once a new one works
	// Unconfirmed is why no server could be asked lately whether the leader passes on everything; nil: one could.
	Unconfirmed error
}

// Status returns the state of Follow.
func (c *Client) Status() FollowStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.status
}

// Follow keeps the replica up to date until the context ends. The events come from a leader of this node's site or from
// any server; when one falls silent, Follow changes to another. On a server it rests while Raft brings the log. It
// follows when Raft hears no leader, because a server that was away may not know the servers that lead now. It returns
// an error only when this node needs a person: for an event that it does not know, or a damaged file.
func (c *Client) Follow(ctx context.Context) error {
	wait := followMin
	for ctx.Err() == nil {
		if !c.raftIsSilent() {
			if !pause.For(ctx, time.Second) {
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
			heard = heard && !errors.Is(err, ErrDiverged) // the same server would report the same again
			if progress = heard; heard {
				break // choose anew among all sources
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

// raftIsSilent reports whether the log must come by subscription, because Raft does not bring it.
func (c *Client) raftIsSilent() bool {
	s := c.local()
	return s == nil || time.Since(s.LastContact()) > raftSilence
}

// sources returns the sources to follow, the best first.
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

// followOrder returns the servers in random order, without preference for the leader, so that the load spreads; the
// server that failed last comes last.
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
	repeated := c.status.Err != nil // on any server; it is logged once, since all of them may be away for hours
	c.status.Server, c.status.Passed, c.status.Err = id, s.passed, err
	c.mu.Unlock()
	switch {
	case errors.Is(err, errForged):
		c.log.Error("a leader of this site passed on events that no server has signed; it is not followed for a while",
			"leader", id, "error", err)
	case errors.Is(err, ErrDiverged):
		c.log.Error("this node's agreed history differs from a server's", "server", id, "error", err, "next", divergedNext)
		c.reportDiverged(fmt.Errorf("this node's agreed history differs from that of server %s: %w", id, err))
	case !repeated:
		c.log.Info("a subscription ended", "server", id, "error", err)
	}
}

// followOne follows one server until its stream ends, and reports whether it received anything.
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
		if err := c.apply(m); err != nil {
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
		if heard { // the server's first message comes before it refuses
			c.reportDiverged(nil)
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

func (c *Client) reportDiverged(err error) {
	if c.cfg.OnDiverged != nil {
		c.cfg.OnDiverged(err)
	}
}

// following notes the current subscription; leave is nil when it has ended.
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
	case passes != checkpoints && !s.passed: // the answer has changed since the subscription was planned
		leave(errMoved)
	default:
		c.planMove(leaders)
	}
}

// subscription returns the request for what comes after a state.
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

// apply applies one message. On a server, Raft may have brought part of it meanwhile.
func (c *Client) apply(m *skeinv1.SubscribeResponse) error {
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

// compare checks whether the server has the same history. The server may be behind, such as after a recovery from an
// old state: so this node looks up the server's index in its own archive.
func (c *Client) compare(h *skeinv1.SubscribeResponse_Heartbeat) error {
	if len(h.GetHash()) != 32 || h.GetIndex() == 0 || h.GetIndex() > c.cfg.Replica.State().Index() {
		return nil
	}
	state, err := c.cfg.Replica.At(h.GetIndex())
	if err != nil || state.Hash() == [32]byte(h.GetHash()) {
		return nil // equal, or not known: the archive does not hold this index
	}
	return fmt.Errorf("index %d: %w", h.GetIndex(), ErrDiverged)
}
