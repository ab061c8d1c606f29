package flows_test

import (
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/announce"
	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/testgw"
	"github.com/skeinmesh/skein/internal/testns"
)

const (
	every1ms  = time.Millisecond
	underWay  = 60 * time.Millisecond // how long the former owner goes on
	around    = 300                   // packets before and after a move
	holdQueue = 100
)

// stream sends numbers every millisecond, which are echoed.
type stream struct {
	name       string
	sent, back atomic.Uint64
	wrong      atomic.Uint64 // numbers that came back out of order
	longest    atomic.Int64  // between two that came back, in ns
	stop       chan struct{}
	wg         sync.WaitGroup
	tcp        *net.TCPConn
}

func echoes(t testing.TB, n *testns.NS) {
	t.Helper()
	n.Must("echo", func() error {
		u, err := net.ListenUDP("udp", &net.UDPAddr{Port: 9})
		if err != nil {
			return err
		}
		l, err := net.Listen("tcp", ":9")
		if err != nil {
			return err
		}
		t.Cleanup(func() { u.Close(); l.Close() })
		roomy(t, u)
		go func() {
			b := make([]byte, 8)
			for {
				_, from, err := u.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				_, _ = u.WriteToUDPAddrPort(b, from)
			}
		}()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() { defer c.Close(); _, _ = io.Copy(c, c) }()
			}
		}()
		return nil
	})
}

// roomy gives a socket room for a complete stream, so that only the gateways' losses are counted.
func roomy(t testing.TB, c *net.UDPConn) {
	raw, err := c.SyscallConn()
	if err == nil {
		_ = raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20) })
	}
	if err != nil {
		t.Errorf("receive buffer: %v", err)
	}
}

func start(t testing.TB, n *testns.NS, network string, to netip.Addr) *stream {
	t.Helper()
	s := &stream{name: network + " to " + to.String(), stop: make(chan struct{})}
	var c net.Conn
	n.Must("dialing", func() (err error) {
		c, err = net.DialTimeout(network, netip.AddrPortFrom(to, 9).String(), limit)
		return err
	})
	s.tcp, _ = c.(*net.TCPConn)
	if u, ok := c.(*net.UDPConn); ok {
		roomy(t, u)
	}
	t.Cleanup(func() { c.Close() })
	s.wg.Go(func() {
		tick := time.NewTicker(every1ms)
		defer tick.Stop()
		for {
			select {
			case <-s.stop:
				return
			case <-tick.C:
				if _, err := c.Write(binary.BigEndian.AppendUint64(nil, s.sent.Load())); err != nil {
					t.Errorf("%s: %v", s.name, err)
					return
				}
				s.sent.Add(1)
			}
		}
	})
	go func() {
		b := make([]byte, 8)
		last := time.Now()
		for {
			if _, err := io.ReadFull(c, b); err != nil {
				return
			}
			now := time.Now()
			s.longest.Store(max(s.longest.Load(), int64(now.Sub(last))))
			last = now
			if binary.BigEndian.Uint64(b) != s.back.Load() {
				s.wrong.Add(1)
			}
			s.back.Add(1)
		}
	}()
	return s
}

func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, limit)
		}
	}
}

func (s *stream) more(t testing.TB, n uint64) {
	t.Helper()
	want := s.back.Load() + n
	until(t, s.name+" goes on", func() bool { return s.back.Load() >= want })
}

// end stops sending, and checks that everything returned. At the moment when the rule is removed, datagrams may
// overtake queued ones if this process is late; hold's own test checks the order of queued ones.
func (s *stream) end(t testing.TB) {
	t.Helper()
	close(s.stop)
	s.wg.Wait()
	for last := time.Now(); s.back.Load() < s.sent.Load() && time.Since(last) < 2*time.Second; {
		time.Sleep(time.Millisecond)
	}
	retransmits := uint32(0)
	if s.tcp != nil {
		raw, err := s.tcp.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		_ = raw.Control(func(fd uintptr) {
			info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			if err != nil {
				t.Error(err)
				return
			}
			retransmits = info.Total_retrans
		})
	}
	t.Logf("%s: %d sent, %d came back, %d out of order, %d sent again; longest pause %v", s.name, s.sent.Load(),
		s.back.Load(), s.wrong.Load(),
		retransmits, time.Duration(s.longest.Load()).Round(100*time.Microsecond))
	if s.sent.Load() != s.back.Load() {
		t.Errorf("%s lost packets", s.name)
	}
}

