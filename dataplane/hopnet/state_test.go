package hopnet

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables/expr"
	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/dataplane"
)

var (
	pfx  = netip.MustParsePrefix
	addr = netip.MustParseAddr
	full = Host{IPv6: true, RPFilterAll: 1}
)

// spec is that of a leader: others' packets come from 10.4.0.2 for all, and what is for 10.4.8 goes by 10.4.0.3.
func spec() dataplane.Spec {
	return dataplane.Spec{
		Complete: true,
		Link: dataplane.Link{MTU: 1420, Addresses: []netip.Prefix{pfx("10.4.0.1/16"), pfx("fd00:5::1/64")},
			Narrow: []dataplane.Narrow{{Prefix: pfx("10.4.8.1/32"), MTU: 1300}, {Prefix: pfx("10.4.8.2/32"), MTU: 1400}}},
		Pods: dataplane.Pods{Forward: true},
		Hops: dataplane.Hops{
			Self: addr("10.4.0.1"),
			Routes: []dataplane.HopRoute{
				{Prefix: pfx("10.4.0.2/32"), Via: addr("10.4.0.2"), Last: true},
				{Prefix: pfx("10.4.8.1/32"), Via: addr("10.4.0.3")}, {Prefix: pfx("10.4.8.2/32"), Via: addr("10.4.0.3")},
				{Prefix: pfx("fd00:5::8/128"), Via: addr("10.4.0.3")},
			},
			Guards: []dataplane.HopGuard{
				{From: addr("10.4.0.2"), Sources: []netip.Prefix{pfx("10.4.0.2/32"), pfx("fd00:5::2/128")}},
				{From: addr("10.4.0.3"), Sources: []netip.Prefix{pfx("10.4.8.0/24"), pfx("10.4.8.7/32"), pfx("10.4.9.0/24")}},
			},
		},
	}
}

func texts(ops []Op) (out []string) {
	for _, o := range ops {
		out = append(out, o.String())
	}
	return out
}

// TestFromNothingAndBack: what is made, in which order, and that it is taken away the other way round.
func TestFromNothingAndBack(t *testing.T) {
	want, notes := Want(spec(), full)
	if len(notes) > 0 {
		t.Error(notes)
	}
	have := strings.Join(texts(Diff(want, State{RPFilter: -1}, true)), "\n")
	if text := strings.TrimSpace(`
set table inet skein_hop: 4 sources to 10.4.0.1
add link skeinhop0 local 10.4.0.1 mtu 1400
set rp_filter of skeinhop0 to 2
set ipv4 forwarding of skeinhop0
set ipv6 forwarding of skeinhop0
set link skeinhop0 up
add route 10.4.0.2/32 via 10.4.0.2 dev skeinhop0 table 121
add route 10.4.8.1/32 via 10.4.0.3 dev skeinhop0 table 120 src 10.4.0.1 mtu 1300
add route 10.4.8.2/32 via 10.4.0.3 dev skeinhop0 table 120 src 10.4.0.1
add route fd00:5::8/128 via 10.4.0.3 dev skeinhop0 table 120 src fd00:5::1
add rule ipv4 1998: not fwmark 0x20/0x60 lookup 120
add rule ipv4 1997: iif skeinhop0 lookup 121
add rule ipv6 1998: not fwmark 0x20/0x60 lookup 120
add rule ipv6 1997: iif skeinhop0 lookup 121`); have != text {
		t.Errorf("have\n%s\nwant\n%s", have, text)
	}
	if ops := Diff(want, want, true); len(ops) > 0 {
		t.Errorf("of itself it differs by %q", texts(ops))
	}
	none, _ := Want(dataplane.Spec{Complete: true}, full)
	ops := Diff(none, want, true)
	if n := len(ops); n != 10 || ops[0].Verb != DelRule || ops[n-2].Verb != DelLink || ops[n-1].Verb != DelGuards {
		t.Errorf("it is taken away by %q", texts(ops))
	}
	if ops := Diff(none, want, false); len(ops) > 0 {
		t.Errorf("before the Spec is complete it is taken away by %q", texts(ops))
	}
}

