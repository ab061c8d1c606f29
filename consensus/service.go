package consensus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	leaderHold     = 3 * time.Second // how long a server holds a command while nobody leads; less than proposeAttempt
	leaderAgain    = 50 * time.Millisecond
	forwardTimeout = 2 * time.Second // for the leader's answer to a forwarded command
	heartbeatEvery = time.Second
	streamEvents   = 256  // in one message of a subscription
	maxSubscribers = 4096 // per server
	maxReadEvents  = 1000 // in one answer
	compressAbove  = 8 << 10
)

// ServiceConfig says what a Service serves.
type ServiceConfig struct {
	Self    identity.ID
	Replica *Replica
	Server  func() *Server // nil, or returning nil: this node is not a server
	Conns   *Conns         // for forwarding
	Log     *slog.Logger
	// Key signs this server's checkpoints; nil: it makes none.
	Key *identity.Key
	// Pass returns why a node must not get the events from this node, which is not a server. nil: no node may.
	Pass func(identity.ID) error
	// Proof returns the newest checkpoint up to which this node can pass events on, nil if it has none, and a channel
	// that is closed when there is another; see Client.Proof.
	Proof func() (*skeinv1.Checkpoint, <-chan struct{})
	// FilterTest answers a STUN request on behalf of another node; nil if this node cannot.
	FilterTest func(ctx context.Context, peer identity.ID, r *skeinv1.FilterTestRequest) error
	// Holder returns which pod of this node has an address; nil if this node has no pods.
	Holder func(*skeinv1.HolderRequest) (*skeinv1.HolderResponse, error)
	// PeerPaths returns how this node reaches its peers; nil if it has no tunnel.
	PeerPaths func() []*skeinv1.PeerPath
	// Plan and PlanSteps return what this node's kernel should hold, and how that changed; nil if it has no data plane.
	Plan      func(*skeinv1.PlanRequest) (*skeinv1.PlanResponse, error)
	PlanSteps func(*skeinv1.PlanStepsRequest) (*skeinv1.PlanStepsResponse, error)
}

// Service is the ClusterService of a node: every server has one, and other nodes may.
type Service struct {
	cfg         ServiceConfig
	log         *slog.Logger
	subscribers atomic.Int64
	passing     passing
	signer      signer
	began       time.Time // heartbeats are due at multiples of heartbeatEvery from here
}

var _ skeinv1connect.ClusterServiceHandler = (*Service)(nil)

// NewService makes the service.
func NewService(cfg ServiceConfig) *Service {
	return &Service{cfg: cfg, log: cfg.Log.With("component", "consensus"), began: time.Now()}
}

// Handler returns the path and handler to mount.
func (s *Service) Handler() (string, http.Handler) {
	return skeinv1connect.NewClusterServiceHandler(s, connect.WithReadMaxBytes(maxRequest),
		connect.WithCompressMinBytes(compressAbove))
}

func (s *Service) server() *Server {
	if s.cfg.Server == nil {
		return nil
	}
	return s.cfg.Server()
}

// member returns the caller, if it is a member of the cluster.
func (s *Service) member(ctx context.Context) (identity.ID, error) {
	id, ok := PeerFromContext(ctx)
	if !ok {
		return id, connect.NewError(connect.CodeUnauthenticated, errors.New("the caller is unknown: it did not come over "+
			"the control net"))
	}
	if err := checkMember(s.cfg.Replica.State(), id); err != nil {
		return id, err
	}
	return id, nil
}

// upToOwnRevocation cuts events after the one that revokes a node, because the next event is a new gossip key, which
// the node must not get. It returns none if the node's revocation is not among the events.
func upToOwnRevocation(evs []*skeinv1.Event, node identity.ID) []*skeinv1.Event {
	id := node.String()
	return evs[:1+slices.IndexFunc(evs, func(e *skeinv1.Event) bool { return e.GetNodeRevoked().GetNodeId() == id })]
}

// checkMember refuses a revoked node for good and an unknown one for now: it may have been admitted
// after this replica's index.
func checkMember(state *events.State, id identity.ID) error {
	switch {
	case state.Node(id) != nil:
		return nil
	case state.Revoked(id) != nil:
		return connect.NewError(connect.CodePermissionDenied, fmt.Errorf("node %s was revoked", id))
	}
	return connect.NewError(connect.CodeUnavailable, fmt.Errorf("node %s is not a member as of index %d",
		id, state.Index()))
}

