package agent

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/identity"
)

func (s services) Status(ctx context.Context, _ *skeinv1.StatusRequest) (*skeinv1.StatusResponse, error) {
	a := s.a
	r := &skeinv1.StatusResponse{
		NodeId: a.id.String(), Name: a.name(), Version: a.opts.Version, Site: a.host().Site, Epoch: a.epoch,
		StartedAt: a.started.UnixNano(), Problems: a.problems.list(), Phase: a.phase.Load().(string),
		ReconcileWrites: a.writes.Load(),
	}
	if a.opts.Load != nil {
		r.ConfigFile, r.RestartDue = a.opts.File, changeViews(a.live.due())
	}
	if a.replica == nil || r.Phase != PhaseRunning {
		return r, nil
	}
	st := a.replica.State()
	hash := st.Hash()
	r.ClusterId, r.Index, r.StateHash = a.cluster.String(), st.Index(), hex.EncodeToString(hash[:])
	records := a.gossip.Hash()
	r.RecordsHash = hex.EncodeToString(records[:])
	r.GossipKeys = gossipKeysView(st.GossipKeys(), a.gossip.KeyUsed())
	if n := a.self(); n != nil {
		r.Ipv4, r.Ipv6 = n.GetIpv4(), n.GetIpv6()
	}
	r.Role = string(st.Role(a.id.String()))
	if since := st.Settings().GetRolesSince(); since != st.Cluster().GetCreatedAt() {
		r.RolesIntroduced = since
	}
	if id, ok := a.leader(); ok {
		r.Leader, r.LeaderName = id.String(), a.roster.Name(id)
	}
	for _, v := range st.Servers() {
		status := a.serverStatus(v, r.GetLeaderName())
		r.Servers = append(r.Servers, status)
		if v.GetNodeId() == r.NodeId {
			r.Server, r.Voter = true, status.GetVoter()
		}
	}
	for _, id := range a.roster.Members() {
		r.Nodes++
		if id == a.id || a.gossip.Alive(id) {
			r.NodesAlive++
		}
	}
	if a.plane != nil {
		r.WireguardDriver = a.plane.Driver()
	}
	r.RelayUdp = a.udpText()
	a.siteStatus(r)
	a.placeStatus(r)
	a.hopStatus(ctx, r)
	r.Carries = a.heldPlain()
	a.eventStatus(r)
	if a.clockSeen.Load() {
		r.ClockOffsetNanos = a.clock.Load()
	}
	own := a.ownRecord()
	r.NatType, r.Relay = own.GetNatType(), own.GetRelay() != nil
	r.PeersDirect, r.PeersRelay, r.TransportMode = own.GetPeersDirect(), own.GetPeersRelay(), own.GetTransportMode()
	r.Peers = a.tunnelPeers()
	r.PeersDown = r.Peers - min(r.Peers, r.PeersDirect+r.PeersRelay)
	return r, nil
}

// serverStatus describes a server and whether it votes. A server's own Raft knows this, the leader's best; other
// nodes use the log.
func (a *Agent) serverStatus(v *skeinv1.Server, leader string) *skeinv1.ServerStatus {
	id, _ := identity.ParseID(v.GetNodeId())
	r := &skeinv1.ServerStatus{NodeId: v.GetNodeId(), Name: a.roster.Name(id), Voter: v.GetVoter(),
		Reachable: id == a.id || a.gossip.Alive(id)}
	if leads, ok := a.leader(); ok {
		r.Leader = leads == id
	}
	if s := a.server.Load(); s != nil {
		r.Voter, r.Waiting = s.Vote(v)
	}
	switch {
	case r.Voter || r.Waiting != "":
	case leader == "":
		r.Waiting = "there is no leader to let it vote"
	case !r.Reachable:
		r.Waiting = "it is not reachable; it votes when it has kept up with the log for some seconds"
	default:
		r.Waiting = "leader " + leader + " lets it vote when it has kept up with the log for some seconds; skein status " +
			"there tells how far it is"
	}
	return r
}

// tunnelPeers counts the members that this node has a tunnel to: not those that only relay, nor those reached over a
// hop.
func (a *Agent) tunnelPeers() (n uint32) {
	if a.relayOnly() {
		return 0
	}
	records := a.gossip.Records()
	for _, id := range a.roster.Members() {
		if id != a.id && records[id].Record.GetRole() != gossip.RoleRelay && a.reach.Load().Peer(id) {
			n++
		}
	}
	return n
}

func (s services) Nodes(ctx context.Context, _ *skeinv1.NodesRequest) (*skeinv1.NodesResponse, error) {
	a := s.a
	records, notAsked := a.allRecords(ctx)
	paths := a.currentPaths()
	r := &skeinv1.NodesResponse{NotAsked: notAsked}
	for _, n := range a.replica.State().Nodes() {
		r.Nodes = append(r.Nodes, a.nodeView(n, records, paths))
	}
	slices.SortFunc(r.Nodes, func(x, y *skeinv1.NodeView) int {
		return strings.Compare(x.GetNode().GetName(), y.GetNode().GetName())
	})
	r.PlainPeers = a.plainPeerService().Views()
	return r, nil
}

