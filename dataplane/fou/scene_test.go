package fou_test

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/testns"
)

var (
	client4, endpoint4, target4 = netip.MustParseAddr("10.100.1.2"), netip.MustParseAddr("10.100.2.1"),
		netip.MustParseAddr("198.51.100.7")
	client6, endpoint6, target6 = netip.MustParseAddr("fd00:1::2"), netip.MustParseAddr("fd00:2::1"),
		netip.MustParseAddr("2001:db8:7::7")
)

const (
	underMTU = 1420 // of the network below: WireGuard's
	mtu4     = underMTU - dataplane.FoUOverhead4
	mtu6     = underMTU - dataplane.FoUOverhead6
	deadline = 10 * time.Second
)

// scene is a client, a gateway and a target: client —under— gateway —out— target.
type scene struct {
	client, gateway, target *testns.NS
	near, far               fou.Driver // of the client and the gateway
	gatewayMode, auto       bool
	nearPorts, farPorts     dataplane.FoUPorts
}

// newScene makes the namespaces and both tunnels' ends.
func newScene(t testing.TB, near, far string, auto bool) *scene {
	t.Helper()
	s := &scene{client: testns.New(t, "foucl"), gateway: testns.New(t, "fougw"), target: testns.New(t, "foutg"),
		auto: auto, gatewayMode: true}
	p := netip.MustParsePrefix
	testns.Link(s.client, s.gateway, "under", []netip.Prefix{p("10.100.1.2/16"), p("fd00:1::2/16")},
		[]netip.Prefix{p("10.100.2.1/16"), p("fd00:2::1/16")})
	testns.Link(s.gateway, s.target, "out", []netip.Prefix{p("198.51.100.1/24"), p("2001:db8:7::1/64")},
		[]netip.Prefix{p("198.51.100.7/24"), p("2001:db8:7::7/64")})
	for _, n := range []*testns.NS{s.client, s.gateway} {
		n.Must("MTU", func() error { return setMTU("under", underMTU) })
		n.Sysctl("net.ipv4.conf.all.rp_filter", "0")
		n.Sysctl("net.ipv4.conf.default.rp_filter", "0")
	}
	s.gateway.Sysctl("net.ipv4.ip_forward", "1")
	s.gateway.Sysctl("net.ipv6.conf.all.forwarding", "1")
	for _, r := range []string{"10.100.0.0/16 198.51.100.1", "fd00::/8 2001:db8:7::1"} {
		route(t, s.target, r, "", 0)
	}
	s.near, s.far = open(t, s.client, near), open(t, s.gateway, far)
	s.reconcile(t)
	for _, pair := range [][2]netip.Addr{{endpoint4, target4}, {endpoint6, target6}} {
		route(t, s.client, netip.PrefixFrom(pair[1], pair[1].BitLen()).String(), s.near.Link(clientOf(pair[0]), pair[0]), 0)
	}
	for _, c := range []netip.Addr{client4, client6} {
		route(t, s.gateway, netip.PrefixFrom(c, c.BitLen()).String(), s.far.Link(endpointOf(c), c), dataplane.GatewayTable)
	}
	s.gateway.Must("rule", func() error {
		for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
			r := netlink.NewRule()
			r.Family, r.Priority, r.IifName, r.Table = f, dataplane.GatewayRule, "out", dataplane.GatewayTable
			if err := netlink.RuleAdd(r); err != nil {
				return err
			}
		}
		return nil
	})
	return s
}

func (s *scene) nearSpec() fou.Spec {
	return fou.Spec{IPv4: true, IPv6: true, Any: true, Ports: s.nearPorts,
		Tunnels: []fou.Tunnel{{Local: client4, Remote: endpoint4, SourcePortAuto: s.auto, MTU: mtu4},
			{Local: client6, Remote: endpoint6, SourcePortAuto: s.auto, MTU: mtu6}}}
}

func (s *scene) farSpec() fou.Spec {
	return fou.Spec{IPv4: true, IPv6: true, Gateway: s.gatewayMode, Ports: s.farPorts,
		Tunnels: []fou.Tunnel{{Local: endpoint4, Remote: client4, SourcePortAuto: s.auto, MTU: mtu4},
			{Local: endpoint6, Remote: client6, SourcePortAuto: s.auto, MTU: mtu6}}}
}

func (s *scene) reconcile(t testing.TB) (writes int) {
	t.Helper()
	for _, e := range []struct {
		d fou.Driver
		s fou.Spec
	}{{s.near, s.nearSpec()}, {s.far, s.farSpec()}} {
		n, err := e.d.Reconcile(e.s)
		if err != nil {
			t.Fatalf("%s: %v", e.d.Name(), err)
		}
		writes += n
	}
	return writes
}

func open(t testing.TB, n *testns.NS, driver string) fou.Driver {
	t.Helper()
	d, err := fou.Open(fou.Options{NetNS: "/run/netns/" + n.Name, Driver: driver})
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	t.Cleanup(func() {
		if !closed {
			d.Close()
		}
	})
	return &once{Driver: d, closed: &closed}
}

