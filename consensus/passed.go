package consensus

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// A node follows a leader of its site as it follows a server, but believes only what a server has signed: see
// docs/decisions/0059-events-by-site.md.

const (
	passedBytes = 16 << 20 // of one message, and of all events that wait for a checkpoint
	// freshFor is how old the newest checkpoint may be. A leader whose server falls silent needs streamSilence, and a
	// moment more, to get a checkpoint from another server.
	freshFor   = 7 * time.Second
	auditSoon  = 5 * time.Second // before the first audit, at most, while the clock of the server that signs is unknown
	auditEvery = time.Minute     // between two audits, give or take half
	auditAgain = 10 * time.Second
	auditWait  = 3 * time.Second // for one server's answer

	backoffMin    = 10 * time.Second // after the first failure of a leader; doubles with each further one
	backoffMax    = 5 * time.Minute
	backoffForged = 10 * time.Minute // after a leader passed on what no server has signed
	backoffReset  = time.Minute      // a leader that was followed for so long starts again with backoffMin
	moveWithin    = time.Second      // before a move to a better source, so that not all nodes of a site move at once
)

// errMoved ends a stream in favour of a better source.
var errMoved = errors.New("there is a better source of the events")

// source is a node that the events come from.
type source struct {
	id     identity.ID
	passed bool // it is a leader of this node's site, and no server
}

// backoff says when a leader that failed may be followed again.
type backoff struct {
	until time.Time
	fails int
}

// after returns the backoff of a leader after one more failure. followed is how long it was followed before it failed.
func (d backoff) after(err error, followed time.Duration, now time.Time) backoff {
	if followed >= backoffReset {
		d.fails = 0
	}
	d.fails = min(d.fails+1, 8)
	wait := min(backoffMin<<(d.fails-1), backoffMax)
	if errors.Is(err, errForged) {
		wait = backoffForged
	}
	d.until = now.Add(wait)
	return d
}

// order returns the sources to follow, the best first: leaders that are not in backoff, then the servers. A leader that
// is a server is followed as a server.
func order(leaders, servers []identity.ID, backoffs map[identity.ID]backoff, now time.Time) (out []source) {
	for _, id := range leaders {
		if !now.Before(backoffs[id].until) {
			out = append(out, source{id, !slices.Contains(servers, id)})
		}
	}
	for _, id := range servers {
		if !slices.ContainsFunc(out, func(s source) bool { return s.id == id }) {
			out = append(out, source{id, false})
		}
	}
	return out
}

// moveAt returns when to leave a source for a better one if nothing changes until then; zero: never.
func moveAt(current source, leaders []identity.ID, backoffs map[identity.ID]backoff, now time.Time) (at time.Time) {
	place := slices.Index(leaders, current.id)
	if current.passed && place < 0 {
		return now
	}
	for i, id := range leaders {
		if i == place {
			break
		}
		from := backoffs[id].until
		if from.Before(now) {
			from = now
		}
		if at.IsZero() || from.Before(at) {
			at = from
		}
	}
	return at
}

// freshness judges by checkpoints whether a leader passes on what its server said last, or holds it back. Servers'
// clocks may be wrong: each is compared with this host's clock when the server itself is heard.
type freshness struct {
	newest map[identity.ID]int64 // the time in the newest checkpoint of each server, Unix nanoseconds
	// ahead is this host's time (sinceStart) minus a server's time; missing until the server itself was heard.
	ahead map[identity.ID]time.Duration
}

// errStale means that a leader passes on old checkpoints only.
var errStale = errors.New("the events that are passed on are late")

// heard notes a server's clock at a moment when the server itself was heard.
func (f *freshness) heard(server identity.ID, at int64, local time.Duration) {
	if f.newest == nil {
		f.newest, f.ahead = make(map[identity.ID]int64), make(map[identity.ID]time.Duration)
	}
	f.ahead[server] = local - time.Duration(at)
	f.newest[server] = at
}

// knows reports whether the server's clock is known.
func (f *freshness) knows(server identity.ID) bool { _, ok := f.ahead[server]; return ok }

