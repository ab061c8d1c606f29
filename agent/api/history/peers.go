package history

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// PeersThen is how this node reached its peers at a moment: the log tells of the members, the journal of the paths, and
// the plan of then what each was allowed.
func (s HistoryService) PeersThen(ctx context.Context, index uint64, at int64) (*skeinv1.PeersResponse, error) {
	st, err := s.Agent.StateThen(ctx, index, at)
	if err != nil {
		return nil, err
	}
	plan, err := s.planThen(index, at)
	if err != nil {
		return nil, err
	}
	moment := time.Unix(0, cmp.Or(at, st.Time()))
	then, err := path.ThenAt(s.Journal, moment)
	if err != nil {
		return nil, api.Error(err)
	}
	return peersThen(st, s.Agent.Self(), &then, plan.Text), nil
}

// peersThen is PeersThen, of what was read.
func peersThen(st *events.State, self identity.ID, then *path.Then, plan string) *skeinv1.PeersResponse {
	allowed := map[string][]string{}
	for line := range strings.Lines(plan) {
		words := strings.Fields(line)
		if i := slices.Index(words, "allowed"); len(words) > 1 && words[0] == "peer" && i > 0 {
			allowed[words[1]] = words[i+1:]
		}
	}
	name := func(id identity.ID) string { return api.NodeName(st, id.String()) }
	r := &skeinv1.PeersResponse{PeerTransports: map[string]string{}}
	for _, n := range st.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil || id == self {
			continue
		}
		v := pastPath(n, id, then, name)
		v.AllowedIps = allowed[n.GetName()]
		r.Peers = append(r.Peers, v)
		r.PeerTransports[v.GetName()] = pathWord(v)
	}
	slices.SortFunc(r.Peers, func(x, y *skeinv1.PeerView) int { return strings.Compare(x.GetName(), y.GetName()) })
	return r
}

// ExplainThen tells of a path to a peer as it was, and answers from the journal.
func (s HistoryService) ExplainThen(n *skeinv1.Node, id identity.ID, out *skeinv1.ExplainPeerResponse,
	at time.Time) (*skeinv1.ExplainPeerResponse, error) {
	past, err := path.ExplainAt(s.Journal, id, at)
	if err != nil {
		return nil, api.Error(err)
	}
	out.Peer = pastPeer(n, past, s.Agent.Name)
	switch {
	case past.Path == "":
		out.Decided = "the journal does not reach back that far, or no path had been decided yet"
	case past.Restarts:
		out.Decided = "the agent had just started, and no path was decided yet; before, " + past.Rule + ": " + past.Reason
	default:
		out.Decided = past.Rule + ": " + past.Reason
	}
	out.History = past.History
	return out, nil
}

// pastPeer is a path as the journal has it.
func pastPeer(n *skeinv1.Node, past path.Past, name func(identity.ID) string) *skeinv1.PeerView {
	v := &skeinv1.PeerView{
		NodeId: n.GetId(), Name: n.GetName(), Path: "none", Reason: past.Reason, Rule: past.Rule,
		Since: api.Nanos(past.Since),
	}
	kind, where, _ := strings.Cut(past.Path, ":")
	switch kind {
	case "relay":
		where, port, udp := strings.Cut(where, ",")
		v.Path, v.Detail = kind, "session"
		if id, err := identity.ParseID(where); err == nil { // an idle pair has none
			v.Relay, v.RelayName = where, name(id)
		}
		if udp {
			v.Endpoint, v.Detail = port, "udp"
		}
	case "direct":
		v.Path, v.Endpoint = kind, where
	}
	return v
}

// pastPath is the path to a member as the journal has it.
func pastPath(n *skeinv1.Node, id identity.ID, then *path.Then, name func(identity.ID) string) *skeinv1.PeerView {
	past := then.Paths[id]
	if past.Path == "" || past.Restarts {
		past = path.Past{}
	}
	v := pastPeer(n, past, name)
	v.Ipv4, v.Ipv6, v.Alive, v.NatType = n.GetIpv4(), n.GetIpv6(), past.Alive(), then.Nodes[id].NAT
	if past.Path == "" {
		v.Path = pathUnknown
	}
	return v
}

// pathWord is a path in one word, as NodeView has it.
func pathWord(p *skeinv1.PeerView) string {
	if p.GetPath() != pathUnknown && !p.GetAlive() {
		return "down"
	}
	return p.GetPath()
}
