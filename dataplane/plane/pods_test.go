package plane_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/internal/testns"
)

var (
	block4, block6 = pfx("10.64.0.0/27"), pfx("fd64::/123")
	single         = pfx("10.65.0.9/32") // a block of one address
)

// pod is one with its link.
type pod struct {
	*testns.NS
	podnet.Attachment
}

func newPod(t *testing.T, h *host, n int) pod {
	t.Helper()
	ns := testns.New(t, "pod")
	p := pod{ns, podnet.Attachment{Key: podnet.Key{ContainerID: fmt.Sprintf("pod%d", n), Interface: "eth0"},
		NetNS: "/var/run/netns/" + ns.Name, MTU: 1420,
		IPv4: addr(fmt.Sprintf("10.64.0.%d", n)), IPv6: addr(fmt.Sprintf("fd64::%d", n))}}
	h.Must("add pod", func() error { _, err := podnet.Add(p.Attachment); return err })
	return p
}

func (p pod) link() string { return podnet.HostLink(p.Key) }

// withPods is the Spec with blocks and pods.
func withPods(s dataplane.Spec, pods ...pod) dataplane.Spec {
	s.Pods.Blocks = []netip.Prefix{block4, single, block6}
	for _, p := range pods {
		s.Pods.Routes = append(s.Pods.Routes, dataplane.PodRoute{Addr: p.IPv4, Link: p.link()},
			dataplane.PodRoute{Addr: p.IPv6, Link: p.link()})
	}
	slices.SortFunc(s.Pods.Routes, func(a, b dataplane.PodRoute) int { return a.Addr.Compare(b.Addr) })
	return s
}

// TestOthersPodsAreReachedFromTheTunnelsAddress: a host's own packets to another node's block leave with its overlay
// address, even without a default route by which they could be sent and marked, and their MTU is respected.
func TestOthersPodsAreReachedFromTheTunnelsAddress(t *testing.T) {
	a := newHost(t, 1)
	s := a.spec()
	s.Pods.Remote = []dataplane.Narrow{{Prefix: pfx("10.64.9.0/27")}, {Prefix: pfx("fd64:9::/123"), MTU: 1300}}
	a.apply(t, s)
	for to, want := range map[string]netip.Addr{"10.64.9.1": a.overlay4(), "fd64:9::1": a.overlay6()} {
		a.Must("way to "+to, func() error {
			routes, err := netlink.RouteGet(net.ParseIP(to))
			if err != nil {
				return err
			}
			src, _ := netip.AddrFromSlice(routes[0].Src)
			if src.Unmap() != want || want.Is6() && routes[0].MTU != 1300 {
				return fmt.Errorf("the kernel would send to %s from %s with MTU %d; want %s", to, src, routes[0].MTU, want)
			}
			return nil
		})
	}
	a.clean(t, s)
}

