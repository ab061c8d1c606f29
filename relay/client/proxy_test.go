package client_test

import (
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/testenv"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/wire"
)

// wireguard stands for WireGuard's socket.
type wireguard struct {
	*net.UDPConn
	proxies *client.Proxies
}

func (w wireguard) addr() netip.AddrPort { return w.LocalAddr().(*net.UDPAddr).AddrPort() }

func startWireGuard(t testing.TB, n *relaytest.Node, opt client.ProxyOptions) wireguard {
	t.Helper()
	c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadBuffer(4 << 20)
	w := wireguard{UDPConn: c}
	w.proxies = client.NewProxies(n.Pool, w.addr, opt)
	t.Cleanup(func() { w.proxies.Close(); c.Close() })
	return w
}

func (w wireguard) want(t testing.TB, want string) netip.AddrPort {
	t.Helper()
	b := make([]byte, 65536)
	if err := w.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	n, from, err := w.ReadFromUDPAddrPort(b)
	if err != nil || string(b[:n]) != want {
		t.Fatalf("WireGuard got %.40q, %v; want %.40q", b[:n], err, want)
	}
	return from
}

func (w wireguard) send(t testing.TB, to netip.AddrPort, s string) {
	t.Helper()
	if _, err := w.WriteToUDPAddrPort([]byte(s), to); err != nil {
		t.Fatal(err)
	}
}

func TestProxiesCarryWireGuard(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	made := make(chan netip.AddrPort, 1)
	wa := startWireGuard(t, a, client.ProxyOptions{})
	wb := startWireGuard(t, b, client.ProxyOptions{OnNew: func(peer identity.ID, at netip.AddrPort) {
		if peer == a.ID {
			made <- at
		}
	}})
	endpoint := wa.proxies.Endpoint(b.ID)
	if endpoint.Addr() != netip.MustParseAddr("127.0.0.1") {
		t.Errorf("the peer's endpoint is %s", endpoint)
	}
	wa.send(t, endpoint, "initiation")
	from := wb.want(t, "initiation") // b did not know a, and the first packet still arrives
	if at := <-made; at != from || wb.proxies.Endpoint(a.ID) != from {
		t.Errorf("packet from %s, proxy announced at %s, endpoint %s", from, at, wb.proxies.Endpoint(a.ID))
	}
	wb.send(t, from, "response")
	if at := wa.want(t, "response"); at != endpoint {
		t.Errorf("answer from %s, want the peer's endpoint %s", at, endpoint)
	}
	large := string(make([]byte, 60000))
	wa.send(t, endpoint, large)
	wb.want(t, large)

	// Both sessions break; the addresses stay.
	r.Kill()
	relaytest.WaitFor(t, "the loss to be noticed", func() bool { return len(a.Links())+len(b.Links()) == 0 })
	r.Listen(t, r.Address)
	for _, n := range []*relaytest.Node{a, b} {
		relaytest.WaitFor(t, "the session to return", func() bool { return n.Connected(r.Key.ID()) })
	}
	wa.send(t, endpoint, "after")
	if at := wb.want(t, "after"); at != from {
		t.Errorf("after a reconnect packets come from %s, want %s", at, from)
	}
}

func TestProxyTakesOnlyWireGuardsDatagrams(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	wa, wb := startWireGuard(t, a, client.ProxyOptions{}), startWireGuard(t, b, client.ProxyOptions{})
	endpoint := wa.proxies.Endpoint(b.ID)
	stranger, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(endpoint))
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	for range 10 {
		_, _ = stranger.Write([]byte("injected")) // refused, which the next write reports
	}
	wa.send(t, endpoint, "genuine")
	wb.want(t, "genuine")
	if n := wa.proxies.Stats().ToPeers; n != 1 {
		t.Errorf("%d packets taken, want WireGuard's one", n)
	}
}

// A proxy's socket never gets a port that another program needs: once, an agent had no WireGuard for as long as one of
// its proxies had, by chance, WireGuard's port.
func TestProxiesAvoidOthersPorts(t *testing.T) {
	var even []uint16
	for port := 0; port < 1<<16; port += 2 {
		even = append(even, uint16(port))
	}
	w := startWireGuard(t, relaytest.NewNode(t, nil, relaytest.NewKey(t)), client.ProxyOptions{Avoid: even})
	for range 16 {
		if at := w.proxies.Endpoint(relaytest.NewKey(t).ID()); at.Port()%2 == 0 {
			t.Errorf("a proxy has the port of %s, which is to be avoided", at)
		}
	}
}

