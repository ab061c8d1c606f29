package hold_test

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/flows"
	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/testgw"
	"github.com/skeinmesh/skein/internal/testns"
)

const (
	limit  = 10 * time.Second
	number = 7 // of the queue
)

func scene(t *testing.T) (*testgw.Scene, *hold.Queue) {
	s := testgw.New(t)
	s.Via(s.B)
	s.Return(s.B)
	warm(t, s)
	s.B.Hold(number, true)
	return s, open(t, s)
}

// warm sends packets both ways, so that neighbours are resolved: a burst would overflow the queue of unresolved ones.
func warm(t *testing.T, s *testgw.Scene) {
	for _, a := range []netip.Addr{testgw.Target4, testgw.Target6} {
		server, client := udp(t, s.Target, at(a, 9), nil), udp(t, s.Client, nil, at(a, 9))
		send(t, client, 0)
		_, from := receive(t, server)
		if _, err := server.WriteToUDPAddrPort([]byte("warm"), from); err != nil {
			t.Fatal(err)
		}
		receive(t, client)
	}
}

func open(t *testing.T, s *testgw.Scene) *hold.Queue {
	t.Helper()
	q, err := hold.Open(testgw.Path(s.B.NS), number, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.Close() })
	return q
}

func udp(t *testing.T, n *testns.NS, from, to *net.UDPAddr) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	n.Must("UDP socket", func() (err error) {
		if to == nil {
			c, err = net.ListenUDP("udp", from)
		} else {
			c, err = net.DialUDP("udp", from, to)
		}
		return err
	})
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(limit))
	return c
}

func at(a netip.Addr, port int) *net.UDPAddr { return &net.UDPAddr{IP: a.AsSlice(), Port: port} }

func send(t *testing.T, c net.Conn, numbers ...uint32) {
	t.Helper()
	for _, n := range numbers {
		if _, err := c.Write(binary.BigEndian.AppendUint32(nil, n)); err != nil {
			t.Fatal(err)
		}
	}
}

func receive(t *testing.T, c *net.UDPConn) (uint32, netip.AddrPort) {
	t.Helper()
	b := make([]byte, 4)
	n, from, err := c.ReadFromUDPAddrPort(b)
	if err != nil || n != 4 {
		t.Fatalf("%d bytes: %v", n, err)
	}
	return binary.BigEndian.Uint32(b), from
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, limit)
		}
	}
}

func TestPacketsWaitAndComeInOrder(t *testing.T) {
	s, q := scene(t)
	server := udp(t, s.Target, &net.UDPAddr{Port: 7}, nil)
	client := udp(t, s.Client, nil, at(testgw.Target4, 7))
	var ping *icmp.PacketConn
	s.Client.Must("ping socket", func() (err error) {
		ping, err = icmp.ListenPacket("ip4:icmp", "0.0.0.0")
		return err
	})
	defer ping.Close()
	echo := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: 77, Seq: 1, Data: []byte("hold")}}
	b, err := echo.Marshal(nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ping.WriteTo(b, &net.IPAddr{IP: testgw.Target4.AsSlice()}); err != nil {
		t.Fatal(err)
	}
	const n = 200 // as much as the server's socket takes at once
	for i := range uint32(n) {
		send(t, client, i)
	}
	until(t, "all wait", func() bool { return q.Waiting() == n+1 })
	if got, err := q.Release(); err != nil || got != n+1 {
		t.Fatalf("released %d: %v", got, err)
	}
	for i := range uint32(n) {
		if got, _ := receive(t, server); got != i {
			t.Fatalf("packet %d came as number %d", got, i)
		}
	}
	_ = ping.SetReadDeadline(time.Now().Add(limit))
	if n, from, err := ping.ReadFrom(make([]byte, 100)); err != nil || from.String() != testgw.Target4.String() {
		t.Fatalf("ping: %d bytes from %v: %v", n, from, err)
	}
	send(t, client, n) // those that come later do not wait
	if got, _ := receive(t, server); got != n {
		t.Fatalf("packet %d, not %d", got, n)
	}
	if q.Waiting() != 0 {
		t.Errorf("%d wait after the release", q.Waiting())
	}
	s.B.Hold(number, false)
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	send(t, client, n+1)
	if got, _ := receive(t, server); got != n+1 {
		t.Fatalf("packet %d, not %d", got, n+1)
	}
	if _, err := q.Release(); !errors.Is(err, hold.ErrClosed) {
		t.Errorf("release of a closed queue: %v", err)
	}
}

// A TCP connection opened while its packets are queued is established by the release, without a retransmission.
func TestTCPWaits(t *testing.T) {
	s, q := scene(t)
	var l net.Listener
	s.Target.Must("listening", func() (err error) {
		l, err = net.Listen("tcp", ":80")
		return err
	})
	defer l.Close()
	dialed := make(chan error, 1)
	start := time.Now()
	go s.Client.Do(func() {
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(testgw.Target6, 80).String(), limit)
		if err == nil {
			c.Close()
		}
		dialed <- err
	})
	until(t, "the SYN waits", func() bool { return q.Waiting() > 0 })
	if _, err := q.Release(); err != nil {
		t.Fatal(err)
	}
	if err := <-dialed; err != nil {
		t.Fatal(err)
	}
	t.Logf("open after %v", time.Since(start).Round(time.Millisecond))
}

