package egressclient

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/golden"
)

func addr(s string) netip.Addr            { return netip.MustParseAddr(s) }
func pfx(s string) netip.Prefix           { return netip.MustParsePrefix(s) }
func all(netip.Addr) bool                 { return true }
func none(netip.Addr) bool                { return false }
func steady(string) bool                  { return false }
func tun(s string) dataplane.ClientTunnel { return dataplane.ClientTunnel{Remote: addr(s)} }
func to(dst, remote string) dataplane.ClientRoute {
	return dataplane.ClientRoute{Destination: pfx(dst), Remote: addr(remote)}
}

// scene is the client pod of the seed: one egress for everything, another for a private network.
func scene() dataplane.ClientSpec {
	return dataplane.ClientSpec{
		Name: "default/web-0", Addr4: addr("10.20.30.40"), Uplink: "eth0", MTU: 1420,
		Tunnels: []dataplane.ClientTunnel{tun("10.68.12.49"), tun("10.68.124.145")},
		Routes:  []dataplane.ClientRoute{to("192.168.10.0/24", "10.68.12.49"), to("0.0.0.0/0", "10.68.124.145")},
		Inside:  []netip.Prefix{pfx("10.4.0.0/16"), pfx("10.20.0.0/16")},
	}
}

// dual is the scene with IPv6 as well.
func dual() dataplane.ClientSpec {
	s := scene()
	s.Addr6 = addr("fd10::40")
	s.Tunnels = append(s.Tunnels, tun("fd10::1:1"), tun("fd10::2:1"))
	s.Routes = append(s.Routes, to("fd55::/64", "fd10::1:1"), to("::/0", "fd10::2:1"))
	s.Inside = append(s.Inside, pfx("fd10::/48"))
	return s
}

// hostScene is a VM host that uses an egress.
func hostScene() dataplane.ClientSpec {
	return dataplane.ClientSpec{
		Name: "host a", Addr4: addr("10.4.0.1"), Addr6: addr("fd73::1"), Uplink: "skein0", MTU: 1420, Host: true,
		Tunnels: []dataplane.ClientTunnel{tun("10.68.0.1"), tun("fd10::1")},
		Routes:  []dataplane.ClientRoute{to("0.0.0.0/0", "10.68.0.1"), to("2001:db8::/32", "fd10::1")},
		Inside: []netip.Prefix{pfx("10.4.0.0/16"), pfx("10.68.0.0/16"), pfx("100.70.0.0/16"), pfx("fd10::/48"),
			pfx("fd73::/64")},
	}
}

func TestWant(t *testing.T) {
	hostAddrs := []netip.Addr{addr("198.51.100.7"), addr("2001:db8:1::7")}
	for _, c := range []struct {
		name  string
		spec  dataplane.ClientSpec
		own   []netip.Addr
		ready func(netip.Addr) bool
	}{
		{"seed", scene(), nil, all},
		{"dual", dual(), nil, all},
		{"not-ready", dual(), nil, none},
		{"nothing", dataplane.ClientSpec{Addr4: addr("10.20.30.40"), Uplink: "eth0"}, nil, all},
		{"host", hostScene(), hostAddrs, all},
		{"ipv6-only", func() dataplane.ClientSpec {
			s := dual()
			s.Addr4, s.Tunnels, s.Routes = netip.Addr{}, s.Tunnels[2:], s.Routes[2:]
			return s
		}(), nil, all},
		{"precedence", func() dataplane.ClientSpec { // same destination twice, a longer one inside it
			s := scene()
			s.Routes = append(s.Routes, to("0.0.0.0/0", "10.68.12.49"), to("203.0.113.0/24", "10.68.12.49"))
			return s
		}(), nil, all},
		{"inside", func() dataplane.ClientSpec { // a public pool, and an overlay in a private destination
			s := scene()
			s.Inside = append(s.Inside, pfx("100.64.0.0/16"), pfx("203.0.113.0/24"))
			s.Routes = append(s.Routes, to("10.0.0.0/8", "10.68.12.49"), to("10.4.7.0/24", "10.68.12.49"),
				to("203.0.113.0/24", "10.68.12.49"))
			return s
		}(), nil, all},
		// a route without its tunnel, one of the wrong family, one without an address
		{"no-tunnel", func() dataplane.ClientSpec {
			s := scene()
			s.Tunnels = append(s.Tunnels[:1], tun("fd10::1"))
			s.Routes = append(s.Routes, to("198.51.100.0/24", "fd10::1"), to("2001:db8::/32", "fd10::1"))
			return s
		}(), nil, all},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, notes := Want(c.spec, c.own, c.ready)
			for i := range notes {
				notes[i] = "note: " + notes[i]
			}
			golden.Lines(t, "want-"+c.name, append(s.Lines(), notes...))
		})
	}
}