// Propose commits a command, or forwards it once to the leader. The issuer is the calling node. A forwarded command
// names its issuer itself, which is accepted from voters only: a voter got the command from the issuer. A refusal is an
// answer with an error code; an RPC error means that the caller should try again, elsewhere or later, unless it denies
// permission.
func (s *Service) Propose(ctx context.Context, r *skeinv1.ProposeRequest) (*skeinv1.ProposeResponse, error) {
	peer, err := s.member(ctx)
	if err != nil {
		return nil, err
	}
	if r.GetCommand() == nil || r.GetCommand().GetRequestId() == "" {
		return nil, connect.NewError(connect.CodeInvalidArgument,
			errors.New("the command is missing or carries no request ID"))
	}
	server := s.server()
	if server == nil {
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("this node is not a server: ask a server"))
	}
	c := proto.CloneOf(r.GetCommand())
	c.Time, c.Entropy = 0, nil // the leader sets these
	if !r.GetForwarded() {
		c.Issuer = peer.String()
	} else if !server.votes(peer) {
		// The refusal is not final: the issuer should ask another server, and the calling server may soon vote.
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("node %s does not vote and may not hand on "+
			"commands of others: ask a voter", peer))
	}
	a, err := s.commit(ctx, server, c, r.GetForwarded())
	return answered(a, err)
}

