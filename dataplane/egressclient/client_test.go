package egressclient

import (
	"context"
	"errors"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/dataplane/reconcile"
	"github.com/skeinmesh/skein/internal/testns"
)

// pairs replaces a driver in tests of rules and routes: its tunnels are veth pairs with the right names. Like the
// kernel's driver, it recreates a tunnel when the source port changes.
type pairs struct {
	ns     *testns.NS
	far    *testns.NS // where their other ends are
	during func()     // while tunnels are made
	fail   error
	have   map[string]fou.Tunnel
}

func (d *pairs) Name() string                     { return "userspace" }
func (d *pairs) Link(_, remote netip.Addr) string { return dataplane.FoULink(remote) }
func (d *pairs) Stats() (fou.Stats, error)        { return fou.Stats{}, nil }
func (d *pairs) Close() error                     { return nil }

func (d *pairs) Reconcile(s fou.Spec) (writes int, err error) {
	if d.fail != nil {
		return 0, d.fail
	}
	want := map[string]fou.Tunnel{}
	for _, t := range s.Tunnels {
		want[d.Link(t.Local, t.Remote)] = t
	}
	d.ns.Do(func() {
		links, lerr := netlink.LinkList()
		there := map[string]bool{}
		for _, l := range links {
			name := l.Attrs().Name
			if !strings.HasPrefix(name, "fou") {
				continue
			}
			if t, ok := want[name]; ok && (d.have[name] == t || d.have == nil) {
				there[name] = true
				continue
			}
			writes++
			err = errors.Join(err, netlink.LinkDel(l))
		}
		if d.during != nil {
			d.during()
		}
		err = errors.Join(err, lerr)
		for name, t := range want {
			if !there[name] {
				writes++
				err = errors.Join(err, addLink(d.far, name, t.MTU))
			}
			if l, lerr := netlink.LinkByName(name); lerr == nil {
				err = errors.Join(err, netlink.LinkSetUp(l))
			}
		}
	})
	d.have = want
	return writes, err
}

// addLink makes a veth pair in the calling thread's namespace, with its other end elsewhere.
func addLink(far *testns.NS, name string, mtu int) error {
	a := netlink.NewLinkAttrs()
	a.Name, a.MTU = name, mtu
	err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: a, PeerName: name, PeerNamespace: netlink.NsFd(far.Handle)})
	far.Do(func() {
		if l, lerr := netlink.LinkByName(name); lerr == nil {
			err = errors.Join(err, netlink.LinkSetUp(l))
		}
	})
	return err
}

func path(ns *testns.NS) string { return "/run/netns/" + ns.Name }

// pod is a namespace like those of package podnet: addresses without a network, a default route through the host's
// end.
func pod(t testing.TB) *testns.NS {
	t.Helper()
	ns, up := testns.New(t, "ec"), testns.New(t, "eh")
	testns.Link(up, ns, "eth0", nil, []netip.Prefix{pfx("10.20.30.40/32"), pfx("fd10::40/128")})
	ip(t, ns, "route add 169.254.1.1 dev eth0")
	ip(t, ns, "route add default via 169.254.1.1 dev eth0 onlink")
	ip(t, ns, "-6 route add default via fe80::1 dev eth0")
	return ns
}

// ip runs the ip command inside.
func ip(t testing.TB, ns *testns.NS, args string) string {
	t.Helper()
	out, err := ipErr(ns, args)
	if err != nil {
		t.Fatalf("ip %s: %v: %s", args, err, out)
	}
	return out
}

func ipErr(ns *testns.NS, args string) (string, error) {
	out, err := exec.Command("ip", append([]string{"-n", ns.Name}, strings.Fields(args)...)...).CombinedOutput()
	var lines []string
	for _, l := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		lines = append(lines, strings.Join(strings.Fields(l), " "))
	}
	return strings.Join(lines, "\n"), err
}

// client opens a Client whose tunnels are veth pairs.
func client(t testing.TB, ns *testns.NS) (*Client, *pairs) {
	t.Helper()
	d := &pairs{ns: ns, far: testns.New(t, "ef")}
	c, err := open(Options{NetNS: path(ns)}, func(string) (fou.Driver, error) { return d, nil })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, d
}