// judge takes a checkpoint that a leader passed on, and reports whether it is newer than those before.
func (f *freshness) judge(server identity.ID, at int64, local time.Duration) (fresh bool, err error) {
	ahead, known := f.ahead[server]
	if age := local - time.Duration(at) - ahead; known && age > freshFor {
		delete(f.ahead, server) // the server's clock may have been set: it is compared anew
		return false, fmt.Errorf("%w: server %s has signed it %s ago", errStale, server, age.Round(time.Second))
	}
	if at <= f.newest[server] {
		return false, nil
	}
	if f.newest == nil {
		f.newest, f.ahead = make(map[identity.ID]int64), make(map[identity.ID]time.Duration)
	}
	f.newest[server] = at
	return true, nil
}

// unproven holds events that a leader passed on, until a checkpoint comes for them.
type unproven struct {
	base  uint64
	evs   []*skeinv1.Event
	bytes int
}

func (u *unproven) end() uint64 { return u.base + uint64(len(u.evs)) }

// add takes one message of a leader. When a checkpoint comes, it returns the events that the checkpoint covers. The
// caller checks that the state after them has the checkpoint's hash.
func (u *unproven) add(m *skeinv1.SubscribeResponse,
	state *events.State) (news *skeinv1.Batch, c *skeinv1.Checkpoint, err error) {
	if m.GetSnapshot() != nil {
		return nil, nil, fmt.Errorf("%w: a whole state was sent, which servers alone do", errForged)
	}
	if b := m.GetBatch(); b != nil {
		if err := checkBatch(b); err != nil {
			return nil, nil, fmt.Errorf("%w: %v", errForged, err)
		}
		if b.GetBase() != u.end() {
			return nil, nil, fmt.Errorf("%w: events follow on index %d, those before end at %d", errForged, b.GetBase(), u.end())
		}
		u.evs = append(u.evs, b.GetEvents()...)
		if u.bytes += proto.Size(b); u.bytes > passedBytes || len(u.evs) > 2*passedMost {
			return nil, nil, fmt.Errorf("%w: %d events, of %d bytes, without a checkpoint", errForged, len(u.evs), u.bytes)
		}
	}
	c = m.GetCheckpoint()
	if c == nil {
		return nil, nil, nil
	}
	if _, err := verifyCheckpoint(state, c); err != nil {
		return nil, nil, err
	}
	switch {
	case c.GetIndex() > u.end():
		return nil, nil, fmt.Errorf("a checkpoint for index %d came, and no events after %d", c.GetIndex(), u.end())
	case len(u.evs) > 0 && c.GetIndex() != u.end():
		return nil, nil, fmt.Errorf("%w: events up to index %d came with a checkpoint for %d", errForged,
			u.end(), c.GetIndex())
	case len(u.evs) > 0:
		news = &skeinv1.Batch{Base: u.base, Events: u.evs}
		*u = unproven{base: u.end()}
	}
	return news, c, nil
}

// leaders returns the leaders of this node's site that it may follow, the best first.
func (c *Client) leaders() []identity.ID {
	if c.cfg.Leaders == nil || c.local() != nil || c.passes() { // a node that passes events on follows servers only
		return nil
	}
	return slices.DeleteFunc(slices.Clone(c.cfg.Leaders()), func(id identity.ID) bool { return id == c.cfg.Self })
}

// passes reports whether this node passes events on, for which it needs checkpoints.
func (c *Client) passes() bool { return c.cfg.Passes != nil && c.local() == nil && c.cfg.Passes() }

// LeadersChanged must be called when Leaders or Passes gives another answer than before. The client then leaves a
// source that is no longer a leader, or not the best one.
func (c *Client) LeadersChanged() {
	leaders, passes := c.leaders(), c.passes()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leave == nil {
		return
	}
	if passes != c.asked && !c.current.passed {
		c.leave(errMoved)
		return
	}
	c.planMove(leaders)
}

