package consensus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// ClientConfig configures a Client.
type ClientConfig struct {
	Self    identity.ID
	Replica *Replica
	Dialer  Dialer
	Conns   *Conns         // to share [own ones over Dialer]
	Local   func() *Server // nil, or returning nil: this node is not a server
	// OnHeartbeat is called with each heartbeat of the followed server, once a second, unless the server's history
	// differs from this node's. It must not block; nil: it is not called.
	OnHeartbeat func(server identity.ID, h *skeinv1.SubscribeResponse_Heartbeat)
	// OnDiverged is called with an error when a server's history differs from this node's, and with nil once a server is
	// followed. It must not block; nil: it is not called.
	OnDiverged func(error)
	// Leaders returns the leaders of this node's site that pass events on, the best first. The client prefers them to
	// servers, and believes only what a server has signed. nil: there are none. It may be called at any time; see
	// LeadersChanged.
	Leaders func() []identity.ID
	// Passes reports whether this node passes events on, for which it needs servers' checkpoints. nil: it does not.
	Passes func() bool
	Log    *slog.Logger
}

const (
	proposeHold    = 30 * time.Second // for a command whose context has no deadline
	proposeAttempt = 4 * time.Second  // one server's time to answer, forwarding included
	hedgeAfter     = 400 * time.Millisecond
	retryMin       = 50 * time.Millisecond
	retryMax       = 300 * time.Millisecond
	behindFor      = 300 * time.Millisecond // how long a followed server may take to bring an agreed index
)

// Client hands commands to whoever leads, reads history, and keeps the replica of a node that does not
// get the log by Raft up to date.
type Client struct {
	cfg   ClientConfig
	log   *slog.Logger
	began time.Time

	mu      sync.Mutex
	leader  identity.ID // as last heard; zero if unknown
	status  FollowStatus
	leave   context.CancelCauseFunc // ends the current subscription; nil: there is none
	current source                  // of the current subscription
	asked   bool                    // the current subscription asks for checkpoints
	move    *time.Timer             // ends the subscription in favour of a better source
	hurry   chan struct{}           // ends the pause between two subscriptions

	backoffs map[identity.ID]backoff // about leaders of the site
	forged   int                     // how often one passed on what no server has signed
	fresh    freshness
	proof    *skeinv1.Checkpoint // of the server that is followed; nil: there was none yet
	provedAt time.Time
	proved   chan struct{} // closed when there is another

	expected  uint64        // the index that is known to be agreed
	expecting bool          // a timer checks whether the index has come
	patience  time.Duration // of the next such timer
}

// NewClient makes a client.
func NewClient(cfg ClientConfig) *Client {
	if cfg.Conns == nil {
		cfg.Conns = NewConns(cfg.Dialer)
	}
	return &Client{cfg: cfg, log: cfg.Log.With("component", "consensus"), began: time.Now(), hurry: make(chan struct{}, 1),
		proved: make(chan struct{})}
}

// Propose commits a command. It tries the local server, the leader, then all servers, again and again
// with the same request ID until one answers or the context ends (after 30 s if it has no deadline). A
// refusal is an *events.Error.
func (c *Client) Propose(ctx context.Context, cmd *skeinv1.Command) (*skeinv1.Answer, error) {
	if err := checkSize(cmd); err != nil { // a server would not read it to the end
		return nil, err
	}
	cmd = proto.CloneOf(cmd)
	if cmd.RequestId == "" {
		cmd.RequestId = NewRequestID()
	}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeFor(proposeHold, cmd))
		defer cancel()
	}
	wait := retryMin
	for {
		a, err := c.proposeOnce(ctx, cmd)
		var refusal *events.Error
		if err == nil || errors.As(err, &refusal) {
			c.Expect(a.GetIndex())
			return a, err
		}
		c.log.Debug("a command waits for a leader", "request", cmd.RequestId, "error", err)
		select {
		case <-time.After(max(wait/2, RetryAfter(err)) + rand.N(wait/2)):
			wait = min(2*wait, retryMax)
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: command %s: %w", ErrUncertain, cmd.RequestId, err)
		}
	}
}

