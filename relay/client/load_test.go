package client_test

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/wire"
)

// loadPair is two clients of one relay; one sends full-sized packets that tell when they were sent.
type loadPair struct {
	from, to *client.Pool
	id       identity.ID
	mu       sync.Mutex
	latency  []time.Duration
	packets  atomic.Uint64
	run      atomic.Uint64 // number of the present run
	seen     atomic.Uint64 // the last packet's number in it
}

// loaded is the clients' side of a measurement.
type loaded struct {
	b     *testing.B
	relay *child
	pairs []*loadPair
	start time.Time
}

func newLoad(b *testing.B, relay *child, clients int) *loaded {
	b.Helper()
	l := &loaded{b: b, relay: relay, start: time.Now()}
	node := func(cfg client.PoolConfig) (*client.Pool, identity.ID) {
		key := relaytest.NewKey(b)
		cfg.Self, cfg.Key = key.ID(), key
		p := client.NewPool(cfg)
		b.Cleanup(func() { p.Close() })
		p.SetRelays([]client.Relay{relay.relay()})
		return p, key.ID()
	}
	for range clients / 2 {
		p := &loadPair{}
		p.from, _ = node(client.PoolConfig{})
		p.to, p.id = node(client.PoolConfig{OnPacket: func(_ identity.ID, _ byte, x []byte) {
			if len(x) != benchPacket {
				return
			}
			d := time.Since(l.start) - time.Duration(binary.BigEndian.Uint64(x))
			if binary.BigEndian.Uint64(x[16:]) == p.run.Load() { // not left from the run before
				p.seen.Store(binary.BigEndian.Uint64(x[8:]))
			}
			if n := p.packets.Add(1); n%16 == 0 {
				p.mu.Lock()
				p.latency = append(p.latency, d)
				p.mu.Unlock()
			}
		}})
		l.pairs = append(l.pairs, p)
	}
	for _, p := range l.pairs {
		for _, n := range []*client.Pool{p.from, p.to} {
			relaytest.WaitFor(b, "sessions", func() bool { return len(n.Links()) == 1 })
		}
	}
	return l
}

// outcome is one measurement.
type outcome struct {
	goodput    float64 // bits per second that arrived
	each       []float64
	p50, p99   time.Duration
	relayCPU   float64 // processors
	clientCPU  float64
	reconnects uint64
	dropped    uint64 // by the relay
}

// run offers pace bytes per second and pair; 0: as much as a window of 256 packets lets through.
func (l *loaded) run(pace []float64, seconds float64) (o outcome) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i, p := range l.pairs {
		wg.Go(func() { l.offer(p, pace[i%len(pace)], stop) })
	}
	time.Sleep(500 * time.Millisecond) // TCP's windows open
	begin, used, mine := time.Now(), l.relay.cpu(l.b), cpuTime()
	before := make([]uint64, len(l.pairs))
	for i, p := range l.pairs {
		before[i] = p.packets.Load()
		p.mu.Lock()
		p.latency = p.latency[:0]
		p.mu.Unlock()
		o.reconnects -= p.reconnects()
	}
	o.dropped = -l.relay.stats(l.b).Dropped
	time.Sleep(time.Duration(seconds * float64(time.Second)))
	took := time.Since(begin).Seconds()
	o.relayCPU = (l.relay.cpu(l.b) - used).Seconds() / took
	o.clientCPU = (cpuTime() - mine).Seconds() / took
	var all []time.Duration
	for i, p := range l.pairs {
		rate := float64(p.packets.Load()-before[i]) * benchPacket * 8 / took
		o.each = append(o.each, rate)
		o.goodput += rate
		p.mu.Lock()
		all = append(all, p.latency...)
		p.mu.Unlock()
		o.reconnects += p.reconnects()
	}
	close(stop)
	wg.Wait()
	o.dropped += l.relay.stats(l.b).Dropped
	slices.Sort(all)
	if len(all) > 0 {
		o.p50, o.p99 = all[len(all)/2], all[len(all)*99/100]
	}
	return o
}

