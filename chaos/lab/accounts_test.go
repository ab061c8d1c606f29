package lab

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// agreeing are accounts of two nodes without a mistake: a has a pod and a spare block, b a pod with a static address.
func agreeing() accounts {
	view := func(own string) *agentAccount {
		return &agentAccount{
			blocks: []blockAccount{
				{pool: "default", number: 0, node: "a", prefixes: prefixes("10.1.0.0/30", "fd01::/126"), used: 1, own: own == "a"},
				{pool: "default", number: 1, node: "b", prefixes: prefixes("10.1.0.4/30", "fd01::4/126"), own: own == "b"},
				{pool: "default", number: 2, node: "a", prefixes: prefixes("10.1.0.8/30", "fd01::8/126"), own: own == "a"},
				{pool: "kept", number: 0, prefixes: prefixes("10.2.0.0/30")},
			},
			statics: []staticAccount{{node: "b", addrs: addrs("10.2.0.1")}, {node: "", addrs: addrs("10.2.0.2")}},
		}
	}
	a := nodeAccount{node: "a", pods: []podAccount{{"p", "a.p.1", addrs("10.1.0.1", "fd01::1")}},
		hosts:       addrs("10.1.0.1", "fd01::1"),
		unreachable: prefixes("10.1.0.0/30", "10.1.0.8/30", "fd01::/126", "fd01::8/126"), exported: prefixes("10.1.0.0/30",
			"10.1.0.8/30", "fd01::/126", "fd01::8/126"), view: view("a")}
	a.view.pods = slices.Clone(a.pods)
	b := nodeAccount{node: "b", pods: []podAccount{{"q", "b.q.1", addrs("10.2.0.1")}}, hosts: addrs("10.2.0.1"),
		unreachable: prefixes("10.1.0.4/30", "fd01::4/126"), exported: prefixes("10.1.0.4/30", "10.2.0.1/32", "fd01::4/126"),
		view: view("b")}
	b.view.pods = slices.Clone(b.pods)
	return accounts{a, b}
}

func TestAccountsThatAgree(t *testing.T) {
	if wrong := agreeing().wrong(); len(wrong) > 0 {
		t.Errorf("found wrong: %s", strings.Join(wrong, "\n"))
	}
	silent := agreeing()
	silent[0].view = nil // its agent is down: the others' word and the kernel remain
	if wrong := silent.wrong(); len(wrong) > 0 {
		t.Errorf("with a's agent down: %s", strings.Join(wrong, "\n"))
	}
}

func TestAccountsThatContradict(t *testing.T) {
	cases := []struct {
		name  string
		spoil func(a, b *nodeAccount)
		want  []string
	}{
		{"an address given twice", func(a, b *nodeAccount) {
			b.pods = append(b.pods, podAccount{"r", "b.r.1", addrs("10.1.0.1")})
			b.view.pods, b.hosts = b.pods, append(b.hosts, addrs("10.1.0.1")...)
		}, []string{"10.1.0.1 is given twice: a/p and b/r have it",
			"b/r has 10.1.0.1, which is in no block of b as a sees it", "b/r has 10.1.0.1, which is in no block of b as b " +
				"sees it"}},
		{"a block taken from under a pod", func(a, b *nodeAccount) { b.view.blocks = b.view.blocks[1:] },
			[]string{"a/p has 10.1.0.1, which is in no block of a as b sees it", "a/p has fd01::1, which is in no block of a " +
				"as b sees it",
				"a: table 119 has 10.1.0.0/30, which is not a block of its as b sees it",
				"a: table 119 has fd01::/126, which is not a block of its as b sees it"}},
		{"a static address that moved", func(a, b *nodeAccount) { a.view.statics[0].node = "a" },
			[]string{"b/q has 10.2.0.1, which is in no block of b as a sees it", "b: table 119 has 10.2.0.1/32, which is not " +
				"a block of its as a sees it"}},
		{"a route missing", func(a, _ *nodeAccount) { a.hosts = a.hosts[1:] }, []string{"a: no route of table 116 leads to " +
			"pod address 10.1.0.1"}},
		{"a route left", func(_, b *nodeAccount) { b.hosts = append(b.hosts, addrs("10.1.0.5")...) },
			[]string{"b: a route of table 116 leads to 10.1.0.5, which no pod has"}},
		{"a pod leaked", func(a, _ *nodeAccount) {
			a.pods, a.hosts = nil, nil
		}, []string{`a: its agent keeps 10.1.0.1 and fd01::1 for container "a.p.1", which is gone`}},
		{"a pod unknown", func(_, b *nodeAccount) { b.view.pods = nil }, []string{"b/q has 10.2.0.1, and its agent does " +
			"not know it"}},
		{"another address", func(_, b *nodeAccount) { b.view.pods[0].addrs = addrs("10.1.0.5") },
			[]string{"b/q has 10.2.0.1, and its agent says 10.1.0.5"}},
		{"two spare blocks", func(a, _ *nodeAccount) { a.view.blocks[0].used = 0 }, []string{"a keeps 2 empty blocks of " +
			"pool default (0, 2), one is its to keep"}},
		{"a block not exported", func(a, _ *nodeAccount) { a.exported, a.unreachable = a.exported[:3], a.unreachable[:3] },
			[]string{"a: its block fd01::8/126, as a sees it, is not in table 119", "a: its block fd01::8/126, as b sees it, " +
				"is not in table 119"}},
		{"a loop", func(a, _ *nodeAccount) { a.unreachable = a.unreachable[:3] }, []string{"a: fd01::8/126 is exported, " +
			"but not unreachable in table 116: packets for what no pod has would circle"}},
		{"a pool refused behind its blocks", func(a, b *nodeAccount) {
			a.view.pools = prefixes("10.1.0.0/24", "fd01::/120")
			a.unreachable, b.unreachable = append(a.unreachable, a.view.pools...), append(b.unreachable, a.view.pools...)
		}, nil},
		{"something else refused", func(a, _ *nodeAccount) {
			a.unreachable = append(a.unreachable, prefixes("10.9.0.0/24")...)
		},
			[]string{"a: 10.9.0.0/24 is unreachable in table 116, but is not a route of table 119"}},
		{"overlapping blocks", func(a, _ *nodeAccount) {
			a.view.blocks[3].prefixes = prefixes("10.1.0.0/16")
			a.view.blocks = append(a.view.blocks[:1], a.view.blocks[2:]...)
			a.view.blocks = a.view.blocks[:3]
		}, []string{
			"b: table 119 has 10.1.0.4/30, which is not a block of its as a sees it",
			"b: table 119 has fd01::4/126, which is not a block of its as a sees it",
			"block 0 of pool default (10.1.0.0/30, fd01::/126) and block 0 of pool kept (10.1.0.0/16) overlap as a sees them",
			"block 2 of pool default (10.1.0.8/30, fd01::8/126) and block 0 of pool kept (10.1.0.0/16) overlap as a sees them"}},
		{"a block of nobody", func(_, b *nodeAccount) { b.view.blocks[3].unknown = "0a" }, []string{"block 0 of pool kept " +
			"(10.2.0.0/30) belongs to 0a as b sees it, which is not a node"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := agreeing()
			c.spoil(&a[0], &a[1])
			got := a.wrong()
			slices.Sort(got)
			slices.Sort(c.want)
			if !slices.Equal(got, c.want) {
				t.Errorf("\n got %s\nwant %s", strings.Join(got, "\n     "), strings.Join(c.want, "\n     "))
			}
		})
	}
}