// The purpose: queued packets find the flow that is loaded meanwhile.
func TestPacketsFindTheFlowLoadedMeanwhile(t *testing.T) {
	s, q := scene(t)
	server := udp(t, s.Target, &net.UDPAddr{Port: 7}, nil)
	client := udp(t, s.Client, &net.UDPAddr{Port: 40000}, at(testgw.Target4, 7))
	send(t, client, 1, 2)
	until(t, "both wait", func() bool { return q.Waiting() == 2 })
	e := []byte{1, 4, unix.IPPROTO_UDP, 3, 0, 0, 0, 60, 0, 0, 0, 0, 0, 0}
	e = append(append(append(e, testgw.Client4.AsSlice()...), testgw.Target4.AsSlice()...), testgw.Source4.AsSlice()...)
	e = append(e, 0x9c, 0x40, 0, 7, 0x9c, 0xaf) // from port 40000 to 7, translated to port 40111
	if _, _, err := flows.Load(testgw.Path(s.B.NS), flows.Match{Source4: testgw.Source4}, [][]byte{e}); err != nil {
		t.Fatal(err)
	}
	if _, err := q.Release(); err != nil {
		t.Fatal(err)
	}
	want := netip.AddrPortFrom(testgw.Source4, 40111)
	for range 2 {
		_, from := receive(t, server)
		if from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); from != want {
			t.Errorf("from %s, not %s", from, want)
		}
		if _, err := server.WriteToUDPAddrPort([]byte("back"), from); err != nil {
			t.Fatal(err)
		}
		if _, err := client.Read(make([]byte, 4)); err != nil {
			t.Errorf("no answer: %v", err)
		}
	}
}

// A closing queue drops its packets. Afterwards packets continue without a queue.
func TestClosedDrops(t *testing.T) {
	s, q := scene(t)
	server := udp(t, s.Target, &net.UDPAddr{Port: 7}, nil)
	client := udp(t, s.Client, nil, at(testgw.Target4, 7))
	send(t, client, 1)
	until(t, "it waits", func() bool { return q.Waiting() == 1 })
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	send(t, client, 2) // nobody has the queue
	if got, _ := receive(t, server); got != 2 {
		t.Errorf("packet %d came, want the second: nobody has the queue", got)
	}
	again := open(t, s)
	send(t, client, 3)
	until(t, "the third waits", func() bool { return again.Waiting() == 1 })
	if _, err := again.Release(); err != nil {
		t.Fatal(err)
	}
	if got, _ := receive(t, server); got != 3 {
		t.Errorf("packet %d came, want the third, which was let go", got)
	}
}

func TestOneHasTheQueue(t *testing.T) {
	s, _ := scene(t)
	if q, err := hold.Open(testgw.Path(s.B.NS), number, slog.Default()); err == nil {
		q.Close()
		t.Error("two have the queue")
	}
}

// Slots that share a queue move at different times.
func TestAcceptByMark(t *testing.T) {
	s, q := scene(t)
	server := udp(t, s.Target, &net.UDPAddr{Port: 7}, nil)
	four, six := udp(t, s.Client, nil, at(testgw.Target4, 7)), udp(t, s.Client, nil, at(testgw.Target6, 7))
	send(t, six, 1)
	send(t, four, 2)
	until(t, "both wait", func() bool { return q.Waiting() == 2 })
	if n, err := q.Accept(4); err != nil || n != 1 {
		t.Fatalf("accepted %d: %v", n, err)
	}
	send(t, four, 3)
	for _, want := range []uint32{2, 3} {
		if got, _ := receive(t, server); got != want {
			t.Errorf("packet %d, not %d", got, want)
		}
	}
	q.Keep(4)
	send(t, four, 4)
	until(t, "one of each waits", func() bool { return q.Waiting() == 2 })
	if n, err := q.Release(); err != nil || n != 2 {
		t.Fatalf("released %d: %v", n, err)
	}
	for _, want := range []uint32{1, 4} {
		if got, _ := receive(t, server); got != want {
			t.Errorf("packet %d, not %d", got, want)
		}
	}
}

func TestFull(t *testing.T) {
	s, q := scene(t)
	client := udp(t, s.Client, nil, at(testgw.Target4, 7))
	_ = client.SetDeadline(time.Now().Add(3 * limit))
	until(t, "the queue is full", func() bool {
		for range 500 {
			send(t, client, 0)
		}
		return q.Waiting() >= hold.MaxPackets
	})
	for range 500 {
		send(t, client, 0)
	}
	if n, err := q.Release(); err != nil || n != hold.MaxPackets {
		t.Errorf("released %d of %d: %v", n, hold.MaxPackets, err)
	}
}
