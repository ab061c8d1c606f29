package nft

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/dataplane"
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
	state := func(s dataplane.Spec) State { w, _ := Want(s); return w }
	pools := []string{"10.64.0.0/16", "fd64::/112"}
	base := sourced(7946, pools, nil, "sk1")
	plain := base
	plain.Plain = true
	former := state(base) // as the version before left it
	former.dropSources()
	damaged := state(base)
	damaged.Chains[dataplane.ChainSources] = Chain{Kind: kindSources,
		Rules: damaged.Chains[dataplane.ChainSources].Rules[1:]}
	for _, c := range []struct {
		name         string
		want, actual State
		prune        bool
	}{
		{"sources-upgrade", state(base), former, true},
		{"sources-unchanged", state(base), state(base), true},
		{"sources-block-reserved", state(sourced(7946, pools, []string{"10.64.7.0/27"}, "sk1")), state(base), true},
		{"sources-gateway-more", state(sourced(7946, pools, nil, "sk1", "sk0")), state(base), true},
		{"sources-before-complete", state(sourced(7946, pools[:1], nil, "sk2")), state(base), false},
		{"sources-control-port", state(sourced(7950, pools, nil, "sk1")), state(base), true},
		{"sources-damaged", state(base), damaged, true},
		{"sources-table-gone", state(base), State{}, true},
		{"sources-plain-table-gone", state(plain), State{}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			ops := Diff(c.want, c.actual, c.prune)
			var lines []string
			for _, o := range ops {
				lines = append(lines, o.String())
			}
			golden.Lines(t, c.name, lines)
			after, err := c.actual.Apply(ops)
			if err != nil {
				t.Fatal(err)
			}
			if again := Diff(c.want, after, c.prune); len(again) > 0 {
				t.Errorf("not settled after one round: %v", again)
			}
		})
	}
}

func TestSourceRulesReadBackAreRecognised(t *testing.T) {
	for _, r := range sourceRules(dataplane.DefaultNumbers(), "skein0", 7946, true, true) {
		if got := ruleText(dataplane.DefaultNumbers(), r.exprs); got != r.text {
			t.Errorf("%s is read back as %s", r.text, got)
		}
	}
	golden.Lines(t, "source-rules", rulesOf(sourceRules(dataplane.DefaultNumbers(), "skein0", 7946, false, false)))
	golden.Lines(t, "source-rules-with-hops",
		rulesOf(sourceRules(dataplane.DefaultNumbers(), "skein0", 7946, true, false)))
	golden.Lines(t, "source-rules-plain", rulesOf(sourceRules(dataplane.DefaultNumbers(), "skein0", 7946, false, true)))
}

// Addresses that are not the mesh's to lead are cut out of its pools, exactly.
func TestWithoutCutsExactly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pools, _ := ranges(genLow(t, "pools"))
		cut, _ := ranges(genLow(t, "elsewhere"))
		got := without(pools, cut)
		in := func(rs []Range, a netip.Addr) bool {
			return slices.ContainsFunc(rs, func(r Range) bool { return r.From.Compare(a) <= 0 && a.Compare(r.To) <= 0 })
		}
		for i := range 256 {
			a := netip.AddrFrom4([4]byte{255, 255, 255, byte(i)})
			if in(got, a) != (in(pools, a) && !in(cut, a)) {
				t.Fatalf("%s: %v without %v is %v", a, pools, cut, got)
			}
		}
		for i := 1; i < len(got); i++ {
			if !got[i-1].To.Less(got[i].From) {
				t.Fatalf("%v overlaps or is out of order", got)
			}
		}
	})
}

func genLow(t *rapid.T, name string) []netip.Prefix {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, rapid.Byte().Draw(t, "low")}),
			rapid.IntRange(23, 32).Draw(t, "bits"))
	}), 0, 8).Draw(t, name)
}

// A kernel that cannot look up routes has all else, and says what it lacks.
func TestWithoutRouteLookups(t *testing.T) {
	r := &Reconciler{noFib: true}
	want, notes := r.wanted(sourced(7946, nil, nil))
	if _, there := want.Chains[dataplane.ChainSources]; there || len(notes) != 1 {
		t.Errorf("chains %v, notes %q", want.Chains, notes)
	}
	all := rebuild(want).All
	if d := cmp.Diff(want.Sets, all.Sets, equal); d != "" || len(all.Chains) != len(want.Chains) {
		t.Errorf("made anew it differs: %d chains for %d, sets %s", len(all.Chains), len(want.Chains), d)
	}
}
