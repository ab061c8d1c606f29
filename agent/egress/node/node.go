// Package node combines everything that one node does for egresses: as a gateway, for its own clients, and as a
// service for other nodes.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/egress"
	"github.com/skeinmesh/skein/agent/egress/clients"
	"github.com/skeinmesh/skein/agent/ipam"
	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/announce"
	"github.com/skeinmesh/skein/dataplane/egressns"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	gatewayDir     = "netns"          // in the run directory: the namespaces of gateways
	gatewayClients = "egress-clients" // in the run directory: the clients that gateways know
	subjectEgress  = "egress: "
	// graceFor is how long clients' hosts send to the former owner of a slot in a planned move. By then the new owner
	// knows of the move, too, since all servers publish it at once. A client's host may even learn of it up to Handover
	// − graceFor later than the former owner without loss.
	graceFor = 80 * time.Millisecond
	// hedgeAfter is how long the leader may take before the other servers are asked for leases as well, since they may
	// have elected another.
	hedgeAfter = 60 * time.Millisecond
	maxSync    = 8 << 20 // bytes of a message between gateways and clients' hosts
)

// Config is what a Node needs. The functions may be called from any goroutine.
type Config struct {
	Self             identity.ID
	Epoch            uint64 // of this start
	RunDir, StateDir string
	Driver           string // of tunnels
	Numbers          dataplane.Numbers
	State            func() *events.State
	Leader           func() (identity.ID, bool)
	Alive            func(identity.ID) bool // by gossip
	MTU              func() int             // of the tunnel's link
	Links            func() []announce.Link // the host's, on which addresses can be announced
	Configured       func() ([]clients.Configured, error)
	Leases           func() []ipam.Lease // of this host's pods
	// Of is a node's service. LeaseOf is the same over separate connections, which carry nothing else.
	Of, LeaseOf func(identity.ID) skeinv1connect.EgressServiceClient
	// Expect is called with the index in a server's answer.
	Expect func(index uint64)
	// Wake makes the agent's loop call Follow again.
	Wake func()
	// Journal records events of slots here. Renewed counts the answers to requests for leases: granted, denied or none.
	Journal func(*skeinv1.SlotHeld)
	Renewed func(namespace, name, answer string)
	Report  func(subject string, severity part.Severity, message, advice string)
	Log     *slog.Logger
}

// Node is this host's part in egresses: as a gateway, and for its own clients.
type Node struct {
	c          Config
	gateways   *egress.Gateways
	clients    *clients.Clients
	told       map[string]bool      // subjects of the problems in status; only for the goroutine that calls Follow
	configured []clients.Configured // as last configured; likewise
	swept      bool                 // removal of an earlier run's remains has begun; likewise

	seen  *events.State      // likewise
	ports fouPorts           // likewise
	woken dataplane.FoUPorts // ports for which a wake-up was already scheduled; likewise

	mu    sync.Mutex
	moved map[uint64]time.Time // planned moves, by epoch, and when they were seen
}

// New makes a Node, and adopts what an earlier run left.
func New(c Config) (*Node, error) {
	e := &Node{c: c, told: map[string]bool{}, moved: map[uint64]time.Time{}}
	e.gateways = egress.NewGateways(egress.GatewaysConfig{
		Self: c.Self, Dir: filepath.Join(c.RunDir, gatewayDir), Known: filepath.Join(c.RunDir, gatewayClients),
		Driver: c.Driver, Tunnel: c.Numbers.Link, Numbers: c.Numbers, Leader: e, Clocks: e, Links: c.Links,
		Changed: c.Wake, Log: c.Log,
		TakeOver: func(ctx context.Context, node identity.ID, r *skeinv1.TakeOverRequest) (*skeinv1.TakeOverResponse, error) {
			return c.Of(node).TakeOver(ctx, r)
		},
		Journal: c.Journal,
	})
	var err error
	e.clients, err = clients.Open(clients.Config{
		File: filepath.Join(c.StateDir, clients.ClientsFile), Sender: e,
		Open:    clients.OpenNamespace(c.Driver, "", c.Numbers, c.Log),
		Changed: c.Wake, Epoch: c.Epoch, GatewayDir: filepath.Join(c.RunDir, gatewayDir), Owner: c.Numbers.Owner(),
		Log: c.Log,
	})
	if err != nil {
		return nil, err
	}
	st := c.State()
	e.clients.Follow(st, e.followPorts(st, time.Now())) // before the first pod asks
	return e, nil
}

