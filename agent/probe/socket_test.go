package probe

import (
	"bytes"
	"net"
	"net/netip"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/nattest"
)

// station is a host on which an ordinary socket owns WireGuard's port, and a Prober works beside it.
type station struct {
	host   *nattest.Host
	owner  *net.UDPConn
	socket *Socket
	*Prober
	pings  chan Ping
	pongs  chan Pong
	stun   chan netip.AddrPort
	others atomic.Int64 // datagrams that the handler saw
}

func newStation(t *testing.T, host *nattest.Host, self, other identity.ID) *station {
	t.Helper()
	s := &station{host: host, pings: make(chan Ping, 100), pongs: make(chan Pong, 100),
		stun: make(chan netip.AddrPort, 100)}
	host.Do(func() {
		var err error
		if s.owner, err = net.ListenUDP("udp", &net.UDPAddr{Port: wgPort}); err != nil {
			t.Fatal(err)
		}
		if s.socket, err = Open(Config{Port: wgPort, Mark: 0x20}); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() { s.owner.Close() })
	t.Cleanup(func() { s.socket.Close() })
	s.Prober = NewProber(ProberConfig{
		Self: self, Epoch: 1, Socket: s.socket,
		OnPing: func(p Ping) { s.pings <- p },
		OnPong: func(p Pong) { s.pongs <- p },
		OnSTUN: func(from netip.AddrPort, _ netip.Addr, _ []byte, _ time.Time) { s.stun <- from },
	})
	s.SetPeer(other, key)
	s.socket.Serve(func(from netip.AddrPort, local netip.Addr, b []byte, at time.Time) {
		s.others.Add(1)
		s.Handle(from, local, b, at)
	})
	return s
}

func within[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(5 * time.Second):
		t.Fatal("nothing came within 5 s")
		panic("unreachable")
	}
}

func TestPingBesideTheOwnerOfThePort(t *testing.T) {
	internet := nattest.New(t)
	a := newStation(t, internet.Host(nattest.Public), alice, bob)
	b := newStation(t, internet.Host(nattest.Public), bob, alice)
	pairs := map[string][2]netip.Addr{"IPv4": {a.host.Addr, b.host.Addr}, "IPv6": {a.host.Addr6, b.host.Addr6}}
	for name, pair := range pairs {
		for _, size := range []int{Size, Size + 1, 1300, MaxSize} {
			t.Run(name+" "+strconv.Itoa(size), func(t *testing.T) {
				to := netip.AddrPortFrom(pair[1], wgPort)
				from := netip.AddrPortFrom(pair[0], wgPort)
				tx, err := a.SendPingSize(bob, to, size)
				if err != nil {
					t.Fatal(err)
				}
				ping := within(t, b.pings)
				if ping.Peer != alice || ping.From != from || ping.Local != pair[1] || ping.Size != size {
					t.Errorf("bob saw %+v", ping)
				}
				pong := within(t, a.pongs)
				if pong.Tx != tx || pong.From != to || pong.To != to || pong.Observed != from || pong.RTT <= 0 ||
					pong.RTT > 5*time.Second {
					t.Errorf("alice saw %+v", pong)
				}
				// The owner gets the ping as well: so it was a valid datagram, with a good checksum, from WireGuard's port.
				_ = b.owner.SetReadDeadline(time.Now().Add(5 * time.Second))
				buf := make([]byte, 2000)
				n, seen, err := b.owner.ReadFromUDPAddrPort(buf)
				if err != nil || n != size || seen.Addr().Unmap() != from.Addr() || seen.Port() != wgPort {
					t.Errorf("the port's owner read %d bytes from %s, %v", n, seen, err)
				}
			})
		}
	}
}

