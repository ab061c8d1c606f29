package server_test

import (
	"encoding/binary"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/wire"
)

func TestSlowReaderCostsOthersNothing(t *testing.T) {
	m := relaytest.NewMembers()
	const (
		queuePackets, queueBytes = 1024, 2 << 20 // the defaults
		pongs                    = 4 << 10       // they wait, too
	)
	r := relaytest.StartRelay(t, m, func(c *server.Config) { c.IdleTimeout = 2 * time.Second })
	slowKey := relaytest.NewKey(t)
	slow := relaytest.RawSession(t, r, slowKey, identity.ALPNRelay) // never reads again
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				_, _ = slow.Write(wire.AppendToken(nil, wire.FramePing, 1))
			}
		}
	})
	defer func() { close(stop); wg.Wait() }()
	big := make([]byte, 1400)
	worst := time.Duration(0)
	for i := range 200 {
		for range 200 {
			_ = a.Send(slowKey.ID(), wire.ChannelWireGuard, big)
		}
		began := time.Now()
		if err := a.Send(b.ID, wire.ChannelWireGuard, binary.BigEndian.AppendUint64(nil, uint64(i))); err != nil {
			t.Fatal(err)
		}
		b.Want(t, a.ID, wire.ChannelWireGuard, string(binary.BigEndian.AppendUint64(nil, uint64(i))))
		worst = max(worst, time.Since(began))
		for _, c := range r.Server.Clients() {
			if c.ID == slowKey.ID() && (c.Packets > queuePackets || c.QueueBytes > queueBytes+pongs) {
				t.Errorf("%d packets, %d bytes wait for a slow reader", c.Packets, c.QueueBytes)
			}
		}
	}
	if worst > 500*time.Millisecond {
		t.Errorf("a packet past the slow reader took %s", worst)
	}
	relaytest.WaitFor(t, "the slow reader's end", func() bool { return !r.Server.Connected(slowKey.ID()) })
	if _, err := io.Copy(io.Discard, slow); err == nil {
		t.Log("the slow reader saw a clean end")
	}
}

// TestFloodCostsOthersLittle floods the same destination that another node talks to.
func TestFloodCostsOthersLittle(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a, flooder := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	arrived := make(chan struct{}, 1)
	b := relaytest.NewNode(t, m, relaytest.NewKey(t), func(c *client.PoolConfig) {
		c.OnPacket = func(from identity.ID, _ byte, _ []byte) {
			if from == a.ID {
				arrived <- struct{}{}
			}
		}
	})
	b.Use(r)
	relaytest.WaitFor(t, "session", func() bool { return b.Connected(r.Key.ID()) })
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		big := make([]byte, 1400)
		for {
			select {
			case <-stop:
				return
			default:
				_ = flooder.Send(b.ID, wire.ChannelWireGuard, big)
			}
		}
	})
	defer func() { close(stop); wg.Wait() }()
	relaytest.WaitFor(t, "the flood", func() bool { return r.Server.Stats().Packets > 10000 })
	worst := time.Duration(0)
	for i := range 200 {
		began := time.Now()
		if err := a.Send(b.ID, wire.ChannelWireGuard, []byte("ping")); err != nil {
			t.Fatal(err)
		}
		select {
		case <-arrived:
			worst = max(worst, time.Since(began))
		case <-time.After(2 * time.Second):
			t.Fatalf("packet %d lost in the flood", i)
		}
	}
	t.Logf("worst latency under the flood %s", worst)
	if !b.Connected(r.Key.ID()) || !a.Connected(r.Key.ID()) {
		t.Error("a session became suspect under the flood: control frames starve")
	}
}

