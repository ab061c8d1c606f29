package fabric

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func (p Plan) must(t *testing.T, q Plan, err error) Plan {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// A router that forgets gives every host another port, keeps its kind, and lets the old port's peers in no more.
func TestRouterForgets(t *testing.T) {
	for _, kind := range []NAT{FullCone, PortRestrictedCone, Symmetric, SymmetricSequential, Double} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			p := raise(t, []SiteSpec{{Name: "x", NAT: None}, {Name: "y", NAT: None}, {Name: "site", NAT: kind}},
				HostSpec{"x1", "x"}, HostSpec{"y1", "y"}, HostSpec{"h1", "site"}, HostSpec{"h2", "site"})
			s, h := p.servers(t), p.socket(t, "h1", false, 51820)
			before := s.mappings(t, h)
			q, err := p.Forgotten("site")
			q = p.must(t, q, err)
			if err := Retranslate(q, "site", true); err != nil {
				t.Fatal(err)
			}
			if _, ok := passes(t, s.a1, before[0], h); ok {
				t.Error("an old mapping still lets its peer in")
			}
			after := s.mappings(t, h)
			for i := range after {
				if after[i] == before[i] {
					t.Errorf("the mapping is %s again", after[i])
				}
			}
			if got := mapping(h, after); got != want[kind].Mapping {
				t.Errorf("its mapping is %s now, want %s", got, want[kind].Mapping)
			}
		})
	}
}

// A router that becomes of another kind behaves like that kind, and back.
func TestRouterChangesItsKind(t *testing.T) {
	p := raise(t, []SiteSpec{{Name: "x", NAT: None, IPv6: true}, {Name: "y", NAT: None, IPv6: true},
		{Name: "site", NAT: FullCone, IPv6: true}},
		HostSpec{"x1", "x"}, HostSpec{"y1", "y"}, HostSpec{"h1", "site"}, HostSpec{"h2", "site"})
	s, h := p.servers(t), p.socket(t, "h1", false, 51820)
	x6, h6 := p.socket(t, "x1", true, 1000), p.socket(t, "h1", true, 1000)
	for _, kind := range []NAT{Symmetric, PortRestrictedCone, UDPBlocked, FullCone} {
		q, err := p.WithNAT("site", kind)
		p = p.must(t, q, err)
		if err := Retranslate(p, "site", kind != UDPBlocked); err != nil {
			t.Fatal(err)
		}
		if _, ok := passes(t, x6, local(h6), h6); ok != (kind == FullCone) {
			t.Errorf("%s: a stranger comes in over IPv6: %v", kind, ok)
		}
		if kind == UDPBlocked {
			if _, ok := passes(t, s.a1, local(h), h); ok {
				t.Error("UDP still passes")
			}
			continue
		}
		if got := mapping(h, s.mappings(t, h)); got != want[kind].Mapping {
			t.Errorf("%s: mapping %s, want %s", kind, got, want[kind].Mapping)
		}
	}
	for _, kind := range []NAT{None, OneToOne, Double} {
		if _, err := p.WithNAT("site", kind); err == nil {
			t.Errorf("the router became %s, which numbers hosts differently", kind)
		}
	}
}