// commit proposes a command or forwards it to the leader. While nobody leads, it holds the command for leaderHold.
func (s *Service) commit(ctx context.Context, server *Server, c *skeinv1.Command,
	forwarded bool) (*skeinv1.Answer, error) {
	hold := time.NewTimer(leaderHold)
	defer hold.Stop()
	for {
		news := server.leader.wait()
		a, err := server.Propose(ctx, c)
		var other *NotLeaderError
		if !errors.As(err, &other) {
			return a, err
		}
		if !forwarded && !server.votes(s.cfg.Self) {
			return nil, errors.New("this server has no vote and may not hand commands on: ask another")
		}
		if !other.Leader.IsZero() && !forwarded {
			a, err := s.forward(ctx, other.Leader, c, news)
			if !errors.Is(err, errNewLeader) {
				return a, err
			}
			continue
		}
		select {
		case <-news:
		case <-time.After(leaderAgain): // leadership may begin a moment after its news
		case <-hold.C:
			return nil, err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// errNewLeader ends a forward to a server that leads no more.
var errNewLeader = errors.New("the leader changed")

// forward hands a command to the leader. It gives up with errNewLeader as soon as the leader changes: the old one may
// be dead, and only a time-out would show that.
func (s *Service) forward(ctx context.Context, leader identity.ID, c *skeinv1.Command,
	news <-chan struct{}) (*skeinv1.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, timeFor(forwardTimeout, c))
	defer cancel()
	changed, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	go func() {
		select {
		case <-news:
			giveUp(errNewLeader)
		case <-changed.Done():
		}
	}()
	r, err := s.cfg.Conns.Cluster(leader).Propose(changed, &skeinv1.ProposeRequest{Command: c, Forwarded: true})
	if err != nil && errors.Is(context.Cause(changed), errNewLeader) {
		return nil, errNewLeader
	}
	if err != nil {
		return nil, fmt.Errorf("%w: forward to node %s: %w", ErrUncertain, leader, err)
	}
	return r.GetAnswer(), nil
}

// answered puts a refusal into the answer, and makes everything else an RPC error.
func answered(a *skeinv1.Answer, err error) (*skeinv1.ProposeResponse, error) {
	var refusal *events.Error
	switch {
	case err == nil:
		return &skeinv1.ProposeResponse{Answer: a}, nil
	case errors.As(err, &refusal):
		return &skeinv1.ProposeResponse{Answer: &skeinv1.Answer{ErrorCode: string(refusal.Code),
			ErrorMessage: refusal.Message}}, nil
	}
	var rpc *connect.Error
	if errors.As(err, &rpc) && rpc.Code() == connect.CodePermissionDenied {
		return nil, rpc
	}
	return nil, connect.NewError(connect.CodeUnavailable, err)
}

// Subscribe streams the batches after an index. A snapshot comes first if the archive no longer reaches back. A
// follower whose state at its index has another hash than this server's is refused: it would fold events of one history
// on another. Nothing is queued for a subscriber: each stream reads from the archive at its own pace, and a subscriber
// that reads nothing for writeTimeout is cut. A node that is not a server streams to nodes of its site while it leads
// that site; see pass.
func (s *Service) Subscribe(ctx context.Context, r *skeinv1.SubscribeRequest,
	out *connect.ServerStream[skeinv1.SubscribeResponse]) error {
	peer, err := s.member(ctx)
	if err != nil {
		return err
	}
	send := func(m *skeinv1.SubscribeResponse) error {
		writeDeadline(ctx, writeTimeout)
		return out.Send(m)
	}
	if s.server() == nil {
		return s.pass(ctx, peer, r.GetAfter(), send)
	}
	if s.subscribers.Add(1) > maxSubscribers {
		s.subscribers.Add(-1)
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("this server has %d subscribers: ask another",
			maxSubscribers))
	}
	defer s.subscribers.Add(-1)
	heartbeat := func() *skeinv1.SubscribeResponse { return s.heartbeat(r.GetCheckpoints()) }
	at, checked := r.GetAfter(), len(r.GetHash()) == 0 // earlier versions send no hash
	if err := send(heartbeat()); err != nil {          // the answer begins at once, even if nothing is new
		return err
	}
	beat := time.NewTimer(s.untilHeartbeat())
	defer beat.Stop()
	w := waiter{replica: s.cfg.Replica}
	defer func() { w.stop() }()
	for {
		seen := at
		// A follower that is ahead is compared when this server reaches its index.
		if index := s.cfg.Replica.State().Index(); !checked && index >= at {
			switch err := s.cfg.Replica.checkFollower(peer, at, r.GetHash()); {
			case errors.Is(err, ErrTooSoon):
				seen = index // it is compared at one of the next heartbeats
			case err != nil:
				return notServed(err)
			default:
				checked = true
			}
		}
		if checked { // this server may have got there since it looked
			if at, err = s.sendNews(peer, at, r.GetCheckpoints(), send); err != nil {
				return err
			}
			seen = at
		}
		if s.cfg.Replica.State().Server(s.cfg.Self) == nil { // a removed server learns late of what is agreed afterwards
			return connect.NewError(connect.CodeUnavailable, errors.New("this node is no longer a server: ask another"))
		}
		select {
		case <-w.beyond(ctx, seen):
		case <-beat.C:
			beat.Reset(s.untilHeartbeat())
			// With checked, sendNews makes this check, and first sends a revoked node its last event.
			if err = send(heartbeat()); err == nil && !checked {
				err = checkMember(s.cfg.Replica.State(), peer)
			}
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err == nil && s.cfg.Replica.isClosed() {
			err = connect.NewError(connect.CodeUnavailable, errors.New("this server is stopping"))
		}
		if err != nil {
			return err
		}
	}
}

// untilHeartbeat returns the time until the next heartbeat. All subscribers get theirs at the same moment, so that the
// process wakes once.
func (s *Service) untilHeartbeat() time.Duration {
	return heartbeatEvery - time.Since(s.began)%heartbeatEvery
}

// waiter waits, again and again, in a goroutine of its own, for the replica to get beyond an index.
type waiter struct {
	replica *Replica
	index   uint64
	done    chan struct{} // nil: no goroutine waits
	cancel  context.CancelFunc
}

// beyond returns a channel that is closed once the replica is beyond the index, or ctx has ended.
func (w *waiter) beyond(ctx context.Context, index uint64) <-chan struct{} {
	if w.done != nil {
		select {
		case <-w.done:
		default:
			if w.index == index {
				return w.done
			}
		}
		w.stop()
	}
	w.index, w.done = index, make(chan struct{})
	ctx, w.cancel = context.WithCancel(ctx)
	go func(done chan<- struct{}) { defer close(done); _ = w.replica.Wait(ctx, index) }(w.done)
	return w.done
}

// stop ends the goroutine.
func (w *waiter) stop() {
	if w.done != nil {
		w.cancel()
		<-w.done
		w.done = nil
	}
}

// notServed makes the RPC error for a follower: Aborted is final and means that its history differs; after any other
// error it may try again.
func notServed(err error) error {
	if errors.Is(err, ErrDiverged) {
		return connect.NewError(connect.CodeAborted, err)
	}
	return connect.NewError(connect.CodeInternal, err)
}

// sendNews sends everything after an index, and returns the new index. A checkpoint goes with the newest state if it is
// wanted. A revoked node gets the event of its revocation as its last, if that is among the next events, and is then
// refused.
func (s *Service) sendNews(
	peer identity.ID, at uint64, checkpoints bool, send func(*skeinv1.SubscribeResponse) error,
) (uint64, error) {
	for {
		evs, first, _, err := s.cfg.Replica.Events(at, streamEvents)
		if err != nil {
			return at, connect.NewError(connect.CodeInternal, err)
		}
		var m *skeinv1.SubscribeResponse
		state := s.cfg.Replica.State() // it has all of evs
		denied := checkMember(state, peer)
		if denied != nil {
			if evs = upToOwnRevocation(evs, peer); len(evs) == 0 {
				return at, denied
			}
		}
		whole := len(evs)
		switch {
		case denied == nil && at+1 < first && state.Index() > at:
			if err := sent(state); err != nil {
				return at, err
			}
			m = &skeinv1.SubscribeResponse{Body: &skeinv1.SubscribeResponse_Snapshot{Snapshot: state.Proto()}}
			at = state.Index()
		case len(evs) == 0:
			return at, nil
		default:
			evs = Portion(evs)
			m = &skeinv1.SubscribeResponse{Body: &skeinv1.SubscribeResponse_Batch{Batch: &skeinv1.Batch{Base: at, Events: evs}}}
			at += uint64(len(evs))
		}
		if state := s.cfg.Replica.State(); checkpoints && state.Index() == at {
			m.Checkpoint = s.checkpoint(state)
		}
		if err := send(m); err != nil {
			return at, err
		}
		if denied != nil && len(m.GetBatch().GetEvents()) == whole {
			return at, denied
		}
	}
}

// heartbeat carries this server's index and hash. A follower at the same index sees by the hash whether both have the
// same history.
func (s *Service) heartbeat(checkpoint bool) *skeinv1.SubscribeResponse {
	state := s.cfg.Replica.State()
	hash := state.Hash()
	h := &skeinv1.SubscribeResponse_Heartbeat{Index: state.Index(), Time: time.Now().UnixNano(), Hash: hash[:],
		Leader: s.leads()}
	m := &skeinv1.SubscribeResponse{Body: &skeinv1.SubscribeResponse_Heartbeat_{Heartbeat: h}}
	if checkpoint {
		m.Checkpoint = s.checkpoint(state)
	}
	return m
}

// leads returns the ID of the cluster's leader, as far as this server knows; empty: none.
func (s *Service) leads() string {
	if server := s.server(); server != nil {
		if id, ok := server.Leader(); ok {
			return id.String()
		}
	}
	return ""
}

// checkpoint returns a state's checkpoint, signed by this server; nil: it has no key, or there is no cluster yet.
func (s *Service) checkpoint(state *events.State) *skeinv1.Checkpoint {
	if s.cfg.Key == nil || state.Cluster() == nil {
		return nil
	}
	return s.signer.sign(s.cfg.Key, state, s.leads(), time.Now())
}

// ReadState returns the state at an index.
func (s *Service) ReadState(ctx context.Context, r *skeinv1.ReadStateRequest) (*skeinv1.ReadStateResponse, error) {
	if _, err := s.member(ctx); err != nil {
		return nil, err
	}
	state, err := s.cfg.Replica.At(r.GetAt())
	if err != nil {
		return nil, readError(err)
	}
	if err := sent(state); err != nil {
		return nil, err
	}
	if _, err := s.member(ctx); err != nil { // it may have been revoked since
		return nil, err
	}
	hash := state.Hash()
	return &skeinv1.ReadStateResponse{State: state.Proto(), Hash: hash[:]}, nil
}

// ReadEvents reads the archive. For the greatest index it returns no events, and the range of the archive.
func (s *Service) ReadEvents(ctx context.Context, r *skeinv1.ReadEventsRequest) (*skeinv1.ReadEventsResponse, error) {
	if _, err := s.member(ctx); err != nil {
		return nil, err
	}
	limit := r.GetLimit()
	if limit == 0 || limit > maxReadEvents {
		limit = maxReadEvents
	}
	evs, first, last, err := s.cfg.Replica.Events(min(r.GetAfter(), math.MaxUint64-1), int(limit))
	if err != nil {
		return nil, readError(err)
	}
	if _, err := s.member(ctx); err != nil { // it may have been revoked since
		return nil, err
	}
	return &skeinv1.ReadEventsResponse{Events: Portion(evs), FirstAvailable: first, Last: last,
		Time: s.now().UnixNano()}, nil
}

// now returns this node's time, as commands get it.
func (s *Service) now() time.Time {
	if server := s.server(); server != nil {
		return server.cfg.Now()
	}
	return time.Now()
}

func readError(err error) error {
	if errors.Is(err, ErrGone) {
		return connect.NewError(connect.CodeNotFound, err)
	}
	return connect.NewError(connect.CodeInternal, err)
}

// FilterTest answers a STUN request on behalf of another node.
func (s *Service) FilterTest(ctx context.Context, r *skeinv1.FilterTestRequest) (*skeinv1.FilterTestResponse, error) {
	peer, err := s.member(ctx)
	if err != nil {
		return nil, err
	}
	if s.cfg.FilterTest == nil {
		return nil, connect.NewError(connect.CodeUnimplemented, errors.New("this node answers no STUN requests"))
	}
	if err := s.cfg.FilterTest(ctx, peer, r); err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return &skeinv1.FilterTestResponse{}, nil
}

// Holder returns which pod of this node has, or had, an address.
func (s *Service) Holder(ctx context.Context, r *skeinv1.HolderRequest) (*skeinv1.HolderResponse, error) {
	if _, err := s.member(ctx); err != nil {
		return nil, err
	}
	if s.cfg.Holder == nil {
		return nil, connect.NewError(connect.CodeUnimplemented, errors.New("this node gives no addresses to pods"))
	}
	return s.cfg.Holder(r)
}

// PeerPaths returns how this node reaches its peers, to admins and servers only. Other members would learn which nodes
// communicate through which relay, and since when.
func (s *Service) PeerPaths(ctx context.Context, _ *skeinv1.PeerPathsRequest) (*skeinv1.PeerPathsResponse, error) {
	peer, err := s.member(ctx)
	if err != nil {
		return nil, err
	}
	if role := s.cfg.Replica.State().Role(peer.String()); role != events.RoleAdmin && role != events.RoleServer {
		return nil, connect.NewError(connect.CodePermissionDenied, fmt.Errorf(
			"only admins and servers may ask how another node reaches its peers, and node %s is an %s: ask on one of them, "+
				"or make it an admin with `skein node grant`", peer, role))
	}
	if s.cfg.PeerPaths == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("this node only relays and has no peers"))
	}
	return &skeinv1.PeerPathsResponse{Peers: s.cfg.PeerPaths()}, nil
}

