package plane_test

import (
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/nlcount"
	"github.com/skeinmesh/skein/internal/testns"
)

// repairLimit is the limit for repairing drift. Emulated guests are slow.
func repairLimit() time.Duration {
	if wantKernel() {
		return 3 * time.Second
	}
	return time.Second
}

func ourTable() *nftables.Table {
	return &nftables.Table{Name: dataplane.DefaultNumbers().NftTable, Family: nftables.TableFamilyINet}
}

func withNft(f func(*nftables.Conn)) func() error {
	return func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		f(c)
		return c.Flush()
	}
}

func withLink(f func(netlink.Link) error) func() error {
	return func() error {
		l, err := netlink.LinkByName(dataplane.DefaultNumbers().Link)
		if err != nil {
			return err
		}
		return f(l)
	}
}

func ourRoute(family int, unreachable bool) func() error {
	return withLink(func(l netlink.Link) error {
		list, err := netlink.RouteListFiltered(family, &netlink.Route{Table: dataplane.DefaultNumbers().RouteTable},
			netlink.RT_FILTER_TABLE)
		for _, r := range list {
			if (r.Type == unix.RTN_UNREACHABLE) == unreachable {
				return netlink.RouteDel(&r)
			}
		}
		return err
	})
}

func ourRule(family int) func() error {
	return func() error {
		list, err := netlink.RuleList(family)
		for _, r := range list {
			if r.Priority == dataplane.DefaultNumbers().RulePriority {
				return netlink.RuleDel(&r)
			}
		}
		return err
	}
}

var drifts = []struct {
	name, subsystem string
	kernelOnly      bool
	do              func() error
}{
	{"IPv4 rule deleted", "route", false, ourRule(unix.AF_INET)},
	{"IPv6 rule deleted", "route", false, ourRule(unix.AF_INET6)},
	{"rule of ours with another mark added", "route", false, func() error {
		r := netlink.NewRule()
		r.Priority, r.Table, r.Protocol, r.Mark, r.Family = dataplane.DefaultNumbers().RulePriority,
			dataplane.DefaultNumbers().RouteTable, dataplane.RouteProtocol, 7, unix.AF_INET
		return netlink.RuleAdd(r)
	}},
	{"IPv4 default route deleted", "route", false, ourRoute(unix.AF_INET, false)},
	{"IPv6 default route deleted", "route", false, ourRoute(unix.AF_INET6, false)},
	{"IPv4 fallback deleted", "route", false, ourRoute(unix.AF_INET, true)},
	{"IPv6 fallback deleted", "route", false, ourRoute(unix.AF_INET6, true)},
	{"address deleted", "route", false, withLink(func(l netlink.Link) error {
		list, err := netlink.AddrList(l, unix.AF_INET)
		if err != nil {
			return err
		}
		return netlink.AddrDel(l, &list[0])
	})},
	{"address added", "route", false, withLink(func(l netlink.Link) error {
		a, _ := netlink.ParseAddr("198.51.100.1/24")
		return netlink.AddrAdd(l, a)
	})},
	{"link set down", "route", false, withLink(netlink.LinkSetDown)},
	{"MTU changed", "route", false, withLink(func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1300) })},
	{"reverse path filter set", "route", false, func() error {
		return os.WriteFile("/proc/sys/net/ipv4/conf/"+dataplane.DefaultNumbers().Link+"/rp_filter", []byte("1"), 0o644)
	}},
	{"link deleted", "wireguard", false, withLink(netlink.LinkDel)},
	{"table deleted", "nft", false, withNft(func(c *nftables.Conn) { c.DelTable(ourTable()) })},
	{"whole ruleset flushed", "nft", false, withNft(func(c *nftables.Conn) { c.FlushRuleset() })},
	{"rules flushed", "nft", false, withNft(func(c *nftables.Conn) { c.FlushTable(ourTable()) })},
	{"rule added in front", "nft", false, withNft(func(c *nftables.Conn) {
		t := ourTable()
		c.InsertRule(&nftables.Rule{Table: t, Chain: &nftables.Chain{Name: dataplane.ChainOutgoing, Table: t},
			Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}})
	})},
	{"set flushed", "nft", false, withNft(func(c *nftables.Conn) {
		c.FlushSet(&nftables.Set{Table: ourTable(), Name: dataplane.SetTargetsIPv4})
	})},
	{"element added", "nft", false, withNft(func(c *nftables.Conn) {
		_ = c.SetAddElements(&nftables.Set{Table: ourTable(), Name: dataplane.SetTargetsIPv4, KeyType: nftables.TypeIPAddr,
			Interval: true},
			[]nftables.SetElement{{Key: []byte{8, 8, 8, 8}}, {Key: []byte{8, 8, 8, 9}, IntervalEnd: true}})
	})},
	{"chain added", "nft", false, withNft(func(c *nftables.Conn) {
		c.AddChain(&nftables.Chain{Name: "stranger", Table: ourTable()})
	})},
	{"peer removed", "wireguard", true, changePeer(func(p wgtypes.Peer) wgtypes.PeerConfig {
		return wgtypes.PeerConfig{PublicKey: p.PublicKey, Remove: true}
	})},
	{"allowed IPs replaced", "wireguard", true, changePeer(func(p wgtypes.Peer) wgtypes.PeerConfig {
		return wgtypes.PeerConfig{PublicKey: p.PublicKey, ReplaceAllowedIPs: true,
			AllowedIPs: []net.IPNet{{IP: net.IP{10, 9, 9, 9}, Mask: net.CIDRMask(32, 32)}}}
	})},
	{"peer added", "wireguard", true, changePeer(func(wgtypes.Peer) wgtypes.PeerConfig {
		return wgtypes.PeerConfig{PublicKey: wgtypes.Key{9, 9, 9},
			AllowedIPs: []net.IPNet{{IP: net.IP{10, 9, 9, 9}, Mask: net.CIDRMask(32, 32)}}}
	})},
	{"firewall mark cleared", "wireguard", true, func() error {
		c, err := wgctrl.New()
		if err != nil {
			return err
		}
		defer c.Close()
		none := 0
		return c.ConfigureDevice(dataplane.DefaultNumbers().Link, wgtypes.Config{FirewallMark: &none})
	}},
}

