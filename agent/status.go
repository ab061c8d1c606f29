package agent

import (
	"context"
	"encoding/hex"

	"github.com/skeinmesh/skein/agent/api/members"
	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
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
	r.GossipKeys = members.GossipKeys(st.GossipKeys(), a.gossip.KeyUsed())
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

func (a *Agent) currentPaths() map[identity.ID]path.Path {
	if a.paths == nil {
		return nil
	}
	return a.paths.Paths()
}
