package client_test

import (
	"crypto/ed25519"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/wire"
)

const benchPacket = 1420 + 32 // a full WireGuard datagram

// benchPair is two nodes at one relay, and what the second has received.
type benchPair struct {
	relay    *relaytest.Relay
	from, to *client.Pool
	id       identity.ID
	packets  atomic.Uint64
	bytes    atomic.Uint64
	onPacket atomic.Pointer[func([]byte)]
}

func newBenchPair(b *testing.B, m *relaytest.Members, r *relaytest.Relay) *benchPair {
	b.Helper()
	p := &benchPair{relay: r}
	p.from = relaytest.StartNode(b, m, r).Pool
	key := relaytest.NewKey(b)
	m.Allow(key.ID())
	p.id = key.ID()
	p.to = client.NewPool(client.PoolConfig{Self: p.id, Key: key, OnPacket: func(_ identity.ID, _ byte, x []byte) {
		p.packets.Add(1)
		p.bytes.Add(uint64(len(x)))
		if f := p.onPacket.Load(); f != nil {
			(*f)(x)
		}
	}})
	b.Cleanup(func() { p.to.Close() })
	p.to.SetRelays([]client.Relay{r.Entry()})
	relaytest.WaitFor(b, "session", func() bool { return len(p.to.Links()) == 1 })
	return p
}

// BenchmarkGoodput sends as fast as the receiver takes: a window of packets is under way, and nothing is dropped.
func BenchmarkGoodput(b *testing.B) {
	m := relaytest.NewMembers()
	p := newBenchPair(b, m, relaytest.StartRelay(b, m))
	packet := make([]byte, benchPacket)
	b.SetBytes(benchPacket)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		for uint64(i)-p.packets.Load() > 512 {
			time.Sleep(20 * time.Microsecond)
		}
		if err := p.from.Send(p.id, wire.ChannelWireGuard, packet); err != nil {
			b.Fatal(err)
		}
	}
	for p.packets.Load() < uint64(b.N) {
		time.Sleep(20 * time.Microsecond)
	}
}

// BenchmarkTwiceTheLoad finds the peak with a window per pair, then offers twice as much at a steady pace, and
// reports what arrives. A relay that collapses under load shows here.
func BenchmarkTwiceTheLoad(b *testing.B) {
	for _, n := range []int{1, 10} {
		b.Run(fmt.Sprintf("pairs=%d", n), func(b *testing.B) {
			m := relaytest.NewMembers()
			r := relaytest.StartRelay(b, m)
			var pairs []*benchPair
			for range n {
				pairs = append(pairs, newBenchPair(b, m, r))
			}
			peak, cost := goodput(pairs, 0)
			double, cost2 := goodput(pairs, 2*peak/float64(n))
			b.ReportMetric(peak*8/1e9, "peak-Gb/s")
			b.ReportMetric(double*8/1e9, "at2x-Gb/s")
			b.ReportMetric(double/peak*100, "%ofpeak")
			// Busy neighbours change the rates above, and these hardly: both ends' work is in them.
			b.ReportMetric(peak*8/1e9/cost, "peak-Gb/cpu-s")
			b.ReportMetric(double*8/1e9/cost2, "at2x-Gb/cpu-s")
		})
	}
}

