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
	"github.com/vishvananda/netns"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/testns"
)

var (
	local4, local6   = netip.MustParseAddr("169.254.101.7"), netip.MustParseAddr("fd73:6b65:696e:6567::7")
	end4, end6       = netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd09::1")
	otherEnd4        = netip.MustParseAddr("10.9.0.2")
	otherEnd6        = netip.MustParseAddr("fd09::2")
	source4, source6 = netip.MustParseAddr("192.0.2.50"), netip.MustParseAddr("2001:db8::50")
	client4, client6 = netip.MustParseAddr("10.20.30.40"), netip.MustParseAddr("fd20::40")
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
		Inside:       prefixes("10.0.0.0/8", "198.51.100.0/24", "fd09::/16", "fd20::/16"),
		Complete:     true,
	}
}

// plain is a driver whose tunnels are two links that lead straight to the clients: packets come out of them as they come out
// of a tunnel.
type plain struct{ last fou.Spec }

func (p *plain) Name() string { return "plain" }
func (p *plain) Reconcile(s fou.Spec) (int, error) {
	p.last = s
	return 0, nil
}
func (p *plain) Link(remote netip.Addr) string {
	return pick(remote, dataplane.FoUAny4, dataplane.FoUAny6)
}
func (p *plain) Stats() (fou.Stats, error) { return fou.Stats{}, nil }
func (p *plain) Close() error              { return nil }

// scene is a gateway's host with the namespace of an egress, a client behind a tunnel of it, and a target on the host's LAN.
type scene struct {
	t                    testing.TB
	host, client, target *testns.NS
	file                 string
	n                    *NS
	driver               *plain
	mended               atomic.Int64 // calls of Changed
}

func newScene(t testing.TB) *scene {
	s := &scene{t: t, host: testns.New(t, "gwh"), client: testns.New(t, "gwc"), target: testns.New(t, "gwt"), driver: &plain{}}
	s.file = filepath.Join(t.TempDir(), "netns", "internet-nat")
	testns.Link(s.host, s.target, "lan0", prefixes("192.0.2.1/24", "2001:db8::1/64"), prefixes("192.0.2.9/24", "2001:db8::9/64"))
	for _, name := range []string{"net.ipv4.conf.lan0.forwarding", "net.ipv6.conf.all.forwarding"} {
		s.host.Sysctl(name, "1")
	}
	s.open()
	t.Cleanup(func() {
		if s.n != nil {
			s.n.Close()
		}
		s.host.Must("removing the namespace", func() error { return Remove(s.file) })
	})
	// A client's end of what stands for its tunnels.
	s.client.Must("links of the client", func() error {
		for i, name := range []string{dataplane.FoUAny4, dataplane.FoUAny6} {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = name
			h, err := netns.GetFromPath(s.file)
			if err != nil {
				return err
			}
			defer h.Close()
			if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name, PeerNamespace: netlink.NsFd(h)}); err != nil {
				return err
			}
			in, err := netlink.NewHandleAt(h)
			if err != nil {
				return err
			}
			defer in.Close()
			l, err := in.LinkByName(name)
			if err != nil {
				return err
			}
			if err := in.LinkSetUp(l); err != nil {
				return err
			}
			if i == 1 {
				g, _ := netlink.ParseAddr("fe80::99/64")
				g.Flags = 2
				if err := in.AddrAdd(l, g); err != nil {
					return err
				}
			}
		}
		return nil
	})
	s.client.Address(dataplane.FoUAny4, netip.PrefixFrom(client4, 32))
	s.client.Address(dataplane.FoUAny6, netip.PrefixFrom(client6, 128))
	s.in(s.client, "ip", "route", "add", "default", "dev", dataplane.FoUAny4)
	s.in(s.client, "ip", "-6", "route", "add", "default", "via", "fe80::99", "dev", dataplane.FoUAny6)
	s.in(s.target, "ip", "route", "add", "default", "via", "192.0.2.1")
	s.in(s.target, "ip", "-6", "route", "add", "default", "via", "2001:db8::1")
	s.inside("sysctl", "-qw", "net.ipv4.conf."+dataplane.FoUAny4+".proxy_arp=1") // the client asks for its destinations
	for _, a := range []netip.Addr{source4, source6, local4, local6} {
		s.in(s.host, "ip", "route", "add", netip.PrefixFrom(a, a.BitLen()).String(), "dev", s.n.HostLink())
	}
	s.echo()
	return s
}

// open opens the namespace, again when it is open.
func (s *scene) open() {
	s.t.Helper()
	if s.n != nil {
		if err := s.n.Close(); err != nil {
			s.t.Fatal(err)
		}
	}
	s.host.Must("opening", func() (err error) {
		s.n, err = open(Options{File: s.file, Egress: "internet/nat", Changed: func() { s.mended.Add(1) }},
			func(string) (fou.Driver, error) { return s.driver, nil })
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

// socket is a client's.
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

// ask sends one packet and returns what source the target has seen, or "" when there is no answer in time.
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

// seen asks until the answer comes.
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
	return s.inside("nft", "list", "ruleset") + s.inside("ip", "addr") + s.inside("ip", "rule") + s.inside("ip", "route", "show", "table", "all")
}

// grant lets slot pass for a while.
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
