package peers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// ExplainPeer says why a peer is reached as it is.
func (s PeerService) ExplainPeer(ctx context.Context,
	r *skeinv1.ExplainPeerRequest) (*skeinv1.ExplainPeerResponse, error) {
	n, id, err := api.Find(s.Host.State(), r.GetPeer())
	if err != nil {
		return nil, err
	}
	paths := s.Host.Paths()
	if paths == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("this node only relays and has no paths "+
			"of its own; ask another node"))
	}
	if id == s.Host.Self() {
		return nil, connect.NewError(connect.CodeInvalidArgument,
			fmt.Errorf("%s is this node itself; name a peer", n.GetName()))
	}
	records, notAsked := s.Host.RecordsOf(ctx, []*skeinv1.Node{n})
	record := records[id].Record
	out := &skeinv1.ExplainPeerResponse{Record: record, Self: s.Host.OwnRecord(), NotAsked: notAsked}
	if r.GetAt() > 0 {
		return s.Past.ExplainThen(n, id, out, time.Unix(0, r.GetAt()))
	}
	e, ok := paths.Explain(id)
	out.Peer = s.view(n, id, record, e.Path)
	if out.Peer.GetRule() == "site-leader" || out.Peer.GetRule() == "no-leader" {
		out.Decided = out.Peer.GetReason()
		out.WouldChange = []string{"another node leads this site or that one", "the topology or a node's site is set to " +
			"another (skein settings, skein node set)"}
		return out, nil
	}
	if !ok {
		out.Decided = "nothing: no record of this node has arrived yet, so nobody knows how to reach it"
		out.WouldChange = []string{"the node comes up and gossip brings its record"}
		return out, nil
	}
	out.Strategy, out.Decided, out.WouldChange = e.Strategy, e.Decided, e.WouldChange
	for _, p := range e.Probes {
		v := &skeinv1.ProbeView{Endpoint: p.Endpoint.String(), Source: p.Source, Sent: p.Sent, Answered: p.Answered,
			RttNanos: int64(p.RTT), Outcome: p.Outcome}
		v.LastSent, v.LastAnswered = api.Nanos(p.LastSent), api.Nanos(p.LastAnswered)
		out.Probes = append(out.Probes, v)
	}
	if g := e.Prediction; g != nil {
		out.Guess = &skeinv1.PortGuessView{
			Rule: g.Rule, Role: g.Role, Running: g.Running, Tries: uint32(g.Tries), Outcome: g.Outcome, At: api.Nanos(g.At),
			Next:   api.Nanos(g.Next),
			Probes: uint32(g.Probes), Sockets: uint32(g.Sockets), TookNanos: int64(g.Took),
		}
	}
	if past, err := path.ExplainAt(s.Past.Journal, id, time.Now()); err == nil {
		out.History = past.History
	}
	return out, nil
}
