package egressclient

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/testns"
)

// twoSlots is a client of an egress with two slots: its own, and optionally one that flows still use.
func twoSlots(own int, flows ...int) dataplane.ClientSpec {
	ends := [][2]string{{"10.68.124.145", "fd10::2:1"}, {"10.68.12.49", "fd10::1:1"}}
	s := dataplane.ClientSpec{Name: "web/nginx", Addr4: addr("10.20.30.40"), Addr6: addr("fd10::40"),
		Uplink: "eth0", MTU: 1420}
	routes := func(slot int) []dataplane.ClientRoute {
		return []dataplane.ClientRoute{to("0.0.0.0/0", ends[slot][0]), to("192.168.10.0/24", ends[slot][0]),
			to("::/0", ends[slot][1])}
	}
	s.Routes = routes(own)
	for _, slot := range append([]int{own}, flows...) {
		for _, end := range ends[slot] {
			s.Tunnels = append(s.Tunnels, dataplane.ClientTunnel{Remote: addr(end), Slot: slot})
		}
	}
	for _, slot := range flows {
		s.Flows = append(s.Flows, dataplane.ClientFlows{Slot: slot, Routes: routes(slot)})
	}
	for _, pair := range ends {
		s.Ends = append(s.Ends, addr(pair[0]), addr(pair[1]))
	}
	return s
}

// gateways are the two slots' ends with a target behind them, each with its own device.
type gateways struct {
	t *testing.T
	*far
}

var targets = []string{"8.8.8.8:7100", "192.168.10.1:7100", "[2001:db8::8]:7100"}

func newGateways(t *testing.T, driver string) (*testns.NS, *gateways) {
	ns, f := tunnels(t, driver)
	g := &gateways{t, f}
	spec := fou.Spec{IPv4: true, IPv6: true, Any: true, Gateway: true}
	for _, tun := range twoSlots(0, 1).Tunnels {
		one := fou.Tunnel{Local: tun.Remote, Remote: addr("10.20.30.40"), MTU: 1392}
		if tun.Remote.Is6() {
			one.Remote, one.MTU = addr("fd10::40"), 1372
		}
		spec.Tunnels = append(spec.Tunnels, one)
	}
	if _, err := f.driver.Reconcile(spec); err != nil {
		t.Fatal(err)
	}
	g.answerBy(0)
	for _, at := range targets {
		var c *net.UDPConn
		f.ns.Must("listening", func() (err error) {
			c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at)))
			return err
		})
		t.Cleanup(func() { c.Close() })
		go func() {
			b := make([]byte, 100)
			for {
				n, from, err := c.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				c.WriteToUDPAddrPort(b[:n], from)
			}
		}()
	}
	return ns, g
}

// device is the device of a slot's tunnel of one family.
func (g *gateways) device(slot int, six bool) string {
	if six {
		return g.driver.Link(twoSlots(slot).Tunnels[1].Remote, addr("fd10::40"))
	}
	return g.driver.Link(twoSlots(slot).Tunnels[0].Remote, addr("10.20.30.40"))
}

// answerBy sends all answers through one slot's end.
func (g *gateways) answerBy(slot int) {
	g.t.Helper()
	ip(g.t, g.ns, "route replace 10.20.30.40 dev "+g.device(slot, false)+" table 118")
	_, _ = ipErr(g.ns, "-6 route del fd10::40 table 118")
	ip(g.t, g.ns, "-6 route add fd10::40 dev "+g.device(slot, true)+" table 118")
}

// received is the number of packets that a slot's end has received.
func (g *gateways) received(slot int, six bool) int {
	g.t.Helper()
	var n int
	g.ns.Must("reading counters", func() error {
		l, err := netlink.LinkByName(g.device(slot, six))
		if err == nil {
			n = int(l.Attrs().Statistics.RxPackets)
		}
		return err
	})
	return n
}

// flow is a UDP flow from the client to a target.
type flow struct {
	conn *net.UDPConn
	six  bool
	n    int
}

func begin(t *testing.T, ns *testns.NS, at string) *flow {
	t.Helper()
	f := &flow{six: netip.MustParseAddrPort(at).Addr().Is6()}
	ns.Must("a socket", func() (err error) {
		f.conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at)))
		return err
	})
	t.Cleanup(func() { f.conn.Close() })
	return f
}

