package node

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/egress"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Service answers requests of other nodes, and of this one.
type Service struct {
	// Self is this node, State the agreed state.
	Self  identity.ID
	State func() *events.State
	// SlotController decides on slots; nil: this node does not lead. LeaderName is the leader's name, "" if unknown.
	SlotController func() *egress.SlotController
	LeaderName     func() string
	// Node is nil on a node that runs no egresses.
	Node *Node
	// Own: the requests come from this node itself.
	Own bool
}

var (
	_ skeinv1connect.EgressServiceHandler = Service{}
	_ skeinv1connect.EgressServiceClient  = Service{}
)

// Handler is the path and handler to mount.
func (s Service) Handler() (string, http.Handler) {
	return skeinv1connect.NewEgressServiceHandler(s, connect.WithReadMaxBytes(maxSync))
}

// Client connects to the service of another node.
func Client(conns *consensus.Conns, id identity.ID) skeinv1connect.EgressServiceClient {
	return skeinv1connect.NewEgressServiceClient(conns.HTTP(), consensus.URL(id), connect.WithReadMaxBytes(maxSync))
}

// caller is the member that sent the request.
func (s Service) caller(ctx context.Context) (identity.ID, error) {
	if s.Own {
		return s.Self, nil
	}
	id, ok := consensus.PeerFromContext(ctx)
	if !ok {
		return id, connect.NewError(connect.CodeUnauthenticated, errors.New("the caller is unknown: it did not come over "+
			"the control net"))
	}
	if s.State().Node(id) == nil {
		return id, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("node %s is not a member as of index %d", id,
			s.State().Index()))
	}
	return id, nil
}

// RenewLeases grants leases of slots to a gateway, on the server that leads.
func (s Service) RenewLeases(ctx context.Context,
	r *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	from, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	if k := s.SlotController(); k != nil {
		return k.RenewLeases(ctx, from, r)
	}
	return nil, egress.NotLeading(s.LeaderName())
}

// errNoGateway is the answer of nodes that run no egresses.
var errNoGateway = connect.NewError(connect.CodeFailedPrecondition, egress.ErrNone)

// SyncEgressClients handles another node's list of clients.
func (s Service) SyncEgressClients(ctx context.Context,
	r *skeinv1.SyncEgressClientsRequest) (*skeinv1.SyncEgressClientsResponse, error) {
	from, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	if s.Node == nil {
		return nil, errNoGateway
	}
	return s.Node.gateways.SyncClients(ctx, from, r), nil
}

// TakeOver handles the connections of a slot that moves to this node.
func (s Service) TakeOver(ctx context.Context, r *skeinv1.TakeOverRequest) (*skeinv1.TakeOverResponse, error) {
	from, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	if s.Node == nil {
		return nil, errNoGateway
	}
	return s.Node.gateways.TakeOver(from, r), nil
}

// EgressReport reports this node's work for egresses.
func (s Service) EgressReport(ctx context.Context,
	r *skeinv1.EgressReportRequest) (*skeinv1.EgressReportResponse, error) {
	if _, err := s.caller(ctx); err != nil {
		return nil, err
	}
	if s.Node == nil {
		return nil, errNoGateway
	}
	want := func(ref egress.Ref) bool {
		return r.GetName() == "" || ref == egress.RefOf(r)
	}
	return &skeinv1.EgressReportResponse{Gateways: s.Node.gateways.Report(want),
		Clients: s.Node.clients.Report()}, nil
}