// Expect says that an index is agreed, by the answer of another node. If the followed server does not bring it soon,
// its stream is ended, and so is a pause between two subscriptions: the server may be the leader whose death delayed a
// command, or its stream may hang. Each try without result doubles the time, since a line may only be slow.
func (c *Client) Expect(index uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.expectMore(index)
}

// expectMore starts the timer for the expected index, unless the index is here or the timer runs. The caller holds mu.
func (c *Client) expectMore(index uint64) {
	if c.cfg.Replica.State().Index() >= c.expected {
		c.patience = behindFor
	}
	if c.expecting {
		c.expected = max(c.expected, index)
		return
	}
	c.expected = index // even a lower index: servers that were recovered begin earlier
	if c.expecting = c.cfg.Replica.State().Index() < index; !c.expecting {
		return
	}
	patience := c.patience
	time.AfterFunc(patience, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.expecting = false
		if c.cfg.Replica.State().Index() >= index {
			c.expectMore(c.expected) // there may be more by now
			return
		}
		c.patience = min(2*patience, followMax)
		if c.leave != nil {
			c.leave(fmt.Errorf("index %d is agreed, but had not arrived here %s later", index, patience))
		}
		select {
		case c.hurry <- struct{}{}:
		default:
		}
	})
}

// proposeOnce asks every server that may help once.
func (c *Client) proposeOnce(ctx context.Context, cmd *skeinv1.Command) (*skeinv1.Answer, error) {
	failure := fmt.Errorf("%w: this node knows no other server", ErrNoServer)
	if s := c.local(); s != nil {
		own := proto.CloneOf(cmd)
		own.Issuer = c.cfg.Self.String()
		attempt, cancel := context.WithTimeout(ctx, timeFor(proposeAttempt, cmd))
		a, err := s.Propose(attempt, own)
		cancel()
		var other *NotLeaderError
		if !errors.As(err, &other) {
			return a, err
		}
		failure = err
		c.heardLeader(other.Leader)
	}
	return c.askServers(ctx, cmd, failure)
}

// askServers asks one server after the other: the next as soon as one has failed, or has been silent for
// a while, since a server that was killed says nothing. Being asked twice changes nothing: the request
// ID is the same. The first answer counts.
func (c *Client) askServers(ctx context.Context, cmd *skeinv1.Command, failure error) (*skeinv1.Answer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		id     identity.ID
		answer *skeinv1.Answer
		err    error
	}
	servers := c.servers()
	results := make(chan result, len(servers))
	asked, open := 0, 0
	ask := func() {
		id := servers[asked]
		asked, open = asked+1, open+1
		go func() {
			a, err := c.proposeTo(ctx, id, cmd)
			results <- result{id, a, err}
		}()
	}
	next := time.NewTicker(hedgeAfter)
	defer next.Stop()
	for {
		if open == 0 {
			if asked == len(servers) {
				return nil, failure
			}
			ask()
		}
		select {
		case r := <-results:
			open--
			var refusal *events.Error
			if r.err == nil || errors.As(r.err, &refusal) {
				return r.answer, r.err
			}
			failure = fmt.Errorf("server %s: %w", r.id, r.err)
		case <-next.C:
			if asked < len(servers) {
				ask()
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", ctx.Err(), failure)
		}
	}
}

func (c *Client) proposeTo(ctx context.Context, id identity.ID, cmd *skeinv1.Command) (*skeinv1.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, timeFor(proposeAttempt, cmd))
	defer cancel()
	r, err := c.cfg.Conns.Cluster(id).Propose(ctx, &skeinv1.ProposeRequest{Command: cmd})
	switch code := connect.CodeOf(err); {
	case err == nil && r.GetAnswer().GetErrorCode() != "":
		return nil, &events.Error{Code: events.Code(r.GetAnswer().GetErrorCode()), Message: r.GetAnswer().GetErrorMessage()}
	case err == nil:
		return r.GetAnswer(), nil
	case code == connect.CodePermissionDenied || code == connect.CodeInvalidArgument:
		return nil, &events.Error{Code: events.Code(code.String()), Message: connectMessage(err)}
	}
	return nil, err
}