// TestOwnPacketsGoStraightWithinAWiderRoute: a node that this host passes packets on to is not sent its own by
// another one.
func TestOwnPacketsGoStraightWithinAWiderRoute(t *testing.T) {
	s := spec()
	s.Hops.Routes = []dataplane.HopRoute{
		{Prefix: pfx("10.4.8.0/24"), Via: addr("10.4.0.3")}, {Prefix: pfx("10.4.8.1/32"), Via: addr("10.4.8.1"), Last: true},
		{Prefix: pfx("10.4.9.1/32"), Via: addr("10.4.9.1"), Last: true},
		{Prefix: pfx("fd00:5::/64"), Via: addr("10.4.0.3")}, {Prefix: pfx("fd00:5::/80"), Via: addr("10.4.0.4")},
		{Prefix: pfx("fd00:5::8/128"), Via: addr("10.4.8.1"), Last: true},
	}
	want, _ := Want(s, full)
	var have []string
	for _, r := range want.Routes {
		if r.Plain {
			have = append(have, r.String())
		}
	}
	if text := "throw 10.4.8.1/32 table 120, throw fd00:5::8/128 table 120"; strings.Join(have, ", ") != text {
		t.Errorf("have %q, want %s", have, text)
	}
	other, _ := Want(dataplane.Spec{Link: s.Link, Hops: dataplane.Hops{Self: addr("10.4.0.7")}}, full)
	if left := Diff(other, want.Apply(Diff(other, want, true)), true); len(left) > 0 {
		t.Errorf("they are on no link, and with another one is left %q", texts(left))
	}
}

// TestWithoutIPv6 nothing is wanted of it.
func TestWithoutIPv6(t *testing.T) {
	want, _ := Want(spec(), Host{RPFilterAll: 0})
	for _, text := range texts(Diff(want, State{RPFilter: -1}, true)) {
		if strings.Contains(text, "ipv6") || strings.Contains(text, "fd00") {
			t.Error(text)
		}
	}
	if want.RPFilter != 0 {
		t.Errorf("rp_filter %d where the host has 0", want.RPFilter)
	}
}

// TestForwardingByFamily: IPv6 is not forwarded for pods that have IPv4 only, nor anything where nobody needs it.
func TestForwardingByFamily(t *testing.T) {
	for _, c := range []struct {
		pods      dataplane.Pods
		four, six bool
	}{
		{dataplane.Pods{}, false, false},
		{dataplane.Pods{Forward: true}, true, true},
		{dataplane.Pods{Blocks: []netip.Prefix{pfx("10.64.0.0/27")}}, true, false},
		{dataplane.Pods{Blocks: []netip.Prefix{pfx("10.64.0.0/27"), pfx("fd64::/123")}}, true, true},
		{dataplane.Pods{Routes: []dataplane.PodRoute{{Addr: addr("fd64::1"), Link: "sk1"}}}, true, true},
	} {
		s := spec()
		s.Pods = c.pods
		if w, _ := Want(s, full); w.Forward4 != c.four || w.Forward6 != c.six {
			t.Errorf("%+v: IPv4 %t, IPv6 %t", c.pods, w.Forward4, w.Forward6)
		}
	}
}

// TestAnotherAddressMakesTheLinkAnew, with all that goes with it.
func TestAnotherAddressMakesTheLinkAnew(t *testing.T) {
	s := spec()
	actual, _ := Want(s, full)
	s.Hops.Self = addr("10.4.0.9")
	want, _ := Want(s, full)
	verbs := map[Verb]int{}
	for _, o := range Diff(want, actual, true) {
		verbs[o.Verb]++
	}
	if verbs[DelLink] != 1 || verbs[AddLink] != 1 || verbs[SetGuards] != 1 || verbs[SetUp] != 1 ||
		verbs[AddRoute] != len(want.Routes) || verbs[DelRoute] != 0 {
		t.Errorf("%v", verbs)
	}
}

