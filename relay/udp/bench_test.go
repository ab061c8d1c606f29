package udp_test

import (
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nattest"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/udp"
	"github.com/skeinmesh/skein/relay/wire"
)

const (
	benchDatagram = 1452 // a full WireGuard datagram
	benchTrain    = 16   // datagrams that one system call sends, as wireguard-go has them
	benchWindow   = 512  // datagrams under way
	benchFor      = 1500 * time.Millisecond
	benchEchoes   = 1500
)

// BenchmarkRelayed carries full datagrams between two hosts through a third: in its kernel, in its process, in sessions
// with it, and without it. Trains are what wireguard-go sends, single datagrams what kernel WireGuard sends.
func BenchmarkRelayed(b *testing.B) {
	for _, way := range []string{"none", "kernel", "userspace", "session"} {
		b.Run(way, func(b *testing.B) {
			n, m := nattest.New(b), relaytest.NewMembers()
			driver := way
			if way == "none" || way == "session" {
				driver = "userspace"
			}
			r := startUDP(b, n.Host(nattest.Public), m, driver)
			x, y := n.Host(nattest.Public), n.Host(nattest.Public)
			e, f := startEnd(b, m, x, r), startEnd(b, m, y, r)
			l := &benchLine{b: b, from: e, to: f, way: way}
			if way == "kernel" || way == "userspace" {
				join(b, e, f)
				passes(b, e, f)
			}
			l.open()
			var trains, singly float64
			p50, p99 := time.Hour, time.Hour
			for b.Loop() { // the best of all: busy neighbours only make it worse
				if way != "session" { // where a train is nothing of its own
					trains = max(trains, l.rate(benchTrain))
				}
				singly = max(singly, l.rate(1))
				x, y := l.echo()
				p50, p99 = min(p50, x), min(p99, y)
			}
			b.ReportMetric(trains, "Gb/s")
			b.ReportMetric(singly, "singly-Gb/s")
			b.ReportMetric(float64(p50.Microseconds()), "p50-us")
			b.ReportMetric(float64(p99.Microseconds()), "p99-us")
		})
	}
}

// benchLine is a one-way line between two ends, however it is made.
type benchLine struct {
	b        *testing.B
	from, to *udpEnd
	way      string
	got      atomic.Uint64
	echoed   chan struct{}
	send     func(data []byte, segment int)
}

// open takes the receiving end's socket over.
func (l *benchLine) open() {
	l.echoed = make(chan struct{}, 1)
	if l.way == "session" {
		l.from.onPacket = func([]byte) { l.echoed <- struct{}{} }
		l.to.onPacket = func(p []byte) {
			l.got.Add(1)
			if len(p) < benchDatagram {
				_ = l.to.Send(l.from.ID, wire.ChannelWireGuard, p)
			}
		}
		l.send = func(data []byte, segment int) {
			for len(data) > 0 {
				n := min(segment, len(data))
				_ = l.from.Send(l.to.ID, wire.ChannelWireGuard, data[:n])
				data = data[n:]
			}
		}
		return
	}
	there, back := l.from.port(l.to), l.to.port(l.from)
	if l.way == "none" {
		there = netip.AddrPortFrom(l.to.host.Addr, l.to.conn.LocalAddr().(*net.UDPAddr).AddrPort().Port())
		back = netip.AddrPortFrom(l.from.host.Addr, l.from.conn.LocalAddr().(*net.UDPAddr).AddrPort().Port())
	}
	read := func(c *net.UDPConn, f func(n, packets int)) {
		raw, err := c.SyscallConn()
		if err != nil {
			l.b.Fatal(err)
		}
		_ = raw.Control(wire.PrepareUDP)
		burst := udp.NewBurst()
		go func() {
			for raw.Read(func(fd uintptr) bool { return burst.Receive(fd, f) != 0 }) == nil {
			}
		}()
	}
	l.from.takeOver()
	l.to.takeOver()
	read(l.from.conn, func(int, int) { l.echoed <- struct{}{} })
	small := make([]byte, 148)
	read(l.to.conn, func(n, packets int) {
		l.got.Add(uint64(packets))
		if n == len(small) {
			_, _ = l.to.conn.WriteToUDPAddrPort(small, back)
		}
	})
	l.send = func(data []byte, segment int) {
		if segment == len(data) {
			_, _ = l.from.conn.WriteToUDPAddrPort(data, there)
			return
		}
		raw, _ := l.from.conn.SyscallConn()
		_ = raw.Write(func(fd uintptr) bool {
			to := &unix.SockaddrInet4{Addr: there.Addr().As4(), Port: int(there.Port())}
			_, err := unix.SendmsgN(int(fd), data, udp.AppendSegment(nil, segment), to, 0)
			return err != unix.EAGAIN
		})
	}
}

// rate is what arrives, in gigabits per second, with so many datagrams sent at a time.
func (l *benchLine) rate(train int) float64 {
	data := make([]byte, train*benchDatagram)
	base, sent := l.got.Load(), uint64(0)
	begin, moved, seen := time.Now(), time.Now(), uint64(0)
	for time.Since(begin) < benchFor {
		got := l.got.Load() - base
		if got != seen {
			seen, moved = got, time.Now()
		}
		switch {
		case sent-got < benchWindow:
			l.send(data, benchDatagram)
			sent += uint64(train)
		case time.Since(moved) > 20*time.Millisecond:
			sent, moved = got, time.Now() // the rest was lost
		default:
			time.Sleep(20 * time.Microsecond)
		}
	}
	return float64(l.got.Load()-base) * benchDatagram * 8 / time.Since(begin).Seconds() / 1e9
}

// echo is how long a small packet takes there and back, on the line that is else idle.
func (l *benchLine) echo() (p50, p99 time.Duration) {
	var took []time.Duration
	small := make([]byte, 148)
	for range benchEchoes {
		begin := time.Now()
		l.send(small, len(small))
		select {
		case <-l.echoed:
			took = append(took, time.Since(begin))
		case <-time.After(time.Second):
			l.b.Fatal("an echo was lost")
		}
	}
	slices.Sort(took)
	return took[len(took)/2], took[len(took)*99/100]
}
