package plane_test

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/wireguard"
	"github.com/skeinmesh/skein/internal/testns"
)

// everything lists links, rules, routes and nftables' tables with their chains, rules and sets.
func everything(t *testing.T, ns *testns.NS) (out []string) {
	t.Helper()
	ns.Must("read everything", func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		names := map[int]string{}
		for _, l := range links {
			names[l.Attrs().Index] = l.Attrs().Name
			out = append(out, "link "+l.Attrs().Name)
		}
		for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
			rules, err := netlink.RuleList(f)
			if err != nil {
				return err
			}
			for _, r := range rules {
				out = append(out, fmt.Sprintf("rule %d proto %d %s", f, r.Protocol, r))
			}
			routes, err := netlink.RouteListFiltered(f, &netlink.Route{}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			for _, r := range routes {
				if r.Table != unix.RT_TABLE_LOCAL && r.Table != unix.RT_TABLE_MAIN {
					out = append(out, fmt.Sprintf("route %d table %d proto %d type %d dev %s %s", f, r.Table, r.Protocol, r.Type,
						names[r.LinkIndex], r.Dst))
				}
			}
		}
		c := &nftables.Conn{}
		tables, err := c.ListTables()
		if err != nil {
			return err
		}
		for _, table := range tables {
			out = append(out, "table "+table.Name)
			sets, err := c.GetSets(table)
			if err != nil {
				return err
			}
			for _, s := range sets {
				out = append(out, "set "+table.Name+" "+s.Name)
			}
		}
		chains, err := c.ListChains()
		if err != nil {
			return err
		}
		for _, chain := range chains {
			rules, err := c.GetRules(chain.Table, chain)
			if err != nil {
				return err
			}
			out = append(out, fmt.Sprintf("chain %s %s: %d rules", chain.Table.Name, chain.Name, len(rules)))
		}
		return nil
	})
	slices.Sort(out)
	return out
}

// with selects lines that contain any of the words.
func with(lines []string, words ...string) (out []string) {
	for _, l := range lines {
		if slices.ContainsFunc(words, func(w string) bool { return strings.Contains(l, w) }) {
			out = append(out, l)
		}
	}
	return out
}

// addKubeSpan makes the state of Talos KubeSpan on a host: a link, a rule for its mark, its table with a default
// route, and an nft table that marks.
func addKubeSpan(t *testing.T, ns *testns.NS) {
	t.Helper()
	ns.Must("add KubeSpan", func() error {
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "kubespan"},
			PeerName: "kubespan-peer"}); err != nil {
			return err
		}
		l, err := netlink.LinkByName("kubespan")
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		if err != nil {
			return err
		}
		mask := uint32(0x60)
		for f, anywhere := range map[int]string{unix.AF_INET: "0.0.0.0/0", unix.AF_INET6: "::/0"} {
			r := netlink.NewRule()
			r.Family, r.Priority, r.Mark, r.Mask, r.Table = f, 32500, 0x40, &mask, 180
			if err := netlink.RuleAdd(r); err != nil {
				return err
			}
			_, dst, _ := net.ParseCIDR(anywhere)
			if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Table: 180,
				Scope: netlink.SCOPE_LINK, Protocol: unix.RTPROT_STATIC}); err != nil {
				return err
			}
		}
		c := &nftables.Conn{}
		table := c.AddTable(&nftables.Table{Name: "talos_kubespan", Family: nftables.TableFamilyINet})
		chain := c.AddChain(&nftables.Chain{Table: table, Name: "kubespan_prerouting", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityFilter})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}})
		if err := c.AddSet(&nftables.Set{Table: table, Name: "kubespan_targets_ipv4", KeyType: nftables.TypeIPAddr,
			Interval: true}, nil); err != nil {
			return err
		}
		return c.Flush()
	})
}