// TestGuardsGrowOnlyBeforeTheSpecIsComplete.
func TestGuardsGrowOnlyBeforeTheSpecIsComplete(t *testing.T) {
	s := spec()
	actual, _ := Want(s, full)
	s.Hops.Guards = []dataplane.HopGuard{{From: addr("10.4.0.4"), Sources: []netip.Prefix{pfx("10.4.7.0/24")}}}
	want, _ := Want(s, full)
	for _, prune := range []bool{false, true} {
		i := slices.IndexFunc(Diff(want, actual, prune), func(o Op) bool { return o.Verb == SetGuards })
		if n := len(Diff(want, actual, prune)[i].Guards.Sources); n != map[bool]int{false: 5, true: 1}[prune] {
			t.Errorf("complete %t: %d sources", prune, n)
		}
	}
}

// TestItSettles: from any state to any other in one round.
func TestItSettles(t *testing.T) {
	address := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 4, 0, byte(n)}) }
	some := func(t *rapid.T, name string) dataplane.Spec {
		s := spec()
		s.Hops = dataplane.Hops{}
		if !rapid.Bool().Draw(t, name+" has hops") {
			return s
		}
		s.Link.MTU = rapid.SampledFrom([]int{1420, 1380}).Draw(t, "mtu")
		s.Pods.Forward = rapid.Bool().Draw(t, "forward")
		s.Hops.Self = address(rapid.IntRange(1, 2).Draw(t, "self"))
		for i := range rapid.IntRange(0, 5).Draw(t, "routes") {
			s.Hops.Routes = append(s.Hops.Routes, dataplane.HopRoute{Prefix: netip.PrefixFrom(address(100+i), 32),
				Via: address(rapid.IntRange(10, 12).Draw(t, "via")), Last: rapid.Bool().Draw(t, "last")})
		}
		if rapid.Bool().Draw(t, "wide") { // around all of them
			s.Hops.Routes = append(s.Hops.Routes, dataplane.HopRoute{Prefix: pfx("10.4.0.0/24"), Via: address(13)})
		}
		for i := range rapid.IntRange(0, 3).Draw(t, "guards") {
			s.Hops.Guards = append(s.Hops.Guards, dataplane.HopGuard{From: address(10 + i),
				Sources: []netip.Prefix{netip.PrefixFrom(address(100), rapid.IntRange(24, 32).Draw(t, "bits"))}})
		}
		return s
	}
	rapid.Check(t, func(t *rapid.T) {
		before, _ := Want(some(t, "before"), full)
		want, _ := Want(some(t, "after"), full)
		if rapid.Bool().Draw(t, "robbed") {
			before.Rules, before.Up = nil, false
			before.Routes = before.Routes[:len(before.Routes)/2]
			if len(before.Routes) > 0 {
				before.Routes[0].Other = " (of another kind)"
			}
		}
		after := before.Apply(Diff(want, before, true))
		if left := Diff(want, after, true); len(left) > 0 {
			t.Fatalf("from %+v\nto %+v\nis left %q", before, want, texts(left))
		}
	})
}

// TestRefusedAndMalformedAreToldApart by the texts that are kept beside the rules.
func TestRefusedAndMalformedAreToldApart(t *testing.T) {
	refused, malformed := 0, 0
	for _, r := range guardRules(addr("10.4.0.1")) {
		if !slices.ContainsFunc(r.Exprs, func(e expr.Any) bool { _, ok := e.(*expr.Counter); return ok }) {
			continue
		}
		switch what(r.Text) {
		case "refused":
			refused++
		case "malformed":
			malformed++
		}
	}
	if refused != 2 || malformed != 4 {
		t.Errorf("%d rules refuse, %d drop what is malformed", refused, malformed)
	}
}