// Clients are this host's clients.
func (e *Node) Clients() *clients.Clients { return e.clients }

// Gateways are this node's gateways.
func (e *Node) Gateways() *egress.Gateways { return e.gateways }

// followPorts returns the tunnels' current ports, and schedules a wake-up for when they change.
func (e *Node) followPorts(st *events.State, now time.Time) dataplane.FoUPorts {
	p, next := e.ports.follow(st, e.seen == nil, now)
	if next > 0 && p != e.woken {
		time.AfterFunc(next, e.c.Wake)
	}
	e.woken = p
	return p
}

// Run works until the context ends. Gateways and clients in the kernel continue after that.
func (e *Node) Run(ctx context.Context) {
	e.gateways.Run(ctx)
}

// sweep removes what is left of egresses that ended, or left this node, while the agent was away.
func (e *Node) sweep() {
	for _, file := range e.gateways.Strays() {
		if err := egressns.Remove(file); err != nil {
			e.c.Log.Warn("cannot remove the network namespace of an egress that has ended", "file", file, "error", err)
		}
	}
	if err := e.gateways.ForgetStrays(); err != nil {
		e.c.Log.Warn("cannot remove the clients of an egress that has ended", "error", err)
	}
}

// Purge removes everything of egresses from this host, also from pods.
func (e *Node) Purge() error {
	if e == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	e.clients.Clear(ctx)
	return PurgeGateways(e.c.RunDir, e.c.Numbers)
}

// Follow passes on the newest agreed state and reports problems. It must not be called concurrently.
func (e *Node) Follow(st *events.State) {
	if e == nil {
		return
	}
	if st.Cluster() == nil {
		return
	}
	ports := e.followPorts(st, time.Now())
	e.gateways.Follow(st, e.c.MTU(), ports)
	if !e.swept { // only after the gateways know which egresses they serve
		e.swept = true
		go e.sweep()
	}
	e.clients.Follow(st, ports)
	e.configure()
	e.noteMoves(st, time.Now())
	now := map[string]bool{}
	for subject, text := range e.gateways.Problems() {
		now[subjectEgress+subject] = true
		e.c.Report(subjectEgress+subject, part.Warns, text, "this node is a worse gateway until it is repaired; "+
			"it is tried again")
	}
	for subject := range e.told {
		if !now[subject] {
			e.c.Report(subject, part.Warns, "", "")
		}
	}
	e.told = now
}

// noteMoves records slots that have just moved by plan.
func (e *Node) noteMoves(st *events.State, now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for epoch, at := range e.moved {
		if now.Sub(at) >= graceFor {
			delete(e.moved, epoch)
		}
	}
	if st == e.seen {
		return
	}
	for _, epoch := range plannedSince(e.seen, st) {
		e.moved[epoch] = now
		time.AfterFunc(graceFor, e.c.Wake)
	}
	e.seen = st
}

// plannedSince returns the epochs of slots that moved by plan after old.
func plannedSince(old, now *events.State) (out []uint64) {
	if old == nil {
		return nil
	}
	for _, e := range now.Egresses() {
		for _, s := range now.Slots(e.GetNamespace(), e.GetName()) {
			if s.GetPlanned() && s.GetEpoch() > old.Index() {
				out = append(out, s.GetEpoch())
			}
		}
	}
	return out
}

// InGrace returns the epochs of slots whose packets still go to their former owner.
func (e *Node) InGrace() map[uint64]bool {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[uint64]bool{}
	for epoch, at := range e.moved {
		if time.Since(at) < graceFor {
			out[epoch] = true
		}
	}
	return out
}

// Sync sends this host's clients to a gateway.
func (e *Node) Sync(ctx context.Context, node identity.ID,
	r *skeinv1.SyncEgressClientsRequest) (*skeinv1.SyncEgressClientsResponse, error) {
	return e.c.Of(node).SyncEgressClients(ctx, r)
}

// Report asks a node for its egress report.
func (e *Node) Report(ctx context.Context, node identity.ID,
	r *skeinv1.EgressReportRequest) (*skeinv1.EgressReportResponse, error) {
	return e.c.Of(node).EgressReport(ctx, r)
}

