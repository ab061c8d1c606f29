package path

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// A heartbeat's answer and the tick that sends the next one: what a busy direct peer costs four times a second.
func BenchmarkStepHeartbeat(b *testing.B) {
	e := ap("203.0.113.2:2000")
	peer := node(natRestricted, cand(host, "192.168.2.2:51820"), cand(host, "10.0.0.2:51820"), cand(srflx, e.String()))
	m := NewMachine(nodeIDs[0], nodeIDs[1], simStart)
	now := simStart
	m, _ = Step(m, now, Input{Kind: InputPeer, Node: &peer})
	m, _ = Step(m, now.Add(time.Millisecond), Input{Kind: InputPong, Endpoint: e, RTT: time.Millisecond, Sent: now})
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(heartbeat)
		m, _ = Step(m, now, Input{Kind: InputTraffic})
		m, _ = Step(m, now, Input{Kind: InputTick})
		m, _ = Step(m, now.Add(time.Millisecond), Input{Kind: InputPong, Endpoint: e, RTT: time.Millisecond, Sent: now})
	}
	if m.Path.Kind != Direct {
		b.Fatal(m.Path)
	}
}

// echo answers every ping 5 ms later, on the clock that the benchmark moves.
type echo struct {
	m     *Manager
	now   time.Time
	tx    uint64
	queue []event
}

func (e *echo) SendPingSize(peer identity.ID, to netip.AddrPort, _ int) ([12]byte, error) {
	return e.SendPing(peer, to)
}

func (e *echo) SendPing(peer identity.ID, to netip.AddrPort) ([12]byte, error) {
	e.tx++
	var tx [12]byte
	binary.BigEndian.PutUint64(tx[4:], e.tx)
	e.queue = append(e.queue, event{at: e.now.Add(5 * time.Millisecond), peer: peer,
		in: Input{Kind: InputPong, Endpoint: to}, tx: tx})
	return tx, nil
}

// run turns the manager's loop by hand for a while.
func (e *echo) run(d time.Duration) {
	for end := e.now.Add(d); ; {
		e.m.drain()
		e.m.due()
		e.m.publish()
		next := end
		if len(e.m.o.timers) > 0 {
			next = earlier(next, e.m.o.timers[0].wake)
		}
		if len(e.queue) > 0 {
			next = earlier(next, e.queue[0].at)
		}
		if !next.Before(end) {
			e.now = end
			return
		}
		e.now = next
		for len(e.queue) > 0 && !e.queue[0].at.After(e.now) {
			q := e.queue[0]
			e.queue = e.queue[1:]
			e.m.PongReceived(q.peer, q.in.Endpoint, q.tx, q.at)
		}
	}
}

// fleet gives a manager n direct peers.
func fleet(n int) (*echo, []identity.ID) {
	e := &echo{now: simStart}
	ctx, stop := context.WithCancel(context.Background())
	e.m = newManager(Config{Self: identity.ID{255}, Prober: e, Log: slog.New(slog.DiscardHandler),
		Clock: func() time.Time {
			return e.now
		}}, ctx, stop)
	e.m.SetSelf(recordOf("203.0.113.1:51820"))
	ids := make([]identity.ID, n)
	for i := range ids {
		binary.BigEndian.PutUint64(ids[i][:], uint64(i+1)<<20)
		e.m.SetPeer(ids[i], recordOf(fmt.Sprintf("198.18.%d.%d:51820", i>>8, i&255)))
	}
	e.run(10 * time.Second)
	return e, ids
}

// A minute of a mesh of 1,000 direct peers, none or some of them with traffic.
func BenchmarkManagerMinute(b *testing.B) {
	for _, busy := range []int{0, 50} {
		b.Run(fmt.Sprintf("peers=1000/busy=%d", busy), func(b *testing.B) {
			e, ids := fleet(1000)
			n := uint64(0)
			b.ReportAllocs()
			for b.Loop() {
				for range 60 {
					n += 1000
					c := make(map[identity.ID]Counters, len(ids))
					for i, id := range ids {
						if c[id] = (Counters{}); i < busy {
							c[id] = Counters{RxBytes: n, TxBytes: n}
						}
					}
					e.m.Traffic(c)
					e.run(time.Second)
				}
			}
			b.ReportMetric(b.Elapsed().Seconds()/float64(b.N)/60*100, "%core")
			if d := e.m.Metrics(); d.PeersDirect != 1000 || d.Downgrades > 0 {
				b.Fatalf("%+v", d)
			}
		})
	}
}

// Idle peers cost a keepalive each, and little memory.
func TestThousandPeers(t *testing.T) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	e, _ := fleet(1000)
	sent := e.m.Metrics().PingsSent
	e.run(10 * time.Minute)
	runtime.GC()
	runtime.ReadMemStats(&after)
	perPeer := float64(e.m.Metrics().PingsSent-sent) / 1000
	size := (int64(after.HeapAlloc) - int64(before.HeapAlloc)) / 1000
	t.Logf("%.1f pings per idle peer in ten minutes, %d bytes of memory per peer", perPeer, size)
	if perPeer > 45 || size > 12<<10 {
		t.Errorf("too much for idle peers")
	}
	if d := e.m.Metrics(); d.PeersDirect != 1000 || d.Downgrades != 0 || len(e.m.o.pings) > 2000 {
		t.Errorf("%d pings outstanding, metrics %+v", len(e.m.o.pings), d)
	}
}
