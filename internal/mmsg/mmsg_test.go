package mmsg_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/mmsg"
	"github.com/skeinmesh/skein/internal/testns"
)

// end is one socket with both directions.
type end struct {
	*net.UDPConn
	*mmsg.Reader
	*mmsg.Writer
	at netip.AddrPort
}

func (e *end) Close() error { return e.UDPConn.Close() }

func listen(t *testing.T, network, address string) *end {
	t.Helper()
	l := net.ListenConfig{Control: mmsg.Prepare}
	c, err := l.ListenPacket(context.Background(), network, address)
	if err != nil {
		t.Error(err) // not Fatal: it may run on another goroutine
		return nil
	}
	t.Cleanup(func() { c.Close() })
	e := &end{UDPConn: c.(*net.UDPConn)}
	e.at = e.LocalAddr().(*net.UDPAddr).AddrPort()
	if e.Reader, err = mmsg.NewReader(e.UDPConn, 8); err != nil {
		t.Error(err)
	}
	if e.Writer, err = mmsg.NewWriter(e.UDPConn); err != nil {
		t.Error(err)
	}
	return e
}

// take receives n datagrams.
func (e *end) take(t *testing.T, n int) []mmsg.Datagram {
	t.Helper()
	e.SetReadDeadline(time.Now().Add(10 * time.Second))
	var out []mmsg.Datagram
	for len(out) < n {
		if err := e.Reader.Read(); err != nil {
			t.Fatalf("after %d of %d datagrams: %v", len(out), n, err)
		}
		for d, ok := e.Next(); ok; d, ok = e.Next() {
			d.Data = bytes.Clone(d.Data)
			out = append(out, d)
		}
	}
	return out
}

// Whatever the sizes, what is written arrives: all of it, in order, each as it was.
func TestEveryDatagramArrivesAsItWas(t *testing.T) {
	for _, family := range []struct{ network, address string }{{"udp4", "127.0.0.1:0"}, {"udp6", "[::1]:0"}} {
		t.Run(family.network, func(t *testing.T) {
			a, b := listen(t, family.network, family.address), listen(t, family.network, family.address)
			random := rand.New(rand.NewPCG(1, 2))
			for range 200 {
				var packets [][]byte
				size := 1 + random.IntN(1500)
				for range 1 + random.IntN(200) {
					switch random.IntN(12) {
					case 0:
						size = 1 + random.IntN(1500)
					case 1:
						size = 1 + random.IntN(9000)
					}
					p := make([]byte, size)
					p[0], p[len(p)-1] = byte(random.Int()), byte(len(packets))
					packets = append(packets, p)
				}
				for start := 0; start < len(packets); start += 100 { // the receiver's buffer is not endless
					part := packets[start:min(start+100, len(packets))]
					if n, err := a.Writer.Write(part, b.at, mmsg.Source{}); err != nil || n != len(part) {
						t.Fatalf("sent %d of %d: %v", n, len(part), err)
					}
					for i, d := range b.take(t, len(part)) {
						if !bytes.Equal(d.Data, part[i]) || d.From != a.at || d.To.Addr != b.at.Addr() {
							t.Fatalf("datagram %d: %d bytes from %s to %s, want %d from %s to %s", start+i, len(d.Data), d.From, d.To.Addr,
								len(part[i]), a.at, b.at.Addr())
						}
					}
				}
			}
		})
	}
}

// Equal packets travel as one message: a train is really used.
func TestEqualPacketsTravelAsTrains(t *testing.T) {
	a := listen(t, "udp4", "127.0.0.1:0")
	plain, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	raw, _ := plain.SyscallConn()
	raw.Control(func(fd uintptr) {
		if err := unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_GRO, 1); err != nil {
			t.Fatal(err)
		}
	})
	packets := make([][]byte, 20)
	for i := range packets {
		packets[i] = make([]byte, 1400)
	}
	packets[19] = packets[19][:100]
	if _, err := a.Writer.Write(packets, plain.LocalAddr().(*net.UDPAddr).AddrPort(), mmsg.Source{}); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1<<16)
	plain.SetReadDeadline(time.Now().Add(5 * time.Second))
	if n, err := plain.Read(buf); err != nil || n != 19*1400+100 {
		t.Errorf("the first message has %d bytes, %v; want all 20 packets in it", n, err)
	}
}

// A closed socket ends who waits for it.
func TestCloseEndsRead(t *testing.T) {
	e := listen(t, "udp4", "127.0.0.1:0")
	done := make(chan error)
	go func() { done <- e.Reader.Read() }()
	e.Close()
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
	if _, err := e.Writer.Write([][]byte{{1}}, e.at, mmsg.Source{}); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}

