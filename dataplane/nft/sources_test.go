package nft

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/internal/golden"
)

// sourced is the Spec of a host in an overlay, with pools and gateways.
func sourced(control int, pools, elsewhere []string, gateways ...string) dataplane.Spec {
	return dataplane.Spec{ControlPort: control,
		Link: dataplane.Link{Name: "skein0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.4.0.1/16"),
			netip.MustParsePrefix("fd00::1/64")}},
		Pods: dataplane.Pods{Pools: targets(pools...), Elsewhere: targets(elsewhere...), Gateways: gateways}}
}

func TestDiffOfSources(t *testing.T) {
	pools := []string{"10.64.0.0/16", "fd64::/112"}
	base := sourced(7946, pools, nil, "sk1")
	plain := base
	plain.Plain = true
	w, _ := Want(base, nftable.State{})
	former := withoutSources(w).State() // as the version before left it
	damaged := tableOf(base)
	chain := damaged.Chains[dataplane.ChainSources]
	chain.Rules = chain.Rules[1:]
	damaged.Chains[dataplane.ChainSources] = chain
	for _, c := range []diffCase{
		{"sources-upgrade", base, former, true},
		{"sources-unchanged", base, tableOf(base), true},
		{"sources-block-reserved", sourced(7946, pools, []string{"10.64.7.0/27"}, "sk1"), tableOf(base), true},
		{"sources-gateway-more", sourced(7946, pools, nil, "sk1", "sk0"), tableOf(base), true},
		{"sources-before-complete", sourced(7946, pools[:1], nil, "sk2"), tableOf(base), false},
		{"sources-control-port", sourced(7950, pools, nil, "sk1"), tableOf(base), true},
		{"sources-damaged", base, damaged, true},
		{"sources-table-gone", base, nftable.State{}, true},
		{"sources-plain-table-gone", plain, nftable.State{}, false},
	} {
		t.Run(c.name, c.check)
	}
}

func TestSourceRules(t *testing.T) {
	rulesOf := func(rs []nftable.Rule) (out []string) {
		for _, r := range rs {
			out = append(out, r.Text)
		}
		return out
	}
	golden.Lines(t, "source-rules", rulesOf(sourceRules(dataplane.DefaultNumbers(), "skein0", 7946, false, false)))
	golden.Lines(t, "source-rules-with-hops",
		rulesOf(sourceRules(dataplane.DefaultNumbers(), "skein0", 7946, true, false)))
	golden.Lines(t, "source-rules-plain", rulesOf(sourceRules(dataplane.DefaultNumbers(), "skein0", 7946, false, true)))
}

// A kernel that cannot look up routes has all else, and says what it lacks.
func TestWithoutRouteLookups(t *testing.T) {
	r := &Reconciler{noFib: true}
	want, notes := r.wanted(sourced(7946, nil, nil), nftable.State{})
	if slices.ContainsFunc(want.Chains, func(c nftable.Chain) bool { return c.Name == dataplane.ChainSources }) ||
		want.Set(dataplane.SetGateways) != nil || len(notes) != 1 {
		t.Errorf("chains %v, notes %q", want.Chains, notes)
	}
}