func connectMessage(err error) string {
	var e *connect.Error
	if errors.As(err, &e) {
		return e.Message()
	}
	return err.Error()
}

func (c *Client) local() *Server {
	if c.cfg.Local == nil {
		return nil
	}
	return c.cfg.Local()
}

// servers are the other servers: the leader first, voters before the rest, otherwise in random order
// so that agents spread.
func (c *Client) servers() []identity.ID {
	c.mu.Lock()
	leader := c.leader
	c.mu.Unlock()
	var voters, rest []identity.ID
	for _, s := range c.cfg.Replica.State().Servers() {
		id, err := identity.ParseID(s.NodeId)
		switch {
		case err != nil || id == c.cfg.Self || id == leader:
		case s.Voter:
			voters = append(voters, id)
		default:
			rest = append(rest, id)
		}
	}
	rand.Shuffle(len(voters), func(i, j int) { voters[i], voters[j] = voters[j], voters[i] })
	out := append(voters, rest...)
	if c.cfg.Replica.State().Server(leader) != nil && leader != c.cfg.Self {
		out = append([]identity.ID{leader}, out...)
	}
	return out
}

// Leader returns the leader as this node's own server or the followed one names it; unknown while there is none.
func (c *Client) Leader() (identity.ID, bool) {
	if s := c.local(); s != nil {
		if id, ok := s.Leader(); ok {
			return id, true
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leader.IsZero() || time.Since(c.status.LastHeard) > streamSilence {
		return identity.ID{}, false
	}
	return c.leader, true
}

func (c *Client) heardLeader(id identity.ID) {
	c.mu.Lock()
	c.leader = id
	c.mu.Unlock()
}

// ReadState returns the state at an index (0: the newest here), from the own archive or that of a server.
func (c *Client) ReadState(ctx context.Context, at uint64) (*events.State, error) {
	state, err := c.cfg.Replica.At(at)
	if err == nil || !errors.Is(err, ErrGone) {
		return state, err
	}
	failure := err
	for _, id := range c.servers() {
		r, err := Patiently(ctx, proposeAttempt, func(ctx context.Context) (*skeinv1.ReadStateResponse, error) {
			return c.cfg.Conns.Cluster(id).ReadState(ctx, &skeinv1.ReadStateRequest{At: at})
		})
		if err == nil {
			return events.FromProto(r.GetState())
		}
		if connect.CodeOf(err) != connect.CodeNotFound {
			failure = errors.Join(failure, fmt.Errorf("server %s: %w", id, err))
		}
	}
	return nil, failure
}

// ReadEvents returns events from the own archive, or from a server's if that reaches further back. With ErrUnanswered
// it returns what the own archive has: events are missing, and a server that may have them did not answer.
func (c *Client) ReadEvents(ctx context.Context, after uint64,
	limit int) (evs []*skeinv1.Event, firstAvailable, last uint64, err error) {
	evs, firstAvailable, last, err = c.cfg.Replica.Events(after, limit)
	if err != nil || after+1 >= firstAvailable {
		return evs, firstAvailable, last, err
	}
	var silent []error
	for _, id := range c.servers() {
		r, err := Patiently(ctx, proposeAttempt, func(ctx context.Context) (*skeinv1.ReadEventsResponse, error) {
			return c.cfg.Conns.Cluster(id).ReadEvents(ctx, &skeinv1.ReadEventsRequest{After: after,
				Limit: uint32(max(limit, 0))})
		})
		if err == nil && r.GetFirstAvailable() < firstAvailable {
			return r.GetEvents(), r.GetFirstAvailable(), r.GetLast(), nil
		}
		if err != nil {
			silent = append(silent, fmt.Errorf("server %s: %w", id, err))
		}
	}
	if len(silent) > 0 {
		err = fmt.Errorf("%w: %w", ErrUnanswered, errors.Join(silent...))
	}
	return evs, firstAvailable, last, err
}
