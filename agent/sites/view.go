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
	Full = "full" // its nodes peer with other sites themselves
	Site = "site" // its leaders do
)

// RoleRelay is the Record.role of a node that relays and forwards nothing else.
const RoleRelay = "relay"

// Topology is a site's.
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

// InUse reports whether any site may speak through leaders.
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

// Of is a member's site: what the log says, else what its record says. A member of which neither is known is unknown.
func Of(n *skeinv1.Node, r *skeinv1.Record) (site string, known bool) {
	if n.GetSettings().GetSiteSet() {
		return n.GetSettings().GetSite(), true
	}
	return r.GetSite(), r != nil
}

// Describe is what an election needs to know of a member; known is false while nothing tells its site.
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

// Alike reports whether plans read the same in two records of one member. Most changes of a record are none to plans:
// the members in their places, their leaders and the ways between them follow from few of its fields.
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

// Reachable reports whether other sites can send to an endpoint of a node without its having sent to them before: one
// that was given, a public address of its own, or what a router or cloud forwards to it.
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

// forwarded are the sources of candidates that somebody forwards to the node.
var forwarded = []string{"imds", "pcp", "natpmp", "upnp"}
