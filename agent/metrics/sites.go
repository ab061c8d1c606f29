package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeinmesh/skein/dataplane/hop"
)

var (
	descHopPackets = prometheus.NewDesc("skein_hop_packets_total",
		"Packets inside others between sites: sent, received; dropped: refused, malformed, congested, too_large.",
		[]string{"outcome"}, nil)
	descReached = prometheus.NewDesc("skein_members_reached",
		"Other members by how this node sends to them: by a tunnel of its own, or as a hop by a leader.", []string{"by"}, nil)
	descSiteLeads = prometheus.NewDesc("skein_site_leads",
		"In topology site, 1 for what this node is in its site: leader, reserve, elected.", []string{"site", "state"}, nil)
	descGossipRecords = prometheus.NewDesc("skein_gossip_records",
		"Where sites speak through leaders, records that this node keeps: for everybody, or for its site alone.",
		[]string{"for"}, nil)
	descGossipWith = prometheus.NewDesc("skein_gossip_with",
		"Where sites speak through leaders, 1 for those with whom this node exchanges records: everybody, or its site alone.",
		[]string{"whom"}, nil)
	descLeaderChanges = prometheus.NewDesc("skein_site_leader_changes_total",
		"Times that others led a site than before, as this node sees it: of its own site, of another.", []string{"of"}, nil)
)

// Sites is what the metrics of sites tell of a node.
type Sites struct {
	Tunnels, Hops int    // other members, by how this node sends to them
	Apart         bool   // this node's site speaks through leaders
	Site, Leads   string // this node's, if so
	Own, Other    uint64 // times that others lead a site than before: its own, others
	Packets       *hop.Counts
	Gossip        *SiteGossip // nil: with everybody, as all do
}

// SiteGossip is with whom a node exchanges records.
type SiteGossip struct {
	Wide            bool // everybody
	Everybody, Site int  // records
}

// With whom a node gossips, as status and metrics say.
const (
	WithEverybody = "everybody"
	WithSite      = "site"
)

// Collect tells of them.
func (f Sites) Collect(out chan<- prometheus.Metric) {
	gauge(out, descReached, float64(f.Tunnels), "tunnel")
	gauge(out, descReached, float64(f.Hops), "hop")
	for _, state := range []string{"leader", "reserve", "elected"} {
		if f.Apart {
			gauge(out, descSiteLeads, one(f.Leads == state), f.Site, state)
		}
	}
	counter(out, descLeaderChanges, f.Own, "own")
	counter(out, descLeaderChanges, f.Other, "other")
	if g := f.Gossip; g != nil {
		gauge(out, descGossipRecords, float64(g.Everybody), WithEverybody)
		gauge(out, descGossipRecords, float64(g.Site), WithSite)
		gauge(out, descGossipWith, one(g.Wide), WithEverybody)
		gauge(out, descGossipWith, one(!g.Wide), WithSite)
	}
	if n := f.Packets; n != nil {
		counters(out, descHopPackets, map[string]uint64{"sent": n.Wrapped, "received": n.Unwrapped, "refused": n.Refused,
			"malformed": n.Malformed, "congested": n.Congested, "too_large": n.TooLarge})
	}
}
