package fabric

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/internal/testenv"
)

// raise builds a lab for the length of a test. Its name holds the process, so that runs beside each
// other do not meet.
func raise(t *testing.T, sites []SiteSpec, hosts ...HostSpec) Plan {
	t.Helper()
	testenv.NeedRoot(t)
	p, err := NewPlan(fmt.Sprintf("t%d%s", os.Getpid(), shortHash(t.Name())), sites, hosts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Teardown(context.Background(), p.Lab); err != nil {
			t.Error(err)
		}
		if left, _ := Namespaces(p.Lab); len(left) > 0 {
			t.Errorf("namespaces left: %v", left)
		}
	})
	if err := Build(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return p
}

func shortHash(s string) string {
	h := uint16(1)
	for _, b := range []byte(s) {
		h = h*31 + uint16(b)
	}
	return fmt.Sprintf("%04x", h)
}

func (p Plan) host(t *testing.T, name string) Host {
	t.Helper()
	h, ok := p.Host(name)
	if !ok {
		t.Fatalf("no host %s", name)
	}
	return h
}

// socket opens a UDP socket on a host's own address.
func (p Plan) socket(t *testing.T, host string, v6 bool, port uint16) *net.UDPConn {
	t.Helper()
	h := p.host(t, host)
	addr := h.Addr
	if v6 {
		addr = h.Addr6
	}
	var c *net.UDPConn
	if err := In(HostNS(p.Lab, host), func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, port)))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func local(c *net.UDPConn) netip.AddrPort {
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

// silence is how long a datagram may take; none arriving in it is taken for dropped. Only where nothing
// passes that could tell that it would have arrived by now.
const silence = 500 * time.Millisecond

// arrival is the longest that a datagram takes which is expected, on the busiest machine.
const arrival = 20 * time.Second

// send sends a datagram that need not arrive, and returns its text.
func send(t *testing.T, a *net.UDPConn, to netip.AddrPort) string {
	t.Helper()
	token := fmt.Sprint(time.Now().UnixNano())
	_, _ = a.WriteToUDPAddrPort([]byte(token), to) // no route is an answer too, and so is a refusal of the last one
	return token
}

// await reads until one of the texts comes, and tells which and as whose.
func await(t *testing.T, b *net.UDPConn, patience time.Duration, tokens ...string) (which string, as netip.AddrPort) {
	t.Helper()
	buf := make([]byte, 100)
	deadline := time.Now().Add(patience)
	for {
		b.SetReadDeadline(deadline)
		n, from, err := b.ReadFromUDPAddrPort(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return "", as
		}
		if err == nil && slices.Contains(tokens, string(buf[:n])) {
			return string(buf[:n]), netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		}
	}
}

// passes sends a datagram and tells as whose it arrives; ok is false when it does not within silence.
func passes(t *testing.T, a *net.UDPConn, to netip.AddrPort, b *net.UDPConn) (as netip.AddrPort, ok bool) {
	t.Helper()
	which, as := await(t, b, silence, send(t, a, to))
	return as, which != ""
}

// arrives is passes for a datagram that must arrive.
func arrives(t *testing.T, a *net.UDPConn, to netip.AddrPort, b *net.UDPConn) netip.AddrPort {
	t.Helper()
	token := send(t, a, to)
	which, as := await(t, b, arrival, token)
	if which == "" {
		t.Fatalf("a datagram from %s to %s does not arrive at %s", local(a), to, local(b))
	}
	return as
}

// getsIn tells whether what a sends to an address reaches b, and as whose. Each try is followed by a
// datagram from fence, which is known to arrive there: until then the first had its time.
func getsIn(t *testing.T, a *net.UDPConn, to netip.AddrPort, b, fence *net.UDPConn) (as netip.AddrPort, ok bool) {
	t.Helper()
	var sent []string
	for range 3 { // on two processors the fence may overtake
		sent = append(sent, send(t, a, to))
		stop := send(t, fence, to)
		which, as := await(t, b, arrival, append(sent, stop)...)
		switch {
		case which == "":
			t.Fatalf("a datagram from %s to %s does not arrive at %s", local(fence), to, local(b))
		case which != stop:
			return as, true
		}
	}
	which, as := await(t, b, silence/10, sent...)
	return as, which != ""
}

func TestPlanNumbersEverything(t *testing.T) {
	p, err := NewPlan("x", []SiteSpec{{Name: "dc", NAT: None, IPv6: true}, {Name: "home", NAT: FullCone},
		{Name: "cloud", NAT: OneToOne}},
		[]HostSpec{{"dc1", "dc"}, {"home1", "home"}, {"cloud1", "cloud"}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, h := range p.Hosts {
		got = append(got, fmt.Sprintf("%d %s %s public %s %s", h.Number, h.Name, h.Addr, h.Public, h.Addr6))
	}
	want := []string{
		"1 dc1 198.18.1.11 public 198.18.1.11 2001:db8:1::b",
		"2 home1 192.168.2.12 public 198.18.2.1 invalid IP",
		"3 cloud1 192.168.3.13 public 198.18.3.13 invalid IP",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if _, err := NewPlan("x", nil, []HostSpec{{"a", "nowhere"}}); err == nil {
		t.Error("a host in an unknown site was accepted")
	}
	if _, err := NewPlan("x", []SiteSpec{{Name: "dc"}}, make([]HostSpec, MaxHosts+1)); err == nil {
		t.Error("more hosts than DSCP values were accepted")
	}
}

func TestNamespacesOfLabsWithLikeNames(t *testing.T) {
	all := []string{"skdemo-inet", "skdemo-r-dc", "skdemo-dc1", "skdemo-2-inet", "skdemo-2-dc1", "other", "skdem-x"}
	if d := cmp.Diff([]string{"skdemo-dc1", "skdemo-inet", "skdemo-r-dc"}, belonging("demo", all)); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"skdemo-2-dc1", "skdemo-2-inet"}, belonging("demo-2", all)); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{"inet", "r-dc", "b-inet"} {
		if CheckNodeName(bad) == nil {
			t.Errorf("node name %q accepted", bad)
		}
	}
	for _, bad := range []string{"inet", "b-inet"} {
		if CheckPodName(bad) == nil {
			t.Errorf("pod name %q accepted", bad)
		}
	}
}

func TestPodsOfAHostWithALikeName(t *testing.T) {
	all := []string{"skdemo-inet", "skdemo-dc1", "skdemo-dc1.b", "skdemo-dc1.a", "skdemo-dc11.c", "skdemo-r-dc.carrier",
		"skdemo-2-dc1.d"}
	if d := cmp.Diff([]string{"a", "b"}, podsIn("demo", "dc1", all)); d != "" {
		t.Error(d)
	}
}

func TestPublicSitesReachEachOtherBothFamilies(t *testing.T) {
	p := raise(t, []SiteSpec{{Name: "a", NAT: None, IPv6: true}, {Name: "b", NAT: None, IPv6: true}},
		HostSpec{"a1", "a"}, HostSpec{"a2", "a"}, HostSpec{"b1", "b"})
	for _, v6 := range []bool{false, true} {
		a1, a2, b1 := p.socket(t, "a1", v6, 1000), p.socket(t, "a2", v6, 1000), p.socket(t, "b1", v6, 1000)
		for _, pair := range [][2]*net.UDPConn{{a1, b1}, {b1, a1}, {a1, a2}} {
			if as := arrives(t, pair[0], local(pair[1]), pair[1]); as != local(pair[0]) {
				t.Errorf("from %s to %s: arrived as %s", local(pair[0]), local(pair[1]), as)
			}
		}
	}
}

func TestDropsHitOnlyTheirSenderAndProtocol(t *testing.T) {
	p := raise(t, []SiteSpec{{Name: "dc", NAT: None, IPv6: true}, {Name: "home", NAT: PortRestrictedCone}},
		HostSpec{"dc1", "dc"}, HostSpec{"dc2", "dc"}, HostSpec{"home1", "home"})
	dc1, dc2, home := p.socket(t, "dc1", false, 1000), p.socket(t, "dc2", false, 1000), p.socket(t, "home1", false, 1000)
	dc1v6, dc2v6 := p.socket(t, "dc1", true, 1000), p.socket(t, "dc2", true, 1000)
	expect := func(what string, a, b *net.UDPConn, want bool) {
		t.Helper()
		if want {
			arrives(t, a, local(b), b)
		} else if _, ok := passes(t, a, local(b), b); ok {
			t.Errorf("%s: arrived", what)
		}
	}
	set := func(host string, drops ...Drop) {
		t.Helper()
		if err := SetDrops(p.Lab, host, drops); err != nil {
			t.Fatal(err)
		}
	}
	tcp := func(want bool) {
		t.Helper()
		if ok := p.tcpReaches(t, "home1", "dc1"); ok != want {
			t.Errorf("TCP from home1 to dc1: %v, want %v", ok, want)
		}
	}
	expect("before", home, dc1, true)
	tcp(true)
	set("dc1", Drop{From: p.host(t, "home1").Number, Proto: syscall.IPPROTO_UDP})
	expect("udp from home1 dropped behind its NAT", home, dc1, false)
	expect("the other receiver", home, dc2, true)
	expect("another sender", dc2, dc1, true)
	tcp(true)
	set("dc1", Drop{From: p.host(t, "home1").Number}, Drop{From: p.host(t, "dc2").Number})
	tcp(false)
	expect("same site", dc2, dc1, false)
	expect("same site, IPv6", dc2v6, dc1v6, false)
	expect("the way back is another fault", dc1v6, dc2v6, true)
	set("dc1")
	expect("healed", home, dc1, true)
	expect("healed, IPv6", dc2v6, dc1v6, true)
}

// tcpReaches opens a TCP connection between two hosts, over IPv4.
func (p Plan) tcpReaches(t *testing.T, from, to string) bool {
	t.Helper()
	var l net.Listener
	if err := In(HostNS(p.Lab, to), func() (err error) {
		l, err = net.Listen("tcp4", netip.AddrPortFrom(p.host(t, to).Addr, 0).String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return In(HostNS(p.Lab, from), func() error {
		c, err := net.DialTimeout("tcp4", l.Addr().String(), time.Second)
		if err == nil {
			c.Close()
		}
		return err
	}) == nil
}

func TestDelayWorksOrSaysWhyNot(t *testing.T) {
	testenv.NeedRoot(t)
	p, err := NewPlan(fmt.Sprintf("t%dd", os.Getpid()), []SiteSpec{{Name: "a", NAT: None, Delay: 30 * time.Millisecond},
		{Name: "b", NAT: None}},
		[]HostSpec{{"a1", "a"}, {"b1", "b"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Teardown(context.Background(), p.Lab) })
	err = Build(t.Context(), p)
	if errors.Is(err, ErrNoNetem) {
		return // said plainly: that is what this kernel can do
	}
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if !p.tcpReaches(t, "a1", "b1") || time.Since(start) < 60*time.Millisecond {
		t.Errorf("a round trip took %v with 30ms each way", time.Since(start))
	}
}

// A lab that is built carries its first packet: the kernel brings links up some time after it was told to.
func TestBuiltMeansUp(t *testing.T) {
	p := raise(t, []SiteSpec{{Name: "a", NAT: None, IPv6: true}, {Name: "empty", NAT: FullCone}}, HostSpec{"a1", "a"},
		HostSpec{"a2", "a"})
	for ns, want := range map[string]int{HostNS(p.Lab, "a1"): 1, Router(p.Lab, "a"): 4, Core(p.Lab): 2} {
		up := 0
		if err := on(ns, func(h *netlink.Handle) error {
			links, err := h.LinkList()
			for _, l := range links {
				if l.Attrs().OperState == netlink.OperUp {
					up++
				}
			}
			return err
		}); err != nil || up != want {
			t.Errorf("%s: %d links up, want %d (%v)", ns, up, want, err)
		}
	}
}

func TestTeardownEndsWhatLivesInside(t *testing.T) {
	p := raise(t, []SiteSpec{{Name: "a", NAT: None}}, HostSpec{"a1", "a"})
	cmd := exec.Command("/bin/sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := In(HostNS(p.Lab, "a1"), cmd.Start); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	if pids, err := processesOf(p.Lab); err != nil || len(pids) != 1 || pids[0] != cmd.Process.Pid {
		t.Errorf("processes inside: %v, %v; want %d", pids, err, cmd.Process.Pid)
	}
	if err := Teardown(t.Context(), p.Lab); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil {
		t.Error("the process was not killed")
	}
	if err := Teardown(t.Context(), p.Lab); err != nil {
		t.Errorf("a second time: %v", err)
	}
	if err := Build(t.Context(), p); err != nil {
		t.Errorf("the name is not free again: %v", err)
	}
	if err := Build(t.Context(), p); err == nil {
		t.Error("a second lab of the same name was built")
	}
}

// processesOf lists the processes that live in any namespace of a lab.
func processesOf(lab string) ([]int, error) {
	list, err := Namespaces(lab)
	if err != nil {
		return nil, err
	}
	return processes(inodesOf(list))
}