// Plan returns what this node's kernel should hold, or should have held, to admins and servers only. Other members
// would learn at which addresses all its peers are reached.
func (s *Service) Plan(ctx context.Context, r *skeinv1.PlanRequest) (*skeinv1.PlanResponse, error) {
	if err := s.mayReadPlans(ctx); err != nil {
		return nil, err
	}
	return s.cfg.Plan(r)
}

// PlanSteps returns how this node's plan changed, to admins and servers only.
func (s *Service) PlanSteps(ctx context.Context, r *skeinv1.PlanStepsRequest) (*skeinv1.PlanStepsResponse, error) {
	if err := s.mayReadPlans(ctx); err != nil {
		return nil, err
	}
	return s.cfg.PlanSteps(r)
}

func (s *Service) mayReadPlans(ctx context.Context) error {
	peer, err := s.member(ctx)
	if err != nil {
		return err
	}
	if role := s.cfg.Replica.State().Role(peer.String()); role != events.RoleAdmin && role != events.RoleServer {
		return connect.NewError(connect.CodePermissionDenied, fmt.Errorf(
			"only admins and servers may ask for another node's plan, and node %s is an %s: ask on one of them, "+
				"or make it an admin with `skein node grant`", peer, role))
	}
	if s.cfg.Plan == nil {
		return connect.NewError(connect.CodeFailedPrecondition, errors.New("this node only relays and has no data plane"))
	}
	return nil
}
