package egressclient

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/testns"
)

// far is the other end of a client's tunnels: a gateway that has the targets on its own loopback, and accepts packets
// to them only from tunnels.
type far struct {
	ns     *testns.NS
	driver fou.Driver
}

// tunnels connects a client's namespace and a far end.
func tunnels(t *testing.T, driver string) (*testns.NS, *far) {
	t.Helper()
	client, gw := testns.New(t, "ec"), testns.New(t, "eg")
	testns.Link(gw, client, "eth0",
		[]netip.Prefix{pfx("169.254.1.1/32"), pfx("10.68.12.49/32"), pfx("10.68.124.145/32"), pfx("fd10::1:1/128"),
			pfx("fd10::2:1/128")},
		[]netip.Prefix{pfx("10.20.30.40/32"), pfx("fd10::40/128")})
	gw.Address("eth0", pfx("fe80::1/64"))
	gw.Address("lo", pfx("8.8.8.8/32"), pfx("192.168.10.1/32"), pfx("2001:db8::8/128"))
	for _, args := range []string{"route add 169.254.1.1 dev eth0", "route add default via 169.254.1.1 dev eth0 onlink",
		"-6 route add default via fe80::1 dev eth0"} {
		ip(t, client, args)
	}
	d, err := fou.Open(fou.Options{NetNS: path(gw), Driver: driver})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	spec := fou.Spec{IPv4: true, IPv6: true, Any: true, Gateway: true, Tunnels: []fou.Tunnel{
		{Local: addr("10.68.124.145"), Remote: addr("10.20.30.40"), MTU: 1392},
		{Local: addr("fd10::2:1"), Remote: addr("fd10::40"), MTU: 1372}}}
	if _, err := d.Reconcile(spec); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{
		"route add 10.20.30.40 dev eth0", "-6 route add fd10::40 dev eth0",
		"route add 10.20.30.40 dev " + d.Link(addr("10.68.124.145"), addr("10.20.30.40")) + " table 118",
		"-6 route add fd10::40 dev " + d.Link(addr("fd10::2:1"), addr("fd10::40")) + " table 118",
		"rule add pref 90 from 8.8.8.8 lookup 118", "rule add pref 91 from 192.168.10.1 lookup 118",
		"-6 rule add pref 90 from 2001:db8::8 lookup 118",
		"rule del pref 0", "rule add pref 100 lookup local", "-6 rule del pref 0", "-6 rule add pref 100 lookup local",
		"rule add pref 10 iif eth0 to 8.8.8.8 prohibit", "rule add pref 11 iif eth0 to 192.168.10.1 prohibit",
		"-6 rule add pref 10 iif eth0 to 2001:db8::8 prohibit",
	} {
		ip(t, gw, args)
	}
	f := &far{ns: gw, driver: d}
	for _, at := range []string{"8.8.8.8:7000", "192.168.10.1:7000", "[2001:db8::8]:7000"} {
		f.echo(t, at)
	}
	return client, f
}

// echo answers lines, prefixed with the caller's address.
func (f *far) echo(t *testing.T, at string) {
	t.Helper()
	var l net.Listener
	f.ns.Must("listening on "+at, func() (err error) { l, err = net.Listen("tcp", at); return err })
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				for in := bufio.NewScanner(conn); in.Scan(); {
					fmt.Fprintf(conn, "%s %s\n", netip.MustParseAddrPort(conn.RemoteAddr().String()).Addr(), in.Text())
				}
			}()
		}
	}()
}

// talk is a connection that sends lines and receives their echo.
type talk struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Scanner
	n    int
}

func dial(t *testing.T, ns *testns.NS, at string) *talk {
	t.Helper()
	var conn net.Conn
	ns.Must("connecting to "+at, func() (err error) { conn, err = net.DialTimeout("tcp", at, 5*time.Second); return err })
	t.Cleanup(func() { conn.Close() })
	return &talk{t: t, conn: conn, in: bufio.NewScanner(conn)}
}

func (k *talk) say(from string) {
	k.t.Helper()
	k.n++
	_ = k.conn.SetDeadline(time.Now().Add(5 * time.Second))
	want := fmt.Sprint(from, " line ", k.n)
	fmt.Fprintln(k.conn, "line", k.n)
	if !k.in.Scan() || k.in.Text() != want {
		k.t.Errorf("heard %q, want %q; %v", k.in.Text(), want, k.in.Err())
	}
}

// TestThroughTunnels: connections of both families use tunnels only, and survive changes of source port and
// destinations; no packet loops.
func TestThroughTunnels(t *testing.T) {
	t.Run(fou.Userspace, func(t *testing.T) { throughTunnels(t, fou.Userspace) })
	if err := fou.TryKernel(); err != nil {
		t.Logf("without the kernel's driver, which the kernel tier has: %v", err)
		return
	}
	t.Run(fou.Kernel, func(t *testing.T) { throughTunnels(t, fou.Kernel) })
}