// TestRules: the list for documents has exactly the rules that are written, in the same order.
func TestRules(t *testing.T) {
	var lines []string
	for _, r := range Rules() {
		if r.Why == "" {
			t.Errorf("%d has no reason", r.Priority)
		}
		lines = append(lines, fmt.Sprintf("%s %d: %s | %s%s", r.Family, r.Priority, r.Text,
			map[bool]string{true: "host: "}[r.Host], r.Why))
	}
	golden.Lines(t, "rules", lines)
	s, _ := Want(hostScene(), []netip.Addr{addr("198.51.100.7")}, all)
	for _, have := range s.Rules {
		known := slices.ContainsFunc(Rules(), func(r RuleInfo) bool {
			return r.Family == have.Family && r.Priority == have.Priority && strings.HasSuffix(r.Text,
				"lookup "+tableName(have.Table))
		})
		if !known || !ours(have.Priority, have.Table, dataplane.DefaultNumbers()) {
			t.Errorf("%s is written, and not in the list", have)
		}
	}
	for i := range dataplane.MaxInstance + 1 {
		n := dataplane.NumbersOf(i)
		for _, other := range [][2]int{{n.PodRule(), n.PodTable()}, {n.RulePriority, n.RouteTable},
			{n.EgressRule(), n.EgressTable()},
			{n.HopRule(), n.HopTable()}, {n.HopLastRule(), n.HopLastTable()}} {
			if ours(other[0], other[1], n) {
				t.Errorf("instance %d: rule %d to table %d is taken for one of these", i, other[0], other[1])
			}
		}
	}
}

func TestManyInsideNetworks(t *testing.T) {
	s := scene()
	for i := range 200 {
		s.Inside = append(s.Inside, netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64, byte(i), 0}), 24))
	}
	state, _ := Want(s, nil, all)
	n := 0
	for _, r := range state.Rules {
		if r.Priority >= insideRule && r.Priority < dataplane.ClientWideRule {
			n++
		}
	}
	if n != 200 {
		t.Errorf("%d of 200 networks have a rule before %d", n, dataplane.ClientWideRule)
	}
}

func lines(ops []Op) []string {
	var out []string
	for _, o := range ops {
		out = append(out, o.String())
	}
	return out
}

func TestDiff(t *testing.T) {
	want, _ := Want(scene(), nil, all)
	refused, _ := Want(scene(), nil, none)
	other := func(f func(s *State)) State {
		s := State{Rules: slices.Clone(want.Rules), Routes: slices.Clone(want.Routes)}
		f(&s)
		return s
	}
	for _, c := range []struct {
		name         string
		want, actual State
		shakes       func(string) bool
	}{
		{"first", want, State{}, steady},
		{"unchanged", want, want, steady},
		{"replaced", want, want, func(l string) bool { return l == "fou4_0a447c91" }},
		{"tunnel-stands", want, refused, steady},
		{"ends", State{}, want, steady},
		{"moved", want, other(func(s *State) { s.Routes[1].Link = "fou4_0a440c31" }), steady},
		{"rule-lost", want, other(func(s *State) { s.Rules = slices.Delete(s.Rules, 2, 4) }), steady},
		{"foreign-kinds", want, other(func(s *State) {
			s.Rules[1].Other, s.Routes[0].Other = "(not plain)", "type 6 blackhole"
		}), steady},
	} {
		t.Run(c.name, func(t *testing.T) {
			out := append([]string{"before:"}, lines(Before(c.want, c.actual, c.shakes))...)
			golden.Lines(t, "diff-"+c.name, append(append(out, "after:"), lines(After(c.want, c.actual))...))
		})
	}
}