func changePeer(f func(wgtypes.Peer) wgtypes.PeerConfig) func() error {
	return func() error {
		c, err := wgctrl.New()
		if err != nil {
			return err
		}
		defer c.Close()
		d, err := c.Device(dataplane.DefaultNumbers().Link)
		if err != nil {
			return err
		}
		return c.ConfigureDevice(dataplane.DefaultNumbers().Link, wgtypes.Config{Peers: []wgtypes.PeerConfig{f(d.Peers[0])}})
	}
}

func TestDriftIsRepaired(t *testing.T) {
	for _, c := range drifts {
		t.Run(c.name, func(t *testing.T) {
			a := newHost(t, 1)
			if c.kernelOnly && a.plane.Driver() != "kernel" {
				t.Skip("a userspace device lives inside this process, where nobody else can change it; the kernel tier does")
			}
			s := withPeer(a.spec(), newKeyPair(t).public, netip.MustParseAddrPort("192.0.2.9:51820"), pfx("10.4.0.9/32"),
				pfx("fd00:5::9/128"))
			a.apply(t, s)
			a.clean(t, s)
			quiet(t) // otherwise a round for the plane's own writes would find the change
			a.Must(c.name, c.do)
			if len(a.diff(t, s)) == 0 {
				t.Log("repaired before it could be looked at")
			}
			took := within(t, repairLimit(), "repaired", func() bool { return len(a.diff(t, s)) == 0 })
			within(t, time.Second, "reported as foreign", func() bool {
				a.mu.Lock()
				defer a.mu.Unlock()
				return slices.Contains(a.foreign, c.subsystem)
			})
			t.Logf("repaired after %s", took)
		})
	}
}

// quiet waits until this process has not used the kernel for 100 ms, so that the effects of its own writes are over.
func quiet(t *testing.T) {
	t.Helper()
	last, since := nlcount.Read().Requests, time.Now()
	within(t, 10*time.Second, "nothing more is looked at", func() bool {
		if now := nlcount.Read().Requests; now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > 100*time.Millisecond
	})
}

// A program that repeatedly undoes the plane's work must not keep it busy.
func TestRepairIsRateLimited(t *testing.T) {
	a := newHost(t, 1)
	s := a.spec()
	a.apply(t, s)
	quit := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.Do(func() {
			for {
				select {
				case <-quit:
					return
				default:
					_ = ourRule(unix.AF_INET)()
					time.Sleep(time.Millisecond)
				}
			}
		})
	}()
	repairs := func() int { a.mu.Lock(); defer a.mu.Unlock(); return len(a.foreign) }
	start := time.Now()
	within(t, 10*time.Second, "eight repairs", func() bool { return repairs() >= 8 })
	took, n := time.Since(start), repairs()
	close(quit)
	<-done
	if most := 5 + int(took/(200*time.Millisecond)); n > most {
		t.Errorf("%d repairs in %s, want at most %d", n, took, most)
	}
	within(t, 2*time.Second, "repaired when the quarrel ends", func() bool { return len(a.diff(t, s)) == 0 })
}

