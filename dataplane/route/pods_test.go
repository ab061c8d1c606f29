package route

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/dataplane"
)

// pods are some blocks, of one address too, and the ways to pods on two links.
func pods(blocks ...string) (p dataplane.Pods) {
	for _, b := range blocks {
		p.Blocks = append(p.Blocks, netip.MustParsePrefix(b))
	}
	return p
}

func wayTo(addr, link string) dataplane.PodRoute {
	return dataplane.PodRoute{Addr: netip.MustParseAddr(addr), Link: link}
}

func withPods(p dataplane.Pods, h Host) State { s, _ := Want(link(), p, h); return s }

// read is a wanted state as it is read back: the link's number is known, and not which link a host route leads through.
func read(s State) State {
	s.Link.Index = 7
	s.Hosts = slices.Clone(s.Hosts)
	for i := range s.Hosts {
		s.Hosts[i].Link = ""
	}
	return s
}

func podCases() []diffCase {
	two := pods("10.64.0.0/27", "10.65.0.9/32", "fd64::/123")
	ways := two
	ways.Routes = []dataplane.PodRoute{wayTo("10.64.0.1", "sk1"), wayTo("10.64.0.2", "sk2"), wayTo("fd64::1", "sk1")}
	h := full
	h.HasForward4, h.HasForward6 = true, true
	older := h
	older.HasForward6 = false
	coil := func(s State) State {
		s.Rules = append(slices.Clone(s.Rules), Rule{Family: IPv4, Pods: true})
		s.Hosts = []dataplane.PodRoute{wayTo("10.64.0.20", "")}
		return s
	}
	robbed := read(withPods(ways, h))
	robbed.Hosts = robbed.Hosts[1:2]
	robbed.Ready = []dataplane.PodRoute{wayTo("10.64.0.1", "sk1")} // fd64::1 is not: its link has another address now
	others := func(mtu int, blocks ...string) dataplane.Pods {
		var p dataplane.Pods
		for _, b := range blocks {
			p.Remote = append(p.Remote, dataplane.Narrow{Prefix: netip.MustParsePrefix(b), MTU: mtu})
		}
		return p
	}
	elsewhere := others(0, "10.64.1.0/27", "10.65.1.9/32", "fd64::100/123")
	both := two
	both.Remote = elsewhere.Remote
	pooled := both
	pooled.Pools = []netip.Prefix{netip.MustParsePrefix("10.64.0.0/16"), netip.MustParsePrefix("10.65.0.9/32"),
		netip.MustParsePrefix("fd64::/112")}
	pooled.Elsewhere = []netip.Prefix{netip.MustParsePrefix("10.64.7.0/27"), netip.MustParsePrefix("fd64::e0/123")}
	only := dataplane.Pods{Pools: pooled.Pools}
	reserved := pooled // what was another host's block is reserved now, and what was reserved is nobody's
	reserved.Remote, reserved.Elsewhere = elsewhere.Remote[1:], []netip.Prefix{elsewhere.Remote[0].Prefix}
	given := pooled // a block of this host's becomes somebody else's in place
	given.Blocks, given.Elsewhere = two.Blocks[1:], append(slices.Clone(pooled.Elsewhere), two.Blocks[0])
	return []diffCase{
		{"pools-on-a-host-without-pods", withPods(only, h), there(h, nil), true},
		{"pools-where-blocks-were", withPods(pooled, h), read(withPods(both, h)), true},
		{"pools-with-the-first-blocks", withPods(pooled, h), there(h, nil), true},
		{"pools-no-link-yet", withPods(pooled, h), State{RPFilter: -1}, true},
		{"pools-unchanged", withPods(pooled, h), read(withPods(pooled, h)), true},
		{"pools-block-reserved", withPods(reserved, h), read(withPods(pooled, h)), true},
		{"pools-own-block-reserved", withPods(given, h), read(withPods(pooled, h)), true},
		{"pools-no-more", want(h), read(withPods(only, h)), true},
		{"pools-no-more-before-complete", want(h), read(withPods(pooled, h)), false},
		{"pools-beside-coil", withPods(pooled, h), coil(there(h, nil)), true},
		{"pools-without-ipv6", withPods(pooled, Host{HasRPFilter: true, HasForward4: true}),
			State{Link: Link{Name: "skein0", Index: 7, MTU: 1420, Up: true}}, true},
		{"pods-elsewhere", withPods(elsewhere, h), there(h, nil), true},
		{"pods-elsewhere-no-link-yet", withPods(elsewhere, h), State{RPFilter: -1}, true},
		{"pods-elsewhere-too", withPods(both, h), read(withPods(two, h)), true},
		{"pods-elsewhere-unchanged", withPods(both, h), read(withPods(both, h)), true},
		{"pods-elsewhere-narrower", withPods(others(1328, "10.64.1.0/27", "10.65.1.9/32", "fd64::100/123"), h),
			read(withPods(elsewhere, h)), true},
		{"pods-elsewhere-no-more", withPods(two, h), read(withPods(both, h)), true},
		{"pods-elsewhere-before-complete", want(h), read(withPods(elsewhere, h)), false},
		{"pods-first", withPods(two, h), there(h, nil), true},
		{"pods-first-older-kernel", withPods(two, older), there(older, nil), true},
		{"pods-no-link-yet", withPods(two, h), State{RPFilter: -1}, true},
		{"pods-unchanged", withPods(ways, h), read(withPods(ways, h)), true},
		{"pods-one-block-more", withPods(pods("10.64.0.0/27", "10.64.0.32/27", "10.65.0.9/32", "fd64::/123"), h),
			read(withPods(two, h)), true},
		{"pods-one-block-less", withPods(pods("10.64.0.0/27", "fd64::/123"), h), read(withPods(two, h)), true},
		{"pods-one-block-less-before-complete", withPods(pods("10.64.0.0/27"), h), read(withPods(two, h)), false},
		{"pods-none", want(h), read(withPods(two, h)), true},
		{"pods-none-but-one-lives", want(h), read(withPods(ways, h)), true},
		{"pods-without-ipv6", withPods(ways, Host{HasRPFilter: true, HasForward4: true}),
			State{Link: Link{Name: "skein0", Index: 7, MTU: 1420, Up: true}}, true},
		{"pods-routes-lost", withPods(ways, h), robbed, true},
		{"pods-none-and-known", want(h), func() State {
			s := there(h, nil)
			s.Rules = append(slices.Clone(s.Rules), Rule{Family: IPv4, Pods: true}, Rule{Family: IPv6, Pods: true})
			s.HadPods = true
			return s
		}(), true},
		{"passes-on", withPods(dataplane.Pods{Forward: true}, h), there(h, nil), true},
		{"passes-on-older-kernel", withPods(dataplane.Pods{Forward: true}, older), there(older, nil), true},
		{"pods-of-coil-only", want(h), coil(there(h, nil)), true},
		{"pods-beside-coil", withPods(two, h), coil(there(h, nil)), true},
		{"pods-none-beside-coil", want(h), coil(read(withPods(two, h))), true},
	}
}

