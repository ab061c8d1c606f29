package plane_test

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/internal/testns"
)

const (
	forgedPort  = 4444
	controlPort = 7946
)

// ear receives UDP packets in a namespace.
type ear struct {
	mu    sync.Mutex
	texts []string
}

func hear(t *testing.T, n *testns.NS, port int) *ear {
	t.Helper()
	e := &ear{}
	var c *net.UDPConn
	n.Must("listen", func() (err error) { c, err = net.ListenUDP("udp", &net.UDPAddr{Port: port}); return err })
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 100)
		for {
			k, _, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			e.mu.Lock()
			e.texts = append(e.texts, string(b[:k]))
			e.mu.Unlock()
		}
	}()
	return e
}

func (e *ear) heard(text string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Contains(e.texts, text)
}

// say sends from an address of the namespace.
func say(t *testing.T, n *testns.NS, from, to netip.Addr, port int, text string) {
	t.Helper()
	n.Must("send", func() error {
		c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)),
			net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, uint16(port))))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte(text))
		return err
	})
}

// scene is a host with a plane, two pods and a neighbour in its network, all of which forward and have all routes.
type scene struct {
	*host
	lan  *testns.NS
	p, q pod
	spec dataplane.Spec
	said int
}

func newScene(t *testing.T) *scene {
	t.Helper()
	a := newHost(t, 1)
	s := &scene{host: a, lan: uplink(t, a), p: newPod(t, a, 1), q: newPod(t, a, 2)}
	s.spec = withPools(withPods(a.spec(), s.p, s.q))
	s.spec.ControlPort = controlPort
	return s
}

// forge sends with a false source address and then with the sender's own, and reports whether the first arrived;
// arrival is in order.
func (s *scene) forge(t *testing.T, e *ear, n *testns.NS, from, own, to netip.Addr) bool {
	t.Helper()
	s.said++
	what := fmt.Sprintf("%d: %s as %s to %s", s.said, n.Name, from, to)
	say(t, n, from, to, forgedPort, what)
	honest := what + ", then as itself"
	within(t, 5*time.Second, honest, func() bool {
		say(t, n, own, to, forgedPort, honest)
		return e.heard(honest)
	})
	return e.heard(what)
}

// give lets a namespace use foreign addresses.
func give(n *testns.NS, addrs ...netip.Addr) {
	for _, a := range addrs {
		n.Address("lo", netip.PrefixFrom(a, a.BitLen()))
	}
}

// TestPodsSendUnderTheirOwnAddressesOnly: whatever the host's reverse path filter is, and in IPv6, which has none.
func TestPodsSendUnderTheirOwnAddressesOnly(t *testing.T) {
	for _, all := range []string{"0", "1", "2"} {
		t.Run("all.rp_filter="+all, func(t *testing.T) {
			s := newScene(t)
			s.Sysctl("net.ipv4.conf.all.rp_filter", all)
			third := newPod(t, s.host, 3)
			s.apply(t, withPods(s.spec, third))
			host, lan, other := hear(t, s.NS, forgedPort), hear(t, s.lan, forgedPort), hear(t, third.NS, forgedPort)
			forged4 := []netip.Addr{s.overlay4(), addr("10.4.0.9"), addr("10.64.0.7"), addr("10.64.200.1"),
				addr("192.0.2.1"), addr("198.51.100.77")}
			forged6 := []netip.Addr{s.overlay6(), addr("fd00:5::9"), addr("fd64::7"), addr("fd64::9999"),
				addr("2001:db8::1"), addr("2001:db8:77::1")}
			at4, at6 := addr("192.0.2.5"), addr("2001:db8::5")
			s.Address("up", netip.PrefixFrom(at4, 24), netip.PrefixFrom(at6, 64))
			give(s.p.NS, slices.Concat(forged4, forged6, []netip.Addr{s.q.IPv4, s.q.IPv6})...)
			for _, c := range []struct {
				e        *ear
				to4, to6 netip.Addr
			}{{host, at4, at6}, {lan, addr("192.0.2.2"), addr("2001:db8::2")}, {other, third.IPv4, third.IPv6}} {
				for _, from := range append(forged4, s.q.IPv4) {
					if s.forge(t, c.e, s.p.NS, from, s.p.IPv4, c.to4) {
						t.Errorf("a pod was heard as %s at %s", from, c.to4)
					}
				}
				for _, from := range append(forged6, s.q.IPv6) {
					if s.forge(t, c.e, s.p.NS, from, s.p.IPv6, c.to6) {
						t.Errorf("a pod was heard as %s at %s", from, c.to6)
					}
				}
			}
		})
	}
}