// deleteRoutes deletes a table's routes of a kind.
func deleteRoutes(family, table, kind int) func() error {
	return func() error {
		list, err := netlink.RouteListFiltered(family, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
		n := 0
		for _, r := range list {
			if r.Type == kind {
				n++
				if err := netlink.RouteDel(&r); err != nil {
					return err
				}
			}
		}
		if err == nil && n == 0 {
			err = fmt.Errorf("table %d has no such route", table)
		}
		return err
	}
}

func podRule(family int) func() error {
	return func() error {
		r := netlink.NewRule()
		r.Family, r.Priority, r.Table = family, dataplane.DefaultNumbers().PodRule(), dataplane.DefaultNumbers().PodTable()
		return netlink.RuleDel(r)
	}
}

func TestWhatOthersDoToPodsIsRepaired(t *testing.T) {
	a := newHost(t, 1)
	p, q := newPod(t, a, 1), newPod(t, a, 2)
	s := withPods(a.spec(), p, q)
	a.apply(t, s)
	a.clean(t, s)
	for _, c := range []struct {
		name string
		do   func() error
	}{
		{"IPv4 rule deleted", podRule(unix.AF_INET)},
		{"IPv6 rule deleted", podRule(unix.AF_INET6)},
		{"IPv4 blocks deleted", deleteRoutes(unix.AF_INET, dataplane.DefaultNumbers().PodTable(), unix.RTN_UNREACHABLE)},
		{"IPv6 blocks deleted", deleteRoutes(unix.AF_INET6, dataplane.DefaultNumbers().PodTable(), unix.RTN_UNREACHABLE)},
		{"IPv4 exports deleted", deleteRoutes(unix.AF_INET, dataplane.DefaultNumbers().ExportTable(), unix.RTN_UNREACHABLE)},
		{"IPv6 exports deleted", deleteRoutes(unix.AF_INET6, dataplane.DefaultNumbers().ExportTable(), unix.RTN_UNREACHABLE)},
		{"export replaced", func() error {
			dst := &net.IPNet{IP: block4.Addr().AsSlice(), Mask: net.CIDRMask(27, 32)}
			return netlink.RouteReplace(&netlink.Route{Dst: dst, Table: dataplane.DefaultNumbers().ExportTable(),
				Type: unix.RTN_PROHIBIT})
		}},
		{"IPv4 host routes deleted", deleteRoutes(unix.AF_INET, dataplane.DefaultNumbers().PodTable(), unix.RTN_UNICAST)},
		{"IPv6 host routes deleted", deleteRoutes(unix.AF_INET6, dataplane.DefaultNumbers().PodTable(), unix.RTN_UNICAST)},
		{"pod's link down and up", func() error {
			l, err := netlink.LinkByName(p.link())
			if err != nil {
				return err
			}
			if err := netlink.LinkSetDown(l); err != nil {
				return err
			}
			return netlink.LinkSetUp(l)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := a.repairs()
			a.Must(c.name, c.do)
			took := within(t, repairLimit(), "repaired", func() bool { return a.repairs() > before && len(a.diff(t, s)) == 0 })
			t.Logf("repaired after %s", took)
		})
	}
	for _, x := range []pod{q} { // its link was not taken down, which would remove its IPv6 gateway address
		a.Must("check", func() error { return podnet.Check(x.Attachment) })
	}
}

func (h *host) repairs() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.foreign)
}

// Changes by podnet and by the plane itself are not foreign, and cause no further round.
func TestPodsComingAndGoingIsNoDrift(t *testing.T) {
	a := newHost(t, 1)
	p := newPod(t, a, 1)
	s := withPods(a.spec(), p)
	a.apply(t, s)
	var pods []pod
	for n := 2; n < 12; n++ {
		pods = append(pods, newPod(t, a, n))
		a.apply(t, withPods(a.spec(), append(pods, p)...))
	}
	for i, x := range pods {
		a.Must("del", func() error { return podnet.Del(x.NetNS, x.Key) })
		w := a.apply(t, withPods(a.spec(), append(pods[i+1:len(pods):len(pods)], p)...)).Writes["route"]
		if w != 0 {
			t.Errorf("%d writes for a pod that went", w)
		}
	}
	// A foreign change follows all notifications of own changes: once it is repaired, all of those were handled.
	a.Must("rule", podRule(unix.AF_INET))
	within(t, repairLimit(), "repaired", func() bool { return a.repairs() > 0 })
	within(t, repairLimit(), "clean", func() bool { return len(a.diff(t, s)) == 0 })
	if n := a.repairs(); n != 1 {
		t.Errorf("%d foreign changes were repaired, want 1", n)
	}
}

