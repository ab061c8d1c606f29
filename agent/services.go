package agent

import (
	"context"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/api/addresses"
	"github.com/skeinmesh/skein/agent/api/egresses"
	"github.com/skeinmesh/skein/agent/api/history"
	"github.com/skeinmesh/skein/agent/api/members"
	"github.com/skeinmesh/skein/agent/api/nattraversal"
	"github.com/skeinmesh/skein/agent/api/peers"
	"github.com/skeinmesh/skein/agent/api/plainpeers"
	"github.com/skeinmesh/skein/agent/api/pools"
	"github.com/skeinmesh/skein/agent/api/profile"
	"github.com/skeinmesh/skein/agent/discovery"
	"github.com/skeinmesh/skein/agent/ipam"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/pods"
	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/udp"
)

// services are the local API; each method reads what the agent has, or proposes a command.
type services struct {
	a *Agent
	addresses.AddressService
	egresses.EgressService
	history.HistoryService
	members.MemberService
	peers.PeerService
	plainpeers.PlainPeerService
	pools.PoolService
	profile.ProfileService
	nattraversal.TraversalService
}

var _ skeinv1connect.AgentServiceHandler = services{}

func (a *Agent) services() services {
	s := services{a: a, AddressService: a.addressService(), PoolService: pools.PoolService{Agent: answering{a}},
		PlainPeerService: a.plainPeerService(), HistoryService: a.historyService(), PeerService: a.peerService(),
		MemberService:    a.memberService(),
		TraversalService: nattraversal.TraversalService{Host: answering{a}, WireGuardPort: a.cfg.Ports.WireGuard},
		EgressService:    egresses.EgressService{Agent: answering{a}, Journal: a.journal, Log: a.log}}
	s.ProfileService = profile.ProfileService{Name: a.name, Turn: &a.profiling, Log: a.log}
	if a.egresses != nil {
		s.EgressService.Host = a.egresses
	}
	if a.pods != nil {
		s.PoolService.Addresses = a.pods.IPAM()
	}
	return s
}

func (a *Agent) historyService() history.HistoryService {
	return history.HistoryService{
		Agent: answering{a}, Archive: a.archive, Journal: a.journal, Plans: a.plans.log, Elsewhere: a.elsewhere,
		Newest: func() (dataplane.Spec, func(dataplane.Key) string, bool) {
			now := a.plans.now.Load()
			if now == nil {
				return dataplane.Spec{}, nil, false
			}
			return now.spec, keyName(now.names), true
		},
		Changes: func(ctx context.Context, s dataplane.Spec) ([]string, error) { return a.plane.Diff(ctx, s) },
		Cluster: answering{a}.Cluster,
	}
}

func (a *Agent) memberService() members.MemberService {
	return members.MemberService{Host: answering{a}}
}

func (a *Agent) peerService() peers.PeerService {
	return peers.PeerService{Host: answering{a}, Past: a.historyService()}
}

// Journal returns the newest entries of the journal.
func (s services) Journal(_ context.Context, r *skeinv1.JournalRequest) (*skeinv1.JournalResponse, error) {
	return s.ReadJournal(r)
}

func (a *Agent) archive() history.Archive {
	return history.Archive{Replica: a.replica, Client: a.client}
}

func (a *Agent) plainPeerService() plainpeers.PlainPeerService {
	return plainpeers.PlainPeerService{Agent: answering{a}, Carrier: a.plain, Now: a.leaderTime,
		Joined: func() bool { return a.replica != nil && a.gossip != nil }}
}

func (a *Agent) addressService() addresses.AddressService {
	s := addresses.AddressService{Agent: answering{a}, Journal: a.journal,
		Ask: func(ctx context.Context, node identity.ID, r *skeinv1.HolderRequest) (*skeinv1.HolderResponse, error) {
			return a.conns.Cluster(node).Holder(ctx, r)
		}}
	if a.pods != nil {
		s.Host = hostAddresses{a.pods.IPAM(), a.pods}
	}
	return s
}