// TestNeighboursDoNotSendAsTheMesh: also if the host forwards packets from its network, to pods and into the tunnel.
func TestNeighboursDoNotSendAsTheMesh(t *testing.T) {
	s := newScene(t)
	reserved := addr("10.64.7.1")
	s.spec.Pods.Elsewhere = []netip.Prefix{pfx("10.64.7.0/27")}
	s.Sysctl("net.ipv4.conf.all.rp_filter", "0")
	s.apply(t, s.spec)
	host, pod := hear(t, s.NS, forgedPort), hear(t, s.p.NS, forgedPort)
	mesh4 := []netip.Addr{s.overlay4(), addr("10.4.0.9"), s.q.IPv4, addr("10.64.0.7"), addr("10.64.200.1")}
	mesh6 := []netip.Addr{s.overlay6(), addr("fd00:5::9"), s.q.IPv6, addr("fd64::7"), addr("fd64::9999")}
	foreign := []netip.Addr{addr("198.51.100.77"), reserved}
	foreign6 := []netip.Addr{addr("2001:db8:77::1")}
	give(s.lan, slices.Concat(mesh4, mesh6, foreign, foreign6)...)
	for _, c := range []struct {
		e        *ear
		to4, to6 netip.Addr
	}{{host, addr("192.0.2.1"), addr("2001:db8::1")}, {pod, s.p.IPv4, s.p.IPv6}} {
		for _, from := range slices.Concat(mesh4, foreign) {
			if heard, want := s.forge(t, c.e, s.lan, from, addr("192.0.2.2"), c.to4),
				slices.Contains(foreign, from); heard != want {
				t.Errorf("a neighbour as %s to %s: heard %t, want %t", from, c.to4, heard, want)
			}
		}
		for _, from := range slices.Concat(mesh6, foreign6) {
			if heard, want := s.forge(t, c.e, s.lan, from, addr("2001:db8::2"), c.to6),
				slices.Contains(foreign6, from); heard != want {
				t.Errorf("a neighbour as %s to %s: heard %t, want %t", from, c.to6, heard, want)
			}
		}
	}
}

// TestOnlyNodesReachTheControlNet: pods and neighbours cannot reach its port on overlay addresses, but can reach
// other ports.
func TestOnlyNodesReachTheControlNet(t *testing.T) {
	s := newScene(t)
	s.apply(t, s.spec)
	s.lan.Must("way to the overlay", func() error {
		l, err := netlink.LinkByName("up")
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index,
			Dst: netlink.NewIPNet(s.overlay4().AsSlice()), Gw: net.ParseIP("192.0.2.1")})
	})
	control, other := hear(t, s.NS, controlPort), hear(t, s.NS, controlPort+1)
	for _, c := range []struct {
		n        *testns.NS
		from, to netip.Addr
		heard    bool
	}{
		{s.p.NS, s.p.IPv4, s.overlay4(), false}, {s.p.NS, s.p.IPv6, s.overlay6(), false},
		{s.lan, addr("192.0.2.2"), s.overlay4(), false},
		{s.NS, s.overlay4(), s.overlay4(), true}, {s.NS, s.overlay6(), s.overlay6(), true},
	} {
		text := fmt.Sprintf("%s %s", c.n.Name, c.from)
		say(t, c.n, c.from, c.to, controlPort, text)
		within(t, 5*time.Second, "another port", func() bool {
			say(t, c.n, c.from, c.to, controlPort+1, text)
			return other.heard(text)
		})
		if !c.heard && control.heard(text) {
			t.Errorf("%s is heard at the control net's port", c.from)
		}
		if c.heard {
			within(t, 5*time.Second, text, func() bool { return control.heard(text) })
		}
	}
}