// Attach changes which egresses a pod of this host uses.
func (e *Node) Attach(ctx context.Context,
	r *skeinv1.AttachEgressRequest) (*skeinv1.AttachEgressResponse, error) {
	var refs []egress.Ref
	for _, text := range r.GetEgresses() {
		ref, err := egress.ParseRef(text)
		if err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
		refs = append(refs, ref)
	}
	var found []podnet.Attachment
	for _, l := range e.c.Leases() {
		same := r.GetContainerId() != "" && l.Key.ContainerID == r.GetContainerId() ||
			r.GetContainerId() == "" && l.Pod == r.GetPod() && (r.GetNamespace() == "" || l.Namespace == r.GetNamespace())
		if same && l.Key.ContainerID != "" && l.Until.IsZero() {
			found = append(found, l.Attachment)
		}
	}
	name := cmp.Or(r.GetContainerId(), r.GetNamespace()+"/"+r.GetPod())
	switch len(found) {
	case 0:
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no pod %s has an address on this host; ask on its "+
			"own host, `skein ip who` tells which that is", name))
	case 1:
	default:
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%d interfaces of this host's pods match %s: "+
			"name the namespace or the container", len(found), name))
	}
	out, err := e.clients.Attach(ctx, found[0], refs, r.GetDetach())
	if err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return &skeinv1.AttachEgressResponse{Egresses: out}, nil
}

// RenewLeases requests leases and counts the answers. The index in an answer shows a gateway whose subscription hangs
// that it is behind.
func (e *Node) RenewLeases(ctx context.Context,
	r *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	answer, err := e.askServers(ctx, r)
	e.c.Expect(answer.GetIndex())
	count := e.c.Renewed
	for _, s := range answer.GetGranted() {
		count(s.GetNamespace(), s.GetName(), "granted")
	}
	for _, d := range answer.GetDenied() {
		count(d.GetSlot().GetNamespace(), d.GetSlot().GetName(), "denied")
	}
	if err != nil {
		for _, w := range r.GetWishes() {
			count(w.GetSlot().GetNamespace(), w.GetSlot().GetName(), "none")
		}
	}
	return answer, err
}

// askServers asks the leader, and if it does not answer soon or fails, all other servers, since one of them may lead
// now. The first answer that is not an error counts.
func (e *Node) askServers(ctx context.Context,
	r *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type answer struct {
		r   *skeinv1.RenewLeasesResponse
		err error
	}
	var servers []identity.ID
	for _, s := range e.c.State().Servers() {
		if id, err := identity.ParseID(s.GetNodeId()); err == nil {
			servers = append(servers, id)
		}
	}
	if leader, ok := e.c.Leader(); ok {
		if i := slices.Index(servers, leader); i > 0 {
			servers[0], servers[i] = servers[i], servers[0]
		}
	}
	answers := make(chan answer, len(servers))
	ask := func(id identity.ID) {
		go func() {
			a, err := e.c.LeaseOf(id).RenewLeases(ctx, r)
			answers <- answer{a, err}
		}()
	}
	hedge := time.NewTimer(hedgeAfter)
	defer hedge.Stop()
	asked := 0
	more := func(n int) {
		for ; asked < min(n, len(servers)); asked++ {
			ask(servers[asked])
		}
	}
	more(1)
	var errs []error
	for len(errs) < len(servers) {
		select {
		case a := <-answers:
			if a.err == nil {
				return a.r, nil
			}
			errs = append(errs, a.err)
			more(len(servers))
		case <-hedge.C:
			more(len(servers))
		case <-ctx.Done():
			return nil, errors.Join(append(errs, ctx.Err())...)
		}
	}
	if len(errs) == 0 {
		return nil, errors.New("no server is known")
	}
	return nil, errors.Join(errs...)
}

// configure passes changed clients of the host's configuration on. Follow calls it.
func (e *Node) configure() {
	all, err := e.c.Configured()
	if err != nil {
		e.c.Report(subjectEgress+"configuration", part.Fails, err.Error(), "correct egress.clients in the configuration")
		return
	}
	if !reflect.DeepEqual(all, e.configured) {
		e.configured = all
		e.clients.Configure(all)
	}
}