func TestDevices(t *testing.T) {
	s := dual()
	s.Tunnels[1].SourcePortAuto = true
	s.Tunnels = append(s.Tunnels, s.Tunnels[0])
	var got []string
	d, notes := Devices(s, 1420)
	for _, t := range d.Tunnels {
		got = append(got, fmt.Sprint(dataplane.FoULink(t.Remote), " ", t.Local, " ", t.MTU, " ", t.SourcePortAuto))
	}
	if diff := cmp.Diff([]string{
		"fou4_0a440c31 10.20.30.40 1392 false", "fou4_0a447c91 10.20.30.40 1392 true",
		dataplane.FoULink(addr("fd10::1:1")) + " fd10::40 1372 false", dataplane.FoULink(addr("fd10::2:1")) +
			" fd10::40 1372 false",
	}, got); diff != "" || !d.Any || !d.IPv4 || !d.IPv6 || d.Gateway || len(notes) > 0 {
		t.Errorf("%+v\n%s", d, diff)
	}
	if d, notes := Devices(s, 1300); len(d.Tunnels) != 2 || d.IPv6 || len(notes) != 2 {
		t.Errorf("with an MTU too small for IPv6: %+v, %q", d, notes)
	}
	s.Addr6 = netip.Addr{}
	if d, _ := Devices(s, 1420); d.IPv6 || len(d.Tunnels) != 2 {
		t.Errorf("without an IPv6 address: %+v", d)
	}
	if d, _ := Devices(dataplane.ClientSpec{}, 1420); d.Any || d.IPv4 || d.IPv6 {
		t.Errorf("without tunnels: %+v", d)
	}
}

// With other numbers a host's rules and tables are the same but for the numbers, and no other instance's are taken
// for its own.
func TestHostsRulesMoveWithTheNumbers(t *testing.T) {
	first, _ := Want(hostScene(), []netip.Addr{addr("198.51.100.7")}, all)
	s, n, former := hostScene(), dataplane.NumbersOf(1), dataplane.DefaultNumbers()
	s.Numbers = n
	second, _ := Want(s, []netip.Addr{addr("198.51.100.7")}, all)
	if len(second.Rules) != len(first.Rules) || len(second.Routes) != len(first.Routes) {
		t.Fatalf("%d rules and %d routes, want %d and %d", len(second.Rules), len(second.Routes), len(first.Rules),
			len(first.Routes))
	}
	for i, r := range second.Rules {
		if r.Priority-n.FirstRule != first.Rules[i].Priority-former.FirstRule || !ours(r.Priority, r.Table, n) ||
			!n.OwnsRule(r.Priority, r.Table, unix.RT_TABLE_MAIN) {
			t.Errorf("%s instead of %s is not of these numbers", r, first.Rules[i])
		}
		if ours(r.Priority, r.Table, former) || r.Mask != 0 && r.Mask != n.MarkMask {
			t.Errorf("%s has something of the default numbers", r)
		}
	}
	for i, r := range second.Routes {
		if r.Table-n.FirstTable != first.Routes[i].Table-former.FirstTable {
			t.Errorf("%s is in table %d instead of %d", r, r.Table, first.Routes[i].Table)
		}
	}
}