func (s services) ShowNode(ctx context.Context, r *skeinv1.ShowNodeRequest) (*skeinv1.ShowNodeResponse, error) {
	n, _, err := s.a.find(r.GetNode())
	if err != nil {
		return nil, err
	}
	records, notAsked := s.a.recordsOf(ctx, []*skeinv1.Node{n})
	return &skeinv1.ShowNodeResponse{Node: s.a.nodeView(n, records, s.a.currentPaths()), NotAsked: notAsked}, nil
}

func (a *Agent) nodeView(n *skeinv1.Node, records map[identity.ID]gossip.Entry,
	paths map[identity.ID]path.Path) *skeinv1.NodeView {
	id, _ := identity.ParseID(n.GetId())
	v := &skeinv1.NodeView{Node: n, Self: id == a.id}
	if e, ok := records[id]; ok {
		v.Record, v.RecordAgeNanos = e.Record, int64(time.Since(e.ReceivedAt))
	}
	v.Alive = v.Self || a.gossip.Alive(id)
	v.Site, _ = a.siteOf(n, v.Record)
	v.SiteLeads = leads(a.sitePlan.Load(), id)
	if srv := a.replica.State().Server(id); srv != nil {
		v.Server, v.Voter = true, srv.GetVoter()
	}
	v.Role = string(a.replica.State().Role(n.GetId()))
	leader, ok := a.leader()
	v.Leader = ok && leader == id
	v.Path = a.transport(id, paths)
	if v.Record.GetRole() == gossip.RoleRelay {
		v.Path = "none"
	}
	if v.Self {
		v.Path = "self"
	}
	return v
}

// transport is the way to a member, as one word for users.
func (a *Agent) transport(id identity.ID, paths map[identity.ID]path.Path) string {
	via, hop := a.reach.Load().Via(id)
	if !hop {
		return paths[id].Transport()
	}
	if paths[via].Alive {
		return "hop"
	}
	return "down"
}

func (a *Agent) currentPaths() map[identity.ID]path.Path {
	if a.paths == nil {
		return nil
	}
	return a.paths.Paths()
}

func (s services) Peers(ctx context.Context, q *skeinv1.PeersRequest) (*skeinv1.PeersResponse, error) {
	a := s.a
	past := q.GetAt() > 0 || q.GetAtTime() != 0
	if q.GetNode() != "" {
		if n, id, err := a.find(q.GetNode()); err != nil || id != a.id {
			if err == nil && past {
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New(
					"peers of another node are known only as they are now; for its past, run `skein plan --node NAME --at TIME`"))
			}
			return a.peersOf(ctx, n, id, err)
		}
	}
	if past {
		return s.PeersThen(ctx, q.GetAt(), q.GetAtTime())
	}
	records, notAsked := a.allRecords(ctx)
	paths := a.currentPaths()
	r := &skeinv1.PeersResponse{PeerTransports: map[string]string{}, NotAsked: notAsked}
	for _, n := range a.replica.State().Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil || id == a.id {
			continue
		}
		v := a.peerView(n, id, records[id].Record, paths[id])
		r.Peers = append(r.Peers, v)
		r.PeerTransports[v.GetName()] = a.transport(id, paths)
	}
	slices.SortFunc(r.Peers, func(x, y *skeinv1.PeerView) int { return strings.Compare(x.GetName(), y.GetName()) })
	return r, nil
}