// TestOthersLinksKeepTheirSources: Coil's pods and gateways' namespaces can send with addresses of pools over their
// own links.
func TestOthersLinksKeepTheirSources(t *testing.T) {
	s := newScene(t)
	e := hear(t, s.NS, forgedPort)
	coil, gateway := testns.New(t, "coil"), testns.New(t, "gw")
	coils, endpoint, moved := addr("10.64.0.20"), addr("10.64.3.1"), addr("10.64.3.2")
	testns.Link(s.NS, coil, "veth1a2b3c", []netip.Prefix{pfx("169.254.7.1/30")},
		[]netip.Prefix{pfx("169.254.7.2/30"), netip.PrefixFrom(coils, 32)})
	name := podnet.HostLink(podnet.Key{ContainerID: "egress/internet/nat", Interface: "eth0"})
	testns.Link(s.NS, gateway, name, []netip.Prefix{pfx("169.254.8.1/30")},
		[]netip.Prefix{pfx("169.254.8.2/30"), netip.PrefixFrom(endpoint, 32), netip.PrefixFrom(moved, 32)})
	s.Must("ways", func() error {
		for link, to := range map[string]netip.Addr{"veth1a2b3c": coils, name: endpoint} {
			l, err := netlink.LinkByName(link)
			if err != nil {
				return err
			}
			r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: netlink.NewIPNet(to.AsSlice()),
				Table: dataplane.DefaultNumbers().PodTable(), Protocol: dataplane.RouteProtocol}
			if err := netlink.RouteAdd(r); err != nil {
				return err
			}
		}
		return nil
	})
	s.spec.Pods.Gateways = []string{name}
	s.apply(t, s.spec)
	s.clean(t, s.spec)
	for _, c := range []struct {
		n              *testns.NS
		from, own, via netip.Addr
		heard          bool
	}{
		{coil, coils, addr("169.254.7.2"), addr("169.254.7.1"), true},
		{gateway, endpoint, addr("169.254.8.2"), addr("169.254.8.1"), true},
		{gateway, moved, addr("169.254.8.2"), addr("169.254.8.1"), true}, // the slot has just gone to another node
	} {
		s.Sysctl("net.ipv4.conf.all.rp_filter", "0")
		if heard := s.forge(t, e, c.n, c.from, c.own, c.via); heard != c.heard {
			t.Errorf("%s as %s: heard %t, want %t", c.n.Name, c.from, heard, c.heard)
		}
	}
	s.spec.Pods.Gateways = nil
	if n := s.apply(t, s.spec).Writes["nft"]; n != 1 {
		t.Errorf("%d messages for a gateway that went, want 1", n)
	}
	if s.forge(t, e, gateway, moved, addr("169.254.8.2"), addr("169.254.8.1")) {
		t.Error("a link that is not a gateway's any more sends as it likes")
	}
	give(coil, s.p.IPv4)
	if s.forge(t, e, coil, s.p.IPv4, addr("169.254.7.2"), addr("169.254.7.1")) {
		t.Error("a pod of Coil's sends as a pod of ours")
	}
}

// TestSourceChecksAreRepaired: removed checks are restored.
func TestSourceChecksAreRepaired(t *testing.T) {
	s := newScene(t)
	s.apply(t, s.spec)
	s.clean(t, s.spec)
	before := s.repairs()
	s.Must("remove the chain", withNft(func(c *nftables.Conn) {
		chain := &nftables.Chain{Table: ourTable(), Name: dataplane.ChainSources}
		c.FlushChain(chain)
		c.DelChain(chain)
	}))
	if d := s.diff(t, s.spec); len(d) > 0 && !strings.Contains(strings.Join(d, "\n"),
		"add chain "+dataplane.ChainSources) {
		t.Errorf("skein plan would show %q", d)
	}
	within(t, repairLimit(), "repaired", func() bool { return s.repairs() > before && len(s.diff(t, s.spec)) == 0 })
}
