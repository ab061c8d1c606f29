package relay

import (
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

func TestBucket(t *testing.T) {
	b := bucket{rate: 1000} // a burst of 100
	for _, c := range []struct {
		at   time.Duration
		n    float64
		want time.Duration
	}{
		{time.Second, 100, 0},
		{time.Second, 50, 50 * time.Millisecond},
		{time.Second + 50*time.Millisecond, 10, 10 * time.Millisecond},
		{2 * time.Second, 100, 0}, // idle time saves up no more than a burst
		{2 * time.Second, 1, time.Millisecond},
	} {
		if d := b.take(c.at, c.n); (d - c.want).Abs() > time.Microsecond {
			t.Errorf("%.0f at %s: wait %s, want %s", c.n, c.at, d, c.want)
		}
	}
	if d := (&bucket{}).take(time.Second, 1e12); d != 0 {
		t.Errorf("no limit, and a wait of %s", d)
	}
}

func TestQuotaTakesTheStricter(t *testing.T) {
	q := quota{bucket{rate: 1e6}, bucket{rate: 100}}
	if d := q.take(time.Second, 1000, 60); d != 500*time.Millisecond {
		t.Errorf("wait %s for 50 packets too many at 100 a second", d)
	}
}

// A client over its rate is slowed and loses what its own queue cannot hold; its session stays, and others notice
// nothing.
func TestClientsRateIsLimited(t *testing.T) {
	m := newMembers()
	const rate = 128 << 10 // so little that what one read brings takes half a second
	r := startRelay(t, m, func(c *ServerConfig) { c.ClientBytes = rate })
	a, b, quiet := startNode(t, m, r), startNode(t, m, r), startNode(t, m, r)
	packet := make([]byte, 1400)
	began := time.Now()
	sent := 0
	var delays []time.Duration
	for time.Since(began) < 2*time.Second || len(delays) < 10 {
		for range 500 { // more than passes until the next time, however slow this machine is
			_ = a.Send(b.id, ChannelWireGuard, packet)
			sent += len(packet)
		}
		ping := time.Now()
		if err := quiet.Send(a.id, ChannelSignal, []byte("ping")); err != nil {
			t.Fatal(err)
		}
		a.want(t, got{quiet.id, ChannelSignal, "ping"})
		delays = append(delays, time.Since(ping))
	}
	// behind the client that waits most would take half a second; a busy machine delays one or the other
	slices.Sort(delays)
	if d := delays[len(delays)/2]; d > 250*time.Millisecond {
		t.Errorf("another client's packets took %s", delays)
	}
	s := r.server.Stats()
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
	m := newMembers()
	const limit = 6 << 20
	r := startRelay(t, m, func(c *ServerConfig) { c.MaxMemory = limit })
	a, b := startNode(t, m, r), startNode(t, m, r)
	var slow []identity.ID
	for range 20 {
		key := newKey(t)
		rawSession(t, r, key, identity.ALPNRelay) // never reads again
		slow = append(slow, key.ID())
	}
	packet := make([]byte, 1400)
	flood := func() {
		for _, id := range slow {
			for range 10 {
				_ = a.Send(id, ChannelWireGuard, packet)
			}
		}
	}
	waitFor(t, "the slow readers' queues to drop", func() bool {
		flood()
		if s := r.server.Stats(); s.Memory > limit+limit/8 {
			t.Fatalf("%d bytes are held, the limit is %d", s.Memory, limit)
		}
		return r.server.Stats().Dropped > 5000
	})
	if err := a.Send(b.id, ChannelWireGuard, []byte("past them")); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{a.id, ChannelWireGuard, "past them"})
	for range 64 { // new sessions until there is no memory for more
		key := newKey(t)
		m.allow(key.ID())
		late := newNode(t, m, key)
		late.use(r)
		refused := r.server.Stats().Refused
		waitFor(t, "a session or a refusal", func() bool {
			return late.connected(r.key.ID()) || r.server.Stats().Refused > refused
		})
		if r.server.Stats().Refused > refused {
			break
		}
	}
	if s := r.server.Stats(); s.Refused == 0 || s.Memory > limit+limit/8 {
		t.Errorf("sessions are taken without end: %+v", s)
	}
	for _, id := range slow {
		r.server.Kick(id)
	}
	r.server.Kick(a.id)
	waitFor(t, "the memory to come back", func() bool { return r.server.Stats().Memory < limit/2 })
}