// once makes Close harmless the second time.
type once struct {
	fou.Driver
	closed *bool
}

func (o *once) Close() error {
	if *o.closed {
		return nil
	}
	*o.closed = true
	return o.Driver.Close()
}

func setMTU(link string, mtu int) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	return netlink.LinkSetMTU(l, mtu)
}

// route adds one: "prefix gateway", or a prefix and a link.
func route(t testing.TB, n *testns.NS, what, link string, table int) {
	t.Helper()
	n.Must("route "+what+" "+link, func() error {
		r := netlink.Route{Table: table}
		for i, w := range splitWords(what) {
			if i == 0 {
				p, err := netlink.ParseIPNet(w)
				if err != nil {
					return err
				}
				r.Dst = p
				continue
			}
			r.Gw = net.ParseIP(w)
		}
		if link != "" {
			l, err := netlink.LinkByName(link)
			if err != nil {
				return err
			}
			r.LinkIndex = l.Attrs().Index
			if r.Dst.IP.To4() != nil {
				r.Src = client4.AsSlice()
				if table != 0 {
					r.Src = nil
				}
			} else if table == 0 {
				r.Src = client6.AsSlice()
			}
		}
		return netlink.RouteReplace(&r)
	})
}

func splitWords(s string) (out []string) {
	for len(s) > 0 {
		i := slices.Index([]byte(s), ' ')
		if i < 0 {
			return append(out, s)
		}
		out, s = append(out, s[:i]), s[i+1:]
	}
	return out
}

// echo answers UDP and TCP at port 7 of the target.
func (s *scene) echo(t testing.TB, addr netip.Addr) {
	t.Helper()
	at := netip.AddrPortFrom(addr, 7)
	s.target.Must("listening", func() error {
		u, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		if err != nil {
			return err
		}
		t.Cleanup(func() { u.Close() })
		go func() {
			b := make([]byte, 1<<16)
			for {
				n, from, err := u.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				u.WriteToUDPAddrPort(b[:n], from)
			}
		}()
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					io.Copy(c, c)
				}()
			}
		}()
		return nil
	})
}

// dial opens a connection from the client to the target's port 7.
func (s *scene) dial(t testing.TB, network string, addr netip.Addr) net.Conn {
	t.Helper()
	var c net.Conn
	s.client.Must("dialing "+addr.String(), func() (err error) {
		d := net.Dialer{Timeout: deadline, Control: func(_, _ string, raw syscall.RawConn) error {
			return raw.Control(func(fd uintptr) { // datagrams are never fragmented
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
			})
		}}
		c, err = d.Dial(network, netip.AddrPortFrom(addr, 7).String())
		return err
	})
	t.Cleanup(func() { c.Close() })
	return c
}

// ask sends a datagram until the answer comes.
func ask(t testing.TB, c net.Conn, payload []byte) {
	t.Helper()
	b := make([]byte, 1<<16)
	for end := time.Now().Add(deadline); ; {
		if _, err := c.Write(payload); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatalf("sending %d bytes: %v", len(payload), err)
		}
		c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		n, err := c.Read(b)
		if err == nil && slices.Equal(b[:n], payload) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("no answer to %d bytes: %v", len(payload), err)
		}
	}
}

// wire captures what a link of a namespace carries, from IP's header on.
type wire struct {
	fd int
}

func capture(t testing.TB, n *testns.NS, link string) *wire {
	t.Helper()
	w := &wire{}
	n.Must("capturing", func() (err error) {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		all := int(uint16(unix.ETH_P_ALL)<<8 | uint16(unix.ETH_P_ALL)>>8)
		if w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		tv := unix.NsecToTimeval((100 * time.Millisecond).Nanoseconds())
		unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
		unix.SetsockoptInt(w.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20)
		return unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: uint16(all), Ifindex: l.Attrs().Index})
	})
	t.Cleanup(func() { unix.Close(w.fd) })
	return w
}

// try returns the next packet that matches, nil when none comes for a while.
func (w *wire) try(match func(p []byte) bool) []byte {
	b := make([]byte, 1<<17)
	for {
		n, _, err := unix.Recvfrom(w.fd, b, 0)
		if err != nil {
			return nil
		}
		if n >= 28 && match(b[:n]) {
			return slices.Clone(b[:n])
		}
	}
}

// all returns the packets that match, until none comes for a while.
func (w *wire) all(match func(p []byte) bool) func(yield func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for p := w.try(match); p != nil; p = w.try(match) {
			if !yield(p) {
				return
			}
		}
	}
}

// clientOf and endpointOf are the other end of a tunnel.
func clientOf(endpoint netip.Addr) netip.Addr {
	if endpoint.Is4() {
		return client4
	}
	return client6
}

func endpointOf(client netip.Addr) netip.Addr {
	if client.Is4() {
		return endpoint4
	}
	return endpoint6
}