// A host that moves is reached at its new place in both families, behind a NAT and in the open, and no more at the old
// one. lanMAC is what hosts of a site send to when they send through their router.
func (p Plan) lanMAC(t *testing.T, site string) string {
	t.Helper()
	var mac string
	if err := on(Router(p.Lab, site), func(h *netlink.Handle) error {
		l, err := h.LinkByName(lanLink)
		if err == nil {
			mac = l.Attrs().HardwareAddr.String()
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return mac
}

func TestHostMoves(t *testing.T) {
	p := raise(t, []SiteSpec{{Name: "x", NAT: None, IPv6: true}, {Name: "home", NAT: FullCone, IPv6: true},
		{Name: "cafe", NAT: RestrictedCone}},
		HostSpec{"x1", "x"}, HostSpec{"h1", "home"}, HostSpec{"h2", "home"}, HostSpec{"c1", "cafe"})
	x, x6 := p.socket(t, "x1", false, 3478), p.socket(t, "x1", true, 3478)
	home := p.host(t, "h1")
	mac := p.lanMAC(t, "home")
	for _, site := range []string{"cafe", "x", "home", "home"} {
		q, err := p.Moved("h1", site)
		q = p.must(t, q, err)
		before, after := p.host(t, "h1"), q.host(t, "h1")
		if before.Addr == after.Addr {
			t.Fatalf("to %s: its address is %s as before", site, after.Addr)
		}
		if err := Move(p, q, "h1"); err != nil {
			t.Fatal(err)
		}
		p = q
		if now := p.lanMAC(t, "home"); now != mac {
			t.Errorf("the router of home has changed its MAC address from %s to %s", mac, now)
		}
		h := p.socket(t, "h1", false, 51820)
		if as := arrives(t, h, local(x), x); as.Addr() != after.Public {
			t.Errorf("in %s it is seen as %s, want %s", site, as, after.Public)
		} else {
			arrives(t, x, as, h)
		}
		h.Close()
		if _, has6 := p.Site(site); after.Addr6.IsValid() != (site != "cafe") || !has6 {
			t.Errorf("in %s it has the IPv6 address %s", site, after.Addr6)
		}
		if after.Addr6.IsValid() {
			h6 := p.socket(t, "h1", true, 51820)
			if as := arrives(t, h6, local(x6), x6); as.Addr() != after.Addr6 {
				t.Errorf("in %s it is seen as %s over IPv6", site, as)
			}
			h6.Close()
		}
		if before.Addr6.IsValid() {
			err := In(HostNS(p.Lab, "h1"), func() error {
				c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(before.Addr6, 0)))
				if err == nil {
					c.Close()
				}
				return err
			})
			if err == nil {
				t.Errorf("it still has %s", before.Addr6)
			}
		}
	}
	if p.host(t, "h1").Addr == home.Addr {
		t.Error("a second move to the same place gave the same address")
	}
	// Those who stayed are as they were.
	arrives(t, p.socket(t, "h2", false, 51820), local(x), x)
	arrives(t, p.socket(t, "c1", false, 51820), local(x), x)
}

func TestDropsByLengthAndByChance(t *testing.T) {
	p := raise(t, []SiteSpec{{Name: "a", NAT: None, IPv6: true}, {Name: "b", NAT: None, IPv6: true}}, HostSpec{"a1", "a"},
		HostSpec{"b1", "b"}, HostSpec{"a2", "a"})
	number := p.host(t, "a1").Number
	set := func(drops ...Drop) {
		t.Helper()
		if err := SetDrops(p.Lab, "b1", drops); err != nil {
			t.Fatal(err)
		}
	}
	if err := Segment(p.Lab, "a1", true); err != nil {
		t.Fatal(err)
	}
	for _, v6 := range []bool{false, true} {
		l := line{a: p.socket(t, "a1", v6, 1000), b: p.socket(t, "b1", v6, 1000), fence: p.socket(t, "a2", v6, 1000)}
		overhead := 28
		if v6 {
			overhead = 48
		}
		set(Drop{From: number, Above: 1000 + overhead})
		for size, arrive := range map[int]int{1000: 1, 1001: 0} {
			if n := l.carries(t, 1, size); n != arrive {
				t.Errorf("IPv6 %v: %d of a datagram of %d bytes arrived, want %d", v6, n, size, arrive)
			}
		}
		// Datagrams that the kernel is asked to cut out of one buffer count one by one.
		l.segment(t, 500)
		if n := l.carries(t, 1, 10*500); n != 10 {
			t.Errorf("IPv6 %v: %d of 10 small datagrams of one buffer arrived", v6, n)
		}
		l.segment(t, 0)
		set(Drop{From: number, Percent: 30})
		got := 0
		for range 10 { // a socket does not hold a thousand
			got += l.carries(t, 100, 10)
		}
		if got < 550 || got > 850 { // ten standard deviations to each side
			t.Errorf("IPv6 %v: %d of 1000 arrived with 30 percent lost", v6, got)
		}
		set()
	}
}

// line is a way from a to b; what fence sends to b is never dropped.
type line struct{ a, b, fence *net.UDPConn }

// carries sends datagrams and tells how many arrive.
func (l line) carries(t *testing.T, count, size int) (n int) {
	t.Helper()
	for range count {
		if _, err := l.a.WriteToUDPAddrPort(make([]byte, size), local(l.b)); err != nil {
			t.Fatal(err)
		}
	}
	stop, fenced := send(t, l.fence, local(l.b)), false
	l.b.SetReadDeadline(time.Now().Add(arrival))
	for buf := make([]byte, 2000); ; {
		k, err := l.b.Read(buf)
		switch {
		case err != nil && !fenced:
			t.Fatal(err)
		case err != nil:
			return n
		case string(buf[:k]) == stop: // on two processors it may have overtaken the last ones
			fenced = true
			l.b.SetReadDeadline(time.Now().Add(silence / 10))
		default:
			n++
		}
	}
}

// segment makes a's socket cut what it is given into datagrams of so many bytes; 0: not.
func (l line) segment(t *testing.T, size int) {
	t.Helper()
	rc, err := l.a.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := rc.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, size)
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
}
