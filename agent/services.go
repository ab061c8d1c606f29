package agent

import (
	"context"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/api/addresses"
	"github.com/skeinmesh/skein/agent/api/egresses"
	"github.com/skeinmesh/skein/agent/api/history"
	"github.com/skeinmesh/skein/agent/api/plainpeers"
	"github.com/skeinmesh/skein/agent/api/pools"
	"github.com/skeinmesh/skein/agent/api/profile"
	"github.com/skeinmesh/skein/agent/ipam"
	"github.com/skeinmesh/skein/agent/pods"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// services are the local API; each method reads what the agent has, or proposes a command.
type services struct {
	a *Agent
	addresses.AddressService
	egresses.EgressService
	history.HistoryService
	plainpeers.PlainPeerService
	pools.PoolService
	profile.ProfileService
}

var _ skeinv1connect.AgentServiceHandler = services{}

func (a *Agent) services() services {
	s := services{a: a, AddressService: a.addressService(), PoolService: pools.PoolService{Agent: answering{a}},
		PlainPeerService: a.plainPeerService(), HistoryService: a.historyService(),
		EgressService: egresses.EgressService{Agent: answering{a}, Journal: a.journal, Log: a.log}}
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
		Cluster: func(id identity.ID) skeinv1connect.ClusterServiceClient { return a.conns.Cluster(id) },
	}
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

var _ api.Agent = answering{}

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

func (s answering) Propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	return s.a.propose(ctx, c)
}