func TestOnlyOursReachesUserspace(t *testing.T) {
	internet := nattest.New(t)
	a := newStation(t, internet.Host(nattest.Public), alice, bob)
	b := newStation(t, internet.Host(nattest.Public), bob, alice)
	to := netip.AddrPortFrom(b.host.Addr, wgPort)
	data := append([]byte{4, 0, 0, 0}, bytes.Repeat([]byte{7}, 1300)...)
	for range 200 {
		if _, err := a.owner.WriteToUDPAddrPort(data, to); err != nil {
			t.Fatal(err)
		}
	}
	stun := append([]byte{1, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42}, make([]byte, 12)...)
	if err := a.socket.Send(to, stun); err != nil {
		t.Fatal(err)
	}
	if from := within(t, b.stun); from != netip.AddrPortFrom(a.host.Addr, wgPort) {
		t.Errorf("STUN came from %s", from)
	}
	if n := b.others.Load(); n != 1 {
		t.Errorf("%d datagrams reached the handler, want the STUN message alone", n)
	}
}

func TestSourceAddressFollowsTheRoute(t *testing.T) {
	internet := nattest.New(t)
	a := newStation(t, internet.Host(nattest.Public), alice, bob)
	b := newStation(t, internet.Host(nattest.Public), bob, alice)
	b.host.AddAddress("wan", "203.0.113.77/24")
	second := netip.MustParseAddrPort("203.0.113.77:51820")
	if _, err := a.SendPing(bob, second); err != nil {
		t.Fatal(err)
	}
	if pong := within(t, a.pongs); pong.From != second {
		t.Errorf("the pong came from %s, want the address that was pinged, %s", pong.From, second)
	}
}

func TestThroughNAT(t *testing.T) {
	internet := nattest.New(t)
	public := newStation(t, internet.Host(nattest.Public), bob, alice)
	inside := newStation(t, internet.Host(nattest.Symmetric), alice, bob)
	to := netip.AddrPortFrom(public.host.Addr, wgPort)
	if _, err := inside.SendPing(bob, to); err != nil {
		t.Fatal(err)
	}
	pong := within(t, inside.pongs)
	// WireGuard's own packet to the same place must take the same mapping.
	if _, err := inside.owner.WriteToUDPAddrPort([]byte("as WireGuard"), to); err != nil {
		t.Fatal(err)
	}
	_ = public.owner.SetReadDeadline(time.Now().Add(5 * time.Second))
	for b := make([]byte, 2000); ; {
		n, from, err := public.owner.ReadFromUDPAddrPort(b)
		if err != nil {
			t.Fatal(err)
		}
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		if string(b[:n]) == "as WireGuard" {
			if from != pong.Observed || from.Addr() != inside.host.Outside {
				t.Errorf("WireGuard's packet comes from %s, the ping came from %s", from, pong.Observed)
			}
			return
		}
	}
}

func TestSendErrors(t *testing.T) {
	internet := nattest.New(t)
	a := newStation(t, internet.Host(nattest.Public), alice, bob)
	for _, to := range []netip.AddrPort{{}, netip.AddrPortFrom(a.host.Addr, 0),
		netip.MustParseAddrPort("198.51.100.1:9")} {
		if err := a.socket.Send(to, []byte("x")); err == nil {
			t.Errorf("sending to %s worked", to)
		}
	}
	if err := a.socket.Send(netip.MustParseAddrPort("203.0.113.9:9"), make([]byte, maxPayload+1)); err == nil {
		t.Error("a datagram of 1473 bytes was sent")
	}
	for _, port := range []int{0, -1, 65536} {
		if _, err := Open(Config{Port: port}); err == nil {
			t.Errorf("opened port %d", port)
		}
	}
}

func TestOptionsAreSet(t *testing.T) {
	internet := nattest.New(t)
	a := newStation(t, internet.Host(nattest.Public), alice, bob)
	for _, f := range []*family{a.socket.v4, a.socket.v6} {
		_ = f.conn.Control(func(fd uintptr) {
			if mark, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK); err != nil || mark != 0x20 {
				t.Errorf("mark %#x, %v", mark, err)
			}
		})
	}
}