func throughTunnels(t *testing.T, driver string) {
	ns, far := tunnels(t, driver)
	ns.Sysctl("net.ipv4.conf.all.rp_filter", "1") // as many hosts have it
	c, err := Open(Options{NetNS: path(ns), Driver: driver})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s := dual()
	apply(t, c, s)
	k := keep(t, c, s)
	defer func() {
		if t.Failed() {
			st, _ := c.Stats()
			fs, _ := far.driver.Stats()
			t.Logf("here %+v, there %+v\n%s\n%s", st, fs, ip(t, ns, "-s -d link"), ip(t, ns, "rule"))
		}
	}()
	four, six := dial(t, ns, "8.8.8.8:7000"), dial(t, ns, "[2001:db8::8]:7000")
	both := func() {
		t.Helper()
		four.say("10.20.30.40")
		six.say("fd10::40")
	}
	both()
	for _, auto := range []bool{true, false} {
		for i := range s.Tunnels {
			s.Tunnels[i].SourcePortAuto = auto
		}
		if n := k.apply(s); n == 0 {
			t.Errorf("source port %v: nothing was written", auto)
		}
		both()
	}
	// another way that is the same
	s.Routes = append([]dataplane.ClientRoute{to("8.8.0.0/16", "10.68.124.145")}, s.Routes...)
	k.apply(s)
	both()
	s.Routes = append(s.Routes[:1], to("2001:db8::/32", "fd10::2:1")) // and the old ones end
	k.apply(s)
	both()
	ip(t, ns, "link del "+dataplane.FoULink(addr("10.68.124.145")))
	eventually(t, "the device is there again", func() bool {
		got, _ := ipErr(ns, "route show table 118")
		return got == "8.8.0.0/16 dev fou4_0a447c91 proto 30"
	})
	both()
	stats, err := c.Stats()
	theirs, _ := far.driver.Stats()
	const plenty = 400 // packets; one that went round would make thousands
	if err != nil || theirs.RxPackets == 0 || stats.TxPackets > plenty || theirs.RxPackets > plenty {
		t.Errorf("packets go round: %+v, at the other end %+v, %v", stats, theirs, err)
	}
	if got := ip(t, ns, "rule"); !strings.Contains(got, "2100:") {
		t.Error(got)
	}
	k.stop()
	if err := c.Remove(); err != nil {
		t.Error(err)
	}
	for _, args := range []string{"rule", "-6 rule", "link", "route show table 118", "-6 route show table 118"} {
		if got, _ := ipErr(ns, args); strings.Contains(got, "fou") || strings.Contains(got, "proto 30") {
			t.Errorf("Remove left, of ip %s:\n%s", args, got)
		}
	}
}

// TestAnswerFromElsewhere: an answer from another address than the tunnel's remote end is accepted, whatever the
// reverse path filter is.
func TestAnswerFromElsewhere(t *testing.T) {
	for _, filter := range []string{"0 0", "0 1", "0 2", "1 1", "2 2"} {
		t.Run(filter, func(t *testing.T) { answerFromElsewhere(t, filter[:1], filter[2:]) })
	}
}

func answerFromElsewhere(t *testing.T, all, fresh string) {
	ns, f := tunnels(t, fou.Userspace)
	ns.Sysctl("net.ipv4.conf.all.rp_filter", all)
	ns.Sysctl("net.ipv4.conf.default.rp_filter", fresh)
	c, err := Open(Options{NetNS: path(ns), Driver: fou.Userspace})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	from := func(local string) {
		t.Helper()
		if _, err := f.driver.Reconcile(fou.Spec{IPv4: true, Any: true, Gateway: true,
			Tunnels: []fou.Tunnel{{Local: addr(local), Remote: addr("10.20.30.40"), MTU: 1392}}}); err != nil {
			t.Fatal(err)
		}
		ip(t, f.ns, "route replace 10.20.30.40 dev "+f.driver.Link(addr(local), addr("10.20.30.40"))+" table 118")
	}
	from("10.68.12.49")
	s := scene()
	s.Tunnels, s.Routes = s.Tunnels[:1], s.Routes[:1]
	s.Ends = []netip.Addr{addr("10.68.12.49"), addr("10.68.124.145")} // two slots of one egress
	apply(t, c, s)
	if n := apply(t, c, s); n != 0 {
		t.Errorf("%d writes although nothing changed", n)
	}
	var l net.Listener
	f.ns.Must("listening", func() (err error) { l, err = net.Listen("tcp", "192.168.10.1:7001"); return err })
	defer l.Close()
	k := dial(t, ns, "192.168.10.1:7001")
	there, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	from("10.68.124.145") // it hears nothing of the client any more
	fmt.Fprintln(there, "from elsewhere")
	_ = k.conn.SetDeadline(time.Now().Add(5 * time.Second))
	if !k.in.Scan() || k.in.Text() != "from elsewhere" {
		t.Errorf("heard %q, %v", k.in.Text(), k.in.Err())
	}
}
