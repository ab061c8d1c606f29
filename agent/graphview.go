package agent

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api/history"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Graph is what skein graph draws: the members, and the paths of this node.
func (s services) Graph(ctx context.Context, r *skeinv1.GraphRequest) (*skeinv1.GraphResponse, error) {
	a := s.a
	if a.replica == nil || a.phase.Load() != PhaseRunning {
		return nil, connect.NewError(connect.CodeUnavailable,
			errors.New("the agent has not joined a cluster yet, so there is nothing to draw; see `skein status`"))
	}
	if r.GetAtIndex() != 0 || r.GetAtTime() != 0 {
		return s.GraphThen(ctx, r)
	}
	nodes, err := s.Nodes(ctx, &skeinv1.NodesRequest{})
	if err != nil {
		return nil, err
	}
	peers, err := s.Peers(ctx, &skeinv1.PeersRequest{})
	if err != nil {
		return nil, err
	}
	out := &skeinv1.GraphResponse{
		NodeId: a.id.String(), Index: a.replica.State().Index(), Time: time.Now().UnixNano(),
		Nodes: nodes.GetNodes(), Peers: peers.GetPeers(),
	}
	if a.paths == nil {
		out.Peers, out.Notes = nil, []string{history.OnlyRelays}
	}
	for _, why := range nodes.GetNotAsked() {
		out.Notes = append(out.Notes, "What some nodes say of themselves is missing: "+why+".")
	}
	return out, nil
}
