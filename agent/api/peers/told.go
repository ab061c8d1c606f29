package peers

import (
	"context"
	"slices"
	"strings"

	"github.com/skeinmesh/skein/agent/api"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// PathsForOthers is how this node reaches its peers, for other nodes: without addresses and counters, which only its
// own users see.
func (s PeerService) PathsForOthers() (out []*skeinv1.PeerPath) {
	if s.Host.Paths() == nil {
		return nil
	}
	paths := s.paths()
	for _, n := range s.Host.State().Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil || id == s.Host.Self() {
			continue
		}
		v := s.view(n, id, nil, paths[id])
		out = append(out, &skeinv1.PeerPath{
			NodeId: v.GetNodeId(), Path: v.GetPath(), Relay: v.GetRelay(), RttNanos: v.GetRttNanos(), Since: v.GetSince(),
			Rule: v.GetRule(), Alive: v.GetAlive(), Detail: v.GetDetail(),
		})
	}
	return out
}

// ask asks another member how it reaches its peers.
func (s PeerService) ask(ctx context.Context, n *skeinv1.Node, id identity.ID) (*skeinv1.PeersResponse, error) {
	r, err := consensus.Patiently(ctx, api.PeerPatience,
		func(ctx context.Context) (*skeinv1.PeerPathsResponse, error) {
			return s.Host.Cluster(id).PeerPaths(ctx, &skeinv1.PeerPathsRequest{})
		})
	if err != nil {
		return nil, api.ToldNothing(n.GetName(), "its peers", "peers", err)
	}
	return told(s.Host.State(), id, r.GetPeers()), nil
}

// told is what a node said, with the names that the log has. Only members count, each once, and in the words that
// there are: what comes from another node is shown to a user.
func told(st *events.State, by identity.ID, said []*skeinv1.PeerPath) *skeinv1.PeersResponse {
	r := &skeinv1.PeersResponse{PeerTransports: map[string]string{}}
	seen := map[string]bool{by.String(): true}
	for _, p := range said {
		id, err := identity.ParseID(p.GetNodeId())
		if err != nil || seen[id.String()] {
			continue
		}
		n := st.Node(id)
		if n == nil {
			continue
		}
		seen[id.String()] = true
		v := &skeinv1.PeerView{
			NodeId: n.GetId(), Name: n.GetName(), Ipv4: n.GetIpv4(), Ipv6: n.GetIpv6(),
			RttNanos: max(p.GetRttNanos(), 0), Since: p.GetSince(),
			Path: oneOf(p.GetPath(), "none", "direct", "relay", "hop"), Detail: oneOf(p.GetDetail(), "", "udp", "session"),
			Alive: p.GetAlive(), Rule: word(p.GetRule()),
		}
		if rid, err := identity.ParseID(p.GetRelay()); err == nil {
			if relay := st.Node(rid); relay != nil {
				v.Relay, v.RelayName = relay.GetId(), relay.GetName()
			}
		}
		r.Peers = append(r.Peers, v)
		r.PeerTransports[v.GetName()] = v.GetPath()
		if v.GetPath() == "direct" && !v.GetAlive() || v.GetPath() == "none" {
			r.PeerTransports[v.GetName()] = "down"
		}
	}
	slices.SortFunc(r.Peers, byName)
	return r
}

// oneOf is text if it is allowed, else the first word.
func oneOf(text, other string, allowed ...string) string {
	if slices.Contains(allowed, text) {
		return text
	}
	return other
}

// word is a rule's name: small letters, digits and hyphens; anything else is none.
func word(text string) string {
	odd := func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' }
	if len(text) > 40 || strings.ContainsFunc(text, odd) {
		return ""
	}
	return text
}
