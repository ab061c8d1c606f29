package egressns

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/testenv"
	"github.com/skeinmesh/skein/internal/testns"
)

var (
	local4, local6   = netip.MustParseAddr("169.254.101.7"), netip.MustParseAddr("fd73:6b65:696e:6567::7")
	end4, end6       = netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd09::1")
	otherEnd4        = netip.MustParseAddr("10.9.0.2")
	otherEnd6        = netip.MustParseAddr("fd09::2")
	source4, source6 = netip.MustParseAddr("192.0.2.50"), netip.MustParseAddr("2001:db8::50")
	otherSource4     = netip.MustParseAddr("192.0.2.51")
	otherSource6     = netip.MustParseAddr("2001:db8::51")
	client4, client6 = netip.MustParseAddr("10.20.30.40"), netip.MustParseAddr("fd20::40")
	second4          = netip.MustParseAddr("10.20.30.41")
	target4, target6 = netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("2001:db8::9")
)

const echoPort = 7000

func prefixes(ps ...string) (out []netip.Prefix) {
	for _, p := range ps {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

// aSpec is an egress with two slots, the first with an address of its own, and one client.
func aSpec() dataplane.GatewaySpec {
	return dataplane.GatewaySpec{
		Egress: "internet/nat", Local4: local4, Local6: local6, MTU: 1420,
		Slots: []dataplane.GatewaySlot{
			{Number: 0, Endpoint4: end4, Endpoint6: end6, Source4: source4, Source6: source6},
			{Number: 1, Endpoint4: otherEnd4, Endpoint6: otherEnd6},
		},
		Clients:      []dataplane.GatewayClient{{IPv4: client4, IPv6: client6, Slot: 0}},
		Destinations: prefixes("0.0.0.0/0", "::/0"),
		// Two of each family are adjacent: the kernel must not take them for overlapping ones.
		Inside:   prefixes("10.0.0.0/8", "11.0.0.0/8", "198.51.100.0/24", "fd09::/16", "fd20::/16", "fd21::/16"),
		Complete: true,
	}
}

// wantDriver is the driver of tests: in the kernel tier the kernel's.
func wantDriver() string {
	if os.Getenv("SKEIN_WANT_KERNEL") == "1" {
		return fou.Kernel
	}
	return fou.Auto
}

// scene is a gateway's host with the namespace of an egress, a client on another link of the host, and a target on its
// LAN.
type scene struct {
	t                    testing.TB
	host, client, target *testns.NS
	file                 string
	n                    *NS
	far                  fou.Driver   // the client's
	repaired             atomic.Int64 // calls of Changed
}

func newScene(t testing.TB) *scene {
	s := &scene{t: t, host: testns.New(t, "gwh"), client: testns.New(t, "gwc"), target: testns.New(t, "gwt")}
	s.file = filepath.Join(t.TempDir(), "netns", "internet-nat")
	testns.Link(s.host, s.target, "lan0", prefixes("192.0.2.1/24", "2001:db8::1/64"),
		prefixes("192.0.2.9/24", "2001:db8::9/64"))
	testns.Link(s.host, s.client, "pod0", prefixes("169.254.1.1/32", "fe80::2/64"), nil)
	s.client.Address("pod0", netip.PrefixFrom(client4, 32), netip.PrefixFrom(client6, 128), netip.PrefixFrom(second4, 32))
	for _, name := range []string{"net.ipv4.conf.lan0.forwarding", "net.ipv4.conf.pod0.forwarding",
		"net.ipv6.conf.all.forwarding"} {
		s.host.Sysctl(name, "1")
	}
	s.host.Sysctl("net.ipv4.conf.lan0.rp_filter", "0")
	s.open()
	t.Cleanup(func() {
		if s.n != nil {
			s.n.Close()
		}
		s.host.Must("removing the namespace", func() error { return Remove(s.file) })
	})
	s.clientSide()
	for _, to := range []string{"0.0.0.0/0", "::/0", source4.String() + "/32", source6.String() + "/128",
		otherSource4.String() + "/32", otherSource6.String() + "/128"} { // nobody announces the last four here
		via := "192.0.2.1"
		if strings.Contains(to, ":") {
			via = "2001:db8::1"
		}
		route(s.target, to, via, "lan0")
	}
	s.hostRoutes()
	for _, a := range []netip.Addr{client4, client6, second4} {
		route(s.host, netip.PrefixFrom(a, a.BitLen()).String(), "", "pod0")
	}
	s.echo()
	return s
}

// route adds a route to a namespace, through an address if via is not empty.
func route(n *testns.NS, to, via, link string) {
	n.Must("route to "+to, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		r := netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.ParseIP(via), Scope: netlink.SCOPE_UNIVERSE}
		if via == "" && !strings.Contains(to, ":") {
			r.Scope = netlink.SCOPE_LINK
		}
		if _, r.Dst, err = net.ParseCIDR(to); err != nil {
			return err
		}
		return netlink.RouteReplace(&r)
	})
}