func apply(t testing.TB, c *Client, s dataplane.ClientSpec) int {
	t.Helper()
	n, notes, err := c.Apply(s)
	if err != nil || len(notes) > 0 {
		t.Fatalf("applying %s: %v, notes %q", s.Name, err, notes)
	}
	return n
}

// seedRules and seedTables are the seed's output for its client (with DESIGN.md's order of the private networks),
// plus what today's ip adds: the protocol of a rule.
const seedRules = `0: from all lookup local
1800: from all to 169.254.0.0/16 lookup main proto 30
1900: from all lookup 117 proto 30
2000: from all to 192.168.0.0/16 lookup main proto 30
2001: from all to 172.16.0.0/12 lookup main proto 30
2002: from all to 10.0.0.0/8 lookup main proto 30
2100: from all lookup 118 proto 30
32766: from all lookup main
32767: from all lookup default`

func TestSeedsScene(t *testing.T) {
	ns := pod(t)
	c, _ := client(t, ns)
	apply(t, c, scene())
	for args, want := range map[string]string{
		"rule":                    seedRules,
		"route show table 117":    "192.168.10.0/24 dev fou4_0a440c31 proto 30",
		"route show table 118":    "default dev fou4_0a447c91 proto 30",
		"-6 rule":                 "0: from all lookup local\n32766: from all lookup main",
		"-6 route show table 118": "",
	} {
		if got, _ := ipErr(ns, args); got != want && !(want == "" && strings.Contains(got, "does not exist")) {
			t.Errorf("ip %s\n%s", args, cmp.Diff(want, got))
		}
	}
	for dst, want := range map[string]string{
		"8.8.8.8": "dev fou4_0a447c91 table 118", "192.168.10.9": "dev fou4_0a440c31 table 117", "192.168.11.9": "dev eth0",
		"10.68.124.145": "dev eth0", "10.68.12.49": "dev eth0", "172.20.1.1": "dev eth0", "169.254.1.1": "dev eth0",
	} {
		if got := ip(t, ns, "route get "+dst); !strings.Contains(got, want) {
			t.Errorf("the way to %s: %s; want %s", dst, got, want)
		}
	}
}

func TestDualStack(t *testing.T) {
	ns := pod(t)
	c, _ := client(t, ns)
	apply(t, c, dual())
	want := `0: from all lookup local
1800: from all to fe80::/10 lookup main proto 30
1900: from all lookup 117 proto 30
2000: from all to fc00::/7 lookup main proto 30
2100: from all lookup 118 proto 30
32766: from all lookup main`
	if got := ip(t, ns, "-6 rule"); got != want {
		t.Error(cmp.Diff(want, got))
	}
	for dst, want := range map[string]string{
		"2001:db8::1": "dev " + dataplane.FoULink(addr("fd10::2:1")), "fd55::7": "dev " +
			dataplane.FoULink(addr("fd10::1:1")),
		"fd10::2:1": "dev eth0", "fd99::1": "dev eth0",
	} {
		if got := ip(t, ns, "-6 route get "+dst); !strings.Contains(got, want) {
			t.Errorf("the way to %s: %s; want %s", dst, got, want)
		}
	}
	s := dual() // IPv4 ends, IPv6 stays
	s.Routes, s.Tunnels = s.Routes[2:], s.Tunnels[2:]
	apply(t, c, s)
	if got := ip(t, ns, "rule"); strings.Contains(got, "118") || strings.Contains(ip(t, ns, "-6 rule"),
		"main proto 30") == false {
		t.Errorf("after IPv4 ended:\n%s", got)
	}
}

func TestUnchangedAndAdopted(t *testing.T) {
	ns := pod(t)
	c, _ := client(t, ns)
	if n := apply(t, c, dual()); n == 0 {
		t.Error("the first time nothing was written")
	}
	if n := apply(t, c, dual()); n != 0 {
		t.Errorf("%d writes although nothing changed", n)
	}
	c.Close()
	c, _ = client(t, ns) // as after a restart
	if n := apply(t, c, dual()); n != 0 {
		t.Errorf("%d writes by the next process", n)
	}
	if d, err := c.Diff(dual()); err != nil || len(d) > 0 {
		t.Errorf("differs: %q, %v", d, err)
	}
	if _, _, err := c.Apply(dataplane.ClientSpec{Name: "x", Uplink: "eth7", Routes: scene().Routes}); err == nil ||
		!strings.Contains(err.Error(), "eth7") {
		t.Errorf("a spec without an uplink: %v", err)
	}
	if got, _ := ipErr(ns, "route get 8.8.8.8"); !strings.Contains(got, "unreachable") && !strings.Contains(got, "fou4_") {
		t.Errorf("without an uplink packets leave: %s", got)
	}
}

