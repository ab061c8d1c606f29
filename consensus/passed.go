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

// A node follows a leader of its site as it follows a server, and believes it nothing: see
// docs/decisions/0059-events-by-site.md.

const (
	passedBytes = 16 << 20 // of one message, and of all events that wait for a checkpoint
	// freshFor is how old the newest checkpoint may be. A leader whose server falls silent needs streamSilence and a
	// moment to have another one.
	freshFor   = 7 * time.Second
	auditSoon  = 5 * time.Second // until the clock of a server is known that signs, at most
	auditEvery = time.Minute     // between two questions to a server, give or take half
	auditAgain = 10 * time.Second
	auditWait  = 3 * time.Second // for one server's answer

	backoffMin    = 10 * time.Second // so long a leader that failed is not followed, twice as long each time
	backoffMax    = 5 * time.Minute
	backoffForged = 10 * time.Minute // and one that passed on what no server has signed
	backoffReset  = time.Minute      // followed for so long, it is as good as new
	moveWithin    = time.Second      // to a better source: not all nodes of a site at once
)

// errMoved ends a stream in favour of a better source.
var errMoved = errors.New("there is a better source of the events")

// source is whom the events come from.
type source struct {
	id     identity.ID
	passed bool // a leader of this node's site, which is no server
}

// backoff is when a leader that failed may be followed again.
type backoff struct {
	until time.Time
	fails int
}

// after is the backoff of a leader that has failed once more, after it was followed for some time.
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

// order is whom to follow, the best first: leaders that are not in backoff, then the servers. A leader that is a server
// counts as one.
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

// moveAt is when a source is to be left for a better one if nothing changes until then; zero: never.
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

// freshness judges by checkpoints whether a leader shows what its server said last, or something older. Clocks of
// servers need not be right: each server's is compared with this host's when the server itself is heard.
type freshness struct {
	newest map[identity.ID]int64 // the time in the newest checkpoint of each server
	// of this host's time before a server's; unknown until the server was heard itself
	ahead map[identity.ID]time.Duration
}

// errStale is a leader that shows old checkpoints.
var errStale = errors.New("the events that are passed on are late")

// heard takes what a server's clock showed when the server itself was heard.
func (f *freshness) heard(server identity.ID, at int64, local time.Duration) {
	if f.newest == nil {
		f.newest, f.ahead = make(map[identity.ID]int64), make(map[identity.ID]time.Duration)
	}
	f.ahead[server] = local - time.Duration(at)
	f.newest[server] = at
}

// knows reports whether the server's clock is known.
func (f *freshness) knows(server identity.ID) bool { _, ok := f.ahead[server]; return ok }

// judge takes a checkpoint that was passed on, and reports whether it is news.
func (f *freshness) judge(server identity.ID, at int64, local time.Duration) (fresh bool, err error) {
	ahead, known := f.ahead[server]
	if age := local - time.Duration(at) - ahead; known && age > freshFor {
		delete(f.ahead, server) // its clock may have been set: it is asked anew
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

// unproven are events that were passed on and wait for a checkpoint.
type unproven struct {
	base  uint64
	evs   []*skeinv1.Event
	bytes int
}

func (u *unproven) end() uint64 { return u.base + uint64(len(u.evs)) }

// take takes one message of a leader. With a checkpoint come the events that it is for, of which the state after them
// has to have the checkpoint's hash.
func (u *unproven) take(m *skeinv1.SubscribeResponse,
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

// leaders are those of this node's site that may be followed, the best first.
func (c *Client) leaders() []identity.ID {
	if c.cfg.Leaders == nil || c.local() != nil || c.passes() { // what is passed on comes from servers alone
		return nil
	}
	return slices.DeleteFunc(slices.Clone(c.cfg.Leaders()), func(id identity.ID) bool { return id == c.cfg.Self })
}

// passes reports whether this node passes events on and needs checkpoints for that.
func (c *Client) passes() bool { return c.cfg.Passes != nil && c.local() == nil && c.cfg.Passes() }

// LeadersChanged tells that Leaders or Passes have another answer than before: a source that is no leader any more is
// left, and so is one that is not the best.
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

// planMove has the stream under way end when there is a better source. The caller has mu.
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

// backOff notes that a leader has failed.
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

// Forged is how often a leader of this node's site passed on what no server has signed.
func (c *Client) Forged() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.forged
}

// sinceStart is this host's time, as nobody sets it.
func (c *Client) sinceStart() time.Duration { return time.Since(c.began) }

// followPassed follows a leader of this node's site until its stream ends, and reports whether anything came that a
// server has signed.
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
		point, fresh, err := c.takePassed(&waiting, m)
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
			case <-signers: // the one before was not asked about yet
			default:
			}
			signers <- by
		}
		if !heard {
			c.log.Info("following the agreed state by a leader of this site", "leader", id, "index",
				c.cfg.Replica.State().Index())
			c.tellDiverged(nil)
		}
		heard = true
		c.mu.Lock()
		c.status = FollowStatus{Server: id, Passed: true, LastHeard: time.Now(), Index: max(c.status.Index, point.GetIndex()),
			Unconfirmed: c.status.Unconfirmed}
		c.mu.Unlock()
	}
	return heard, passedError(ctx, stream.Err())
}

// passedError is why a leader's stream ended. What the leader says of that is nobody's word but its own.
func passedError(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err == nil {
		return errors.New("the leader ended the stream")
	}
	return fmt.Errorf("the leader says: %s", connectMessage(err))
}

// takePassed applies what a message proves. fresh: it shows that the leader is where its server is.
func (c *Client) takePassed(waiting *unproven,
	m *skeinv1.SubscribeResponse) (point *skeinv1.Checkpoint, fresh bool, err error) {
	state := c.cfg.Replica.State()
	news, point, err := waiting.take(m, state)
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
	case state.Index() > point.GetIndex(): // it is behind, and is left if it stays so
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

// audit asks servers themselves, now and then, how far the log is: a leader that holds back what servers sign is found
// by that. It begins early while the clock of the server is not known whose checkpoints come.
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

// ask has a server tell how far it is, the one first whose checkpoints come.
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

// prove keeps a checkpoint of the server that this node follows, for those that it passes events on to.
func (c *Client) prove(server identity.ID, point *skeinv1.Checkpoint) {
	state := c.cfg.Replica.State()
	if point == nil || point.GetIndex() > state.Index() {
		return
	}
	if by, err := verifyCheckpoint(state, point); err != nil || by != server {
		return // nobody would take it
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.proof, c.provedAt = point, time.Now()
	close(c.proved)
	c.proved = make(chan struct{})
}

// Proof is the newest checkpoint of the server that this node follows, up to which it has the events, and a channel
// that is closed when there is another. nil: no server was heard lately, or Passes says that none is needed.
func (c *Client) Proof() (*skeinv1.Checkpoint, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.proof == nil || time.Since(c.provedAt) > freshFor {
		return nil, c.proved
	}
	return c.proof, c.proved
}