// needCommands skips tests that need commands for inspecting or breaking the kernel's state.
func needCommands(t testing.TB) {
	t.Helper()
	for _, c := range []string{"ip", "nft"} {
		if _, err := exec.LookPath(c); err != nil {
			testenv.Missing(t, err.Error())
		}
	}
}

// hostRoutes lead from the host to the namespace's addresses.
func (s *scene) hostRoutes() {
	for _, a := range []netip.Addr{source4, source6, otherSource4, otherSource6, local4, local6, end4, end6,
		otherEnd4, otherEnd6} {
		route(s.host, netip.PrefixFrom(a, a.BitLen()).String(), "", s.n.HostLink())
	}
}

// clientSide makes the client's tunnels to both slots, and routes the target into the first.
func (s *scene) clientSide() {
	route(s.client, "169.254.1.1/32", "", "pod0")
	route(s.client, "0.0.0.0/0", "169.254.1.1", "pod0")
	route(s.client, "::/0", "fe80::2", "pod0")
	for _, f := range []string{"all", "default", "pod0"} {
		s.client.Sysctl("net.ipv4.conf."+f+".rp_filter", "0")
	}
	s.client.Must("tunnels of the client", func() (err error) {
		s.far, err = fou.Open(fou.Options{Driver: wantDriver()})
		return err
	})
	s.clientPorts(dataplane.FoUPorts{})
	s.t.Cleanup(func() { s.far.Close() })
	s.lead(target4, end4)
	s.lead(target6, end6)
}

// clientPorts gives the client's tunnels their ports.
func (s *scene) clientPorts(p dataplane.FoUPorts) {
	s.t.Helper()
	if _, err := s.far.Reconcile(fou.Spec{IPv4: true, IPv6: true, Ports: p, Tunnels: []fou.Tunnel{
		{Local: client4, Remote: end4, MTU: 1392}, {Local: client6, Remote: end6, MTU: 1372},
		{Local: client4, Remote: otherEnd4, MTU: 1392}, {Local: client6, Remote: otherEnd6, MTU: 1372},
	}}); err != nil {
		s.t.Fatal(err)
	}
}

// lead routes a destination of the client through the tunnel to one of the endpoints.
func (s *scene) lead(to, end netip.Addr) {
	s.t.Helper()
	route(s.client, netip.PrefixFrom(to, to.BitLen()).String(), "",
		s.far.Link(dataplane.Pick(end, client4, client6), end))
}

// open opens the namespace, or reopens it.
func (s *scene) open() {
	s.t.Helper()
	if s.n != nil {
		if err := s.n.Close(); err != nil {
			s.t.Fatal(err)
		}
	}
	s.host.Must("opening", func() (err error) {
		s.n, err = Open(Options{File: s.file, Egress: "internet/nat", Driver: wantDriver(), Changed: func() {
			s.repaired.Add(1)
		}})
		return err
	})
}