// hostAddresses are those of this host's pods.
type hostAddresses struct {
	*ipam.Manager
	pods *pods.Pods
}

func (h hostAddresses) Look() { h.pods.Look() }

// answering is the agent as services see it.
type answering struct{ a *Agent }

var (
	_ members.Host      = answering{}
	_ peers.Host        = answering{}
	_ nattraversal.Host = answering{}
)

func (s answering) Self() identity.ID                                        { return s.a.id }
func (s answering) Name(id identity.ID) string                               { return s.a.roster.Name(id) }
func (s answering) State() *events.State                                     { return s.a.replica.State() }
func (s answering) Records() api.Records                                     { return s.a.recordsNow() }
func (s answering) Alive(id identity.ID) bool                                { return s.a.gossip.Alive(id) }
func (s answering) Leader() (identity.ID, bool)                              { return s.a.leader() }
func (s answering) SiteOf(n *skeinv1.Node, r *skeinv1.Record) (string, bool) { return s.a.siteOf(n, r) }

func (s answering) RecordsAsked(ctx context.Context) api.Records { return s.a.recordsAsked(ctx) }

func (s answering) StateThen(ctx context.Context, index uint64, at int64) (*events.State, error) {
	return s.a.archive().StateThen(ctx, index, at)
}

func (s answering) EachEvent(ctx context.Context, last uint64, f func(*skeinv1.Event)) error {
	return s.a.archive().EachEvent(ctx, last, f)
}

func (s answering) RecordsOf(ctx context.Context, of []*skeinv1.Node) (map[identity.ID]gossip.Entry, []string) {
	return s.a.recordsOf(ctx, of)
}

func (s answering) Wait(ctx context.Context, index uint64) error { return s.a.replica.Wait(ctx, index) }
func (s answering) Seeds() []*skeinv1.JoinToken_Seed             { return s.a.seeds() }
func (s answering) GossipKeyUsed() []byte                        { return s.a.gossip.KeyUsed() }
func (s answering) OwnRecord() *skeinv1.Record                   { return s.a.ownRecord() }
func (s answering) Paths() *path.Manager                         { return s.a.paths }
func (s answering) Reach() *sitemesh.Reach                       { return s.a.reach.Load() }
func (s answering) Plan() *sites.Plan                            { return s.a.sitePlan.Load() }
func (s answering) Silent(member identity.ID) string             { return s.a.silentText(member) }
func (s answering) PlainPeers() []*skeinv1.PlainPeerView         { return s.a.plainPeerService().Views() }
func (s answering) Discovery() *discovery.Discovery              { return s.a.discovery }
func (s answering) LastChecked() *candidate.Result               { return s.a.netcheck.Load() }
func (s answering) TunnelMTU() int                               { return s.a.tunnelMTU() }
func (s answering) Relays() *client.Pool                         { return s.a.pool }

func (s answering) Cluster(id identity.ID) skeinv1connect.ClusterServiceClient {
	return s.a.conns.Cluster(id)
}

// Relaying has a listener as soon as this host relays. The listener comes after the relay, which may begin while the
// agent runs.
func (s answering) Relaying() (*server.Server, *admission.Listener, *udp.Relay) {
	listener := s.a.listener.Load()
	if listener == nil {
		return nil, nil, nil
	}
	return s.a.relay, listener, s.a.udp.Load()
}

func (s answering) Tunnel(peer identity.ID, key identity.WireGuardKey) (dataplane.PeerStatus, []netip.Prefix) {
	k := s.a.keys.DeviceKey(peer, key)
	counted, _ := s.a.stats.Load().Of(k)
	s.a.mu.Lock()
	defer s.a.mu.Unlock()
	return counted, slices.Clone(s.a.spec.WireGuard.Peers[k].AllowedIPs)
}

func (s answering) Propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	return s.a.propose(ctx, c)
}
