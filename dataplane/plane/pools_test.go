package plane_test

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

// uplink connects a host to an outside, which receives packets without a more specific route. The outside answers at
// some addresses.
func uplink(t *testing.T, a *host, answers ...netip.Addr) *testns.NS {
	t.Helper()
	outside := testns.New(t, "out")
	testns.Link(a.NS, outside, "up", []netip.Prefix{pfx("192.0.2.1/24"), pfx("2001:db8::1/64")},
		[]netip.Prefix{pfx("192.0.2.2/24"), pfx("2001:db8::2/64")})
	for n, gws := range map[*testns.NS][]string{a.NS: {"192.0.2.2", "2001:db8::2"},
		outside: {"192.0.2.1", "2001:db8::1"}} {
		n.Must("default routes", func() error {
			l, err := netlink.LinkByName("up")
			if err != nil {
				return err
			}
			for _, g := range gws {
				if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.ParseIP(g)}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for _, ip := range answers {
		outside.Address("lo", netip.PrefixFrom(ip, ip.BitLen()))
		(&host{NS: outside}).echo(t, ip)
	}
	a.Sysctl("net.ipv4.conf.up.forwarding", "1")
	a.Sysctl("net.ipv6.conf.all.forwarding", "1")
	return outside
}

// withPools is a Spec with the pools around block4, single and block6.
func withPools(s dataplane.Spec) dataplane.Spec {
	s.Pods.Pools = []netip.Prefix{pfx("10.64.0.0/16"), single, pfx("fd64::/112")}
	return s
}

// TestPoolAddressesOfNobodyDoNotLeave: packets of a pod or the host to a pool address that no node has are rejected
// at once. Otherwise they would leave in plaintext by the default route, to an outside that has such an address and
// answers.
func TestPoolAddressesOfNobodyDoNotLeave(t *testing.T) {
	nobody, reserved := []netip.Addr{addr("10.64.200.1"), addr("fd64::9999")},
		[]netip.Addr{addr("10.64.7.1"), addr("fd64::7001")}
	a := newHost(t, 1)
	uplink(t, a, append(nobody, reserved...)...)
	p := newPod(t, a, 1)
	p.echo(t, p.IPv4, p.IPv6)
	asks := map[string]*testns.NS{"the host": a.NS, "a pod": p.NS}
	s := withPods(a.spec(), p)
	a.apply(t, s)
	for who, n := range asks {
		for _, ip := range append(nobody, reserved...) {
			if err := send(n, ip); err != nil {
				t.Fatalf("the scene does not show the fault: from %s to %s without a pool: %v", who, ip, err)
			}
		}
	}
	s = withPools(s)
	s.Pods.Elsewhere = []netip.Prefix{pfx("10.64.7.0/27"), pfx("fd64::7000/123")}
	if n := a.apply(t, s).Writes["route"]; n != 4 { // single is a block: it is refused already
		t.Errorf("%d writes for the pools; want a route for each subnet and each reserved block", n)
	}
	a.clean(t, s)
	for who, n := range asks {
		for _, ip := range nobody {
			if err := send(n, ip); err == nil || !strings.Contains(err.Error(), "no route to host") &&
				!strings.Contains(err.Error(), "network is unreachable") {
				t.Errorf("from %s to %s: %v, want unreachable", who, ip, err)
			}
		}
		for _, ip := range append(reserved, p.IPv4, p.IPv6) {
			if err := send(n, ip); err != nil {
				t.Errorf("from %s to %s: %v", who, ip, err)
			}
		}
	}
	s.Pods.Pools, s.Pods.Elsewhere = nil, nil
	a.apply(t, s)
	a.clean(t, s)
	for _, ip := range nobody {
		if err := send(p.NS, ip); err != nil {
			t.Errorf("the pool is gone, and %s: %v", ip, err)
		}
	}
}

// TestPoolsLeaveCoilsPodsAlone: Coil's host routes to its pods are more specific than any subnet, and packets to its
// pods on other hosts follow its own routes.
func TestPoolsLeaveCoilsPodsAlone(t *testing.T) {
	a := newHost(t, 1)
	asCoil(t, a)
	elsewhere := addr("10.64.2.5") // on a host that is not a member, where a routing daemon of Coil's leads
	uplink(t, a, elsewhere)
	before := podThings(t, a)
	s := withPools(a.spec())
	s.Pods.Elsewhere = []netip.Prefix{pfx("10.64.2.0/27")}
	a.apply(t, s)
	a.clean(t, s)
	a.Must("way to Coil's pod", func() error {
		routes, err := netlink.RouteGet(net.ParseIP("10.64.0.20"))
		if err != nil {
			return err
		}
		l, err := netlink.LinkByIndex(routes[0].LinkIndex)
		if err == nil && l.Attrs().Name != "veth1a2b3c" {
			err = fmt.Errorf("it leads through %s", l.Attrs().Name)
		}
		return err
	})
	if err := send(a.NS, elsewhere); err != nil {
		t.Errorf("to a block of Coil's on a host that is not a member: %v", err)
	}
	if err := send(a.NS, addr("10.64.2.40")); err == nil {
		t.Error("to a block of nobody's: an answer")
	}
	_ = a.plane.Close()
	a.purge(t)
	if now := podThings(t, a); strings.Join(now, "\n") != strings.Join(before, "\n") {
		t.Errorf("before %q\nnow    %q", before, now)
	}
}

// TestLostPoolRoutesAreRepaired: routes of pools are repaired like those of blocks.
func TestLostPoolRoutesAreRepaired(t *testing.T) {
	a := newHost(t, 1)
	s := withPools(a.spec())
	s.Pods.Elsewhere = []netip.Prefix{pfx("10.64.7.0/27"), pfx("fd64::7000/123")}
	a.apply(t, s)
	const throw, unreachable = 9, 7
	for _, kind := range []int{unreachable, throw} {
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			before := a.repairs()
			a.Must("delete", deleteRoutes(family, dataplane.DefaultNumbers().PodTable(), kind))
			within(t, repairLimit(), "repaired", func() bool { return a.repairs() > before && len(a.diff(t, s)) == 0 })
		}
	}
}