// Whatever was there: afterwards all blocks are there and no others, no host route is gone, and there is nothing left
// to do.
func TestPodsSettle(t *testing.T) {
	h := full
	h.HasForward4 = true
	some := rapid.Custom(func(t *rapid.T) dataplane.Pods {
		var p dataplane.Pods
		for i := range 6 {
			if rapid.Bool().Draw(t, "block") {
				p.Blocks = append(p.Blocks, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 64, 0, byte(32 * i)}),
					rapid.SampledFrom([]int{27, 32}).Draw(t, "bits")))
			}
			if rapid.Bool().Draw(t, "pod") {
				p.Routes = append(p.Routes, wayTo(netip.AddrFrom4([4]byte{10, 64, 0, byte(32*i + 1)}).String(), "sk1"))
			}
			if rapid.Bool().Draw(t, "elsewhere") {
				p.Elsewhere = append(p.Elsewhere, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 64, 0, byte(32 * i)}),
					27))
			}
		}
		if rapid.Bool().Draw(t, "pool") {
			p.Pools = []netip.Prefix{netip.MustParsePrefix("10.64.0.0/24"), netip.MustParsePrefix("10.64.0.0/27")}
		}
		return p
	})
	rapid.Check(t, func(t *rapid.T) {
		actual := read(withPods(some.Draw(t, "before"), h))
		want := withPods(some.Draw(t, "after"), h)
		for _, m := range missing(want, actual) {
			if rapid.Bool().Draw(t, "link is there") {
				actual.Ready = append(actual.Ready, m)
			}
		}
		ops := Diff(want, actual, true)
		got := actual.Apply(ops)
		if d := cmp.Diff(want.Routes, got.Routes, equal); d != "" {
			t.Fatalf("routes, -want +got:\n%s", d)
		}
		for _, before := range actual.Hosts {
			if !hasHost(got.Hosts, before.Addr) {
				t.Fatalf("the way to %s is gone", before.Addr)
			}
		}
		if n := len(got.Hosts) - len(actual.Hosts); n != len(actual.Ready) {
			t.Fatalf("%d ways were put back, want %d", n, len(actual.Ready))
		}
		got.Ready = nil
		if again := Diff(want, got, true); len(again) > 0 {
			t.Fatalf("not settled after one round: %v", again)
		}
	})
}

// What leads to a pool's addresses, or passes them on, is there before all others of it are refused.
func TestAPoolIsRefusedLast(t *testing.T) {
	p := pods("10.64.0.0/27")
	p.Pools, p.Elsewhere = []netip.Prefix{netip.MustParsePrefix("10.64.0.0/16")},
		[]netip.Prefix{netip.MustParsePrefix("10.64.7.0/27")}
	p.Remote = []dataplane.Narrow{{Prefix: netip.MustParsePrefix("10.64.1.0/27")}}
	p.Routes = []dataplane.PodRoute{wayTo("10.64.0.1", "sk1")}
	actual := there(full, nil)
	actual.Ready = p.Routes
	ops := Diff(withPods(p, full), actual, true)
	if last := ops[len(ops)-1]; last.Route.Dst != p.Pools[0] || !last.Route.Unreachable {
		t.Errorf("the last is %s", last)
	}
	if before := ops[len(ops)-2]; !before.Route.Throw {
		t.Errorf("before it comes %s", before)
	}
}

// What refuses is there before the rule leads to it, and before the block is announced.
func TestBlockIsRefusedBeforeItIsAnnounced(t *testing.T) {
	h := full
	ops := Diff(withPods(pods("10.64.0.0/27", "fd64::/123"), h), there(h, nil), true)
	at := func(f func(Op) bool) int { return slices.IndexFunc(ops, f) }
	for _, f := range []Family{IPv4, IPv6} {
		refused := at(func(o Op) bool { return o.Route.Table == ToPods && o.Route.Family == f })
		announced := at(func(o Op) bool { return o.Route.Table == Exported && o.Route.Family == f })
		ruled := at(func(o Op) bool { return o.Rule.Pods && o.Rule.Family == f })
		if refused < 0 || refused > announced || refused > ruled {
			t.Errorf("%s: %v", f, ops)
		}
	}
}