func TestProxyFollowsWireGuardsPort(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	var at atomic.Pointer[netip.AddrPort]
	at.Store(&netip.AddrPort{})
	x := client.NewProxies(a.Pool, func() netip.AddrPort { return *at.Load() }, client.ProxyOptions{})
	defer x.Close()
	endpoint := x.Endpoint(b.ID) // before WireGuard is up
	if !endpoint.IsValid() {
		t.Fatal("no endpoint before WireGuard is up")
	}
	wb := startWireGuard(t, b, client.ProxyOptions{})
	for i := range 2 {
		c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		port := c.LocalAddr().(*net.UDPAddr).AddrPort()
		at.Store(&port)
		if err := x.Refresh(); err != nil {
			t.Fatal(err)
		}
		w := wireguard{UDPConn: c}
		w.send(t, endpoint, fmt.Sprint(i))
		back := wb.want(t, fmt.Sprint(i))
		wb.send(t, back, "back")
		w.want(t, "back")
	}
}

func TestUnknownPeersMakeNoProxy(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a, b, c := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	wb := startWireGuard(t, b, client.ProxyOptions{Known: func(id identity.ID) bool { return id == c.ID }})
	for _, n := range []*relaytest.Node{a, c} {
		if err := n.Send(b.ID, wire.ChannelWireGuard, []byte(n.ID.String())); err != nil {
			t.Fatal(err)
		}
	}
	wb.want(t, c.ID.String())
	if n := wb.proxies.Stats().Proxies; n != 1 {
		t.Errorf("%d proxies, want 1", n)
	}
	// Removing a peer closes its socket; asking again opens another.
	old := wb.proxies.Endpoint(c.ID)
	wb.proxies.Remove(c.ID)
	if n := wb.proxies.Stats().Proxies; n != 0 {
		t.Errorf("%d proxies after Remove, want 0 (old one at %s)", n, old)
	}
	if !wb.proxies.Endpoint(c.ID).IsValid() {
		t.Error("no new endpoint after Remove")
	}
}

// TestProxyKeepsDatagramsApart sends bursts whose equal sizes invite the kernel to join them; each datagram
// must arrive as it was sent, in order.
func TestProxyKeepsDatagramsApart(t *testing.T) {
	for _, plain := range []bool{false, true} {
		m := relaytest.NewMembers()
		r := relaytest.StartRelay(t, m)
		a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
		wa, wb := startWireGuard(t, a, client.ProxyOptions{}), startWireGuard(t, b, client.ProxyOptions{})
		wb.proxies.SetPlain(plain)
		endpoint := wa.proxies.Endpoint(b.ID)
		var want []string
		for i, size := range []int{1452, 1452, 1452, 80, 1452, 1452, 32, 32, 32, 32, 1452, 148, 9000, 9000, 9000, 1} {
			s := strings.Repeat(string(rune('a'+i)), size)
			want = append(want, s)
		}
		for range 20 {
			for _, s := range want {
				wa.send(t, endpoint, s)
			}
			for _, s := range want {
				wb.want(t, s)
			}
		}
		if wb.proxies.Plain() != plain {
			t.Log("this kernel refuses UDP_SEGMENT")
		}
	}
}

// TestProxiesAreSmall holds a thousand peers' proxies and looks at the memory.
func TestProxiesAreSmall(t *testing.T) {
	const n = 1000
	p := client.NewPool(client.PoolConfig{})
	defer p.Close()
	x := client.NewProxies(p, func() netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 9)
	}, client.ProxyOptions{})
	defer x.Close()
	// settled is the memory in use once two collections agree: an earlier test's remains, or the start's
	// own garbage, are neither ours to count nor to hide behind.
	settled := func() int64 {
		var m runtime.MemStats
		for last, deadline := int64(0), time.Now().Add(5*time.Second); ; {
			runtime.GC()
			runtime.ReadMemStats(&m)
			now := int64(m.HeapAlloc + m.StackInuse)
			if d := now - last; max(d, -d) < 64<<10 {
				return now
			}
			if last = now; time.Now().After(deadline) {
				t.Fatalf("memory does not settle: heap %d, stacks %d bytes", m.HeapAlloc, m.StackInuse)
			}
		}
	}
	before := settled()
	for i := range n {
		if !x.Endpoint(identity.ID{1, byte(i >> 8), byte(i)}).IsValid() {
			testenv.Missing(t, "this process may not open a thousand sockets: raise the limit of open files")
		}
	}
	each := (settled() - before) / n
	if each > 16<<10 || each <= 0 {
		t.Errorf("%d bytes per proxy, want more than none and at most 16 KiB", each)
	}
	t.Logf("%d bytes per proxy", each)
}