// ask reports whether a packet is answered in time.
func (f *flow) ask(within time.Duration) bool {
	f.n++
	word := fmt.Sprint("word ", f.n)
	if _, err := f.conn.Write([]byte(word)); err != nil {
		return false
	}
	_ = f.conn.SetReadDeadline(time.Now().Add(within))
	b := make([]byte, 100)
	for {
		n, err := f.conn.Read(b)
		if err != nil || string(b[:n]) == word {
			return err == nil
		}
	}
}

// TestFlowsStayWithTheirSlot: after the client's slot has changed, flows continue by the slot by which they began,
// new flows take the new slot, and an answer is accepted only from the slot of its flow. When the former slot no
// longer exists, its flows use the client's slot. Everything is read back as it was written.
func TestFlowsStayWithTheirSlot(t *testing.T) {
	drivers := []string{fou.Userspace}
	if fou.TryKernel() == nil {
		drivers = append(drivers, fou.Kernel)
	}
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) { flowsStay(t, driver) })
	}
}

func flowsStay(t *testing.T, driver string) {
	ns, g := newGateways(t, driver)
	ns.Sysctl("net.ipv4.conf.all.rp_filter", "1")
	c, err := Open(Options{NetNS: path(ns), Driver: driver})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { c.Close() }()
	apply(t, c, twoSlots(0))
	// by sends a packet and returns the slot it arrived by; answered: whether it was.
	by := func(what string, f *flow, slot int, answered bool) {
		t.Helper()
		within := 5 * time.Second
		if !answered {
			within = 200 * time.Millisecond
		}
		before := []int{g.received(0, f.six), g.received(1, f.six)}
		if got := f.ask(within); got != answered {
			t.Errorf("%s: answered: %v, want %v\n%s", what, got, answered, ip(t, ns, "rule"))
		}
		if answered {
			for i := range before {
				if now := g.received(i, f.six); (now > before[i]) != (i == slot) {
					t.Errorf("%s: slot %d had %d packets and has %d, and it should have gone by slot %d", what, i,
						before[i], now, slot)
				}
			}
		}
	}
	var former, later []*flow
	for _, at := range targets {
		former = append(former, begin(t, ns, at))
		by("before, "+at, former[len(former)-1], 0, true)
	}
	slots := func(want ...int) {
		t.Helper()
		if got, err := c.Flows([]netip.Prefix{pfx("0.0.0.0/0"), pfx("::/0")}); err != nil || !slices.Equal(got, want) {
			t.Errorf("flows go by the slots %v (%v), want %v", got, err, want)
		}
	}
	slots(0)

	apply(t, c, twoSlots(1, 0))
	again := func(spec dataplane.ClientSpec) {
		t.Helper()
		if n := apply(t, c, spec); n != 0 {
			t.Errorf("nothing changed, and %d writes", n)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if c, err = Open(Options{NetNS: path(ns), Driver: driver}); err != nil {
			t.Fatal(err)
		}
		if diff, err := c.Diff(spec); err != nil || len(diff) > 0 {
			t.Errorf("as another process sees it: %q, %v", diff, err)
		}
		apply(t, c, spec)
	}
	again(twoSlots(1, 0))
	for i, at := range targets {
		by("a flow of slot 0, "+at, former[i], 0, true)
	}
	g.answerBy(1)
	for i, at := range targets {
		later = append(later, begin(t, ns, at))
		by("a flow of slot 1, "+at, later[i], 1, true)
		by("a flow of slot 0 that slot 1 answers, "+at, former[i], 0, false)
		if got, err := c.Flows([]netip.Prefix{netip.PrefixFrom(netip.MustParseAddrPort(at).Addr(), 24)}); err != nil ||
			!slices.Equal(got, []int{0, 1}) {
			t.Errorf("flows to %s go by the slots %v (%v)", at, got, err)
		}
	}
	g.answerBy(0)
	for i, at := range targets {
		by("a flow of slot 0 again, "+at, former[i], 0, true)
		by("a flow of slot 1 that slot 0 answers, "+at, later[i], 1, false)
	}

	apply(t, c, twoSlots(1))
	again(twoSlots(1))
	g.answerBy(1)
	for i, at := range targets {
		by("slot 0 is no more, "+at, former[i], 1, true)
		by("and slot 1 is, "+at, later[i], 1, true)
	}
	slots(1)
	for _, args := range []string{"rule", "-6 rule", "route show table all", "-6 route show table all"} {
		if got := ip(t, ns, args); strings.Contains(got, "fwmark") || strings.Contains(got, " 117") &&
			strings.Contains(got, "11700") || strings.Contains(got, "11800") {
			t.Errorf("flows of slot 0 have left, of ip %s:\n%s", args, got)
		}
	}
	if err := c.Remove(); err != nil {
		t.Error(err)
	}
}

// TestFlowsStayWhileSlotsChangePlaces: not a single packet of a flow uses another slot while its slot becomes the
// client's own, or stops being it.
func TestFlowsStayWhileSlotsChangePlaces(t *testing.T) {
	ns, g := newGateways(t, fou.Userspace)
	c, err := Open(Options{NetNS: path(ns), Driver: fou.Userspace})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { c.Close() }()
	apply(t, c, twoSlots(0))
	var flows []*flow
	for _, at := range targets {
		flows = append(flows, begin(t, ns, at))
		if !flows[len(flows)-1].ask(5 * time.Second) {
			t.Fatal("no answer from " + at)
		}
	}
	stop, sent := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		defer func() { sent <- n }()
		for {
			for _, f := range flows {
				select {
				case <-stop:
					return
				default:
					_, _ = f.conn.Write([]byte("on and on"))
					n++
				}
			}
		}
	}()
	for i := range 10 {
		for _, s := range []dataplane.ClientSpec{twoSlots(1, 0), twoSlots(0, 1)} {
			if i == 5 { // another process goes on
				c.Close()
				if c, err = Open(Options{NetNS: path(ns), Driver: fou.Userspace}); err != nil {
					t.Fatal(err)
				}
			}
			apply(t, c, s)
		}
	}
	close(stop)
	n := <-sent
	for i, f := range flows { // of its first answers some may find no room behind those to all these packets
		eventually(t, "an answer from "+targets[i], func() bool { return f.ask(200 * time.Millisecond) })
	}
	if four, six := g.received(1, false), g.received(1, true); four+six > 0 || n < 1000 {
		t.Errorf("of %d packets of slot 0, %d and %d came by slot 1", n, four, six)
	}
}