// TestNothingLeaksMeanwhile checks a packet's route while devices are made, recreated, and cannot be made.
func TestNothingLeaksMeanwhile(t *testing.T) {
	ns := pod(t)
	c, d := client(t, ns)
	looked := 0
	closed := func() {
		looked++
		for _, dst := range []string{"8.8.8.8", "192.168.10.1"} {
			if got, err := ipErr(ns, "route get "+dst); err == nil && strings.Contains(got, "eth0") {
				t.Errorf("%s leaves by %s", dst, got)
			}
		}
		if got, err := ipErr(ns, "route get 10.9.9.9"); err != nil || !strings.Contains(got, "eth0") {
			t.Errorf("a private destination: %s", got)
		}
	}
	d.during = closed
	apply(t, c, scene())
	s := scene()
	s.Tunnels[0].SourcePortAuto, s.Tunnels[1].SourcePortAuto = true, true
	d.have = map[string]fou.Tunnel{}                                  // every device is made anew
	ns.Do(func() { _, _ = netlink.LinkByName("fou4_0a440c31") })      // they are there until then
	for _, name := range []string{"fou4_0a440c31", "fou4_0a447c91"} { // and are seen to shake
		ip(t, ns, "link set "+name+" down")
	}
	apply(t, c, s)
	if looked != 2 {
		t.Errorf("looked %d times", looked)
	}
	for _, name := range []string{"fou4_0a440c31", "fou4_0a447c91"} {
		ip(t, ns, "link del "+name)
	}
	d.fail = errors.New("no device for you")
	if _, _, err := c.Apply(s); !errors.Is(err, d.fail) {
		t.Errorf("a driver that fails: %v", err)
	}
	closed()
	d.fail = nil
	apply(t, c, s)
	if got := ip(t, ns, "route show table 118"); got != "default dev fou4_0a447c91 proto 30" {
		t.Errorf("in the end: %s", got)
	}
}

// TestSelfRepair removes one object after the other, in two ways each, while Watch runs.
func TestSelfRepair(t *testing.T) {
	ns := pod(t)
	c, _ := client(t, ns)
	apply(t, c, dual())
	before := picture(t, ns)
	repaired := keep(t, c, dual()).repairs
	remote6 := dataplane.FoULink(addr("fd10::2:1"))
	for _, wreck := range []string{
		"rule del pref 1800", "rule del pref 1900", "rule del pref 2000", "rule del pref 2001", "rule del pref 2002",
		"rule del pref 2100", "-6 rule del pref 1800",
		"-6 rule del pref 2100", "route del default table 118", "route flush table 117", "-6 route flush table 118",
		"route replace default dev eth0 table 118 proto 30", "link del fou4_0a447c91", "link set fou4_0a440c31 down",
		"link del " + remote6,
		"rule add pref 1950 lookup 118 protocol 30", "route add 203.0.113.0/24 dev eth0 table 118 proto 30",
		"rule flush",
	} {
		ip(t, ns, wreck)
		if wreck == "rule flush" { // took the system's own along
			ip(t, ns, "rule add pref 32766 lookup main")
			ip(t, ns, "rule add pref 32767 lookup default")
		}
		began := time.Now()
		eventually(t, "ip "+wreck+" is repaired", func() bool {
			return picture(t, ns) == before
		})
		var last time.Time
		for last.IsZero() || len(repaired) > 0 {
			m := <-repaired
			if last = m.at; m.Err != nil {
				t.Error(m.Err)
			}
		}
		if took := last.Sub(began); took > time.Second {
			t.Errorf("ip %s: repaired after %s", wreck, took)
		}
	}
}

// kept is a namespace that is kept in the state of the latest spec.
type kept struct {
	t       testing.TB
	c       *Client
	repairs chan repair // each look that wrote or failed
	stop    func()

	runner *reconcile.Runner
	target *reconcile.Target
	spec   dataplane.ClientSpec // of the runner's goroutine
}

// repair is the result of one reconciliation, and its time.
type repair struct {
	reconcile.Outcome
	at time.Time
}

