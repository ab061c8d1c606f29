package sites

import (
	"net/netip"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
)

// The two topologies of a site.
const (
	Full = "full" // every node of the site peers with other sites
	Site = "site" // only its leaders do
)

// RoleRelay is the Record.role of a node that relays and forwards nothing else.
const RoleRelay = "relay"

// Topology returns the topology of a site: its own setting, otherwise the default for all sites.
func Topology(s *skeinv1.Settings, site string) string {
	t, ok := s.GetSiteTopology()[site]
	if !ok {
		t = s.GetTopology()
	}
	if t == Site {
		return Site
	}
	return Full
}

// InUse reports whether any site may use leaders.
func InUse(s *skeinv1.Settings) bool {
	if s.GetTopology() == Site {
		return true
	}
	for _, t := range s.GetSiteTopology() {
		if t == Site {
			return true
		}
	}
	return false
}

// Of returns a member's site: as the log sets it, otherwise as its record says. known is false if neither does.
func Of(n *skeinv1.Node, r *skeinv1.Record) (site string, known bool) {
	if n.GetSettings().GetSiteSet() {
		return n.GetSettings().GetSite(), true
	}
	return r.GetSite(), r != nil
}

// Describe returns what an election needs to know of a member; known is false while its site is unknown.
func Describe(id identity.ID, n *skeinv1.Node, r *skeinv1.Record, alive bool) (node Node, known bool) {
	node = Node{ID: id, Reluctant: n.GetDraining(), Term: r.GetLeads(), Alive: alive}
	node.Site, known = Of(n, r)
	switch n.GetSettings().GetLeader() {
	case "yes":
		node.Chosen = true
	case "no":
		node.Reluctant = true
	default:
		node.Wish = r.GetLeaderWish()
	}
	node.Unfit = r == nil || r.GetRole() == RoleRelay
	node.Public = n.GetSettings().GetForceEndpoint() != "" || Reachable(r)
	return node, known
}

// Alike reports whether two records of a member give the same plans. Most changes of a record do not: sites, leaders
// and ways depend on few of its fields.
func Alike(x, y *skeinv1.Record) bool {
	return x == y || (x == nil) == (y == nil) &&
		x.GetSite() == y.GetSite() &&
		(x.GetRole() == RoleRelay) == (y.GetRole() == RoleRelay) &&
		x.GetLeads() == y.GetLeads() && x.GetLeaderSlot() == y.GetLeaderSlot() &&
		x.GetLeaderWish() == y.GetLeaderWish() &&
		slices.EqualFunc(x.GetSilentLeaders(), y.GetSilentLeaders(), sameSilence) &&
		Reachable(x) == Reachable(y)
}

func sameSilence(x, y *skeinv1.SilentLeader) bool {
	return x.GetNodeId() == y.GetNodeId() && x.GetKinds() == y.GetKinds() && x.GetSince() == y.GetSince()
}

// Reachable reports whether other sites can send to a node before it has sent to them: its endpoint was given, it has a
// public address of its own, or a router or cloud forwards an address to it.
func Reachable(r *skeinv1.Record) bool {
	if r.GetForcedEndpoint() != "" {
		return true
	}
	return slices.ContainsFunc(r.GetCandidates(), func(c *skeinv1.Candidate) bool {
		switch {
		case c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_FORCED:
			return true
		case c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_HOST, slices.Contains(forwarded, c.GetSource()):
			ap, err := netip.ParseAddrPort(c.GetAddress())
			return err == nil && addr.Public(ap.Addr())
		}
		return false
	})
}

// forwarded are the sources of candidates that a router or cloud forwards to the node.
var forwarded = []string{"imds", "pcp", "natpmp", "upnp"}
