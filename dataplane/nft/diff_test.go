package nft

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/golden"
)

var equal = cmp.Options{cmpopts.EquateComparable(Range{}, dataplane.PortRewrite{}, dataplane.Numbers{}),
	cmpopts.EquateEmpty()}

func want(targets []netip.Prefix) State { return wantTargets(dataplane.DefaultNumbers(), targets) }

func targets(ss ...string) (out []netip.Prefix) {
	for _, s := range ss {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// altered is a copy of our table with something done to it.
func altered(f func(*State), ss ...string) State {
	s := want(targets(ss...))
	f(&s)
	return s
}

// rewriting is the table of a Spec with these port rewrites.
func rewriting(rs ...dataplane.PortRewrite) State {
	s, _ := Want(dataplane.Spec{WireGuard: dataplane.WireGuard{Port: 51820}, PortRewrites: rs})
	return s
}

func via(local uint16, remote string) dataplane.PortRewrite {
	return dataplane.PortRewrite{Local: local, Remote: netip.MustParseAddrPort(remote)}
}

func TestDiff(t *testing.T) {
	a, b := via(40001, "203.0.113.7:51820"), via(40002, "203.0.113.9:4500")
	otherPort, _ := Want(dataplane.Spec{WireGuard: dataplane.WireGuard{Port: 4242},
		PortRewrites: []dataplane.PortRewrite{a}})
	halfGone := rewriting(a, b)
	delete(halfGone.Sets, dataplane.SetRewriteIn)

	base := []string{"10.4.0.1/32", "10.100.0.0/27", "fd00::1/128"}
	cases := []struct {
		name         string
		want, actual State
		prune        bool
	}{
		{"fresh", want(targets(base...)), State{}, true},
		{"unchanged", want(targets(base...)), want(targets(base...)), true},
		{"targets-change", want(targets("10.4.0.1/32", "10.100.0.32/27", "fd00::1/128")), want(targets(base...)), true},
		{"prefix-grows", want(targets("10.4.0.0/16")), want(targets("10.4.0.1/32", "10.4.7.0/24")), true},
		{"before-complete", want(targets("10.4.0.2/32", "10.100.0.0/24")), want(targets(base...)), false},
		{"rules-damaged", want(nil), altered(func(s *State) {
			s.Chains[dataplane.ChainOutgoing] = Chain{Kind: kindOutgoing, Rules: []string{"meta(3) verdict(1)"}}
		}), true},
		{"chain-missing", want(nil), altered(func(s *State) { delete(s.Chains, dataplane.ChainPrerouting) }), true},
		{"set-missing", want(targets(base...)), altered(func(s *State) { delete(s.Sets, dataplane.SetTargetsIPv6) },
			base...), true},
		{"chain-of-another-kind", want(targets(base...)), altered(func(s *State) {
			s.Chains[dataplane.ChainOutgoing] = Chain{Kind: "type filter hook output priority 0 policy drop"}
		}, base...), true},
		{"strangers-in-our-table", want(nil), altered(func(s *State) {
			s.Chains["stranger"], s.Sets["odd"] = Chain{Kind: "type  hook none priority 0 policy accept"}, Set{Kind: "mark"}
		}), true},
		{"first-rewrite", rewriting(a), rewriting(), true},
		{"rewrite-changes", rewriting(via(40003, "203.0.113.7:51820"), b), rewriting(a), true},
		{"last-rewrite-goes", rewriting(), rewriting(a), true},
		{"rewrites-before-complete", rewriting(via(40003, "203.0.113.7:51820")), rewriting(a, b), false},
		{"rewrites-of-another-port", otherPort, rewriting(a), true},
		{"rewrites-damaged", rewriting(a, b), halfGone, true},
		{"table-gone-with-rewrites", rewriting(a), State{}, true},
		{"strangers-before-complete", want(nil), altered(func(s *State) {
			s.Chains["stranger"], s.Sets["odd"] = Chain{Kind: "type  hook none priority 0 policy accept"}, Set{Kind: "mark"}
		}), false},
	}
	for _, c := range cases {
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

func genTargets(t *rapid.T, name string) []netip.Prefix {
	one := rapid.Custom(func(t *rapid.T) netip.Prefix {
		if rapid.Bool().Draw(t, "six") {
			bits := rapid.SampledFrom([]int{0, 1, 64, 120, 127, 128}).Draw(t, "bits")
			return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xff, 15: rapid.Byte().Draw(t, "low")}), bits)
		}
		bits := rapid.SampledFrom([]int{0, 1, 16, 24, 28, 31, 32}).Draw(t, "bits")
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, rapid.Byte().Draw(t, "low")}), bits)
	})
	return rapid.SliceOfN(one, 0, 12).Draw(t, name)
}

