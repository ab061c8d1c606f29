// Package peers answers the commands about members and the paths to them (`skein nodes`, `skein peers`, `skein explain
// peer`), here and for other nodes.
package peers

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/api/history"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// Host is what the answers need of the agent. Its methods may be called from any goroutine.
type Host interface {
	api.Agent
	// RecordsOf returns the records of some members, those that only other sites keep included. notAsked says, a text for
	// each, which sites could not be asked and why.
	RecordsOf(ctx context.Context, of []*skeinv1.Node) (records map[identity.ID]gossip.Entry, notAsked []string)
	// OwnRecord is this node's record.
	OwnRecord() *skeinv1.Record
	// Paths chooses the paths to peers; nil: this node only relays.
	Paths() *path.Manager
	// Reach says which members are peers, and by which peers the others are reached.
	Reach() *sitemesh.Reach
	// Plan is the plan of the sites; nil: there is none yet.
	Plan() *sites.Plan
	// Silent describes the leaders of this site and of a member's that do not forward; empty: there are none.
	Silent(member identity.ID) string
	// Tunnel is what WireGuard counted for a peer, and the addresses that it accepts from it.
	Tunnel(peer identity.ID, key identity.WireGuardKey) (dataplane.PeerStatus, []netip.Prefix)
	// PlainPeers are the plain WireGuard peers.
	PlainPeers() []*skeinv1.PlainPeerView
	// Cluster is the ClusterService of another node.
	Cluster(identity.ID) skeinv1connect.ClusterServiceClient
}

// PeerService is that part of the API.
type PeerService struct {
	Host Host
	Past history.HistoryService
}

// paths are those to all peers.
func (s PeerService) paths() map[identity.ID]path.Path {
	if m := s.Host.Paths(); m != nil {
		return m.Paths()
	}
	return nil
}

// Peers is how this node, or another one, reaches its peers.
func (s PeerService) Peers(ctx context.Context, q *skeinv1.PeersRequest) (*skeinv1.PeersResponse, error) {
	past := q.GetAt() > 0 || q.GetAtTime() != 0
	if q.GetNode() != "" {
		n, id, err := api.Find(s.Host.State(), q.GetNode())
		switch {
		case err != nil:
			return nil, err
		case id == s.Host.Self():
		case past:
			return nil, connect.NewError(connect.CodeInvalidArgument, errors.New(
				"peers of another node are known only as they are now; for its past, run `skein plan --node NAME --at TIME`"))
		default:
			return s.ask(ctx, n, id)
		}
	}
	if past {
		return s.Past.PeersThen(ctx, q.GetAt(), q.GetAtTime())
	}
	members := s.Host.State().Nodes()
	records, notAsked := s.Host.RecordsOf(ctx, members)
	paths := s.paths()
	r := &skeinv1.PeersResponse{PeerTransports: map[string]string{}, NotAsked: notAsked}
	for _, n := range members {
		id, err := identity.ParseID(n.GetId())
		if err != nil || id == s.Host.Self() {
			continue
		}
		v := s.view(n, id, records[id].Record, paths[id])
		r.Peers = append(r.Peers, v)
		r.PeerTransports[v.GetName()] = transport(s.Host.Reach(), id, paths)
	}
	slices.SortFunc(r.Peers, byName)
	return r, nil
}

func byName(x, y *skeinv1.PeerView) int { return strings.Compare(x.GetName(), y.GetName()) }

// view is a member as a peer. The record may be nil.
func (s PeerService) view(n *skeinv1.Node, id identity.ID, record *skeinv1.Record, p path.Path) *skeinv1.PeerView {
	v := &skeinv1.PeerView{
		NodeId: n.GetId(), Name: n.GetName(), Ipv4: n.GetIpv4(), Ipv6: n.GetIpv6(), NatType: record.GetNatType(),
		Path: "none", RttNanos: int64(p.RTT), Reason: p.Reason, Rule: p.Rule, Since: api.Nanos(p.Since), Alive: p.Alive,
	}
	switch p.Kind {
	case path.Direct:
		v.Path, v.Endpoint = "direct", p.Endpoint.String()
	case path.Relay:
		v.Path, v.Detail = "relay", "session"
		if !p.Relay.IsZero() {
			v.Relay, v.RelayName = p.Relay.String(), s.Host.Name(p.Relay)
		}
		if p.UDP() {
			v.Endpoint, v.Detail = p.Endpoint.String(), "udp"
		}
	}
	s.hopView(v, id)
	if p.Suspect {
		v.Reason += " No ping has been answered for a moment: other leaders carry what would go through it."
	}
	v.Reason += s.Host.Silent(id)
	if len(n.GetWireguardKey()) != len(dataplane.Key{}) {
		return v
	}
	counted, allowed := s.Host.Tunnel(id, identity.WireGuardKey(n.GetWireguardKey()))
	v.RxBytes, v.TxBytes, v.LastHandshake = counted.RxBytes, counted.TxBytes, api.Nanos(counted.LastHandshake)
	for _, p := range allowed {
		v.AllowedIps = append(v.AllowedIps, p.String())
	}
	return v
}

// hopView fills in the node that passes packets on to a member which is not a peer.
func (s PeerService) hopView(v *skeinv1.PeerView, id identity.ID) {
	r := s.Host.Reach()
	via, hop := r.Via(id)
	switch {
	case hop:
		p := s.paths()[via]
		v.Path, v.Detail, v.Relay, v.RelayName, v.Endpoint, v.Alive = "hop", "site", via.String(), s.Host.Name(via), "",
			p.Alive
		v.RttNanos, v.Rule = 0, "site-leader"
		v.Reason = fmt.Sprintf("Another site: %s passes packets on.", v.GetRelayName())
		if !p.Alive {
			v.Reason = fmt.Sprintf("Another site: %s would pass packets on, and is not reached itself. %s",
				v.GetRelayName(), p.Reason)
		}
	case !r.Peer(id):
		v.Rule, v.Reason = "no-leader", "Another site, and no node is known that passes packets on to it."
	}
}

// transport is the way to a member, as one word for users.
func transport(r *sitemesh.Reach, id identity.ID, paths map[identity.ID]path.Path) string {
	via, hop := r.Via(id)
	switch {
	case !hop:
		return paths[id].Transport()
	case paths[via].Alive:
		return "hop"
	}
	return "down"
}
