package plane_test

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/internal/testns"
)

var (
	pfx  = netip.MustParsePrefix
	addr = netip.MustParseAddr
)

// wantKernel requires the kernel driver: the kernel tier sets SKEIN_WANT_KERNEL=1.
func wantKernel() bool { return os.Getenv("SKEIN_WANT_KERNEL") == "1" }

type keyPair struct{ private, public dataplane.Key }

func newKeyPair(t testing.TB) keyPair {
	t.Helper()
	k, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return keyPair{dataplane.Key(k.Bytes()), dataplane.Key(k.PublicKey().Bytes())}
}

// host is a namespace with a plane in it.
type host struct {
	*testns.NS
	keys    keyPair
	n       int // its number in all addresses
	driver  string
	numbers dataplane.Numbers
	plane   *plane.Plane
	mu      sync.Mutex
	foreign []string
}

func newHost(t *testing.T, n int) *host {
	t.Helper()
	return newHostWith(t, n, "auto")
}

func newHostWith(t *testing.T, n int, driver string) *host {
	t.Helper()
	h := &host{NS: testns.New(t, "plane"), keys: newKeyPair(t), n: n, driver: driver}
	h.open(t)
	return h
}

func (h *host) open(t *testing.T) {
	t.Helper()
	p, err := plane.Open(t.Context(), plane.Options{Namespace: &h.Handle, Numbers: h.numbers, Driver: h.driver,
		Log: testLog(t), OnDrift: func(s string) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.foreign = append(h.foreign, s)
		}})
	if err != nil {
		t.Fatal(err)
	}
	h.plane = p
	t.Cleanup(func() { _ = p.Close() })
	if wantKernel() && h.driver == "auto" && p.Driver() != "kernel" {
		t.Fatalf("driver is %s, want kernel", p.Driver())
	}
}

func testLog(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	if w.t.Context().Err() == nil {
		w.t.Logf("%s", b)
	}
	return len(b), nil
}

func (h *host) overlay4() netip.Addr { return addr(fmt.Sprintf("10.4.0.%d", h.n)) }
func (h *host) overlay6() netip.Addr { return addr(fmt.Sprintf("fd00:5::%d", h.n)) }

// spec is this host's Spec without peers.
func (h *host) spec() dataplane.Spec {
	return dataplane.Spec{
		WireGuard: dataplane.WireGuard{PrivateKey: h.keys.private, Port: dataplane.Port, Mark: h.numbers.Filled().MarkWG,
			Peers: map[dataplane.Key]dataplane.Peer{}},
		Link: dataplane.Link{Name: h.numbers.Filled().Link, MTU: dataplane.MTU,
			Addresses: []netip.Prefix{netip.PrefixFrom(h.overlay4(), 16), netip.PrefixFrom(h.overlay6(), 64)}},
		Complete: true,
	}
}

func withPeer(s dataplane.Spec, k dataplane.Key, endpoint netip.AddrPort, ips ...netip.Prefix) dataplane.Spec {
	s.WireGuard.Peers[k] = dataplane.Peer{PresharedKey: dataplane.Key{1, 2, 3}, Endpoint: endpoint, AllowedIPs: ips}
	s.Targets = append(s.Targets, ips...)
	return s
}

// withHost adds another host to the Spec as a peer.
func withHost(s dataplane.Spec, o *host, underlay netip.Addr) dataplane.Spec {
	return withPeer(s, o.keys.public, netip.AddrPortFrom(underlay, dataplane.Port),
		netip.PrefixFrom(o.overlay4(), 32), netip.PrefixFrom(o.overlay6(), 128))
}

func (h *host) apply(t testing.TB, s dataplane.Spec) dataplane.Report {
	t.Helper()
	r, err := h.plane.Apply(t.Context(), s)
	if err != nil {
		t.Fatalf("apply: %v", err)
	}
	return r
}

// clean fails unless the kernel exactly matches the Spec.
func (h *host) clean(t *testing.T, s dataplane.Spec) {
	t.Helper()
	if d := h.diff(t, s); len(d) > 0 {
		t.Fatalf("kernel differs from the Spec:\n%q", d)
	}
}

func (h *host) diff(t *testing.T, s dataplane.Spec) []string {
	t.Helper()
	d, err := h.plane.Diff(t.Context(), s)
	if err != nil {
		t.Fatalf("diff: %v", err)
	}
	return d
}

