package projection

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
)

// blocksOf are the pieces of pools that lead to a node, sorted: its blocks, and the static addresses that it holds.
func blocksOf(s *events.State, node string) []netip.Prefix {
	var out []netip.Prefix
	for _, b := range s.BlocksOf(node) {
		for _, text := range []string{b.GetIpv4(), b.GetIpv6()} {
			if p, err := netip.ParsePrefix(text); err == nil {
				out = append(out, p)
			}
		}
	}
	for _, a := range s.StaticsOf(node) {
		for _, text := range []string{a.GetIpv4(), a.GetIpv6()} {
			if a, err := netip.ParseAddr(text); err == nil {
				out = append(out, netip.PrefixFrom(a, a.BitLen()))
			}
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}

// Pools are the subnets of all address pools.
func Pools(s *events.State) []netip.Prefix {
	var out []netip.Prefix
	for _, pool := range s.Pools() {
		for _, n := range pool.GetSubnets() {
			for _, text := range []string{n.GetIpv4(), n.GetIpv6()} {
				if p, err := netip.ParsePrefix(text); err == nil {
					out = append(out, p)
				}
			}
		}
	}
	return out
}

// mayLead refuses a peer's block that would take the traffic of this host's own network away from it.
func (h *Host) mayLead(block netip.Prefix) error {
	for _, c := range h.Connected {
		if c.Overlaps(block) {
			return fmt.Errorf("block %s overlaps %s, the network on a link of this host", block, c)
		}
	}
	return nil
}

func comparePodRoutes(a, b dataplane.PodRoute) int { return a.Addr.Compare(b.Addr) }
