package nft

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/internal/golden"
)

func targets(ss ...string) (out []netip.Prefix) {
	for _, s := range ss {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// to is a Spec with these targets.
func to(ss ...string) dataplane.Spec { return dataplane.Spec{Targets: targets(ss...)} }

// tableOf is the table of a Spec on a kernel that has none.
func tableOf(s dataplane.Spec) nftable.State {
	w, _ := Want(s, nftable.State{})
	return w.State()
}

// altered is the table for targets with something done to it.
func altered(f func(*nftable.State), ss ...string) nftable.State {
	s := tableOf(to(ss...))
	f(&s)
	return s
}

// rewriting is a Spec with these port rewrites.
func rewriting(rs ...dataplane.PortRewrite) dataplane.Spec {
	return dataplane.Spec{WireGuard: dataplane.WireGuard{Port: 51820}, PortRewrites: rs}
}

func via(local uint16, remote string) dataplane.PortRewrite {
	return dataplane.PortRewrite{Local: local, Remote: netip.MustParseAddrPort(remote)}
}

// diffCase is one change of the table.
type diffCase struct {
	name   string
	want   dataplane.Spec
	actual nftable.State
	prune  bool
}

// check compares the steps with the golden file, and what becomes of the table with what is wanted.
func (c diffCase) check(t *testing.T) {
	c.want.Complete = c.prune
	want, _ := Want(c.want, c.actual)
	ops := nftable.Diff(want, c.actual, c.prune)
	var lines []string
	for _, o := range ops {
		lines = append(lines, o.String())
	}
	golden.Lines(t, c.name, lines)
	after, err := c.actual.Apply(ops)
	if err != nil {
		t.Fatal(err)
	}
	want, _ = Want(c.want, after)
	if again := nftable.Diff(want, after, c.prune); len(again) > 0 {
		t.Errorf("not settled after one round: %v", again)
	}
}

func TestDiff(t *testing.T) {
	a, b := via(40001, "203.0.113.7:51820"), via(40002, "203.0.113.9:4500")
	otherPort := rewriting(a)
	otherPort.WireGuard.Port = 4242
	halfGone := tableOf(rewriting(a, b))
	delete(halfGone.Sets, dataplane.SetRewriteIn)

	base := []string{"10.4.0.1/32", "10.100.0.0/27", "fd00::1/128"}
	for _, c := range []diffCase{
		{"fresh", to(base...), nftable.State{}, true},
		{"unchanged", to(base...), tableOf(to(base...)), true},
		{"targets-change", to("10.4.0.1/32", "10.100.0.32/27", "fd00::1/128"), tableOf(to(base...)), true},
		{"prefix-grows", to("10.4.0.0/16"), tableOf(to("10.4.0.1/32", "10.4.7.0/24")), true},
		{"before-complete", to("10.4.0.2/32", "10.100.0.0/24"), tableOf(to(base...)), false},
		{"rules-damaged", to(), altered(func(s *nftable.State) {
			c := s.Chains[dataplane.ChainOutgoing]
			s.Chains[dataplane.ChainOutgoing] = nftable.ChainState{Kind: c.Kind, Rules: []string{"somebody's"}}
		}), true},
		{"chain-missing", to(), altered(func(s *nftable.State) { delete(s.Chains, dataplane.ChainPrerouting) }), true},
		{"set-missing", to(base...), altered(func(s *nftable.State) { delete(s.Sets, dataplane.SetTargetsIPv6) },
			base...), true},
		{"chain-of-another-kind", to(base...), altered(func(s *nftable.State) {
			s.Chains[dataplane.ChainOutgoing] = nftable.ChainState{Kind: "type filter hook output priority 0 policy drop"}
		}, base...), true},
		{"strangers-in-our-table", to(), altered(strangers), true},
		{"first-rewrite", rewriting(a), tableOf(rewriting()), true},
		{"rewrite-changes", rewriting(via(40003, "203.0.113.7:51820"), b), tableOf(rewriting(a)), true},
		{"last-rewrite-goes", rewriting(), tableOf(rewriting(a)), true},
		{"rewrites-before-complete", rewriting(via(40003, "203.0.113.7:51820")), tableOf(rewriting(a, b)), false},
		{"rewrites-of-another-port", otherPort, tableOf(rewriting(a)), true},
		{"rewrites-damaged", rewriting(a, b), halfGone, true},
		{"table-gone-with-rewrites", rewriting(a), nftable.State{}, true},
		{"strangers-before-complete", to(), altered(strangers), false},
	} {
		t.Run(c.name, c.check)
	}
}

func strangers(s *nftable.State) {
	s.Chains["stranger"], s.Sets["odd"] = nftable.ChainState{Kind: "regular"}, nftable.SetState{Kind: "mark"}
}

func TestRules(t *testing.T) {
	var lines []string
	for _, r := range markRules(dataplane.DefaultNumbers()) {
		lines = append(lines, r.Text)
	}
	golden.Lines(t, "rules", lines)
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
	spec := dataplane.Spec{Targets: thousand(), Complete: true}
	actual := tableOf(spec)
	spec.Targets[1500] = netip.MustParsePrefix("10.200.0.0/27")
	b.ReportAllocs()
	for b.Loop() {
		want, _ := Want(spec, actual)
		if ops := nftable.Diff(want, actual, true); len(ops) != 2 {
			b.Fatal(ops)
		}
	}
}
