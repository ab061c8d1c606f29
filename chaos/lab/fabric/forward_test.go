package fabric

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestForwardDrops: a, m and b are on one LAN, and what a and b send to each other goes by m. Each fault hits what it
// is meant for and nothing else, and what is for m itself always arrives.
func TestForwardDrops(t *testing.T) {
	p := raise(t, []SiteSpec{{Name: "s", NAT: None, IPv6: true}},
		HostSpec{"a", "s"}, HostSpec{"m", "s"}, HostSpec{"b", "s"}, HostSpec{"x", "s"})
	byMiddle(t, p)
	links := []string{HostLink}
	set := func(drops ...ForwardDrop) {
		t.Helper()
		if err := SetForwardDrops(p.Lab, "m", links, drops); err != nil {
			t.Fatal(err)
		}
	}
	for _, v6 := range []bool{false, true} {
		a, b := p.socket(t, "a", v6, 1000), p.socket(t, "b", v6, 1000)
		m, fence := p.socket(t, "m", v6, 1000), p.socket(t, "x", v6, 1000)
		there, back := line{a: a, b: b, fence: fence}, line{a: b, b: a, fence: fence}
		expect := func(what string, l line, size, want int) {
			t.Helper()
			if n := l.carries(t, 1, size); n != want {
				t.Errorf("IPv6 %v, %s: %d arrived, want %d", v6, what, n, want)
			}
			if n := (line{a: l.a, b: m, fence: fence}).carries(t, 1, size); n != 1 {
				t.Errorf("IPv6 %v, %s: what is for the host that forwards does not arrive", v6, what)
			}
		}
		if err := TrackForwarded(p.Lab, "m"); err != nil {
			t.Fatal(err)
		}
		expect("nothing dropped, there", there, 10, 1)
		expect("nothing dropped, back", back, 10, 1)

		set(ForwardDrop{New: true})
		expect("a flow that was there before", there, 10, 1)
		fresh := p.socket(t, "a", v6, 1001)
		expect("a new flow", line{a: fresh, b: b, fence: fence}, 10, 0)

		overhead := 28
		if v6 {
			overhead = 48
		}
		set(ForwardDrop{Above: 1000 + overhead})
		expect("at the length", there, 1000, 1)
		expect("above the length", there, 1001, 0)

		set(ForwardDrop{To: []netip.Addr{local(b).Addr()}})
		expect("the direction that is dropped", there, 10, 0)
		expect("the other direction", back, 10, 1)

		set()
		expect("nothing dropped any more", line{a: fresh, b: b, fence: fence}, 1200, 1)
	}
	links = []string{"skein0", "skeinhop0"}
	set(ForwardDrop{Above: 1})
	a, b := p.socket(t, "a", false, 2000), p.socket(t, "b", false, 2000)
	if n := (line{a: a, b: b, fence: p.socket(t, "x", false, 2000)}).carries(t, 1, 100); n != 1 {
		t.Error("what is passed on between other links is dropped")
	}
}

// byMiddle makes a and b send to each other by m, which forwards.
func byMiddle(t *testing.T, p Plan) {
	t.Helper()
	via := func(from, to string) {
		m, dst := p.host(t, "m"), p.host(t, to)
		if err := on(HostNS(p.Lab, from), func(h *netlink.Handle) error {
			if err := routeAdd(h, HostLink, netip.PrefixFrom(dst.Addr, 32), m.Addr); err != nil {
				return err
			}
			return routeAdd(h, HostLink, netip.PrefixFrom(dst.Addr6, 128), m.Addr6)
		}); err != nil {
			t.Fatal(err)
		}
	}
	via("a", "b")
	via("b", "a")
	for _, host := range []string{"a", "m", "b"} {
		for key, value := range map[string]string{
			"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1",
			"net/ipv4/conf/all/send_redirects": "0", "net/ipv4/conf/" + HostLink + "/send_redirects": "0",
			"net/ipv6/conf/all/accept_redirects": "0", "net/ipv6/conf/" + HostLink + "/accept_redirects": "0",
		} {
			if err := In(HostNS(p.Lab, host), func() error { return sysctl(key, value) }); err != nil {
				t.Fatal(err)
			}
		}
	}
}
