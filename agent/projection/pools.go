package projection

import (
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/events"
)

// Pools are the subnets of all address pools.
func Pools(s *events.State) []netip.Prefix {
	var out []netip.Prefix
	for _, pool := range s.Pools() {
		for _, n := range pool.GetSubnets() {
			out = append(out, prefixesOf(n)...)
		}
	}
	return out
}

// poolsOf are the pools' subnets that are refused behind all that leads somewhere, and the parts of them that are not
// the mesh's to lead: blocks that are reserved for other software, such as pods of Coil on hosts that are not members
// yet; networks on this host's own links; and addresses that egresses' packets leave with, which are reached from
// outside. The addresses that sites' networks have elsewhere are refused likewise.
func poolsOf(s *events.State, connected []netip.Prefix) (pools, elsewhere []netip.Prefix) {
	for _, p := range slices.Concat(Pools(s), Elsewhere(s)) {
		if !slices.ContainsFunc(connected, func(c netip.Prefix) bool { return c.Bits() <= p.Bits() && c.Overlaps(p) }) {
			pools = append(pools, p)
		}
	}
	add := func(ps ...netip.Prefix) {
		for _, p := range ps {
			if slices.ContainsFunc(pools, p.Overlaps) {
				elsewhere = append(elsewhere, p)
			}
		}
	}
	for _, b := range s.BlocksForOthers() {
		add(prefixesOf(b)...)
	}
	for _, e := range s.Egresses() {
		for _, a := range e.GetAddresses() {
			add(addressesOf(a)...)
		}
	}
	for _, c := range connected {
		add(c.Masked())
	}
	return sorted(append(pools, staticsOfNobody(s)...)), sorted(elsewhere)
}

// staticsOfNobody are static addresses that no node holds, where a user has reserved the block around them: what is
// elsewhere by that would take their packets along.
func staticsOfNobody(s *events.State) (out []netip.Prefix) {
	for _, a := range s.Statics() {
		if a.GetNodeId() != "" {
			continue
		}
		for _, p := range addressesOf(a) {
			if _, _, b := s.BlockAt(p.Addr()); events.ForOthers(b) {
				out = append(out, p)
			}
		}
	}
	return out
}

// pair is what has an address or a network of each family, or of one.
type pair interface {
	GetIpv4() string
	GetIpv6() string
}

// prefixesOf are a pair's networks.
func prefixesOf(n pair) (out []netip.Prefix) {
	for _, text := range []string{n.GetIpv4(), n.GetIpv6()} {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p)
		}
	}
	return out
}

// addressesOf are a pair's addresses.
func addressesOf(n pair) (out []netip.Prefix) {
	for _, text := range []string{n.GetIpv4(), n.GetIpv6()} {
		if a, err := netip.ParseAddr(text); err == nil {
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return out
}

// sorted is a list in order, each once.
func sorted(ps []netip.Prefix) []netip.Prefix {
	slices.SortFunc(ps, netip.Prefix.Compare)
	return slices.Compact(ps)
}