// TestKubeSpanIsLeftAlone: beside KubeSpan's table 180, mask 0x60, rule 32500 and nft table, an agent with other
// numbers starts, repairs its own state, and is purged. KubeSpan's state stays unchanged, and what KubeSpan removes
// stays removed.
func TestKubeSpanIsLeftAlone(t *testing.T) {
	h := &host{NS: testns.New(t, "plane"), keys: newKeyPair(t), n: 1, driver: "auto", numbers: dataplane.NumbersOf(1)}
	addKubeSpan(t, h.NS)
	before := everything(t, h.NS)
	kubespan := []string{"kubespan", "table 180", "32500"}
	if n := len(with(before, kubespan...)); n != 9 {
		t.Fatalf("KubeSpan has %d things, want 9: %q", n, with(before, kubespan...))
	}
	h.open(t)
	s := withPeer(h.spec(), newKeyPair(t).public, netip.MustParseAddrPort("192.0.2.9:51820"), pfx("10.4.0.9/32"),
		pfx("fd00:5::9/128"))
	s = withPods(s)
	h.apply(t, s)
	h.clean(t, s)
	repairs := h.repairs()
	h.Must("delete the agent's own rule", func() error {
		mask := uint32(0x18)
		r := netlink.NewRule()
		r.Priority, r.Mark, r.Mask, r.Table = 32501, 0x10, &mask, 181
		return netlink.RuleDel(r)
	})
	within(t, repairLimit(), "repaired", func() bool { return h.repairs() > repairs && len(h.diff(t, s)) == 0 })
	if got, want := with(everything(t, h.NS), kubespan...), with(before, kubespan...); !slices.Equal(got, want) {
		t.Errorf("KubeSpan has\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if err := h.plane.Close(); err != nil {
		t.Fatal(err)
	}
	h.purge(t)
	if got := everything(t, h.NS); !slices.Equal(got, before) {
		t.Errorf("after the agent's end there is\n%s\nand before it there was\n%s", strings.Join(got, "\n"),
			strings.Join(before, "\n"))
	}
}

// TestFormerNumbersLeaveNothing: an agent that starts with other numbers removes everything under the former ones,
// its pods stay reachable throughout, and other programs' objects under the former numbers stay, too.
func TestFormerNumbersLeaveNothing(t *testing.T) {
	h := &host{NS: testns.New(t, "plane"), keys: newKeyPair(t), n: 1, driver: "auto"}
	fresh := everything(t, h.NS)
	h.open(t)
	p := newPod(t, h, 1)
	peer := newKeyPair(t).public
	spec := func() dataplane.Spec {
		return withPods(withPeer(h.spec(), peer, netip.MustParseAddrPort("192.0.2.9:51820"), pfx("10.4.0.9/32")), p)
	}
	h.apply(t, spec())
	reach := func(when string) {
		t.Helper()
		h.Must("way to the pod "+when, func() error {
			l, err := netlink.LinkByName(p.link())
			if err != nil {
				return err
			}
			for _, a := range []net.IP{p.IPv4.AsSlice(), p.IPv6.AsSlice()} {
				routes, err := netlink.RouteGet(a)
				if err != nil || len(routes) != 1 || routes[0].LinkIndex != l.Attrs().Index {
					return fmt.Errorf("%v leads to %v: %w", a, routes, err)
				}
			}
			return nil
		})
	}
	reach("at first")
	if err := h.plane.Close(); err != nil {
		t.Fatal(err)
	}
	h.numbers = dataplane.NumbersOf(1)
	for range 2 { // a second time changes nothing
		h.Must("move pods", func() error { return podnet.Move(0, h.numbers.PodTable()) })
	}
	reach("once it has moved")
	h.Must("delete the former link, which has WireGuard's port in the kernel", func() error {
		_, err := wireguard.DeleteLink(dataplane.DefaultNumbers().Link)
		return err
	})
	h.open(t)
	h.apply(t, spec())
	reach("under both numbers")
	for range 2 {
		if err := plane.Leave(t.Context(), plane.Options{Namespace: &h.Handle, Numbers: h.numbers},
			dataplane.DefaultNumbers()); err != nil {
			t.Fatal(err)
		}
	}
	reach("at last")
	h.clean(t, spec())
	former := dataplane.DefaultNumbers()
	words := []string{"32500:", "table skein ", "skein0", fmt.Sprint(former.PodRule()) + ":"}
	for _, table := range former.Tables() {
		words = append(words, fmt.Sprintf(" table %d ", table))
	}
	if left := with(everything(t, h.NS), words...); len(left) > 0 {
		t.Errorf("left of the former numbers:\n%s", strings.Join(left, "\n"))
	}
	if err := h.plane.Close(); err != nil {
		t.Fatal(err)
	}
	h.purge(t)
	if got := everything(t, h.NS); !slices.Equal(got, fresh) {
		t.Errorf("after the end there is\n%s\nand on a fresh host\n%s", strings.Join(got, "\n"), strings.Join(fresh, "\n"))
	}
}

// TestLeavingKeepsWhatCoilHas: Coil's pods use the rule, table and protocol of the default numbers, too.
func TestLeavingKeepsWhatCoilHas(t *testing.T) {
	h := newHost(t, 1)
	n := dataplane.DefaultNumbers()
	h.Must("a pod of Coil's", func() error {
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "coilpod"},
			PeerName: "peer"}); err != nil {
			return err
		}
		l, err := netlink.LinkByName("coilpod")
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4(10, 64, 0, 20).To4(),
			Mask: net.CIDRMask(32, 32)},
			Table: n.PodTable(), Protocol: dataplane.RouteProtocol, Scope: netlink.SCOPE_LINK})
	})
	h.apply(t, withPods(h.spec()))
	if err := h.plane.Close(); err != nil {
		t.Fatal(err)
	}
	if err := plane.Leave(t.Context(), plane.Options{Namespace: &h.Handle, Numbers: dataplane.NumbersOf(1)},
		n); err != nil {
		t.Fatal(err)
	}
	got := with(everything(t, h.NS), " table 116 ")
	want := []string{"route 2 table 116 proto 30 type 1 dev coilpod 10.64.0.20/32", "rule 2 proto 30 ip rule 2000: from " +
		"all to all table 116 "}
	if !slices.Equal(got, want) {
		t.Errorf("left of pods' routing:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