// TestFlowsAreSpread: if an egress spreads flows, each new flow takes a random slot and keeps it, in both families
// and also for private destinations.
func TestFlowsAreSpread(t *testing.T) {
	ns, g := newGateways(t, fou.Userspace)
	c, err := Open(Options{NetNS: path(ns), Driver: fou.Userspace})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s := twoSlots(0, 1)
	for i := range s.Tunnels {
		if s.Tunnels[i].Slot == 0 {
			s.Tunnels[i].Spread = []int{0, 1}
		}
	}
	apply(t, c, s)
	if diff, err := c.Diff(s); err != nil || len(diff) > 0 {
		t.Errorf("as another process sees it: %q, %v", diff, err)
	}
	const many = 20 // all by one slot: once in 2^19 runs
	for _, at := range targets {
		took := [2]int{}
		for range many {
			f := begin(t, ns, at)
			slot := -1
			for round := range 3 {
				before := [2]int{g.received(0, f.six), g.received(1, f.six)}
				if _, err := f.conn.Write([]byte("x")); err != nil {
					t.Fatal(err)
				}
				now := -1
				eventually(t, "a packet comes", func() bool {
					for i := range before {
						if g.received(i, f.six) > before[i] {
							now = i
						}
					}
					return now >= 0
				})
				if slot >= 0 && now != slot {
					t.Fatalf("%s: packet %d of a flow of slot %d came by slot %d", at, round, slot, now)
				}
				slot = now
			}
			took[slot]++
		}
		if took[0] == 0 || took[1] == 0 {
			t.Errorf("%s: flows by slot: %v", at, took)
		}
	}
}