func TestWritesInProportion(t *testing.T) {
	a := newHost(t, 1)
	w := func(s dataplane.Spec) int { t.Helper(); n := a.apply(t, s).Writes["route"]; a.clean(t, s); return n }
	w(a.spec())
	s := a.spec()
	s.Pods.Blocks = []netip.Prefix{block4}
	if n := w(s); n != 5 { // two rules, two routes, forwarding of the link
		t.Errorf("%d writes for the first block", n)
	}
	s.Pods.Blocks = []netip.Prefix{block4, pfx("10.64.0.32/27")}
	if n := w(s); n != 2 {
		t.Errorf("%d writes for one more block", n)
	}
	if n := w(s); n != 0 {
		t.Errorf("%d writes for nothing", n)
	}
	s.Pods.Blocks = []netip.Prefix{block4}
	if n := w(s); n != 2 {
		t.Errorf("%d writes for one block less", n)
	}
	if n := w(a.spec()); n != 4 {
		t.Errorf("%d writes for the last block", n)
	}
	if left := podThings(t, a); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// podnet removes the last pod, without a notification, and its block with it: the rule is removed, too, and nothing
// remains for a later round.
func TestNothingIsLeftAfterTheLastPod(t *testing.T) {
	for _, blockFirst := range []bool{false, true} {
		a := newHost(t, 1)
		p := newPod(t, a, 1)
		s := withPods(a.spec(), p)
		a.apply(t, s)
		if blockFirst {
			s.Pods.Blocks = nil
			a.apply(t, s)
		}
		a.Must("del", func() error { return podnet.Del(p.NetNS, p.Key) })
		a.apply(t, a.spec())
		if left := podThings(t, a); len(left) > 0 {
			t.Errorf("block first %t: left %q", blockFirst, left)
		}
		a.clean(t, a.spec())
		if n := a.apply(t, a.spec()).Writes["route"]; n != 0 {
			t.Errorf("%d writes for nothing", n)
		}
	}
}

// podThings lists rules for PodTable, and the routes of the two tables.
func podThings(t *testing.T, h *host) (out []string) {
	t.Helper()
	h.Must("list", func() error {
		for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
			rules, err := netlink.RuleList(f)
			if err != nil {
				return err
			}
			for _, r := range rules {
				if r.Priority == dataplane.DefaultNumbers().PodRule() {
					out = append(out, r.String())
				}
			}
			for _, table := range []int{dataplane.DefaultNumbers().PodTable(), dataplane.DefaultNumbers().ExportTable()} {
				routes, err := netlink.RouteListFiltered(f, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
				if err != nil {
					return err
				}
				for _, r := range routes {
					out = append(out, fmt.Sprintf("%s table %d type %d", r, table, r.Type))
				}
			}
		}
		return nil
	})
	return out
}

// asCoil makes the rule and the routes of a node with Coil.
func asCoil(t *testing.T, h *host) {
	t.Helper()
	addVeth(t, h.NS, "veth1a2b3c")
	h.Must("Coil's", func() error {
		l, err := netlink.LinkByName("veth1a2b3c")
		if err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(l); err != nil {
			return err
		}
		r := netlink.NewRule()
		r.Family, r.Priority, r.Table, r.Protocol = unix.AF_INET, dataplane.DefaultNumbers().PodRule(),
			dataplane.DefaultNumbers().PodTable(), dataplane.RouteProtocol
		_, host, _ := net.ParseCIDR("10.64.0.20/32")
		_, block, _ := net.ParseCIDR("10.64.1.0/27")
		for _, err := range []error{netlink.RuleAdd(r),
			netlink.RouteAdd(&netlink.Route{Dst: host, LinkIndex: l.Attrs().Index, Table: dataplane.DefaultNumbers().PodTable(),
				Protocol: dataplane.RouteProtocol}),
			netlink.RouteAdd(&netlink.Route{Dst: block, LinkIndex: lo.Attrs().Index,
				Table: dataplane.DefaultNumbers().ExportTable(), Protocol: dataplane.RouteProtocol})} {
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// Coil uses the same rule, tables and protocol.
func TestCoilBesideUsStaysAsItIs(t *testing.T) {
	a := newHost(t, 1)
	asCoil(t, a)
	before := podThings(t, a)
	check := func(when string) {
		t.Helper()
		if now := podThings(t, a); !slices.Equal(before, now) {
			t.Errorf("%s:\nbefore %q\nnow    %q", when, before, now)
		}
	}
	a.apply(t, a.spec())
	check("without pods of ours")
	a.apply(t, withPods(a.spec(), newPod(t, a, 1)))
	for _, l := range before {
		if !slices.Contains(podThings(t, a), l) {
			t.Errorf("%s is gone", l)
		}
	}
	a.Must("del", func() error { return podnet.Del("", podnet.Key{ContainerID: "pod1", Interface: "eth0"}) })
	a.apply(t, a.spec())
	check("after our pods went")
	_ = a.plane.Close()
	a.purge(t)
	check("after purge")
}

func TestPurgeRemovesPods(t *testing.T) {
	a := newHost(t, 1)
	a.apply(t, withPods(a.spec(), newPod(t, a, 1)))
	_ = a.plane.Close()
	a.purge(t)
	if left := podThings(t, a); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	a.Must("links", func() error {
		ls, err := netlink.LinkList()
		for _, l := range ls {
			// the latter each namespace has while the module is loaded
			if name := l.Attrs().Name; name != "lo" && name != "sit0" {
				t.Errorf("link %s is left", name)
			}
		}
		return err
	})
}

func TestRestartWithPodsWritesNothing(t *testing.T) {
	a := newHost(t, 1)
	s := withPods(a.spec(), newPod(t, a, 1))
	a.apply(t, s)
	before := podThings(t, a)
	_ = a.plane.Close()
	a.open(t)
	lines := a.diff(t, s)
	for _, l := range lines { // a userspace link went with the agent, and comes anew
		if strings.Contains(l, "116") || strings.Contains(l, "119") || strings.Contains(l, "2000") {
			t.Errorf("would be written after a restart: %s", l)
		}
	}
	if w := a.apply(t, s).Writes["route"]; a.plane.Driver() == "kernel" && w != 0 {
		t.Errorf("%d writes", w)
	}
	if now := podThings(t, a); !slices.Equal(before, now) {
		t.Errorf("before %q\nnow    %q", before, now)
	}
}

// A pod's route is not restored when the Spec is older than podnet's last change.
func TestOldSpecGivesNoPodAnothersAddress(t *testing.T) {
	a := newHost(t, 1)
	p := newPod(t, a, 1)
	old := withPods(a.spec(), p)
	a.apply(t, old)
	a.Must("again with another address", func() error {
		if err := podnet.Del(p.NetNS, p.Key); err != nil {
			return err
		}
		now := p.Attachment
		now.IPv4, now.IPv6 = addr("10.64.0.30"), addr("fd64::1e")
		_, err := podnet.Add(now)
		return err
	})
	_ = a.plane.Close()
	a.open(t)
	a.apply(t, old)
	if s := strings.Join(podThings(t, a), "\n"); strings.Contains(s, "10.64.0.1/32") ||
		strings.Contains(s, "fd64::1/128") || !strings.Contains(s, "10.64.0.30/32") {
		t.Errorf("routes:\n%s", s)
	}
}

// A packet to an address of this host's block that no pod has is rejected, and not sent back to where it came from.
func TestUnusedAddressOfOurBlockIsUnreachable(t *testing.T) {
	a, outside := newHost(t, 1), testns.New(t, "out")
	testns.Link(a.NS, outside, "up", []netip.Prefix{pfx("192.0.2.1/24"), pfx("2001:db8::1/64")},
		[]netip.Prefix{pfx("192.0.2.2/24"), pfx("2001:db8::2/64")})
	via := func(n *testns.NS, gw4, gw6 string) {
		n.Must("default routes", func() error {
			l, err := netlink.LinkByName("up")
			if err != nil {
				return err
			}
			for _, g := range []string{gw4, gw6} {
				if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.ParseIP(g)}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	via(a.NS, "192.0.2.2", "2001:db8::2") // where a packet would circle, without us
	via(outside, "192.0.2.1", "2001:db8::1")
	a.Sysctl("net.ipv4.conf.up.forwarding", "1")
	a.Sysctl("net.ipv6.conf.all.forwarding", "1")
	p := newPod(t, a, 1)
	a.apply(t, withPods(a.spec(), p))
	p.echo(t, p.IPv4, p.IPv6)
	for _, ip := range []netip.Addr{p.IPv4, p.IPv6} {
		if err := send(outside, ip); err != nil {
			t.Errorf("the pod at %s: %v", ip, err)
		}
	}
	for _, ip := range []netip.Addr{addr("10.64.0.5"), single.Addr(), addr("fd64::5")} {
		before := sent(t, a)
		for what, n := range map[string]*testns.NS{"from outside": outside, "from the host": a.NS, "from a pod": p.NS} {
			err := send(n, ip)
			if err == nil || !strings.Contains(err.Error(), "no route to host") && !strings.Contains(err.Error(),
				"network is unreachable") {
				t.Errorf("%s to %s: %v, want unreachable", what, ip, err)
			}
		}
		if now := sent(t, a); now > before+8 { // an answer each, and what neighbours ask
			t.Errorf("%s: %d packets left the host", ip, now-before)
		}
	}
}

// echo answers UDP packets inside a pod.
func (p pod) echo(t *testing.T, at ...netip.Addr) {
	t.Helper()
	for _, ip := range at {
		(&host{NS: p.NS}).echo(t, ip)
	}
}

// send sends until an answer or an error comes.
func send(n *testns.NS, to netip.Addr) (err error) {
	n.Do(func() {
		hear := func(_, _ string, c syscall.RawConn) error { // UDP sockets do not report unreachable hosts by themselves
			return c.Control(func(fd uintptr) {
				if to.Is4() {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVERR, 1)
				} else {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1)
				}
			})
		}
		var c net.Conn
		if c, err = (&net.Dialer{Control: hear}).Dial("udp", netip.AddrPortFrom(to, 7).String()); err != nil {
			return
		}
		defer c.Close()
		for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
			_ = c.SetDeadline(time.Now().Add(time.Second))
			if _, err = c.Write([]byte("?")); err == nil {
				_, err = c.Read(make([]byte, 10))
			}
			if err == nil || !os.IsTimeout(err) {
				return
			}
		}
	})
	return err
}

// sent is the number of packets sent over the uplink.
func sent(t *testing.T, h *host) (n uint64) {
	t.Helper()
	h.Must("statistics", func() error {
		l, err := netlink.LinkByName("up")
		if err == nil {
			n = l.Attrs().Statistics.TxPackets
		}
		return err
	})
	return n
}

// Pods of one host reach each other and the host, and the host reaches them, with the state made by the plane.
func TestPodsReachEachOtherAndTheHost(t *testing.T) {
	a := newHost(t, 1)
	p, q := newPod(t, a, 1), newPod(t, a, 2)
	a.apply(t, withPods(a.spec(), p, q))
	p.echo(t, p.IPv4, p.IPv6)
	q.echo(t, q.IPv4, q.IPv6)
	for _, ip := range []netip.Addr{a.overlay4(), a.overlay6(), addr(dataplane.PodGateway)} {
		a.echo(t, ip)
	}
	for _, c := range []struct {
		from *testns.NS
		to   netip.Addr
	}{{p.NS, q.IPv4}, {p.NS, q.IPv6}, {a.NS, p.IPv4}, {a.NS, p.IPv6}, {p.NS, a.overlay4()}, {p.NS, a.overlay6()},
		{p.NS, addr(dataplane.PodGateway)}} {
		if err := send(c.from, c.to); err != nil {
			t.Errorf("%s to %s: %v", c.from.Name, c.to, err)
		}
	}
}
