package route

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/golden"
)

var (
	full  = Host{IPv6: true, IPv6OnLink: true, HasRPFilter: true}
	equal = cmp.Options{cmpopts.EquateComparable(netip.Prefix{}), cmpopts.EquateEmpty(),
		cmpopts.SortSlices(func(a, b Rule) bool { return a.String() < b.String() }),
		cmpopts.SortSlices(func(a, b Route) bool { return a.String() < b.String() })}
)

func link() dataplane.Link {
	return dataplane.Link{Name: "skein0", MTU: 1420, Addresses: []netip.Prefix{netip.MustParsePrefix("10.4.0.1/16"),
		netip.MustParsePrefix("fd00::1/64")}}
}

func want(h Host) State { s, _ := Want(link(), dataplane.Pods{}, h); return s }

// there is the wanted state, read back, with something done to it.
func there(h Host, f func(*State)) State {
	s := want(h)
	s.Link.Index = 7
	if f != nil {
		f(&s)
	}
	return s
}

type diffCase struct {
	name         string
	want, actual State
	prune        bool
}

func TestDiff(t *testing.T) {
	strict := Host{IPv6: true, IPv6OnLink: true, HasRPFilter: true, RPFilterAll: 1}
	cases := []diffCase{
		{"fresh", want(full), State{Link: Link{Name: "skein0", Index: 7, MTU: 1500}}, true},
		{"unchanged", want(full), there(full, nil), true},
		{"no-link-yet", want(full), State{RPFilter: -1}, true},
		{"strict-rp-filter", want(strict), there(full, nil), true},
		{"ipv6-disabled", want(Host{IPv6: true, HasRPFilter: true}),
			State{Link: Link{Name: "skein0", Index: 7, MTU: 1500}}, true},
		{"kernel-without-ipv6", want(Host{HasRPFilter: true}), State{Link: Link{Name: "skein0", Index: 7, MTU: 1500}}, true},
		{"link-down", want(full), there(full, func(s *State) {
			s.Link.Up = false
			s.Routes = slices.DeleteFunc(s.Routes, func(r Route) bool { return !r.Unreachable })
		}), true},
		{"renumbered", want(full), there(full, func(s *State) {
			s.Addresses[0] = netip.MustParsePrefix("10.4.0.9/16")
		}), true},
		{"renumbered-before-complete", want(full), there(full, func(s *State) {
			s.Addresses[0] = netip.MustParsePrefix("10.4.0.9/16")
		}), false},
		{"strangers-before-complete", want(full), there(full, func(s *State) {
			s.Rules = append(s.Rules, Rule{Family: IPv4, Mark: 7, Mask: 7})
			s.Routes = append(s.Routes, Route{Table: ToTunnel, Family: IPv6, Other: "default via 2001:db8::1"})
		}), false},
		{"rule-twice", want(full), there(full, func(s *State) { s.Rules = append(s.Rules, s.Rules[0]) }), true},
		{"rule-and-route-damaged", want(full), there(full, func(s *State) {
			s.Rules[0].Mask = 0xff
			s.Routes[0] = Route{Table: ToTunnel, Family: IPv4, Other: "default via 192.0.2.1"}
		}), true},
	}
	narrow := func(mtu int, ss ...string) State {
		l := link()
		for _, s := range ss {
			l.Narrow = append(l.Narrow, dataplane.Narrow{Prefix: netip.MustParsePrefix(s), MTU: mtu})
		}
		w, _ := Want(l, dataplane.Pods{}, full)
		return w
	}
	has := func(s State) State { s.Link.Index = 7; return s }
	around := link() // a leader within the route to its site
	for p, mtu := range map[string]int{"10.4.1.0/24": 1400, "10.4.1.0/32": 1420, "fd00:0:0:0:1::/80": 1400,
		"fd00:0:0:0:1::7/128": 1420} {
		around.Narrow = append(around.Narrow, dataplane.Narrow{Prefix: netip.MustParsePrefix(p), MTU: mtu})
	}
	led, _ := Want(around, dataplane.Pods{}, full)
	slices.SortFunc(led.Routes, func(a, b Route) int { return strings.Compare(a.String(), b.String()) })
	for name, c := range map[string][2]State{
		"narrow":         {narrow(1328, "10.4.0.7/32", "fd00::7/128"), there(full, nil)},
		"narrower":       {narrow(1280, "10.4.0.7/32", "fd00::7/128"), has(narrow(1328, "10.4.0.7/32", "fd00::7/128"))},
		"narrow-no-more": {want(full), has(narrow(1328, "10.4.0.7/32", "fd00::7/128"))},
		"wide-within":    {led, there(full, nil)},
		"wide-enough":    {narrow(1420, "10.4.0.7/32"), there(full, nil)},
	} {
		cases = append(cases, diffCase{name, c[0], c[1], true})
	}
	cases = append(cases, podCases()...)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			ops := Diff(c.want, c.actual, c.prune)
			var lines []string
			for _, o := range ops {
				lines = append(lines, o.String())
			}
			golden.Lines(t, c.name, lines)
			if again := Diff(c.want, c.actual.Apply(ops), c.prune); len(again) > 0 {
				t.Errorf("not settled after one round: %v", again)
			}
		})
	}
}

func TestApplyingTheDiffGivesWhatIsWanted(t *testing.T) {
	gen := rapid.Custom(func(t *rapid.T) State {
		h := Host{IPv6: rapid.Bool().Draw(t, "v6"), HasRPFilter: true, RPFilterAll: rapid.IntRange(0, 2).Draw(t, "rp")}
		h.IPv6OnLink = h.IPv6 && rapid.Bool().Draw(t, "v6 on link")
		l := link()
		l.MTU = rapid.IntRange(1280, 1290).Draw(t, "mtu")
		l.Addresses = l.Addresses[:rapid.IntRange(0, 2).Draw(t, "addresses")]
		s, _ := Want(l, dataplane.Pods{}, h)
		s.Link.Index = 7
		if rapid.Bool().Draw(t, "damaged") {
			s.Link.Up = false
			s.Rules = append(s.Rules[1:], Rule{Family: IPv4, Mark: rapid.Uint32().Draw(t, "mark")})
			s.Routes = append(s.Routes[1:], Route{Table: ToTunnel, Family: IPv6, Other: "x"})
		}
		return s
	})
	rapid.Check(t, func(t *rapid.T) {
		a := gen.Draw(t, "actual")
		h := Host{IPv6: true, IPv6OnLink: rapid.Bool().Draw(t, "v6 on link"), HasRPFilter: true}
		b := want(h)
		b.Link.Index = 7
		if d := cmp.Diff(b, a.Apply(Diff(b, a, true)), equal); d != "" {
			t.Fatalf("-want +got:\n%s", d)
		}
	})
}

// What refuses stray packets is there before anything that sends packets here.
func TestFallbackComesFirst(t *testing.T) {
	ops := Diff(want(full), State{Link: Link{Index: 7}}, true)
	rule := slices.IndexFunc(ops, func(o Op) bool { return o.Verb == AddRule })
	for i, o := range ops {
		if o.Verb == AddRoute && o.Route.Unreachable && i > rule {
			t.Errorf("%s comes after the first rule", o)
		}
	}
}

func TestHostWithoutIPv6IsNoted(t *testing.T) {
	for _, h := range []Host{{}, {IPv6: true}} {
		s, notes := Want(link(), dataplane.Pods{}, h)
		if len(notes) != 1 || len(s.Addresses) != 1 {
			t.Errorf("%+v: notes %q, addresses %v", h, notes, s.Addresses)
		}
	}
}