func TestApplyingTheDiffGivesWhatIsWanted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := want(genTargets(t, "actual")), want(genTargets(t, "want"))
		got, err := a.Apply(Diff(b, a, true))
		if err != nil {
			t.Fatal(err) // the kernel would refuse an overlap too
		}
		if d := cmp.Diff(b, got, equal); d != "" {
			t.Fatalf("-want +got:\n%s", d)
		}
	})
}

func TestBeforeCompleteEverythingOldAndNewIsCovered(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		old, now := genTargets(t, "actual"), genTargets(t, "want")
		a, b := want(old), want(now)
		got, err := a.Apply(Diff(b, a, false))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range slices.Concat(old, now) {
			p = p.Masked()
			set := got.Sets[dataplane.SetTargetsIPv4]
			if p.Addr().Is6() {
				set = got.Sets[dataplane.SetTargetsIPv6]
			}
			if !slices.ContainsFunc(set.Ranges, func(r Range) bool {
				return r.From.Compare(p.Addr()) <= 0 && last(p).Compare(r.To) <= 0
			}) {
				t.Fatalf("%s is not covered by %v", p, set.Ranges)
			}
		}
	})
}

// The kernel gives elements back in any order, with or without an end between adjacent ranges.
func TestElementsReadBackAreTheRanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		for _, set := range want(genTargets(t, "targets")).Sets {
			es := toElements(set.Ranges)
			if rapid.Bool().Draw(t, "nft's way") { // an end that is also a start is left out
				es = slices.DeleteFunc(es, func(e nftables.SetElement) bool {
					return e.IntervalEnd && slices.ContainsFunc(es, func(o nftables.SetElement) bool {
						return !o.IntervalEnd &&
							bytes.Equal(o.Key, e.Key)
					})
				})
			}
			es = rapid.Permutation(es).Draw(t, "order")
			if d := cmp.Diff(set.Ranges, fromElements(es), equal); d != "" {
				t.Fatalf("-want +got:\n%s", d)
			}
		}
	})
}

func TestRulesReadBackAreRecognised(t *testing.T) {
	for i, e := range ruleExprs(dataplane.DefaultNumbers()) {
		if got := ruleText(dataplane.DefaultNumbers(), e); got != rulesText(dataplane.DefaultNumbers())[i] {
			t.Errorf("rule %d: %s", i, got)
		}
	}
	if got := ruleText(dataplane.DefaultNumbers(), rewriteInExprs(4242)); got != rewriteInText(4242) {
		t.Errorf("the rule for what comes in: %s", got)
	}
	if got := ruleText(dataplane.DefaultNumbers(), rewriteOutExprs(4242)); got != rewriteOutText(4242) {
		t.Errorf("the rule for what goes out: %s", got)
	}
	foreign := []expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, &expr.Counter{},
		&expr.Verdict{Kind: expr.VerdictDrop}}
	if got := ruleText(dataplane.DefaultNumbers(), foreign); slices.Contains(rulesText(dataplane.DefaultNumbers()), got) {
		t.Errorf("a foreign rule was taken for %s", got)
	}
	golden.Lines(t, "rules", rulesText(dataplane.DefaultNumbers()))
}

func FuzzForeignTable(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 10, 0, 1, 0, 's', 'k', 'e', 'i', 'n', 0, 0, 0})
	f.Add([]byte{1, 0, 0, 0, 3, 0, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, name, ok := ForeignTable(b); ok && len(name) > len(b) {
			t.Error("a name longer than the message")
		}
	})
}

func TestForeignTableReadsTheName(t *testing.T) {
	f, name, ok := ForeignTable([]byte{1, 0, 0, 0, 8, 0, 2, 0, 0, 0, 0, 0, 10, 0, 1, 0, 's', 'k', 'e', 'i', 'n', 0, 0, 0})
	if f != 1 || name != "skein" || !ok {
		t.Errorf("%d %q %v", f, name, ok)
	}
}

func thousand() (out []netip.Prefix) {
	for i := range 1000 {
		out = append(out, netip.MustParsePrefix(fmt.Sprintf("10.4.%d.%d/32", i/250, i%250)),
			netip.MustParsePrefix(fmt.Sprintf("10.100.%d.%d/27", i/8, i%8*32)),
			netip.MustParsePrefix(fmt.Sprintf("fd00::%x/128", i)))
	}
	return out
}

func BenchmarkDiff1000Peers(b *testing.B) {
	all := thousand()
	actual := want(all)
	all[1500] = netip.MustParsePrefix("10.200.0.0/27")
	b.ReportAllocs()
	for b.Loop() {
		if ops := Diff(want(all), actual, true); len(ops) != 2 {
			b.Fatal(ops)
		}
	}
}