// planMove schedules the end of the current stream if there is a better source, or will be. The caller holds mu.
func (c *Client) planMove(leaders []identity.ID) {
	if c.move != nil {
		c.move.Stop()
		c.move = nil
	}
	now := time.Now()
	at := moveAt(c.current, leaders, c.backoffs, now)
	if at.IsZero() {
		return
	}
	wait := at.Sub(now) + rand.N(moveWithin)
	if c.current.passed && !slices.Contains(leaders, c.current.id) {
		wait = 0
	}
	leave := c.leave
	c.move = time.AfterFunc(wait, func() { leave(errMoved) })
}

// backOff records that a leader has failed.
func (c *Client) backOff(id identity.ID, err error, followed time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.backoffs == nil {
		c.backoffs = make(map[identity.ID]backoff)
	}
	c.backoffs[id] = c.backoffs[id].after(err, followed, time.Now())
	if errors.Is(err, errForged) {
		c.forged++
	}
}

// Forged returns how often a leader of this node's site passed on what no server has signed.
func (c *Client) Forged() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.forged
}

// sinceStart is this host's monotonic time, which nobody can set.
func (c *Client) sinceStart() time.Duration { return time.Since(c.began) }

// followPassed follows a leader of this node's site until its stream ends, and reports whether it received anything
// that a server has signed.
func (c *Client) followPassed(ctx context.Context, id identity.ID) (heard bool, err error) {
	var auditing sync.WaitGroup
	ctx, cancel := context.WithCancelCause(ctx)
	defer func() {
		cancel(nil)
		auditing.Wait()
	}()
	c.following(cancel, source{id, true}, false)
	defer c.following(nil, source{}, false)
	silence := time.AfterFunc(streamSilence, func() { cancel(fmt.Errorf("nothing heard for %s", streamSilence)) })
	defer silence.Stop()
	stale := time.AfterFunc(freshFor, func() { cancel(fmt.Errorf("%w: nothing new for %s", errStale, freshFor)) })
	defer stale.Stop()
	at := c.cfg.Replica.State().Index()
	stream, err := c.cfg.Conns.passer(id).Subscribe(ctx, &skeinv1.SubscribeRequest{After: at, Checkpoints: true})
	if err != nil {
		return false, passedError(ctx, err)
	}
	defer stream.Close()
	signers := make(chan identity.ID, 1)
	auditing.Go(func() { c.audit(ctx, signers) })
	waiting, signedBy := unproven{base: at}, identity.ID{}
	for stream.Receive() {
		silence.Reset(streamSilence)
		m := stream.Msg()
		point, fresh, err := c.applyPassed(&waiting, m)
		if err != nil {
			return heard, err
		}
		if !fresh {
			continue
		}
		stale.Reset(freshFor)
		if by, _ := identity.ParseID(point.GetServer()); by != signedBy {
			signedBy = by
			select {
			case <-signers: // the signer before has not been audited yet
			default:
			}
			signers <- by
		}
		if !heard {
			c.log.Info("following the agreed state by a leader of this site", "leader", id, "index",
				c.cfg.Replica.State().Index())
			c.reportDiverged(nil)
		}
		heard = true
		c.mu.Lock()
		c.status = FollowStatus{Server: id, Passed: true, LastHeard: time.Now(), Index: max(c.status.Index, point.GetIndex()),
			Unconfirmed: c.status.Unconfirmed}
		c.mu.Unlock()
	}
	return heard, passedError(ctx, stream.Err())
}

// passedError returns why a leader's stream ended. It quotes the leader's error as text only: a leader's error code
// must have no effect, since only a server may say that this node's history differs.
func passedError(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err == nil {
		return errors.New("the leader ended the stream")
	}
	return fmt.Errorf("the leader says: %s", connectMessage(err))
}

