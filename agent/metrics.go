package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeinmesh/skein/agent/api/egresses"
	"github.com/skeinmesh/skein/agent/metrics"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

func newMetrics(a *Agent) *metrics.Metrics {
	return metrics.New(metrics.Config{Writes: a.writes.Load, Forged: func() int { return a.client.Forged() },
		Collect: a.collect, Ready: a.ready})
}

// ready: the data plane holds what it should, and nothing is known to be broken. It does not ask for a
// leader or a quorum: forwarding goes on without.
func (a *Agent) ready() error {
	switch p := a.problems.failing(); {
	case !a.applied.Load() && !a.relayOnly():
		return errors.New("the data plane has not been set up yet")
	case p != nil:
		return fmt.Errorf("%s: %s", p.GetSubject(), p.GetMessage())
	}
	return nil
}

// observe gives the metrics the newest values.
func (a *Agent) observe() {
	own := a.ownRecord()
	now := metrics.Now{Version: a.opts.Version, Node: a.id.String(), Name: a.name(),
		NAT: candidate.NATName(own.GetNatType()), Mode: own.GetTransportMode(), Index: a.replica.State().Index(),
		Paths:   map[string]int{"direct": 0, "relay": 0, "down": 0},
		Streams: a.passing(), Source: a.eventSource(), Problems: map[string]int{warning: 0, failure: 0}}
	if a.plane != nil {
		now.Driver = a.plane.Driver()
	}
	for _, p := range a.currentPaths() {
		now.Paths[p.Transport()]++
	}
	if s := a.server.Load(); s != nil {
		now.Leader = s.IsLeader()
	}
	for _, p := range a.problems.list() {
		now.Problems[p.GetSeverity()]++
	}
	a.metrics.Observe(now)
}

// collect tells what components count themselves.
func (a *Agent) collect(out chan<- prometheus.Metric) {
	name := a.roster.Name
	if a.gossip != nil {
		alive, all := a.countAlive()
		metrics.Nodes(out, alive, all)
		metrics.Gossip(out, a.gossip.Stats())
	}
	for id, n := range a.witnesses.counts() {
		metrics.Echoes(out, name(id), n)
	}
	for _, s := range a.pool.Stats() {
		metrics.RelaySession(out, name(s.Relay), s)
	}
	all := a.stats.Load()
	for _, id := range a.roster.Members() {
		m, _ := a.roster.Get(id)
		if p, ok := all.Of(a.keys.DeviceKey(id, m.WireGuard)); ok {
			metrics.PeerBytes(out, m.Name, p.RxBytes, p.TxBytes)
		}
	}
	if a.paths != nil {
		for id, p := range a.currentPaths() {
			metrics.PeerPath(out, name(id), p.Transport())
		}
		metrics.Paths(out, a.paths.Metrics())
	}
	if listener := a.listener.Load(); listener != nil {
		_, refused := listener.Stats()
		metrics.RelayServer(out, a.relay.Stats(), refused)
	}
	if relay := a.udp.Load(); relay != nil {
		metrics.UDPRelay(out, relay.Stats())
	}
	a.collectWorkloads(out)
	metrics.Usage(out)
	if s := a.server.Load(); s != nil {
		metrics.Raft(out, s.Stats())
	}
	a.collectSites(out)
	if a.predictor != nil {
		metrics.PortPrediction(out, a.predictor.Stats(), len(a.predictor.PortRewrites()))
	}
	if a.prober != nil {
		metrics.Probes(out, a.prober.Stats())
	}
}

// collectWorkloads tells of pools, pods, egresses and plain peers, in the cluster and here.
func (a *Agent) collectWorkloads(out chan<- prometheus.Metric) {
	st := a.replica.State()
	metrics.Pools(out, st, time.Now())
	if a.pods != nil {
		for name, l := range a.pods.IPAM().Pools() {
			metrics.PodAddresses(out, name, l)
		}
	}
	metrics.Slots(out, st)
	if a.egresses != nil {
		ctx, cancel := context.WithTimeout(context.Background(), egresses.Patience)
		defer cancel()
		if r, err := a.egresses.Report(ctx, a.id, &skeinv1.EgressReportRequest{}); err == nil {
			metrics.EgressReport(out, r)
		} else {
			a.log.Debug("metrics: this node's egresses cannot be read", "error", err)
		}
	}
	if a.plain != nil && a.gossip != nil {
		metrics.PlainPeers(out, a.id.String(), a.plainPeerService().Views())
	}
}

// collectSites tells how this node takes part in its site, and how packets fare that travel inside others.
func (a *Agent) collectSites(out chan<- prometheus.Metric) {
	p := a.sitePlan.Load()
	if p == nil || a.relayOnly() {
		return
	}
	s := metrics.Sites{Tunnels: int(a.tunnelPeers()), Apart: p.Topology(p.Site) == sites.Site,
		Site: p.Site, Leads: p.Leads(a.id),
		Own: a.leaderChanges.Own.Load(), Other: a.leaderChanges.Other.Load()}
	if r := a.reach.Load(); r != nil {
		for _, w := range r.Ways() {
			if !w.Passed {
				s.Hops++
			}
		}
	}
	if now, err := a.readHops(context.Background()); err == nil {
		s.Packets = &now.Counts
	}
	if v := a.placed.Load(); v != nil {
		everybody, site := recordCounts(a.gossip.Records())
		s.Gossip = &metrics.SiteGossip{Wide: v.wide, Everybody: everybody, Site: site}
	}
	s.Collect(out)
}

// countAlive are the members that gossip sees, and all.
func (a *Agent) countAlive() (alive, all int) {
	members := a.roster.Members()
	for _, id := range members {
		if id == a.id || a.gossip.Alive(id) {
			alive++
		}
	}
	return alive, len(members)
}