// within waits for a condition.
func within(t *testing.T, d time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > d {
			t.Fatalf("not within %s: %s", d, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
	return time.Since(start)
}

// pair is two hosts connected by a veth pair, with both underlay families.
func pair(t *testing.T) (a, b *host) {
	t.Helper()
	a, b = newHost(t, 1), newHost(t, 2)
	testns.Link(a.NS, b.NS, "under", []netip.Prefix{pfx("192.0.2.1/24"), pfx("2001:db8::1/64")},
		[]netip.Prefix{pfx("192.0.2.2/24"), pfx("2001:db8::2/64")})
	return a, b
}

// echo answers UDP packets at an address inside the tunnel.
func (h *host) echo(t *testing.T, at netip.Addr) {
	t.Helper()
	var c *net.UDPConn
	h.Must("echo", func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, 7)))
		return err
	})
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 2000)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort(b[:n], from)
		}
	}()
}

// reaches reports whether the echo at that address answers.
func (h *host) reaches(t *testing.T, at netip.Addr) (ok bool, err error) {
	t.Helper()
	h.Do(func() {
		var c net.Conn
		if c, err = net.Dial("udp", netip.AddrPortFrom(at, 7).String()); err != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(200 * time.Millisecond))
		if _, err = c.Write([]byte("skein")); err != nil {
			return
		}
		b := make([]byte, 10)
		_, err = c.Read(b)
		ok = err == nil
	})
	return ok, err
}

func TestTwoHostsReachEachOther(t *testing.T) {
	for _, under := range []struct{ name, a, b string }{{"over IPv4", "192.0.2.1", "192.0.2.2"},
		{"over IPv6", "2001:db8::1", "2001:db8::2"}} {
		t.Run(under.name, func(t *testing.T) {
			a, b := pair(t)
			a.apply(t, withHost(a.spec(), b, addr(under.b)))
			b.apply(t, withHost(b.spec(), a, addr(under.a)))
			for _, to := range []netip.Addr{b.overlay4(), b.overlay6()} {
				b.echo(t, to)
				d := within(t, 8*time.Second, "reach "+to.String(), func() bool { ok, _ := a.reaches(t, to); return ok })
				t.Logf("%s answered after %s", to, d)
			}
			peers, err := a.plane.Peers(context.Background())
			if err != nil || len(peers) != 1 || peers[0].LastHandshake.IsZero() || peers[0].RxBytes == 0 ||
				peers[0].Endpoint.Addr() != addr(under.b) {
				t.Errorf("peers: %+v, %v", peers, err)
			}
		})
	}
}

func TestUnchangedSpecWritesNothing(t *testing.T) {
	a := newHost(t, 1)
	s := withPeer(a.spec(), newKeyPair(t).public, netip.MustParseAddrPort("192.0.2.9:51820"), pfx("10.4.0.9/32"),
		pfx("10.100.0.0/27"), pfx("fd00:5::9/128"))
	first := a.apply(t, s)
	for _, sub := range []string{"wireguard", "nft", "route"} {
		if first.Writes[sub] == 0 {
			t.Errorf("the first apply wrote nothing to %s", sub)
		}
	}
	a.clean(t, s)
	for sub, n := range a.apply(t, s).Writes {
		if n != 0 {
			t.Errorf("%s: %d messages for an unchanged Spec", sub, n)
		}
	}
}

// The peer's endpoint lies in a network that is routed through the tunnel to that same peer. WireGuard's own packets
// carry its mark and bypass the tunnel; everything else to that network uses it.
func TestEndpointInsideADestination(t *testing.T) {
	a, b := pair(t)
	with := func(h, o *host, under string) dataplane.Spec {
		return withPeer(h.spec(), o.keys.public, netip.AddrPortFrom(addr(under), dataplane.Port),
			netip.PrefixFrom(o.overlay4(), 32), netip.PrefixFrom(addr(under), 32))
	}
	a.apply(t, with(a, b, "192.0.2.2"))
	b.apply(t, with(b, a, "192.0.2.1"))
	b.echo(t, b.overlay4())
	within(t, 8*time.Second, "reach the overlay address", func() bool { ok, _ := a.reaches(t, b.overlay4()); return ok })
	for mark, link := range map[uint32]string{dataplane.DefaultNumbers().MarkWG: "under",
		dataplane.DefaultNumbers().MarkRoute: dataplane.DefaultNumbers().Link} {
		a.Must("looking for the way", func() error {
			routes, err := netlink.RouteGetWithOptions(net.IPv4(192, 0, 2, 2), &netlink.RouteGetOptions{Mark: mark})
			if err != nil {
				return err
			}
			l, err := netlink.LinkByIndex(routes[0].LinkIndex)
			if err == nil && l.Attrs().Name != link {
				t.Errorf("mark %#x leads to %s, want %s", mark, l.Attrs().Name, link)
			}
			return err
		})
	}
}
