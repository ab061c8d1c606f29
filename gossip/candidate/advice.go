package candidate

import (
	"fmt"
	"slices"
	"strings"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// AllAdvice is what an operator could do so that more peers have a direct path, in plain words; port is WireGuard's.
func (r Result) AllAdvice(port uint16) []string {
	open := slices.IndexFunc(r.Candidates, func(c *skeinv1.Candidate) bool { return slices.Contains(granted, c.Source) })
	if open >= 0 {
		c := r.Candidates[open]
		return []string{fmt.Sprintf("nothing to do: the router forwards UDP at %s to this host (%s), so every peer can "+
			"have a direct path", c.Address, c.Source)}
	}
	out := slices.Clone(r.Advice)
	forced := slices.ContainsFunc(r.Candidates, func(c *skeinv1.Candidate) bool {
		return c.Type == skeinv1.CandidateType_CANDIDATE_TYPE_FORCED
	})
	switch r.NAT {
	case skeinv1.NatType_NAT_TYPE_RESTRICTED_CONE, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE,
		skeinv1.NatType_NAT_TYPE_SYMMETRIC:
	default:
		return out
	}
	if forced || r.Preserving && len(r.Host.Addrs) > 0 && r.ownMapped() {
		return out // no router to ask for anything
	}
	return append(out, r.aboutRouter(port))
}

// granted are the sources of what a router forwards.
var granted = []string{"pcp", "natpmp", "upnp"}

// ownMapped reports whether servers see an address of this host itself.
func (r Result) ownMapped() bool {
	return slices.ContainsFunc(r.Mapped, func(o Observation) bool {
		return slices.Contains(r.Host.Addrs, o.Mapped.Addr())
	})
}

// aboutRouter says what to change at the router, by what came of asking it.
func (r Result) aboutRouter(port uint16) string {
	says := func(text string) bool {
		return slices.ContainsFunc(r.Notes, func(n Note) bool {
			return slices.Contains(granted, n.Source) && strings.Contains(n.Text, text)
		})
	}
	asked := slices.ContainsFunc(r.Notes, func(n Note) bool { return slices.Contains(granted, n.Source) })
	switch {
	case says("do not arrive"):
		return fmt.Sprintf("the router grants UDP port %d, and what is sent there does not arrive: look for a firewall, or "+
			"a second router in front of it", port)
	case says("double NAT"):
		return fmt.Sprintf("there are two NATs in a row: forward UDP port %d on both, or make the inner router a bridge",
			port)
	case says("it has none"), says("has no address itself"):
		return "the router has no public address itself (double NAT, or it is offline): forwarding can only be done by " +
			"whoever runs the NAT in front of it"
	case says("refused"):
		return fmt.Sprintf("the router supports port mapping but refuses it: allow it for this host there, or forward "+
			"UDP port %d to this host", port)
	case asked:
		return fmt.Sprintf("forward UDP port %d on the router to this host, or switch UPnP, NAT-PMP or PCP on there: then "+
			"every peer can have a direct path", port)
	default:
		return fmt.Sprintf("forward UDP port %d on the router to this host, or let skein ask it "+
			"(natTraversal.portMapping): then every peer can have a direct path", port)
	}
}
