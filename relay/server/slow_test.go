package server_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/wire"
)

// deadAfter is how long a pool hears nothing from a relay before it dials anew.
const deadAfter = 3 * time.Second

// A client that reads slowly keeps its session: what is too much for it waits and is dropped at the relay, and not in
// the kernel's buffers, where the answers to its pings would queue for seconds.
func TestSlowClientKeepsItsSession(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	flooder := relaytest.StartNode(t, m, r)
	var packets atomic.Uint64
	slow := relaytest.NewNode(t, m, relaytest.NewKey(t), func(c *client.PoolConfig) {
		c.OnPacket = func(identity.ID, byte, []byte) {
			// Fast at first, so that the kernel makes the receive buffer large; then the slowness itself.
			if packets.Add(1) > 100_000 {
				time.Sleep(time.Millisecond)
			}
		}
	})
	slow.Use(r)
	relaytest.WaitFor(t, "session", func() bool { return slow.Connected(r.Key.ID()) })
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		packet := make([]byte, 1400)
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			burst := 20 // 28 MB/s for a reader of 1.4 MB/s
			if packets.Load() < 100_000 {
				burst = 500
			}
			for range burst {
				_ = flooder.Send(slow.ID, wire.ChannelWireGuard, packet)
			}
		}
	})
	defer func() { close(stop); wg.Wait() }()
	relaytest.WaitFor(t, "the fast packets", func() bool { return packets.Load() > 100_000 })
	// What was under way when the reader became slow delays answers for seconds.
	for began := time.Now(); time.Since(began) < 2*deadAfter; {
		relaytest.WaitFor(t, "a change", func() bool {
			return len(slow.Changed()) > 0 || time.Since(began) > 2*deadAfter
		})
		select {
		case <-slow.Changed():
		default:
		}
		if s := slow.Stats()[0]; s.Reconnects > 0 {
			t.Fatalf("the session was lost %s after its reader became slow: %+v", time.Since(began), s)
		}
	}
	if !r.Server.IsLimitedBy(slow.ID) {
		t.Error("the slow reader grants its relay everything")
	}
	if d := r.Server.Stats().Dropped; d == 0 {
		t.Error("the relay dropped nothing: the flood was not a flood")
	}
}
