package fou

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/dataplane"
)

var (
	local4, local6 = netip.MustParseAddr("10.64.0.2"), netip.MustParseAddr("fd01::2")
	gate4, gate6   = netip.MustParseAddr("10.65.0.1"), netip.MustParseAddr("fd02::1")
	next4          = netip.MustParseAddr("10.65.0.3")
)

func sample() Spec {
	return Spec{IPv4: true, IPv6: true, Any: true, Tunnels: []Tunnel{{Local: local4, Remote: gate4, MTU: 1392},
		{Local: local6, Remote: gate6, SourcePortAuto: true, MTU: 1372}}}
}

// there is what wanted has become in the kernel.
func there(s Spec, driver string) []device {
	out := wanted(s, driver, linkNames(s, driver, nil))
	for i := range out {
		out[i].Index = 10 + i
		if out[i].MTU == 0 {
			out[i].MTU = 1480
		}
	}
	return out
}

func describe(ops []op) string {
	var out []string
	for _, o := range ops {
		out = append(out, fmt.Sprintf("%s %s %s", o.action, o.Name, o.Kind))
	}
	return strings.Join(out, "\n")
}

func TestDiff(t *testing.T) {
	four, six := dataplane.FoULink(gate4), dataplane.FoULink(gate6)
	for name, c := range map[string]struct {
		driver string
		spec   func(*Spec)
		have   func([]device) []device
		want   string
	}{
		"nothing there": {Kernel, nil, func([]device) []device { return nil }, "add " + four +
			" ipip\nadd fou4_any ipip\nadd " + six + " ip6tnl\nadd fou6_any ip6tnl"},
		"nothing there, TUN": {Userspace, nil, func([]device) []device { return nil }, "add " + four +
			" tuntap\nadd fou4_any tuntap\nadd " + six + " tuntap\nadd fou6_any tuntap"},
		"gateway, TUN": {Userspace, func(s *Spec) { s.Gateway, s.Any = true, false },
			func([]device) []device { return nil }, "add " + dataplane.FoULink(local4) + " tuntap\nadd " +
				dataplane.FoULink(local6) + " tuntap"},
		"nothing changed":      {Kernel, nil, nil, ""},
		"nothing changed, TUN": {Userspace, nil, nil, ""},
		"no catch-all any more": {Kernel, func(s *Spec) { s.Any = false }, nil, "remove fou4_any ipip\nremove " +
			"fou6_any ip6tnl"},
		"one tunnel less": {Kernel, func(s *Spec) { s.Tunnels = s.Tunnels[1:] }, nil, "remove " + four + " ipip"},
		"another tunnel": {Kernel, func(s *Spec) { s.Tunnels[0].Remote = next4 }, nil, "remove " + four +
			" ipip\nadd " + dataplane.FoULink(next4) + " ipip"},
		"source port": {Kernel, func(s *Spec) { s.Tunnels[0].SourcePortAuto = true }, nil,
			"change " + four + " ipip"},
		"source port, TUN": {Userspace, func(s *Spec) { s.Tunnels[0].SourcePortAuto = true }, nil, ""},
		"local": {Kernel, func(s *Spec) { s.Tunnels[0].Local = next4 }, nil,
			"change " + four + " ipip"},
		"MTU": {Kernel, func(s *Spec) { s.Tunnels[1].MTU = 1280 }, nil, "set " + six +
			" ip6tnl\nset fou6_any ip6tnl"},
		"someone set a device down": {Userspace, nil, func(d []device) []device { d[0].Up = false; return d },
			"set " + four + " tuntap"},
		"someone took FoU away": {Kernel, nil, func(d []device) []device { d[0].FoU = false; return d },
			"change " + four + " ipip"},
		"from the TUN driver": {Kernel, nil, func([]device) []device { return there(sample(), Userspace)[:1] },
			"replace " + four + " ipip\nadd fou4_any ipip\nadd " + six + " ip6tnl\nadd fou6_any ip6tnl"},
		"a tunnel is a catch-all now": {Kernel, nil, func(d []device) []device { d[0].Any = true; return d },
			"replace " + four + " ipip"},
		"foreign devices": {Kernel, nil, func(d []device) []device {
			return append(d, device{Name: "tunl0", Kind: "ipip"}, device{Name: "fou40", Kind: "ipip"},
				device{Name: "eth0", Kind: "veth"})
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := sample()
			have := there(s, c.driver)
			if c.have != nil {
				have = c.have(have)
			}
			if c.spec != nil {
				c.spec(&s)
			}
			ops := diff(wanted(s, c.driver, linkNames(s, c.driver, have)), have)
			if got := describe(ops); got != c.want {
				t.Errorf("got\n%s\nwant\n%s", got, c.want)
			}
			for _, o := range ops {
				if (o.action == actionAdd) != (o.Index == 0) {
					t.Errorf("%s %s: index %d", o.action, o.Name, o.Index)
				}
			}
		})
	}
}