// Packets larger than the path's MTU cannot go as trains; singly they are fragmented.
func TestLargerThanTheMTU(t *testing.T) {
	ns := testns.New(t, "mmsg")
	var a, b *end
	ns.Do(func() {
		lo, err := netlink.LinkByName("lo")
		if err != nil || netlink.LinkSetMTU(lo, 1280) != nil {
			t.Error("cannot set the MTU", err)
		}
		a, b = listen(t, "udp4", "127.0.0.1:0"), listen(t, "udp4", "127.0.0.1:0")
	})
	if t.Failed() {
		t.FailNow()
	}
	packets := make([][]byte, 10)
	for i := range packets {
		packets[i] = bytes.Repeat([]byte{byte(i)}, 1400)
	}
	if n, err := a.Writer.Write(packets, b.at, mmsg.Source{}); err != nil || n != len(packets) {
		t.Fatalf("sent %d: %v", n, err)
	}
	arrived := b.take(t, len(packets)) // not always in order: packets sent from two processors may overtake each other
	slices.SortFunc(arrived, func(x, y mmsg.Datagram) int { return bytes.Compare(x.Data, y.Data) })
	for i, d := range arrived {
		if !bytes.Equal(d.Data, packets[i]) {
			t.Errorf("datagram %d arrived changed", i)
		}
	}
}

// What is sent from a given address comes from there, and one that this host does not have is an error.
func TestSource(t *testing.T) {
	ns := testns.New(t, "mmsg")
	for _, family := range []struct{ network, any, other string }{{"udp4", "0.0.0.0:0", "127.0.0.9"},
		{"udp6", "[::]:0", "fd00::9"}} {
		other := netip.MustParseAddr(family.other)
		var a, b *end
		ns.Do(func() {
			lo, err := netlink.LinkByName("lo")
			if err == nil {
				err = netlink.AddrAdd(lo,
					&netlink.Addr{IPNet: &net.IPNet{IP: other.AsSlice(), Mask: net.CIDRMask(other.BitLen(), other.BitLen())},
						Flags: unix.IFA_F_NODAD})
			}
			if err != nil {
				t.Error(err)
			}
			a, b = listen(t, family.network, family.any), listen(t, family.network, family.any)
		})
		if t.Failed() {
			t.FailNow()
		}
		to := netip.AddrPortFrom(other, b.at.Port())
		from := mmsg.Source{Addr: other}
		var d mmsg.Datagram
		ok := false
		for deadline := time.Now().Add(5 * time.Second); !ok; { // the kernel adds a new address's route a moment later
			if time.Now().After(deadline) {
				t.Fatal("nothing arrives")
			}
			_, _ = a.Writer.Write([][]byte{{1}}, to, from)
			b.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			if b.Reader.Read() == nil {
				d, ok = b.Next()
			}
		}
		if d.From.Addr() != other || d.To.Addr != other || d.To.Link == 0 {
			t.Errorf("from %s to %v, want both %s", d.From, d.To, other)
		}
		strange := mmsg.Source{Addr: netip.MustParseAddr(map[string]string{"udp4": "203.0.113.9",
			"udp6": "2001:db8::9"}[family.network])}
		if n, err := a.Writer.Write([][]byte{{1}}, to, strange); err == nil || n != 0 {
			t.Errorf("%s: sent %d from an address of another host, %v", family.network, n, err)
		}
	}
}

// The class of a datagram arrives, and a Reader with lent memory reads like another and has none while it waits.
func TestClassAndLentMemory(t *testing.T) {
	memory := mmsg.NewMemory(4)
	for _, family := range []struct {
		network, address string
		level, option    int
	}{{"udp4", "127.0.0.1:0", unix.IPPROTO_IP, unix.IP_RECVTOS}, {"udp6", "[::1]:0", unix.IPPROTO_IPV6,
		unix.IPV6_RECVTCLASS}} {
		a, b := listen(t, family.network, family.address), listen(t, family.network, family.address)
		raw, _ := b.UDPConn.SyscallConn()
		raw.Control(func(fd uintptr) {
			if err := unix.SetsockoptInt(int(fd), family.level, family.option, 1); err != nil {
				t.Error(err)
			}
		})
		var err error
		if b.Reader, err = memory.NewReader(b.UDPConn); err != nil {
			t.Fatal(err)
		}
		for _, class := range []uint8{0, 2, 0xb9} {
			if _, err := a.Writer.Write([][]byte{make([]byte, 900), make([]byte, 900)}, b.at, mmsg.Source{Addr: a.at.Addr(),
				Class: class}); err != nil {
				t.Fatal(err)
			}
			for _, d := range b.take(t, 2) {
				if d.To.Class != class || len(d.Data) != 900 {
					t.Errorf("%s: %d bytes of class %#x, want 900 of %#x", family.network, len(d.Data), d.To.Class, class)
				}
			}
		}
	}
}