func (p *loadPair) reconnects() uint64 {
	return p.from.Stats()[0].Reconnects + p.to.Stats()[0].Reconnects
}

// lossAfter is when a window of packets that nothing came of counts as lost.
const lossAfter = 500 * time.Millisecond

func (l *loaded) offer(p *loadPair, pace float64, stop chan struct{}) {
	packet := make([]byte, benchPacket)
	begin, sent := time.Now(), uint64(0)
	binary.BigEndian.PutUint64(packet[16:], p.run.Add(1))
	p.seen.Store(0)
	base, last, progress := uint64(0), uint64(0), begin
	for {
		select {
		case <-stop:
			return
		default:
		}
		seen := p.seen.Load()
		switch now := time.Now(); {
		case seen != last:
			last, progress = seen, now
		case now.Sub(progress) > lossAfter: // the whole window is lost: begin another
			base, progress = sent, now
		}
		allowed := max(seen, base) + 256
		if pace > 0 {
			allowed = uint64(time.Since(begin).Seconds() * pace / benchPacket)
		}
		for ; sent < allowed; sent++ {
			binary.BigEndian.PutUint64(packet, uint64(time.Since(l.start)))
			binary.BigEndian.PutUint64(packet[8:], sent+1)
			_ = p.from.Send(p.id, wire.ChannelWireGuard, packet)
		}
		time.Sleep(time.Millisecond)
	}
}

// BenchmarkLoad measures a relay in a process of its own: what it moves at most, and what it moves, how late and at
// what cost at 1x and 2x of that. The relay has a processor of its own. With starved it has 15 % of it, so that its
// clients can surely offer more than it can carry.
func BenchmarkLoad(b *testing.B) {
	for _, clients := range []int{2, 20, 100} {
		for _, starved := range []bool{false, true} {
			name := fmt.Sprintf("clients=%d", clients)
			if starved {
				name += ",starved"
			}
			b.Run(name, func(b *testing.B) {
				relay := startChild(b, "SKEIN_TEST_CPU=1")
				pinClients(b)
				if starved {
					limitCPU(b, relay.cmd.Process.Pid, 15)
					b.Cleanup(relay.kill) // before its group goes
				}
				l := newLoad(b, relay, clients)
				var all []map[string]float64
				for range b.N {
					all = append(all, measureLoad(l))
				}
				reportMiddle(b, all)
			})
		}
	}
}

// reportMiddle reports of each figure the middle of all runs.
func reportMiddle(b *testing.B, all []map[string]float64) {
	for name := range all[0] {
		var v []float64
		for _, m := range all {
			v = append(v, m[name])
		}
		slices.Sort(v)
		b.ReportMetric(v[len(v)/2], name)
	}
}

func measureLoad(l *loaded) map[string]float64 {
	m := map[string]float64{}
	report := func(name string, o outcome) outcome {
		m[name+"-Gb/s"] = o.goodput / 1e9
		m[name+"-cpu-s/Gb"] = o.relayCPU / (o.goodput / 1e9)
		m[name+"-p50-ms"] = float64(o.p50.Microseconds()) / 1000
		m[name+"-p99-ms"] = float64(o.p99.Microseconds()) / 1000
		m["reconnects"] += float64(o.reconnects)
		m[name+"-relay-cpu"], m[name+"-clients-cpu"] = o.relayCPU, o.clientCPU
		return o
	}
	peak := report("peak", l.run([]float64{0}, 1))
	pace := peak.goodput / 8 / float64(len(l.pairs))
	report("half", l.run([]float64{pace / 2}, 1))
	report("1x", l.run([]float64{pace}, 1))
	double := report("2x", l.run([]float64{2 * pace}, 1.5))
	m["2x-%ofpeak"] = double.goodput / peak.goodput * 100
	m["2x-least/most"] = slices.Min(double.each) / slices.Max(double.each)
	return m
}

