// Package plainpeers answers the commands about plain WireGuard peers (`skein peer`): hosts that run no skein.
package plainpeers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/carrier"
	"github.com/skeinmesh/skein/agent/plainpeer"
	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
)

// mostCarriers is how many carriers a plain peer gets when its user names none.
const mostCarriers = 3

// PlainPeerService is that part of the API.
type PlainPeerService struct {
	Agent api.Agent
	// Joined says whether this node is a member that gossips. Else only Joined may be called.
	Joined func() bool
	// Carrier answers plain peers here; nil: this node only relays.
	Carrier *carrier.Peers
	// Now is the present by the leader's clock.
	Now func() time.Time
}

// AddPlainPeer chooses the carriers, makes their secrets, and has the log admit the peer.
func (s PlainPeerService) AddPlainPeer(ctx context.Context,
	r *skeinv1.AddPlainPeerRequest) (*skeinv1.AddPlainPeerResponse, error) {
	if !s.Joined() {
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("the agent has not joined a cluster yet; "+
			"see `skein status`"))
	}
	st := s.Agent.State()
	records := s.Agent.RecordsAsked(ctx)
	ends, warnings, err := s.ends(st, records, r.GetVia())
	if err != nil {
		return nil, err
	}
	if err := checkNodeNetworks(r, st, records); err != nil {
		return nil, err
	}
	secrets, public, err := carrier.NewSecrets()
	if err != nil {
		return nil, err
	}
	want := &skeinv1.PlainPeer{Name: r.GetName(), PublicKey: r.GetPublicKey(), AllowedIps: r.GetAllowedIps(),
		CarrierKey: public}
	for _, e := range ends {
		id, _ := identity.ParseID(e.GetNodeId())
		sealed, err := secrets.Seal(st.Node(id))
		if err != nil {
			return nil, fmt.Errorf("plain peer %s: its carrier %s: %w", r.GetName(), e.GetNode(), err)
		}
		want.Carriers = append(want.Carriers, &skeinv1.PlainCarrier{NodeId: e.GetNodeId(), Sealed: sealed})
	}
	answer, err := s.Agent.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_SetPlainPeer{SetPlainPeer: &skeinv1.SetPlainPeer{
			PlainPeer: want, LifetimeNanos: r.GetLifetimeNanos(), Replace: r.GetReplace()}}})
	if err != nil {
		return nil, err
	}
	out := &skeinv1.AddPlainPeerResponse{
		Peer: proto.CloneOf(answer.GetPlainPeer()), Index: answer.GetIndex(), PresharedKey: secrets.PSK[:],
		Endpoints: ends, Warnings: warnings,
	}
	api.RedactPlainPeer(out.Peer)
	for _, p := range routesOf(s.Agent.State(), records, answer.GetPlainPeer()) {
		out.Routes = append(out.Routes, p.String())
	}
	return out, nil
}

// ends are the carriers of a new plain peer, in order, with where they are reached.
func (s PlainPeerService) ends(st *events.State, records api.Records,
	via []string) (out []*skeinv1.PlainEndpoint, warnings []string, err error) {
	if len(via) > 0 {
		for _, name := range via {
			n, id, err := api.Find(st, name)
			if err != nil {
				return nil, nil, err
			}
			end, public := endOf(n, records[id])
			switch {
			case records[id].GetPlainPort() == 0:
				return nil, nil, connect.NewError(connect.CodeFailedPrecondition,
					fmt.Errorf("node %s cannot carry plain peers: it only relays, runs an older version, or has not been heard "+
						"from; name another node", n.GetName()))
			case end.GetAddress() == "":
				return nil, nil, connect.NewError(connect.CodeFailedPrecondition,
					fmt.Errorf("node %s has no address that a plain peer could reach: set forceEndpoint on it, or name another node",
						n.GetName()))
			case !public:
				warnings = append(warnings,
					fmt.Sprintf("%s has no public address: the peer reaches it at %s only from within its network",
						n.GetName(), end.GetAddress()))
			}
			out = append(out, end)
		}
	} else {
		var live, other []*skeinv1.PlainEndpoint
		for _, n := range st.Nodes() {
			id, err := identity.ParseID(n.GetId())
			if err != nil {
				continue
			}
			end, public := endOf(n, records[id])
			switch {
			case !public || records[id].GetPlainPort() == 0:
			case id == s.Agent.Self() || s.Agent.Alive(id):
				live = append(live, end)
			default:
				other = append(other, end)
			}
		}
		byName := func(x, y *skeinv1.PlainEndpoint) int { return strings.Compare(x.GetNode(), y.GetNode()) }
		slices.SortFunc(live, byName)
		slices.SortFunc(other, byName)
		out = append(live, other...)
		out = out[:min(len(out), mostCarriers)]
		if len(out) == 0 {
			return nil, nil, connect.NewError(connect.CodeFailedPrecondition,
				errors.New("no node has a public address that a plain peer could reach: set forceEndpoint on one, or "+
					"name nodes with --via"))
		}
	}
	if len(out) == 1 {
		warnings = append(warnings,
			fmt.Sprintf("only %s carries the peer: while that node is down, the peer has no connection", out[0].GetNode()))
	}
	return out, warnings, nil
}