func (a *Agent) peerView(n *skeinv1.Node, id identity.ID, record *skeinv1.Record, p path.Path) *skeinv1.PeerView {
	v := &skeinv1.PeerView{
		NodeId: n.GetId(), Name: n.GetName(), Ipv4: n.GetIpv4(), Ipv6: n.GetIpv6(), NatType: record.GetNatType(),
		Path: "none", RttNanos: int64(p.RTT), Reason: p.Reason, Rule: p.Rule, Alive: p.Alive,
	}
	if !p.Since.IsZero() {
		v.Since = p.Since.UnixNano()
	}
	switch p.Kind {
	case path.Direct:
		v.Path, v.Endpoint = "direct", p.Endpoint.String()
	case path.Relay:
		v.Path, v.Detail = "relay", "session"
		if !p.Relay.IsZero() {
			v.Relay, v.RelayName = p.Relay.String(), a.roster.Name(p.Relay)
		}
		if p.UDP() {
			v.Endpoint, v.Detail = p.Endpoint.String(), "udp"
		}
	}
	a.hopView(v, id)
	if p.Suspect {
		v.Reason += " No ping has been answered for a moment: other leaders carry what would go through it."
	}
	v.Reason += a.silentText(id)
	if len(n.GetWireguardKey()) != len(dataplane.Key{}) {
		return v
	}
	k := a.keys.DeviceKey(id, identity.WireGuardKey(n.GetWireguardKey()))
	if st, ok := a.stats.Load().Of(k); ok {
		v.RxBytes, v.TxBytes = st.RxBytes, st.TxBytes
		if !st.LastHandshake.IsZero() {
			v.LastHandshake = st.LastHandshake.UnixNano()
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.spec.WireGuard.Peers[k].AllowedIPs {
		v.AllowedIps = append(v.AllowedIps, p.String())
	}
	return v
}

// hopView fills in the node that passes packets on to a member which is not a peer.
func (a *Agent) hopView(v *skeinv1.PeerView, id identity.ID) {
	r := a.reach.Load()
	via, hop := r.Via(id)
	switch {
	case hop:
		p := a.currentPaths()[via]
		v.Path, v.Detail, v.Relay, v.RelayName, v.Endpoint, v.Alive = "hop", "site", via.String(),
			a.roster.Name(via), "", p.Alive
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

func (s services) Netcheck(ctx context.Context, r *skeinv1.NetcheckRequest) (*skeinv1.NetcheckResponse, error) {
	a := s.a
	if r.GetRefresh() && a.discovery != nil {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if _, err := a.discovery.Check(ctx); err != nil {
			return nil, api.Error(err)
		}
	}
	out := &skeinv1.NetcheckResponse{}
	if n := a.checked(); n != nil {
		out = &skeinv1.NetcheckResponse{
			NatType: n.NAT, Udp: n.UDP, Ipv4: n.IPv4, Ipv6: n.IPv6, Candidates: n.Candidates,
			Hairpin: n.Hairpin, Mapping: string(n.Mapping), Filtering: string(n.Filtering), CheckedAt: n.At.UnixNano(),
			PortPreserving: n.Preserving, PortStep: int32(n.PortStep),
		}
		out.Advice = n.AllAdvice(a.cfg.Ports.WireGuard)
		for _, note := range n.Notes {
			out.Notes = append(out.Notes, &skeinv1.DiscoveryNote{Source: note.Source, Ok: note.OK, Text: note.Text})
		}
		for _, g := range n.Host.Gateways {
			out.Gateways = append(out.Gateways, g.Addr.String())
		}
		out.TunnelMtu = uint32(a.tunnelMTU())
		for _, m := range n.Mapped {
			out.Mapped = append(out.Mapped, mappedText(m))
		}
	}
	for _, l := range a.pool.Stats() {
		out.Relays = append(out.Relays, &skeinv1.RelayCheck{
			NodeId: l.Relay.String(), Name: a.roster.Name(l.Relay), Address: strings.Join(l.Addresses, " "),
			Connected: l.Connected, RttNanos: int64(l.RTT), Error: l.LastError, State: l.State(),
		})
	}
	return out, nil
}

// checked is the newest result of discovery. The field netcheck has only results that differ from earlier ones.
func (a *Agent) checked() *candidate.Result {
	if a.discovery != nil {
		if r := a.discovery.Result(); !r.At.IsZero() {
			return &r
		}
	}
	return a.netcheck.Load()
}

// mostOfJournal limits the entries in one answer.
const mostOfJournal = 10_000

// Journal returns the newest entries. The agent answers since its process holds the file.
func (s services) Journal(_ context.Context, r *skeinv1.JournalRequest) (*skeinv1.JournalResponse, error) {
	most := mostOfJournal
	if n := r.GetMost(); n > 0 {
		most = int(min(n, mostOfJournal))
	}
	out := &skeinv1.JournalResponse{}
	err := s.a.journal.Back(func(e *skeinv1.JournalEntry) bool {
		out.Entries = append(out.Entries, e)
		return len(out.Entries) < most
	})
	if err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	slices.Reverse(out.Entries)
	return out, nil
}

func (s services) ExplainPeer(ctx context.Context,
	r *skeinv1.ExplainPeerRequest) (*skeinv1.ExplainPeerResponse, error) {
	a := s.a
	n, id, err := a.find(r.GetPeer())
	if err != nil {
		return nil, err
	}
	if a.paths == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("this node only relays and has no paths "+
			"of its own; ask another node"))
	}
	if id == a.id {
		return nil, connect.NewError(connect.CodeInvalidArgument,
			fmt.Errorf("%s is this node itself; name a peer", n.GetName()))
	}
	records, notAsked := a.recordsOf(ctx, []*skeinv1.Node{n})
	record := records[id].Record
	out := &skeinv1.ExplainPeerResponse{Record: record, Self: a.ownRecord(), NotAsked: notAsked}
	if r.GetAt() > 0 {
		return s.ExplainThen(n, id, out, time.Unix(0, r.GetAt()))
	}
	e, ok := a.paths.Explain(id)
	out.Peer = a.peerView(n, id, record, e.Path)
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
	if past, err := path.ExplainAt(a.journal, id, time.Now()); err == nil {
		out.History = past.History
	}
	return out, nil
}
