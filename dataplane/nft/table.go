package nft

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// Priorities of chains.
const (
	ofSources      = -310 // before all that others do to packets, and before conntrack
	ofTranslateIn  = -305 // behind the check of sources
	ofRewriteIn    = -300 // before conntrack: the host's own firewall sees WireGuard's port alone
	ofClamp        = -150 // of what enters the tunnel the route is known here, and with it how large a packet may be
	ofRewriteOut   = 300  // behind conntrack
	ofTranslateOut = 310  // behind everything else
)

// Want is the table of a Spec, and notes about what in it cannot be. While the Spec is not complete, port rewrites stay
// that the kernel has for other peers.
func Want(s dataplane.Spec, have nftable.State) (nftable.Table, []string) {
	n := s.Numbers.Filled()
	rewrites, notes := usable(s.PortRewrites)
	if !s.Complete {
		rewrites = mergeRewrites(rewrites, rewritesIn(have))
	}
	t := nftable.Table{Name: n.NftTable}
	t.Chains = append(t.Chains,
		nftable.Chain{Name: dataplane.ChainPrerouting, Type: nftables.ChainTypeFilter,
			Hook: nftables.ChainHookPrerouting, Rules: markRules(n)},
		nftable.Chain{Name: dataplane.ChainOutgoing, Type: nftables.ChainTypeRoute, Hook: nftables.ChainHookOutput,
			Rules: markRules(n)},
		nftable.Chain{Name: dataplane.ChainClamp, Type: nftables.ChainTypeFilter, Hook: nftables.ChainHookPostrouting,
			Priority: ofClamp, Rules: []nftable.Rule{clampRule(n)}})
	t.Sets = append(t.Sets, addresses(dataplane.SetTargetsIPv4, dataplane.SetTargetsIPv6, s.Targets)...)
	if len(rewrites) > 0 {
		t.Chains = append(t.Chains,
			nftable.Chain{Name: dataplane.ChainRewriteIn, Type: nftables.ChainTypeFilter,
				Hook: nftables.ChainHookPrerouting, Priority: ofRewriteIn, Rules: []nftable.Rule{rewriteIn(s.WireGuard.Port)}},
			nftable.Chain{Name: dataplane.ChainRewriteOut, Type: nftables.ChainTypeFilter,
				Hook: nftables.ChainHookPostrouting, Priority: ofRewriteOut,
				Rules: []nftable.Rule{rewriteOut(s.WireGuard.Port)}})
		t.Sets = append(t.Sets, rewriteSets(rewrites)...)
	}
	addSources(&t, s, n)
	addTranslations(&t, s, n)
	return t, notes
}

// addresses are the two sets that hold these prefixes, by family.
func addresses(four, six string, ps []netip.Prefix) []nftable.Set {
	r4, r6 := nftable.Ranges(ps)
	return rangeSets(four, six, r4, r6)
}

func rangeSets(four, six string, r4, r6 []nftable.Range) []nftable.Set {
	return []nftable.Set{{Name: four, Key: nftables.TypeIPAddr, Interval: true, Ranges: r4},
		{Name: six, Key: nftables.TypeIP6Addr, Interval: true, Ranges: r6}}
}

// links is a set of links.
func links(set string, names ...string) nftable.Set {
	s := nftable.Set{Name: set, Key: nftables.TypeIFName, Elements: map[string]string{},
		Text: func(key, _ string) string { return string(trim(key)) }}
	for _, n := range names {
		s.Elements[string(nftable.LinkName(n))] = ""
	}
	return s
}

// usable sorts the rewrites and leaves out those that the table has no place for.
func usable(all []dataplane.PortRewrite) (out []dataplane.PortRewrite, notes []string) {
	for _, r := range slices.SortedFunc(slices.Values(all), dataplane.PortRewrite.Compare) {
		switch {
		case !r.Remote.Addr().Is4() || r.Remote.Port() == 0 || r.Local == 0:
			notes = append(notes, fmt.Sprintf("port rewrite %s is left out: it takes an IPv4 address and ports other than 0", r))
		case len(out) > 0 && out[len(out)-1].Remote == r.Remote:
			notes = append(notes, fmt.Sprintf("port rewrite %s is left out: there is another one for the same peer", r))
		default:
			out = append(out, r)
		}
	}
	return out, notes
}

// mergeRewrites is want with those that are there for other peers.
func mergeRewrites(want, have []dataplane.PortRewrite) []dataplane.PortRewrite {
	out := slices.Clone(want)
	for _, a := range have {
		if !slices.ContainsFunc(want, func(w dataplane.PortRewrite) bool { return w.Remote == a.Remote }) {
			out = append(out, a)
		}
	}
	return out
}