// goodput measures bytes per second over one second. pace is what each pair offers per second; 0: as much
// as its window of 256 packets lets through. cpu is how many processors that took.
func goodput(pairs []*benchPair, pace float64) (rate, cpu float64) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for _, p := range pairs {
		wg.Go(func() {
			packet := make([]byte, benchPacket)
			begin, base, sent := time.Now(), p.packets.Load(), uint64(0)
			for {
				select {
				case <-stop:
					return
				default:
				}
				allowed := p.packets.Load() - base + 256
				if pace > 0 {
					allowed = uint64(time.Since(begin).Seconds() * pace / benchPacket)
				}
				for ; sent < allowed; sent++ {
					_ = p.from.Send(p.id, wire.ChannelWireGuard, packet)
				}
				time.Sleep(100 * time.Microsecond)
			}
		})
	}
	total := func() (n uint64) {
		for _, p := range pairs {
			n += p.bytes.Load()
		}
		return n
	}
	time.Sleep(200 * time.Millisecond)
	begin, before, used := time.Now(), total(), cpuTime()
	time.Sleep(time.Second)
	seconds := time.Since(begin).Seconds()
	rate, cpu = float64(total()-before)/seconds, (cpuTime()-used).Seconds()/seconds
	close(stop)
	wg.Wait()
	return rate, cpu
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // cannot fail with these arguments
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkPlainTLS is what one TLS connection moves on this machine; a relay has two in a row.
func BenchmarkPlainTLS(b *testing.B) {
	near, far := relaytest.NewKey(b), relaytest.NewKey(b)
	config, err := far.ServerTLS([]string{identity.ALPNRelay}, func(string, ed25519.PublicKey) error { return nil })
	if err != nil {
		b.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if c, err := l.Accept(); err == nil {
			_, _ = io.Copy(io.Discard, c)
		}
	}()
	config, err = near.ClientTLS(identity.ALPNRelay, identity.Expect(far.Public()))
	if err != nil {
		b.Fatal(err)
	}
	c, err := tls.Dial("tcp", l.Addr().String(), config)
	if err != nil {
		b.Fatal(err)
	}
	record := make([]byte, 11*benchPacket)
	b.SetBytes(benchPacket)
	b.ResetTimer()
	for i := 0; i < b.N; i += 11 {
		if _, err := c.Write(record); err != nil {
			b.Fatal(err)
		}
	}
	c.Close()
	<-done
}

// BenchmarkLatency measures one way through a relay, idle and while another pair floods it.
func BenchmarkLatency(b *testing.B) {
	for _, load := range []string{"idle", "flooded"} {
		b.Run(load, func(b *testing.B) {
			m := relaytest.NewMembers()
			r := relaytest.StartRelay(b, m)
			p := newBenchPair(b, m, r)
			if load == "flooded" {
				flood := newBenchPair(b, m, r)
				stop := make(chan struct{})
				defer close(stop)
				go func() {
					packet := make([]byte, benchPacket)
					for {
						select {
						case <-stop:
							return
						default:
							_ = flood.from.Send(flood.id, wire.ChannelWireGuard, packet)
						}
					}
				}()
			}
			start, arrived := time.Now(), make(chan time.Duration, 1)
			f := func(x []byte) { arrived <- time.Since(start) - time.Duration(binary.BigEndian.Uint64(x)) }
			p.onPacket.Store(&f)
			var all []time.Duration
			b.ResetTimer()
			for range b.N {
				x := make([]byte, 100)
				binary.BigEndian.PutUint64(x, uint64(time.Since(start)))
				if err := p.from.Send(p.id, wire.ChannelWireGuard, x); err != nil {
					b.Fatal(err)
				}
				select {
				case d := <-arrived:
					all = append(all, d)
				case <-time.After(time.Second):
				}
			}
			b.StopTimer()
			slices.Sort(all)
			b.ReportMetric(float64(all[len(all)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(all[len(all)*99/100].Microseconds()), "p99-µs")
			b.ReportMetric(float64(b.N-len(all)), "lost")
		})
	}
}

// BenchmarkProxied goes the whole way of a WireGuard packet: socket, proxy, relay, proxy, socket.
func BenchmarkProxied(b *testing.B) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(b, m)
	from, to := relaytest.StartNode(b, m, r), relaytest.StartNode(b, m, r)
	wf, wt := startWireGuard(b, from, client.ProxyOptions{}), startWireGuard(b, to, client.ProxyOptions{})
	var n atomic.Uint64
	go func() {
		x := make([]byte, 65536)
		for {
			if _, _, err := wt.ReadFromUDPAddrPort(x); err != nil {
				return
			}
			n.Add(1)
		}
	}()
	c := net.UDPAddrFromAddrPort(wf.proxies.Endpoint(to.ID)).AddrPort()
	packet := make([]byte, benchPacket)
	b.SetBytes(benchPacket)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		for begin := time.Now(); uint64(i)-n.Load() > 256; {
			time.Sleep(20 * time.Microsecond)
			if time.Since(begin) > 5*time.Second {
				b.Fatalf("lost packets: %d of %d arrived", n.Load(), i)
			}
		}
		if _, err := wf.WriteToUDPAddrPort(packet, c); err != nil {
			b.Fatal(err)
		}
	}
	for begin := time.Now(); n.Load() < uint64(b.N) && time.Since(begin) < 5*time.Second; {
		time.Sleep(20 * time.Microsecond)
	}
}
