package peers

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// Nodes are the members and the plain peers.
func (s PeerService) Nodes(ctx context.Context, _ *skeinv1.NodesRequest) (*skeinv1.NodesResponse, error) {
	members := s.Host.State().Nodes()
	records, notAsked := s.Host.RecordsOf(ctx, members)
	paths := s.paths()
	r := &skeinv1.NodesResponse{NotAsked: notAsked, PlainPeers: s.Host.PlainPeers()}
	for _, n := range members {
		r.Nodes = append(r.Nodes, s.node(n, records, paths))
	}
	slices.SortFunc(r.Nodes, func(x, y *skeinv1.NodeView) int {
		return strings.Compare(x.GetNode().GetName(), y.GetNode().GetName())
	})
	return r, nil
}

// ShowNode is one member.
func (s PeerService) ShowNode(ctx context.Context, r *skeinv1.ShowNodeRequest) (*skeinv1.ShowNodeResponse, error) {
	n, _, err := api.Find(s.Host.State(), r.GetNode())
	if err != nil {
		return nil, err
	}
	records, notAsked := s.Host.RecordsOf(ctx, []*skeinv1.Node{n})
	return &skeinv1.ShowNodeResponse{Node: s.node(n, records, s.paths()), NotAsked: notAsked}, nil
}

func (s PeerService) node(n *skeinv1.Node, records map[identity.ID]gossip.Entry,
	paths map[identity.ID]path.Path) *skeinv1.NodeView {
	id, _ := identity.ParseID(n.GetId())
	v := &skeinv1.NodeView{Node: n, Self: id == s.Host.Self()}
	if e, ok := records[id]; ok {
		v.Record, v.RecordAgeNanos = e.Record, int64(time.Since(e.ReceivedAt))
	}
	v.Alive = v.Self || s.Host.Alive(id)
	v.Site, _ = s.Host.SiteOf(n, v.Record)
	v.SiteLeads = s.Host.Plan().Leads(id)
	st := s.Host.State()
	if srv := st.Server(id); srv != nil {
		v.Server, v.Voter = true, srv.GetVoter()
	}
	v.Role = string(st.Role(n.GetId()))
	leader, ok := s.Host.Leader()
	v.Leader = ok && leader == id
	switch {
	case v.Self:
		v.Path = "self"
	case v.Record.GetRole() == gossip.RoleRelay:
		v.Path = "none"
	default:
		v.Path = transport(s.Host.Reach(), id, paths)
	}
	return v
}