// endOf is where a node answers plain peers, and whether that is reached from everywhere. Without an address it is
// empty.
func endOf(n *skeinv1.Node, r *skeinv1.Record) (end *skeinv1.PlainEndpoint, public bool) {
	end = &skeinv1.PlainEndpoint{NodeId: n.GetId(), Node: n.GetName(), WireguardKey: n.GetWireguardKey()}
	port := strconv.Itoa(int(r.GetPlainPort()))
	if host, _, err := net.SplitHostPort(r.GetForcedEndpoint()); err == nil {
		end.Address = net.JoinHostPort(host, port)
		return end, true
	}
	var private string
	for _, c := range r.GetCandidates() {
		at, err := netip.ParseAddrPort(c.GetAddress())
		if err != nil || c.GetType() != skeinv1.CandidateType_CANDIDATE_TYPE_HOST || at.Addr().IsLinkLocalUnicast() {
			continue
		}
		if addr.Public(at.Addr()) {
			end.Address = net.JoinHostPort(at.Addr().String(), port)
			return end, true
		}
		private = cmp.Or(private, net.JoinHostPort(at.Addr().String(), port))
	}
	end.Address = private
	return end, false
}

// checkNodeNetworks refuses networks that a member asks others to lead to it. The log does not know them.
func checkNodeNetworks(r *skeinv1.AddPlainPeerRequest, st *events.State, records api.Records) error {
	for _, n := range st.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil {
			continue
		}
		for _, theirs := range records[id].GetNodeAddresses() {
			t, err := netip.ParsePrefix(theirs)
			if err != nil {
				continue
			}
			for _, text := range r.GetAllowedIps() {
				if p, err := netip.ParsePrefix(text); err == nil && addr.Private(p) &&
					p.Overlaps(t) { // the log says why it takes no other
					return connect.NewError(connect.CodeAlreadyExists,
						fmt.Errorf("plain peer %s: network %s overlaps %s, a node address of %s; two must not have the same addresses",
							r.GetName(), p, t, n.GetName()))
				}
			}
		}
	}
	return nil
}

// routesOf is what a plain peer reaches by the mesh: the overlay, the pools, other CNIs' pods, networks behind
// nodes and other plain peers.
func routesOf(st *events.State, records api.Records, own *skeinv1.PlainPeer) []netip.Prefix {
	behind := projection.KnownOutside(st, st.Settings().GetRouteNodeAddresses(), func(id identity.ID) *skeinv1.Record {
		return records[id]
	})
	all := slices.Concat(projection.Overlays(st.Cluster()), projection.Pools(st), behind)
	for _, p := range st.PlainPeers() {
		if p.GetName() != own.GetName() {
			for _, text := range p.GetAllowedIps() {
				if n, err := netip.ParsePrefix(text); err == nil {
					all = append(all, n)
				}
			}
		}
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

// PlainPeers lists the plain peers as this node sees them.
func (s PlainPeerService) PlainPeers(context.Context, *skeinv1.PlainPeersRequest) (*skeinv1.PlainPeersResponse, error) {
	return &skeinv1.PlainPeersResponse{Peers: s.Views()}, nil
}

// RemovePlainPeer removes a plain peer.
func (s PlainPeerService) RemovePlainPeer(ctx context.Context,
	r *skeinv1.RemovePlainPeerRequest) (*skeinv1.RemovePlainPeerResponse, error) {
	answer, err := s.Agent.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_RemovePlainPeer{RemovePlainPeer: &skeinv1.RemovePlainPeer{Name: r.GetName(),
			Reason: "removed by hand"}}})
	if err != nil {
		return nil, err
	}
	peer := proto.CloneOf(answer.GetPlainPeer())
	api.RedactPlainPeer(peer)
	return &skeinv1.RemovePlainPeerResponse{Peer: peer, Index: answer.GetIndex()}, nil
}

// Views are all plain peers as this node sees them, by name.
func (s PlainPeerService) Views() (out []*skeinv1.PlainPeerView) {
	if !s.Joined() {
		return nil
	}
	st, records := s.Agent.State(), s.Agent.Records()
	own, status := s.Carrier.View(), s.Carrier.Status()
	for _, p := range st.PlainPeers() {
		v := &skeinv1.PlainPeerView{Peer: proto.CloneOf(p)}
		api.RedactPlainPeer(v.Peer)
		carriers := projection.PlainCarriers(st, p)
		terms := projection.PlainTerms(p.GetCreatedIndex(), carriers,
			func(id identity.ID) *skeinv1.Record { return records[id] })
		delete(terms, s.Agent.Self())
		if t := own.Terms[p.GetCreatedIndex()]; t > 0 {
			terms[s.Agent.Self()] = t
		}
		if holder, ok := plainpeer.Holder(carriers, terms); ok {
			v.Holder, v.HolderName, v.Alive = holder.String(), s.Agent.Name(holder), holder == s.Agent.Self() ||
				s.Agent.Alive(holder)
			if seen, here := status[p.GetCreatedIndex()]; here && holder == s.Agent.Self() {
				v.RxBytes, v.TxBytes = seen.Session.Received, seen.Session.Sent
				if seen.Session.Endpoint.IsValid() {
					v.Endpoint = seen.Session.Endpoint.String()
				}
				if !seen.Session.Handshake.IsZero() {
					v.LastHandshake = seen.Session.Handshake.UnixNano()
				}
			}
		}
		for _, c := range p.GetCarriers() {
			id, err := identity.ParseID(c.GetNodeId())
			if err != nil || st.Node(id) == nil {
				v.Carriers = append(v.Carriers, c.GetNodeId())
				v.Problem = fmt.Sprintf("carrier %s is not a member any more and still knows the peer's secrets: give it new ones "+
					"with skein peer add %s --replace",
					c.GetNodeId(), p.GetName())
				continue
			}
			v.Carriers = append(v.Carriers, st.Node(id).GetName())
		}
		if projection.PlainExpired(p, s.Now()) {
			v.Problem = "it has expired, and is removed once there is a leader"
		}
		out = append(out, v)
	}
	return out
}