func announcer(t testing.TB, g *testgw.Gateway, valid *atomic.Bool) *announce.Announcer {
	t.Helper()
	valid.Store(true)
	a, err := announce.New(announce.Options{NetNS: testgw.Path(g.NS),
		Log:   slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Valid: func(netip.Addr) bool { return valid.Load() }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

// known reports whether the target has A's MAC for both addresses.
func known(t testing.TB, s *testgw.Scene) bool {
	t.Helper()
	var mac string
	s.A.Must("link", func() error {
		l, err := netlink.LinkByName("lan")
		if err == nil {
			mac = l.Attrs().HardwareAddr.String()
		}
		return err
	})
	n := 0
	s.Target.Must("neighbours", func() error {
		l, err := netlink.LinkByName("lan")
		if err != nil {
			return err
		}
		all, err := netlink.NeighList(l.Attrs().Index, netlink.FAMILY_ALL)
		for _, e := range all {
			if a, _ := netip.AddrFromSlice(e.IP); (a.Unmap() == testgw.Source4 || a == testgw.Source6) &&
				e.HardwareAddr.String() == mac {
				n++
			}
		}
		return err
	})
	return n == 2
}

// A slot moves by plan while streams use it: nothing is lost, and both gateways never forward at the same time.
func TestPlannedMoveLosesNothing(t *testing.T) {
	s := testgw.New(t)
	echoes(t, s.Target)
	var validA, validB atomic.Bool
	a, b := announcer(t, s.A, &validA), announcer(t, s.B, &validB)
	addresses := map[netip.Addr]string{testgw.Source4: "lan", testgw.Source6: "lan"}
	s.Via(s.B) // B's neighbours are known, as on a gateway that has been there for some time
	b.Set(addresses)
	for _, to := range []netip.Addr{testgw.Target4, testgw.Target6} {
		w := start(t, s.Client, "udp", to)
		w.more(t, 1)
		close(w.stop)
	}
	b.Set(nil)
	s.Via(s.A)
	a.Set(addresses)
	until(t, "the target knows that A has the addresses", func() bool { return known(t, s) })
	var streams []*stream
	for _, network := range []string{"udp", "tcp"} {
		for _, to := range []netip.Addr{testgw.Target4, testgw.Target6} {
			streams = append(streams, start(t, s.Client, network, to))
		}
	}
	for _, w := range streams {
		w.more(t, around)
		w.longest.Store(0)
	}

	invalid := s.A.Invalid() + s.B.Invalid()
	q, err := hold.Open(testgw.Path(s.B.NS), holdQueue, slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	s.B.Hold(holdQueue, true)
	begin := time.Now()
	s.Via(s.B)
	b.Set(addresses)
	<-time.After(underWay)
	s.A.Stop()
	validA.Store(false)
	stopped := time.Now()
	entries := dump(t, s.A.NS, match)
	dumped := time.Now()
	load(t, s.B.NS, match, entries)
	loaded := time.Now()
	waited, err := q.Release()
	if err != nil {
		t.Fatal(err)
	}
	released := time.Now()
	s.B.Hold(holdQueue, false)
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	t.Logf("moved %d flows; %d packets waited, at most %v, of that %v after A stopped: %v to dump, %v to load",
		len(entries), waited,
		released.Sub(begin).Round(time.Millisecond), released.Sub(stopped).Round(100*time.Microsecond),
		dumped.Sub(stopped).Round(100*time.Microsecond), loaded.Sub(dumped).Round(100*time.Microsecond))

	for _, w := range streams {
		w.more(t, around)
	}
	for _, w := range streams {
		w.end(t)
	}
	if n := s.A.Invalid() + s.B.Invalid() - invalid; n != 0 {
		t.Errorf("%d packets counted as invalid", n)
	}
	if got := dump(t, s.B.NS, match); len(got) < len(streams) {
		t.Errorf("B has %d flows", len(got))
	}
}