// BenchmarkOthers measures what well-behaved pairs lose to a client that floods one of the receivers, and to a reader
// that has stopped while somebody sends to it.
func BenchmarkOthers(b *testing.B) {
	relay := startChild(b, "SKEIN_TEST_CPU=1")
	pinClients(b)
	l := newLoad(b, relay, 8)
	bad := newLoad(b, relay, 2).pairs[0]
	stopped := startStoppedReader(b, relay)
	var all []map[string]float64
	for range b.N {
		peak := l.run([]float64{0}, 1)
		pace := []float64{peak.goodput / 8 / float64(len(l.pairs)) / 3}
		alone := l.run(pace, 1)
		m := map[string]float64{"alone-p99-ms": alone.p99.Seconds() * 1000}
		for name, to := range map[string]identity.ID{"flood": l.pairs[0].id, "slow": stopped} {
			stop := make(chan struct{})
			var wg sync.WaitGroup
			wg.Go(func() {
				packet := make([]byte, benchPacket-1) // not counted as a pair's own
				for {
					select {
					case <-stop:
						return
					default:
					}
					for range 64 {
						_ = bad.from.Send(to, wire.ChannelWireGuard, packet)
					}
					time.Sleep(100 * time.Microsecond)
				}
			})
			o := l.run(pace, 1)
			close(stop)
			wg.Wait()
			m[name+"-cost-%"] = (1 - o.goodput/alone.goodput) * 100
			m[name+"-p99-ms"] = o.p99.Seconds() * 1000
		}
		all = append(all, m)
	}
	reportMiddle(b, all)
}

// startStoppedReader keeps a session whose client sends pings and never reads.
func startStoppedReader(b *testing.B, relay *child) identity.ID {
	b.Helper()
	key := relaytest.NewKey(b)
	config, err := key.ClientTLS(identity.ALPNRelay, identity.Expect(relay.key))
	if err != nil {
		b.Fatal(err)
	}
	stop := make(chan struct{})
	ended := make(chan struct{})
	b.Cleanup(func() { close(stop); <-ended })
	go func() {
		defer close(ended)
		for { // the relay ends sessions that are stuck for 10 s
			c, err := tls.Dial("tcp", relay.address, config)
			if err != nil {
				return
			}
			for err == nil {
				_, err = c.Write(wire.AppendToken(nil, wire.FramePing, 1))
				select {
				case <-stop:
					c.NetConn().Close()
					return
				case <-time.After(500 * time.Millisecond):
				}
			}
			c.NetConn().Close()
		}
	}()
	return key.ID()
}

// limitCPU lets a process have only a part of a processor, by a control group of version 1 or 2.
func limitCPU(b *testing.B, pid, percent int) {
	b.Helper()
	const period = 20000 // µs
	write := func(path, text string) error {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(text)
		return errors.Join(err, f.Close())
	}
	name := fmt.Sprintf("skein-bench-%d", pid)
	quota := strconv.Itoa(period * percent / 100)
	var errs []error
	for _, try := range []struct {
		root  string
		files [][2]string
	}{
		{"/sys/fs/cgroup/cpu", [][2]string{{"cpu.cfs_period_us", strconv.Itoa(period)}, {"cpu.cfs_quota_us", quota}}},
		{"/sys/fs/cgroup", [][2]string{{"cpu.max", quota + " " + strconv.Itoa(period)}}},
	} {
		dir := filepath.Join(try.root, name)
		err := os.Mkdir(dir, 0o755)
		for _, f := range try.files {
			if err == nil {
				err = write(filepath.Join(dir, f[0]), f[1])
			}
		}
		if err == nil {
			err = write(filepath.Join(dir, "cgroup.procs"), strconv.Itoa(pid))
		}
		if err == nil {
			b.Cleanup(func() { relaytest.WaitFor(b, "the group's end", func() bool { return os.Remove(dir) == nil }) })
			return
		}
		os.Remove(dir)
		errs = append(errs, err)
	}
	b.Skipf("no control group limits processor time here (root needed): %v", errs)
}