// A device becomes a link and is read back as it was.
func TestLinkAndBack(t *testing.T) {
	for _, d := range wanted(sample(), Kernel, linkNames(sample(), Kernel, nil)) {
		d.Index = 7
		l := d.link()
		if got := fromLink(l); got != d {
			t.Errorf("got %+v, want %+v", got, d)
		}
	}
}

func TestSpecCheck(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Spec)
		want   string
	}{
		"good":            {func(*Spec) {}, ""},
		"empty":           {func(s *Spec) { *s = Spec{} }, ""},
		"families differ": {func(s *Spec) { s.Tunnels[0].Local = local6 }, "one family"},
		"no local":        {func(s *Spec) { s.Tunnels[0].Local = netip.Addr{} }, "one family"},
		"IPv4 as IPv6":    {func(s *Spec) { s.Tunnels[1].Remote = netip.AddrFrom16(gate4.As16()) }, "one family"},
		"to itself":       {func(s *Spec) { s.Tunnels[0].Remote = local4 }, "not the same"},
		"to everybody":    {func(s *Spec) { s.Tunnels[0].Remote = netip.MustParseAddr("224.0.0.1") }, "one host"},
		"no family":       {func(s *Spec) { s.IPv6 = false }, "its address family is disabled here"},
		"twice":           {func(s *Spec) { s.Tunnels = append(s.Tunnels, s.Tunnels[0]) }, "twice"},
		"small for IPv6":  {func(s *Spec) { s.Tunnels[1].MTU = 1279 }, "1280"},
		"no MTU":          {func(s *Spec) { s.Tunnels[0].MTU = 0 }, "MTU of 0 bytes"},
		"large":           {func(s *Spec) { s.Tunnels[0].MTU = 65535 }, "MTU of 65535 bytes"},
	} {
		s := sample()
		c.change(&s)
		err := s.check()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestChanges(t *testing.T) {
	of := func(gateway bool, tunnels ...Tunnel) *table {
		out := &table{gateway: gateway, tunnels: map[tunnelEnds]way{}}
		for _, one := range tunnels {
			out.tunnels[tunnelEnds{one.Local, one.Remote}] = way{Tunnel: one}
		}
		return out
	}
	a, b := Tunnel{Local: local4, Remote: gate4, MTU: 1392}, Tunnel{Local: local4, Remote: next4, MTU: 1392}
	auto := a
	auto.SourcePortAuto = true
	for name, c := range map[string]struct {
		before, after *table
		want          int
	}{
		"same":                {of(true, a, b), of(true, b, a), 0},
		"gateway, one more":   {of(true, a), of(true, a, b), 1},
		"gateway, one less":   {of(true, a, b), of(true, b), 1},
		"client, one more":    {of(false, a), of(false, a, b), 0}, // its device counts
		"source port changes": {of(false, a, b), of(false, auto, b), 1},
	} {
		if got := changes(c.before, c.after); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

func TestFlowKeepsItsPort(t *testing.T) {
	seen := map[uint32]int{}
	for port := range 1000 {
		p := segment(4, uint16(1024+port), 1, 100, tcpAck)
		f := flow(p, 1)
		if f != flow(segment(4, uint16(1024+port), 999, 7, tcpAck|tcpPush), 1) {
			t.Fatal("two packets of a flow differ")
		}
		seen[f%autoPorts]++
	}
	for i, n := range slices.Sorted(func(yield func(int) bool) {
		for _, n := range seen {
			if !yield(n) {
				return
			}
		}
	}) {
		if n < 1000/autoPorts/2 {
			t.Errorf("port %d of %d has %d of 1000 flows", i, len(seen), n)
		}
	}
	if len(seen) != autoPorts {
		t.Errorf("%d ports of %d are used", len(seen), autoPorts)
	}
}

// Listeners that are not wanted any more go, if they are ours: also those of a process that ended while the port
// changed.
func TestListenersThatAreLeft(t *testing.T) {
	default4, former4, next4 := listener{0, 5555, 4}, listener{0, 6000, 4}, listener{0, 7000, 4}
	others := listener{1, 6000, 4} // IPv4 in IPv6
	have := []listener{default4, former4, next4, others, {0, 8000, 4}}
	for name, c := range map[string]struct {
		last  []listener
		ports dataplane.FoUPorts
		want  []listener
	}{
		"both are taken": {nil, dataplane.FoUPorts{Send: 7000, Also: 6000}, []listener{default4}},
		"the former one is over": {[]listener{former4, next4}, dataplane.FoUPorts{Send: 7000, Gone: 6000},
			[]listener{default4, former4}},
		"it was over before a start": {nil, dataplane.FoUPorts{Send: 7000, Gone: 6000}, []listener{default4, former4}},
		"the change is forgotten": {[]listener{former4, next4}, dataplane.FoUPorts{Send: 7000},
			[]listener{default4, former4}},
		"never changed": {nil, dataplane.FoUPorts{}, nil},
	} {
		want := ourListeners(Spec{IPv4: true, Ports: c.ports})
		if out := leftListeners(have, want, c.last, c.ports); !slices.Equal(out, c.want) {
			t.Errorf("%s: %+v, want %+v", name, out, c.want)
		}
	}
}

// The kernel's tunnels and listeners: UDP 5555 at both ends, TTL 225, and IPv4 (4) or IPv6 (41) inside; a source port
// of 0 lets the kernel take one by the flow.
func TestNumbersOfTheKernelsTunnels(t *testing.T) {
	seen := map[string]tunnel{}
	for _, d := range wanted(sample(), Kernel, linkNames(sample(), Kernel, nil)) {
		if !d.Any {
			seen[d.Kind] = d.tunnel
		}
	}
	four, six := seen[kindIPIP], seen[kindIP6Tnl]
	if len(seen) != 2 || four.SourcePort != 5555 || four.DestPort != 5555 || four.TTL != 225 ||
		four.Proto != 4 || !four.FoU {
		t.Errorf("ipip: %+v", four)
	}
	if six.SourcePort != 0 || six.DestPort != 5555 || six.TTL != 225 || six.Proto != 41 || !six.FoU {
		t.Errorf("ip6tnl with an automatic source port: %+v", six)
	}
	want := []listener{{family: 0, port: 5555, proto: 4}, {family: 1, port: 5555, proto: 41}}
	if have := ourListeners(sample()); !slices.Equal(have, want) {
		t.Errorf("listeners: %+v, want %+v", have, want)
	}
	next := sample()
	next.Ports = dataplane.FoUPorts{Send: 6000, Also: 5555}
	want = []listener{{0, 6000, 4}, {0, 5555, 4}, {1, 6000, 41}, {1, 5555, 41}}
	if have := ourListeners(next); !slices.Equal(have, want) {
		t.Errorf("listeners while the port changes: %+v, want %+v", have, want)
	}
	for _, d := range wanted(next, Kernel, linkNames(next, Kernel, nil)) {
		if !d.Any && (d.DestPort != 6000 || d.SourcePort != 6000 && d.SourcePort != 0) {
			t.Errorf("a tunnel by another port: %+v", d.tunnel)
		}
	}
}

// A client that has flows at two near ends of a gateway has two tunnels. None is interrupted when the other comes or
// goes: each keeps its device, which is all that a kernel's tunnel is.
func TestTunnelsOfOneClientKeepTheirDevices(t *testing.T) {
	spec := func(near ...netip.Addr) Spec {
		s := Spec{IPv4: true, Gateway: true}
		for _, a := range near {
			s.Tunnels = append(s.Tunnels, Tunnel{Local: a, Remote: next4, MTU: 1392})
		}
		return s
	}
	name := dataplane.FoULink(next4)
	have := there(spec(local4), Kernel)
	for _, c := range []struct {
		spec Spec
		want string
	}{
		{spec(gate4, local4), "add " + name + "00 ipip"},
		{spec(local4, gate4), ""},
		{spec(gate4), "remove " + name + " ipip"},
		{spec(gate4, local4), "add " + name + " ipip"},
		{spec(local4), "remove " + name + "00 ipip"},
		{spec(gate4), "change " + name + " ipip"},
	} {
		next := wanted(c.spec, Kernel, linkNames(c.spec, Kernel, have))
		if got := describe(diff(next, have)); got != c.want {
			t.Errorf("%+v: got\n%s\nwant\n%s", c.spec.Tunnels, got, c.want)
		}
		for i := range next {
			next[i].Index = 20 + i
		}
		have = next
	}
	shared := spec(local4, gate4)
	shared.Tunnels = append(shared.Tunnels, Tunnel{Local: local4, Remote: netip.MustParseAddr("10.64.0.99"), MTU: 1400})
	got := describe(diff(wanted(shared, Userspace, linkNames(shared, Userspace, nil)), nil))
	if want := "add " + dataplane.FoULink(local4) + " tuntap\nadd " + dataplane.FoULink(gate4) + " tuntap"; got != want {
		t.Errorf("TUN: got\n%s\nwant\n%s", got, want)
	}
}