// keep maintains a namespace until the test ends or stop is called.
func keep(t testing.TB, c *Client, s dataplane.ClientSpec) *kept {
	k := &kept{t: t, c: c, repairs: make(chan repair, 1000), spec: s}
	k.target = &reconcile.Target{Name: s.Name, Reconcile: func(context.Context, reconcile.Cause) (r reconcile.Result) {
		r.Writes, _, r.Err = c.Apply(k.spec)
		return r
	}}
	k.runner = reconcile.New(reconcile.Options{Told: func(_ *reconcile.Target, o reconcile.Outcome) {
		if o.Writes > 0 || o.Err != nil {
			k.repairs <- repair{o, time.Now()}
		}
	}}, k.target)
	if err := c.Watch(func() { k.runner.Mark(reconcile.Changed, k.target) }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); k.runner.Run(ctx) }()
	k.stop = func() { cancel(); <-done }
	t.Cleanup(k.stop)
	return k
}

// apply sets another spec, and returns the number of writes.
func (k *kept) apply(s dataplane.ClientSpec) (writes int) {
	k.t.Helper()
	s.Tunnels, s.Routes = slices.Clone(s.Tunnels), slices.Clone(s.Routes) // a test goes on changing them
	if err := k.runner.Do(k.t.Context(), func() {
		k.spec = s
		r := k.runner.Now(k.target, reconcile.Wanted)
		if writes = r.Writes; r.Err != nil {
			k.t.Error(r.Err)
		}
	}); err != nil {
		k.t.Fatal(err)
	}
	return writes
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: it did not come true", what)
		}
	}
}

// picture is the visible state of rules, tables and links.
func picture(t testing.TB, ns *testns.NS) string {
	t.Helper()
	var out []string
	for _, args := range []string{"rule", "-6 rule", "route show table 117", "route show table 118",
		"-6 route show table 117", "-6 route show table 118", "route", "-6 route show table main"} {
		got, err := ipErr(ns, args)
		if err != nil { // there is no such table yet
			got = ""
		}
		out = append(out, args+":")
		for _, l := range strings.Split(got, "\n") {
			if !strings.HasPrefix(l, "fe80::/64 ") { // the kernel's own, in the order in which links came
				out = append(out, l)
			}
		}
	}
	ns.Do(func() {
		links, _ := netlink.LinkList()
		slices.SortFunc(links, func(a, b netlink.Link) int { return strings.Compare(a.Attrs().Name, b.Attrs().Name) })
		for _, l := range links {
			out = append(out, l.Attrs().Name, l.Attrs().Flags.String())
		}
	})
	return strings.Join(out, "\n")
}

// TestOthersStay: other programs' rules and routes, also in this package's tables, outlive it; none of its own do.
func TestOthersStay(t *testing.T) {
	ns := pod(t)
	for _, args := range []string{
		"rule add pref 1900 to 203.0.113.0/24 lookup 117", "rule add pref 2050 lookup 50",
		"rule add pref 2000 lookup 116 protocol 30",
		"route add 203.0.113.0/24 dev eth0 table 117", "route add 198.51.100.0/24 dev eth0 table 118 proto 12",
		"-6 route add 2001:db8:5::/48 dev eth0 table 118",
	} {
		ip(t, ns, args)
	}
	before := picture(t, ns)
	c, _ := client(t, ns)
	apply(t, c, dual())
	if n := apply(t, c, dual()); n != 0 {
		t.Errorf("%d writes beside others' rules", n)
	}
	apply(t, c, dataplane.ClientSpec{Name: "no egress left", Addr4: addr("10.20.30.40"), Uplink: "eth0"})
	if d := cmp.Diff(before, picture(t, ns)); d != "" {
		t.Errorf("after the last egress:\n%s", d)
	}
	apply(t, c, dual())
	if err := c.Remove(); err != nil {
		t.Error(err)
	}
	if d := cmp.Diff(before, picture(t, ns)); d != "" {
		t.Errorf("after Remove:\n%s", d)
	}
	if err := c.Remove(); err != nil {
		t.Errorf("the second time: %v", err)
	}
	ip(t, ns, "route add default dev eth0 table 118 proto 12")
	if _, _, err := c.Apply(scene()); err == nil || !strings.Contains(err.Error(), "another program has added a route") {
		t.Errorf("somebody else's default route: %v", err)
	}
	if got := ip(t, ns, "route show table 118"); !strings.Contains(got, "default dev eth0 proto 12") &&
		!strings.Contains(got, "default dev eth0 proto bird") {
		t.Errorf("it was taken away: %s", got)
	}
}

