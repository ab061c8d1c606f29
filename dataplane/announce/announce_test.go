package announce_test

import (
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane/announce"
	"github.com/skeinmesh/skein/dataplane/testgw"
	"github.com/skeinmesh/skein/internal/testns"
)

const limit = 10 * time.Second

var (
	four, six = netip.MustParseAddr("192.0.2.99"), netip.MustParseAddr("2001:db8:2::99")
	both      = map[netip.Addr]string{four: "lan", six: "lan"}
	addrs     = []netip.Addr{four, six}
)

// host is a host on the LAN with an announcer.
type host struct {
	*testns.NS
	a         *announce.Announcer
	valid     atomic.Bool
	conflicts atomic.Int64
}

func prefixes(number string) []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("192.0.2." + number + "/24"),
		netip.MustParsePrefix("2001:db8:2::" + number + "/64")}
}

func newHost(t *testing.T, lan *testgw.LAN, number string) *host {
	t.Helper()
	h := &host{NS: testns.New(t, "ho")}
	h.valid.Store(true)
	lan.Attach(h.NS, prefixes(number))
	var err error
	h.a, err = announce.New(announce.Options{
		NetNS: testgw.Path(h.NS), Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Valid:    func(netip.Addr) bool { return h.valid.Load() },
		Conflict: func(netip.Addr, string, net.HardwareAddr) { h.conflicts.Add(1) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.a.Close() })
	return h
}

func newNeighbour(t *testing.T, lan *testgw.LAN) *testns.NS {
	n := testns.New(t, "ne")
	lan.Attach(n, prefixes("10"))
	n.Sysctl("net.ipv4.neigh.lan.retrans_time_ms", "100") // it gives up after three
	n.Sysctl("net.ipv6.neigh.lan.retrans_time_ms", "100")
	return n
}

func (h *host) mac(t *testing.T) (m string) {
	t.Helper()
	h.Must("link", func() error {
		l, err := netlink.LinkByName("lan")
		if err == nil {
			m = l.Attrs().HardwareAddr.String()
		}
		return err
	})
	return m
}

// knows is the MAC that a neighbour has for an address; "" for none.
func knows(t *testing.T, n *testns.NS, addr netip.Addr) (m string) {
	t.Helper()
	n.Must("neighbours", func() error {
		l, err := netlink.LinkByName("lan")
		if err != nil {
			return err
		}
		family := netlink.FAMILY_V4
		if addr.Is6() {
			family = netlink.FAMILY_V6
		}
		all, err := netlink.NeighList(l.Attrs().Index, family)
		for _, e := range all {
			if e.IP.Equal(addr.AsSlice()) && e.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE) == 0 {
				m = e.HardwareAddr.String()
			}
		}
		return err
	})
	return m
}

func forget(t *testing.T, n *testns.NS, addr netip.Addr) {
	t.Helper()
	n.Do(func() {
		if l, err := netlink.LinkByName("lan"); err == nil {
			_ = netlink.NeighDel(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: addr.AsSlice()})
		}
	})
}

// send makes the neighbour resolve an address.
func send(t *testing.T, n *testns.NS, addr netip.Addr) {
	t.Helper()
	n.Must("sending", func() error {
		c, err := net.Dial("udp", netip.AddrPortFrom(addr, 9).String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, _ = c.Write([]byte("x")) // fails while the neighbour is failed
		return nil
	})
}

func until(t *testing.T, what string, ok func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > limit {
			t.Fatalf("%s: not within %v", what, limit)
		}
		time.Sleep(time.Millisecond)
	}
	return time.Since(start)
}

func resolves(t *testing.T, n *testns.NS, h *host) {
	t.Helper()
	for _, a := range addrs {
		forget(t, n, a)
		last := time.Time{}
		until(t, a.String()+" resolves", func() bool {
			if time.Since(last) > 100*time.Millisecond {
				send(t, n, a)
				last = time.Now()
			}
			return knows(t, n, a) == h.mac(t)
		})
	}
}

func TestNeighbourResolvesAndFollows(t *testing.T) {
	lan := testgw.NewLAN(t)
	one, two, n := newHost(t, lan, "1"), newHost(t, lan, "2"), newNeighbour(t, lan)
	one.a.Set(both)
	resolves(t, n, one)
	one.valid.Store(false)
	start := time.Now()
	two.a.Set(both)
	for _, a := range addrs {
		until(t, a.String()+" follows", func() bool { return knows(t, n, a) == two.mac(t) })
	}
	t.Logf("the neighbour's stale entries are new after %v", time.Since(start).Round(100*time.Microsecond))
	resolves(t, n, two)
	one.valid.Store(true) // both claim it now: reported
	one.a.Set(nil)
	one.a.Set(both)
	until(t, "reported", func() bool { return two.conflicts.Load() > 0 })
}

func TestNothingIsAnsweredWithoutRight(t *testing.T) {
	lan := testgw.NewLAN(t)
	one, n := newHost(t, lan, "1"), newNeighbour(t, lan)
	one.a.Set(both)
	resolves(t, n, one)
	one.valid.Store(false)
	unanswered(t, n)
	one.valid.Store(true)
	resolves(t, n, one)
	one.a.Set(nil)
	unanswered(t, n)
}

// unanswered waits until the neighbour has given up asking.
func unanswered(t *testing.T, n *testns.NS) {
	t.Helper()
	for _, a := range addrs {
		forget(t, n, a)
		send(t, n, a)
		until(t, "the neighbour gives up", func() bool {
			failed := false
			n.Must("neighbours", func() error {
				l, err := netlink.LinkByName("lan")
				if err != nil {
					return err
				}
				all, err := netlink.NeighList(l.Attrs().Index, netlink.FAMILY_ALL)
				for _, e := range all {
					if e.IP.Equal(a.AsSlice()) {
						failed = e.State == netlink.NUD_FAILED
						if len(e.HardwareAddr) > 0 && !failed {
							t.Errorf("%s answers", a)
						}
					}
				}
				return err
			})
			return failed || t.Failed()
		})
	}
}

// An address that is named before the right to it comes is announced when it comes.
func TestRightComesLater(t *testing.T) {
	lan := testgw.NewLAN(t)
	one, two, n := newHost(t, lan, "1"), newHost(t, lan, "2"), newNeighbour(t, lan)
	one.a.Set(both)
	resolves(t, n, one)
	two.valid.Store(false)
	two.a.Set(both)
	resolves(t, n, one)
	one.a.Set(nil)
	two.valid.Store(true)
	for _, a := range addrs {
		until(t, a.String()+" follows", func() bool { return knows(t, n, a) == two.mac(t) })
	}
}

func TestLinkGoesAndComes(t *testing.T) {
	lan := testgw.NewLAN(t)
	one, n := newHost(t, lan, "1"), newNeighbour(t, lan)
	one.a.Set(both)
	resolves(t, n, one)
	set := func(f func(netlink.Link) error) {
		one.Must("link", func() error {
			l, err := netlink.LinkByName("lan")
			if err != nil {
				return err
			}
			return f(l)
		})
	}
	set(netlink.LinkSetDown)
	set(netlink.LinkSetUp)
	resolves(t, n, one)
	set(netlink.LinkDel)
	lan.Attach(one.NS, prefixes("1"))
	resolves(t, n, one)
}