// A client over its rate is slowed and loses what its own queue cannot hold; its session stays, and others notice
// nothing.
func TestClientsRateIsLimited(t *testing.T) {
	m := relaytest.NewMembers()
	const rate = 128 << 10 // so little that what one read brings takes half a second
	r := relaytest.StartRelay(t, m, func(c *server.Config) { c.ClientBytes = rate })
	a, b, quiet := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	packet := make([]byte, 1400)
	began := time.Now()
	sent := 0
	var delays []time.Duration
	for time.Since(began) < 2*time.Second || len(delays) < 10 {
		for range 500 { // more than passes until the next time, however slow this machine is
			_ = a.Send(b.ID, wire.ChannelWireGuard, packet)
			sent += len(packet)
		}
		ping := time.Now()
		if err := quiet.Send(a.ID, wire.ChannelSignal, []byte("ping")); err != nil {
			t.Fatal(err)
		}
		a.Want(t, quiet.ID, wire.ChannelSignal, "ping")
		delays = append(delays, time.Since(ping))
	}
	// behind the client that waits most would take half a second; a busy machine delays one or the other
	slices.Sort(delays)
	if d := delays[len(delays)/2]; d > 250*time.Millisecond {
		t.Errorf("another client's packets took %s", delays)
	}
	s := r.Server.Stats()
	took := time.Since(began).Seconds() // after the count: no byte of it is younger
	passed := float64(s.Bytes) - float64(len(delays)*len("ping"))
	// the bucket's tenth of a second, and what one read brings
	if most := rate * (took + 0.3); passed > most || passed < rate/4 {
		t.Errorf("%.0f bytes passed of %d sent in %.1f s, limit %d a second", passed, sent, took, rate)
	}
	if sent < 3*rate || s.Limited == 0 {
		t.Fatalf("only %d bytes were sent, %d waits: no test of a limit", sent, s.Limited)
	}
	if x := a.Stats()[0]; x.Reconnects > 0 {
		t.Errorf("the session was lost: %+v", x)
	}
}

// Slow readers together hold no more than the memory that the relay may use, and one who comes later finds some.
func TestMemoryIsBounded(t *testing.T) {
	m := relaytest.NewMembers()
	const limit = 6 << 20
	r := relaytest.StartRelay(t, m, func(c *server.Config) { c.MaxMemory = limit })
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	var slow []identity.ID
	for range 20 {
		key := relaytest.NewKey(t)
		relaytest.RawSession(t, r, key, identity.ALPNRelay) // never reads again
		slow = append(slow, key.ID())
	}
	packet := make([]byte, 1400)
	flood := func() {
		for _, id := range slow {
			for range 10 {
				_ = a.Send(id, wire.ChannelWireGuard, packet)
			}
		}
	}
	relaytest.WaitFor(t, "the slow readers' queues to drop", func() bool {
		flood()
		if s := r.Server.Stats(); s.Memory > limit+limit/8 {
			t.Fatalf("%d bytes are held, the limit is %d", s.Memory, limit)
		}
		return r.Server.Stats().Dropped > 5000
	})
	if err := a.Send(b.ID, wire.ChannelWireGuard, []byte("past them")); err != nil {
		t.Fatal(err)
	}
	b.Want(t, a.ID, wire.ChannelWireGuard, "past them")
	for range 64 { // new sessions until there is no memory for more
		key := relaytest.NewKey(t)
		m.Allow(key.ID())
		late := relaytest.NewNode(t, m, key)
		late.Use(r)
		refused := r.Server.Stats().Refused
		relaytest.WaitFor(t, "a session or a refusal", func() bool {
			return late.Connected(r.Key.ID()) || r.Server.Stats().Refused > refused
		})
		if r.Server.Stats().Refused > refused {
			break
		}
	}
	if s := r.Server.Stats(); s.Refused == 0 || s.Memory > limit+limit/8 {
		t.Errorf("sessions are taken without end: %+v", s)
	}
	for _, id := range slow {
		r.Server.Kick(id)
	}
	r.Server.Kick(a.ID)
	relaytest.WaitFor(t, "the memory to come back", func() bool { return r.Server.Stats().Memory < limit/2 })
}