// The state of other programs in the kernel, as text for comparison.
func foreignState(t *testing.T, h *host) (lines []string) {
	t.Helper()
	h.Do(func() {
		tables, _ := (&nftables.Conn{}).ListTables()
		for _, tb := range tables {
			if tb.Name != dataplane.DefaultNumbers().NftTable {
				lines = append(lines, "table "+tb.Name)
			}
		}
		for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
			rules, _ := netlink.RuleList(f)
			for _, r := range rules {
				if r.Protocol != dataplane.RouteProtocol || r.Priority != dataplane.DefaultNumbers().RulePriority {
					lines = append(lines, r.String())
				}
			}
			routes, _ := netlink.RouteListFiltered(f, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
			for _, r := range routes {
				l, err := netlink.LinkByIndex(r.LinkIndex)
				if ours := r.Table == dataplane.DefaultNumbers().RouteTable && r.Protocol == dataplane.RouteProtocol; !ours &&
					(err != nil || l.Attrs().Name != dataplane.DefaultNumbers().Link) {
					lines = append(lines, r.String())
				}
			}
		}
		other, err := netlink.LinkByName("other")
		if err != nil {
			return
		}
		addrs, _ := netlink.AddrList(other, unix.AF_INET)
		for _, a := range addrs {
			lines = append(lines, a.String())
		}
		rp, _ := os.ReadFile("/proc/sys/net/ipv4/conf/all/rp_filter")
		lines = append(lines, "rp_filter "+string(rp))
	})
	slices.Sort(lines)
	return lines
}

func addVeth(t *testing.T, n *testns.NS, name string) {
	t.Helper()
	n.Must("veth "+name, func() error {
		a := netlink.NewLinkAttrs()
		a.Name = name
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: a, PeerName: name + "-far"})
	})
}

func addForeign(t *testing.T, h *host) {
	t.Helper()
	addVeth(t, h.NS, "other")
	h.Address("other", pfx("198.51.100.1/24"))
	h.Must("foreign rules and routes", func() error {
		other, err := netlink.LinkByName("other")
		if err != nil {
			return err
		}
		rule := func(prio, table int, proto uint8) error {
			r := netlink.NewRule()
			r.Family, r.Priority, r.Table, r.Protocol, r.Mark = unix.AF_INET, prio, table, proto, 0x100
			return netlink.RuleAdd(r)
		}
		// The same protocol under another number, and the same number under another protocol.
		if err := rule(100, dataplane.DefaultNumbers().RouteTable, dataplane.RouteProtocol); err != nil {
			return err
		}
		if err := rule(dataplane.DefaultNumbers().RulePriority, dataplane.DefaultNumbers().RouteTable, 4); err != nil {
			return err
		}
		_, dst, _ := net.ParseCIDR("203.0.113.0/24")
		for _, r := range []netlink.Route{
			{Dst: dst, LinkIndex: other.Attrs().Index, Table: dataplane.DefaultNumbers().RouteTable, Protocol: 4},
			{Dst: dst, LinkIndex: other.Attrs().Index, Table: 99, Protocol: dataplane.RouteProtocol},
			{Dst: dst, LinkIndex: other.Attrs().Index},
		} {
			if err := netlink.RouteAdd(&r); err != nil {
				return err
			}
		}
		return nil
	})
	h.Must("foreign table", withNft(func(c *nftables.Conn) {
		t := c.AddTable(&nftables.Table{Name: "strangers", Family: nftables.TableFamilyINet})
		c.AddChain(&nftables.Chain{Name: dataplane.ChainOutgoing, Table: t})
		_ = c.AddTable(&nftables.Table{Name: dataplane.DefaultNumbers().NftTable, Family: nftables.TableFamilyIPv4})
	}))
}

func TestWhatIsNotOursStaysAsItIs(t *testing.T) {
	a := newHost(t, 1)
	addForeign(t, a)
	before := foreignState(t, a)
	check := func(when string) {
		t.Helper()
		if now := foreignState(t, a); !slices.Equal(before, now) {
			t.Errorf("%s:\nbefore %q\nnow    %q", when, before, now)
		}
	}
	s := withPeer(a.spec(), newKeyPair(t).public, netip.MustParseAddrPort("192.0.2.9:51820"), pfx("10.4.0.9/32"))
	a.apply(t, s)
	check("after apply")
	a.Must("delete table", withNft(func(c *nftables.Conn) { c.DelTable(ourTable()) }))
	within(t, repairLimit(), "repaired", func() bool { return len(a.diff(t, s)) == 0 })
	check("after repair")
	a.apply(t, a.spec())
	check("after pruning")
	if err := a.plane.Close(); err != nil {
		t.Fatal(err)
	}
	a.purge(t)
	check("after purge")
}