func (s *scene) apply(spec dataplane.GatewaySpec) int {
	s.t.Helper()
	w, notes, err := s.n.Apply(spec)
	if err != nil {
		s.t.Fatal(err)
	}
	if len(notes) > 0 {
		s.t.Errorf("notes: %q", notes)
	}
	return w
}

// in runs a command in a namespace and returns what it says.
func (s *scene) in(ns *testns.NS, name string, args ...string) string {
	s.t.Helper()
	var out []byte
	ns.Must(name+" "+strings.Join(args, " "), func() error {
		var err error
		if out, err = exec.Command(name, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	return string(out)
}

// inside runs a command in the egress's namespace.
func (s *scene) inside(name string, args ...string) string {
	s.t.Helper()
	var out []byte
	f, err := os.Open(s.file)
	if err != nil {
		s.t.Fatal(err)
	}
	defer f.Close()
	if err := inside(f, func() error {
		var err error
		if out, err = exec.Command(name, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s %q: %w: %s", name, args, err, out)
		}
		return nil
	}); err != nil {
		s.t.Fatal(err)
	}
	return string(out)
}

// echo answers UDP at the target with the address that it sees.
func (s *scene) echo() {
	for _, a := range []netip.Addr{target4, target6} {
		var c *net.UDPConn
		s.target.Must("listening", func() (err error) {
			c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, echoPort)))
			return err
		})
		s.t.Cleanup(func() { c.Close() })
		go func() {
			b := make([]byte, 2048)
			for {
				n, from, err := c.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				c.WriteToUDPAddrPort(append([]byte(from.Addr().Unmap().String()+" "), b[:n]...), from)
			}
		}()
	}
}

// socket is one of the client's.
func (s *scene) socket(from netip.Addr) *net.UDPConn {
	s.t.Helper()
	var c *net.UDPConn
	s.client.Must("socket of the client", func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)))
		return err
	})
	s.t.Cleanup(func() { c.Close() })
	return c
}

var sequence atomic.Int64

// ask sends one packet and returns the source that the target saw, or "" without a timely answer.
func (s *scene) ask(c *net.UDPConn, to netip.Addr, within time.Duration) string {
	s.t.Helper()
	word := fmt.Sprint("packet ", sequence.Add(1))
	if _, err := c.WriteToUDPAddrPort([]byte(word), netip.AddrPortFrom(to, echoPort)); err != nil {
		return ""
	}
	c.SetReadDeadline(time.Now().Add(within))
	b := make([]byte, 2048)
	for {
		n, _, err := c.ReadFromUDPAddrPort(b)
		if err != nil {
			return ""
		}
		if seen, got, _ := strings.Cut(string(b[:n]), " "); got == word {
			return seen
		}
	}
}

// seen repeats ask until there is an answer.
func (s *scene) seen(c *net.UDPConn, to netip.Addr) string {
	s.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		if a := s.ask(c, to, 200*time.Millisecond); a != "" {
			return a
		}
	}
	s.t.Fatalf("no answer from %s\n%s", to, s.state())
	return ""
}

// silent fails when any of some packets is answered.
func (s *scene) silent(why string, c *net.UDPConn, to netip.Addr) {
	s.t.Helper()
	for range 3 {
		if a := s.ask(c, to, 100*time.Millisecond); a != "" {
			s.t.Fatalf("%s: the target answers, it sees %s", why, a)
		}
	}
}

func (s *scene) state() string {
	s.t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		return fmt.Sprintf("%+v", s.counters())
	}
	return s.inside("nft", "list", "ruleset") + s.inside("ip", "addr") + s.inside("ip", "rule") + s.inside("ip", "route",
		"show", "table", "all")
}

// grant lets a slot's packets pass for a while.
func (s *scene) grant(slot int, lease time.Duration) Ticket {
	s.t.Helper()
	t, err := s.n.Begin(slot, lease)
	if err == nil {
		err = s.n.Grant(slot, t)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return t
}

func (s *scene) counters() Counters {
	s.t.Helper()
	c, err := s.n.Read()
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("not within ten seconds: %s", what)
		}
	}
}
