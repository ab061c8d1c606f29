package birthday

import (
	"net"
	"net/netip"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/nattest"
	"github.com/skeinmesh/skein/internal/testenv"
)

// If the kernel cannot rewrite ports, pings and WireGuard's packets pass through the proxy and use the mapping that
// was hit.
func TestProxyCarriesWhatTheKernelCannot(t *testing.T) {
	one, many := portRestrictedAndSymmetric(t, skeinv1.PairOutcome_BIRTHDAY, nattest.Symmetric)
	before := testenv.OpenFiles(t)
	m := meet(t, one, many, one)
	many.engine.Settle(alice) // its port is free for the proxy
	var proxy *Proxy
	var err error
	many.host.Do(func() {
		proxy, err = OpenProxy(t.Context(), m.Local, m.Remote, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), wgPort),
			dataplane.DefaultNumbers().MarkWG,
			func(from netip.AddrPort, b []byte, at time.Time) { many.prober.Handle(from, netip.Addr{}, b, at) })
	})
	if err != nil {
		t.Fatal(err)
	}
	many.prober.SetDetour(m.Remote, proxy)
	o := heard(t, one, many, m)
	tx, err := one.prober.SendPing(bob, o.Remote)
	if err != nil {
		t.Fatal(err)
	}
	for limit := time.After(5 * time.Second); ; {
		select {
		case p := <-one.pongs:
			if p.Tx != tx {
				continue
			}
			if p.From != o.Remote {
				t.Errorf("answered from %s, want %s", p.From, o.Remote)
			}
		case <-limit:
			t.Fatal("no answer through the proxy")
		}
		break
	}
	exchange(t, many.owner, proxy.Endpoint(), one.owner, o.Remote)
	stranger := newSocket(t, many.host)
	for _, to := range []netip.AddrPort{proxy.Endpoint(), netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), m.Local)} {
		if _, err := stranger.WriteToUDPAddrPort([]byte("from a stranger"), to); err != nil {
			t.Fatal(err)
		}
	}
	exchange(t, many.owner, proxy.Endpoint(), one.owner, o.Remote)

	many.prober.SetDetour(m.Remote, nil)
	proxy.Close()
	one.engine.Stop(bob)
	many.engine.Stop(alice)
	stranger.Close()
	within(t, "sockets closed", 5*time.Second, func() bool { return testenv.OpenFiles(t) <= before })
}

// exchange sends from one socket to an address, where another socket must receive it, and back; a stranger's packets
// must not arrive.
func exchange(t *testing.T, a *net.UDPConn, to netip.AddrPort, b *net.UDPConn, back netip.AddrPort) {
	t.Helper()
	for _, p := range []struct {
		from, into *net.UDPConn
		to         netip.AddrPort
	}{{a, b, to}, {b, a, back}} {
		if _, err := p.from.WriteToUDPAddrPort([]byte("as WireGuard"), p.to); err != nil {
			t.Fatal(err)
		}
		_ = p.into.SetReadDeadline(time.Now().Add(5 * time.Second))
		for buf := make([]byte, 2048); ; {
			n, _, err := p.into.ReadFromUDPAddrPort(buf)
			if err != nil {
				t.Fatal(err)
			}
			if string(buf[:n]) == "as WireGuard" {
				break
			}
			if string(buf[:n]) == "from a stranger" {
				t.Fatal("a stranger's packet went through")
			}
		}
	}
}