// TestHost: on a host, the routing of the mesh, of pods, of answers to outside connections and of forwarded packets
// stays unchanged.
func TestHost(t *testing.T) {
	ns, out := testns.New(t, "ec"), testns.New(t, "eo")
	testns.Link(ns, out, "eth0", []netip.Prefix{pfx("198.51.100.7/24"), pfx("192.168.9.7/24")}, nil)
	for _, name := range []string{"skein0", "sk0123456789ab"} {
		ns.Must("link "+name, func() error { return addLink(out, name, 1420) })
	}
	ns.Address("skein0", pfx("10.4.0.1/16"), pfx("fd73::1/64"))
	ns.Address("sk0123456789ab", pfx("169.254.1.1/32"))
	for _, args := range []string{
		"route add default via 198.51.100.1", "rule add pref 2000 lookup 116 protocol 30",
		"rule add pref 32500 fwmark 0x40/0x60 lookup 180 protocol 30",
		"route add 192.168.77.5 dev sk0123456789ab table 116 proto 30",
		"route add 10.68.0.0/24 dev skein0 table 116 proto 30", "route add default dev skein0 table 180 proto 30",
	} {
		ip(t, ns, args)
	}
	ns.Sysctl("net.ipv4.ip_forward", "1")
	c, _ := client(t, ns)
	s := hostScene()
	s.Routes, s.Tunnels = s.Routes[:1], s.Tunnels[:1]
	apply(t, c, s)
	for _, w := range []struct{ way, want string }{
		{"8.8.8.8", "dev fou4_0a440001 table 118 src 10.4.0.1"},
		{"8.8.8.8 from 198.51.100.7", "via 198.51.100.1"},
		{"8.8.8.8 from 192.168.9.7", "via 198.51.100.1"},
		{"8.8.8.8 mark 0x20", "via 198.51.100.1"},
		{"8.8.8.8 mark 0x40", "dev skein0 table 180"},
		{"192.168.77.5", "dev sk0123456789ab table 116"},
		{"10.68.0.1", "dev skein0 table 116"},
		{"10.4.0.9", "dev skein0"},
		{"192.168.9.1", "dev eth0"},
		{"8.8.8.8 from 192.168.77.5 iif sk0123456789ab", "via 198.51.100.1"}, // a pod's, passed on
	} {
		if got, err := ipErr(ns, "route get "+w.way); err != nil || !strings.Contains(got, w.want) {
			t.Errorf("the way to %s: %s; want %s", w.way, got, w.want)
		}
	}
	keep(t, c, s)
	ip(t, ns, "addr add 198.51.100.8/24 dev eth0")
	eventually(t, "a new address of the host is let out", func() bool {
		got, _ := ipErr(ns, "rule")
		return strings.Contains(got, "1798: from 198.51.100.8 iif lo lookup main")
	})
	ip(t, ns, "addr del 198.51.100.8/24 dev eth0")
	eventually(t, "an old one is forgotten", func() bool {
		got, _ := ipErr(ns, "rule")
		return !strings.Contains(got, "198.51.100.8")
	})
}

func TestUplinkMTU(t *testing.T) {
	ns := pod(t)
	c, d := client(t, ns)
	s := scene()
	s.MTU = 0
	ip(t, ns, "link set eth0 mtu 1400")
	apply(t, c, s)
	for _, tunnel := range d.have {
		if tunnel.MTU != 1400-dataplane.FoUOverhead4 {
			t.Errorf("MTU %d", tunnel.MTU)
		}
	}
}

func TestClosed(t *testing.T) {
	ns := pod(t)
	c, _ := client(t, ns)
	if err := c.Watch(func() {}); err != nil {
		t.Error(err)
	}
	if err := errors.Join(c.Close(), c.Close()); err != nil {
		t.Error(err)
	}
	if _, _, err := c.Apply(scene()); !errors.Is(err, ErrClosed) {
		t.Errorf("Apply: %v", err)
	}
	if _, err := Open(Options{NetNS: "/run/netns/there-is-none"}); err == nil {
		t.Error("a namespace that is not there was opened")
	}
}
