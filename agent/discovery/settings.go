package discovery

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/agent/config"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/addr"
)

// StunOn reports whether a host asks STUN servers, and answers STUN where it is public.
func StunOn(cfg config.Config, set *skeinv1.Settings) bool {
	return cmp.Or(cfg.NatTraversal.Stun, set.GetStun()) != "disabled"
}

// StunServers chooses the servers to ask: the host's own, else the cluster's, else the mesh's public nodes; none where
// STUN is off. The caller may modify the result.
func StunServers(cfg config.Config, set *skeinv1.Settings, mesh []string) []string {
	switch {
	case !StunOn(cfg, set):
		return nil
	case len(cfg.StunServers) > 0:
		return slices.Clone(cfg.StunServers)
	case len(set.GetStunServers()) > 0:
		return slices.Clone(set.GetStunServers())
	}
	return mesh
}

// PublicPorts returns the addresses at which a public node's WireGuard port is reachable from everywhere, at most two.
func PublicPorts(r *skeinv1.Record) (out []netip.AddrPort) {
	for _, c := range r.GetCandidates() {
		a, err := netip.ParseAddrPort(c.GetAddress())
		open := c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_FORCED ||
			c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_HOST && addr.Public(a.Addr())
		if err == nil && open && len(out) < 2 {
			out = append(out, a)
		}
	}
	return out
}
