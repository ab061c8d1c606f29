package linkhold_test

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane/linkhold"
	"github.com/skeinmesh/skein/internal/testns"
)

const (
	kept, passes = 9000, 9001 // ports
	packets      = 100        // twice as many fit into a socket
	queue        = 5117
	table        = "skein_rekey"
)

var near, far = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")

// scene are two hosts with a link between them: one sends numbers to ports of the other.
type scene struct {
	*testing.T
	sender *testns.NS
	out    *net.UDPConn
	in     map[uint16]*net.UDPConn
}

func newScene(t *testing.T) *scene {
	s := &scene{T: t, sender: testns.New(t, "ha"), in: map[uint16]*net.UDPConn{}}
	other := testns.New(t, "hb")
	testns.Link(s.sender, other, "hold0", []netip.Prefix{netip.PrefixFrom(near, 24)},
		[]netip.Prefix{netip.PrefixFrom(far, 24)})
	open := func(n *testns.NS, at netip.AddrPort) (c *net.UDPConn) {
		n.Must("open a socket", func() (err error) {
			c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
			return err
		})
		t.Cleanup(func() { c.Close() })
		return c
	}
	s.out = open(s.sender, netip.AddrPortFrom(near, 0))
	for _, port := range []uint16{kept, passes} {
		s.in[port] = open(other, netip.AddrPortFrom(far, port))
	}
	s.send(passes, 0) // the neighbours are known then
	s.hears(passes, 0)
	return s
}

func (s *scene) send(port uint16, number uint32) {
	s.Helper()
	b := binary.BigEndian.AppendUint32(nil, number)
	if _, err := s.out.WriteToUDPAddrPort(b, netip.AddrPortFrom(far, port)); err != nil {
		s.Fatal(err)
	}
}

func (s *scene) hears(port uint16, want uint32) {
	s.Helper()
	b := make([]byte, 4)
	_ = s.in[port].SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := s.in[port].Read(b); err != nil || binary.BigEndian.Uint32(b) != want {
		s.Fatalf("port %d hears %d, %v; want %d", port, binary.BigEndian.Uint32(b), err, want)
	}
}

func (s *scene) start() (h *linkhold.Hold) {
	s.Helper()
	s.sender.Must("keep back", func() (err error) {
		h, err = linkhold.Start(linkhold.Options{Table: table, Link: "hold0", Queue: queue, Port: passes,
			Log: slog.New(slog.DiscardHandler)})
		return err
	})
	return h
}

// What is sent waits, but for one port, and comes in its order. Nothing is lost of it, nor of what is sent while it is
// let go.
func TestHold(t *testing.T) {
	s := newScene(t)
	for round := range 3 {
		h := s.start()
		for i := range uint32(packets) {
			s.send(kept, i)
		}
		s.send(passes, 7)
		s.hears(passes, 7)
		_ = s.in[kept].SetReadDeadline(time.Now())
		if _, err := s.in[kept].Read(make([]byte, 4)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("round %d: something came although it is kept back: %v", round, err)
		}
		more := make(chan struct{})
		go func() {
			defer close(more)
			for i := range uint32(packets) {
				s.send(kept, packets+i)
			}
		}()
		s.sender.Must("let go", func() error {
			_, err := h.End()
			return err
		})
		<-more
		seen := map[uint32]bool{}
		last := uint32(0)
		for range 2 * packets {
			b := make([]byte, 4)
			_ = s.in[kept].SetReadDeadline(time.Now().Add(10 * time.Second))
			if _, err := s.in[kept].Read(b); err != nil {
				t.Fatalf("round %d: %d of %d arrived: %v", round, len(seen), 2*packets, err)
			}
			number := binary.BigEndian.Uint32(b)
			if seen[number] = true; number < packets {
				if number < last {
					t.Errorf("round %d: %d comes after %d", round, number, last)
				}
				last = number
			}
		}
	}
}

// A table that a former run has left, with a queue that nobody has, keeps nothing back.
func TestLeftBehind(t *testing.T) {
	s := newScene(t)
	h := s.start()
	s.sender.Must("end as a process does", h.Abandon)
	s.send(kept, 5)
	s.hears(kept, 5)
	s.sender.Must("remove", func() error { return linkhold.Remove(table) })
	s.sender.Must("remove what is not there", func() error { return linkhold.Remove(table) })
	s.send(kept, 6)
	s.hears(kept, 6)
}