// applyPassed applies what a message proves. fresh reports whether the message shows that the leader keeps up with its
// server.
func (c *Client) applyPassed(waiting *unproven,
	m *skeinv1.SubscribeResponse) (point *skeinv1.Checkpoint, fresh bool, err error) {
	state := c.cfg.Replica.State()
	news, point, err := waiting.add(m, state)
	if err != nil || point == nil {
		return nil, false, err
	}
	if news != nil {
		if err := c.cfg.Replica.catchUpTo(news, [32]byte(point.GetHash())); err != nil {
			return nil, false, err
		}
	}
	state = c.cfg.Replica.State()
	switch {
	case state.Index() > point.GetIndex(): // the leader is behind; it is left if it stays so
		return point, false, nil
	case state.Hash() != [32]byte(point.GetHash()):
		return nil, false, fmt.Errorf("%w: the state at index %d has another hash here than a server has signed",
			errForged, state.Index())
	}
	signer, _ := identity.ParseID(point.GetServer())
	c.mu.Lock()
	fresh, err = c.fresh.judge(signer, point.GetTime(), c.sinceStart())
	if fresh {
		c.leader, _ = identity.ParseID(point.GetLeader())
	}
	c.mu.Unlock()
	if fresh && c.cfg.OnHeartbeat != nil {
		c.cfg.OnHeartbeat(signer, &skeinv1.SubscribeResponse_Heartbeat{Index: point.GetIndex(), Hash: point.GetHash(),
			Time: point.GetTime(), Leader: point.GetLeader()})
	}
	return point, fresh, err
}

// audit asks a server from time to time how far the log is. That reveals a leader which holds back what servers sign.
// The first audit comes early while the clock of the server that signs the checkpoints is unknown.
func (c *Client) audit(ctx context.Context, signers <-chan identity.ID) {
	next := time.NewTimer(auditEvery/2 + rand.N(auditEvery))
	defer next.Stop()
	var signer identity.ID
	for {
		select {
		case signer = <-signers:
			c.mu.Lock()
			known := c.fresh.knows(signer)
			c.mu.Unlock()
			if !known {
				next.Reset(rand.N(auditSoon))
			}
			continue
		case <-next.C:
		case <-ctx.Done():
			return
		}
		err := c.ask(ctx, signer)
		if ctx.Err() != nil {
			return
		}
		c.mu.Lock()
		c.status.Unconfirmed = err
		c.mu.Unlock()
		if next.Reset(auditEvery/2 + rand.N(auditEvery)); err != nil {
			c.log.Debug("no server could be asked how far the log is", "error", err)
			next.Reset(auditAgain + rand.N(auditAgain))
		}
	}
}

// ask asks the servers in turn how far the log is, until one answers. The server that signs the checkpoints comes
// first.
func (c *Client) ask(ctx context.Context, first identity.ID) error {
	failure := fmt.Errorf("%w: this node knows no server", ErrNoServer)
	servers := c.servers()
	rand.Shuffle(len(servers), func(i, j int) { servers[i], servers[j] = servers[j], servers[i] })
	if i := slices.Index(servers, first); i > 0 {
		servers[0], servers[i] = servers[i], servers[0]
	}
	for _, id := range servers {
		asking, cancel := context.WithTimeout(ctx, auditWait)
		r, err := c.cfg.Conns.Cluster(id).ReadEvents(asking, &skeinv1.ReadEventsRequest{After: math.MaxUint64, Limit: 1})
		cancel()
		if err != nil {
			failure = fmt.Errorf("server %s: %w", id, err)
			continue
		}
		c.mu.Lock()
		c.fresh.heard(id, r.GetTime(), c.sinceStart())
		c.mu.Unlock()
		c.Expect(r.GetLast())
		return nil
	}
	return failure
}

// prove keeps a checkpoint of the followed server, for the nodes that get the events from this one.
func (c *Client) prove(server identity.ID, point *skeinv1.Checkpoint) {
	state := c.cfg.Replica.State()
	if point == nil || point.GetIndex() > state.Index() {
		return
	}
	if by, err := verifyCheckpoint(state, point); err != nil || by != server {
		return // other nodes would refuse it
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.proof, c.provedAt = point, time.Now()
	close(c.proved)
	c.proved = make(chan struct{})
}

// Proof returns the newest checkpoint of the followed server up to which this node has the events, and a channel that
// is closed when there is another. nil: no server was heard within freshFor, or Passes reports that none is needed.
func (c *Client) Proof() (*skeinv1.Checkpoint, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.proof == nil || time.Since(c.provedAt) > freshFor {
		return nil, c.proved
	}
	return c.proof, c.proved
}
