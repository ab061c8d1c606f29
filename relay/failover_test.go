package relay

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// gate stands before a relay and can stop moving bytes while its connections stay open, as a relay does that
// hangs or whose network eats packets.
type gate struct {
	net.Listener
	mu      sync.Mutex
	open    *sync.Cond
	stalled bool
	conns   []net.Conn
}

func startGate(t testing.TB, to string) *gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{Listener: l}
	g.open = sync.NewCond(&g.mu)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", to)
			if err != nil {
				c.Close()
				continue
			}
			g.mu.Lock()
			g.conns = append(g.conns, c, up)
			g.mu.Unlock()
			go g.copy(c, up)
			go g.copy(up, c)
		}
	}()
	t.Cleanup(func() {
		l.Close()
		g.stall(false)
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, c := range g.conns {
			c.Close()
		}
	})
	return g
}

func (g *gate) stall(on bool) {
	g.mu.Lock()
	g.stalled = on
	g.mu.Unlock()
	g.open.Broadcast()
}

func (g *gate) copy(to, from net.Conn) {
	defer to.Close()
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		g.mu.Lock()
		for g.stalled {
			g.open.Wait()
		}
		g.mu.Unlock()
		if n > 0 {
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (n *testNode) choice(peer identity.ID) identity.ID {
	id, _, _ := n.Choose(peer)
	return id
}

// TestFailover runs traffic both ways through one of two relays, takes that relay away, and measures the gap.
func TestFailover(t *testing.T) {
	for _, how := range []string{"killed", "stops reading"} {
		t.Run(how, func(t *testing.T) {
			m := newMembers()
			relays := map[identity.ID]*testRelay{}
			gates := map[identity.ID]*gate{}
			var list []Relay
			for range 2 {
				r := startRelay(t, m)
				g := startGate(t, r.address)
				relays[r.key.ID()], gates[r.key.ID()] = r, g
				list = append(list, Relay{ID: r.key.ID(), Addresses: []string{g.Addr().String()}, Key: r.key.Public()})
			}
			a, b := newNode(t, m, newKey(t)), newNode(t, m, newKey(t))
			for _, n := range []*testNode{a, b} {
				n.SetRelays(list)
				waitFor(t, "both sessions", func() bool { return len(n.Links()) == 2 })
			}
			a.SetPeerLinks(b.id, b.Links())
			b.SetPeerLinks(a.id, a.Links())
			used := a.choice(b.id)
			waitFor(t, "both ends to use one relay", func() bool {
				_ = b.SendVia(used, a.id, ChannelSignal, nil)
				return b.choice(a.id) == used || len(a.packets) > 0
			})

			stop := make(chan struct{})
			var wg sync.WaitGroup
			for _, way := range [][2]*testNode{{a, b}, {b, a}} {
				wg.Go(func() {
					tick := time.NewTicker(5 * time.Millisecond)
					defer tick.Stop()
					for i := uint64(0); ; i++ {
						select {
						case <-stop:
							return
						case <-tick.C:
							_ = way[0].Send(way[1].id, ChannelWireGuard, binary.BigEndian.AppendUint64(nil, i))
						}
					}
				})
			}
			defer func() { close(stop); wg.Wait() }()
			for _, n := range []*testNode{a, b} {
				for range 20 {
					<-n.packets
				}
			}
			if how == "killed" {
				gates[used].Close()
				relays[used].kill()
			} else {
				gates[used].stall(true)
			}
			lost := time.Now()
			var gaps sync.WaitGroup
			for _, n := range []*testNode{a, b} {
				gaps.Go(func() { gap(t, n, lost) })
			}
			gaps.Wait()
			if now := a.choice(b.id); now == used {
				t.Errorf("still uses relay %s", now)
			}
		})
	}
}

// gap checks that packets come again within two seconds and go on coming.
func gap(t *testing.T, n *testNode, lost time.Time) {
	t.Helper()
	longest, last := time.Duration(0), lost
	for time.Since(lost) < 2500*time.Millisecond {
		select {
		case <-n.packets:
		case <-time.After(3 * time.Second):
		}
		longest = max(longest, time.Since(last))
		last = time.Now()
	}
	t.Logf("longest gap %s", longest.Round(time.Millisecond))
	if longest > 2*time.Second {
		t.Errorf("packets stayed away for %s, want at most 2 s", longest)
	}
}

func TestFirstPacketFindsThePeersRelay(t *testing.T) {
	m := newMembers()
	r1, r2, r3 := startRelay(t, m), startRelay(t, m), startRelay(t, m)
	a, b := newNode(t, m, newKey(t)), startNode(t, m, r2)
	a.use(r1, r2, r3) // a session with two of them is all that it keeps
	waitFor(t, "two sessions", func() bool { return len(a.Links()) == 2 })
	if err := a.Send(b.id, ChannelWireGuard, []byte("first")); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{a.id, ChannelWireGuard, "first"})
	waitFor(t, "the choice of the relay where the peer is", func() bool { return a.choice(b.id) == r2.key.ID() })
	// The peer moves. What the old relay refuses comes by the new one.
	b.use(r3)
	waitFor(t, "the peer's new session", func() bool { return b.connected(r3.key.ID()) && !r2.server.Connected(b.id) })
	if err := a.Send(b.id, ChannelWireGuard, []byte("second")); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{a.id, ChannelWireGuard, "second"})
	c, err := a.Dial(t.Context(), b.id)
	if err != nil {
		t.Fatalf("a stream finds the relay too: %v", err)
	}
	c.Close()
}

// TestGivenUpSessionIsReadToItsEnd gives a session up while what was sent by it is under way. The relay refuses that,
// and it must go by another relay.
func TestGivenUpSessionIsReadToItsEnd(t *testing.T) {
	m := newMembers()
	r1, r2 := startRelay(t, m), startRelay(t, m)
	g := startGate(t, r2.address)
	behind := r2.relay()
	behind.Addresses = []string{g.Addr().String()}
	a, b := newNode(t, m, newKey(t)), startNode(t, m, r1)
	a.SetRelays([]Relay{r1.relay(), behind})
	waitFor(t, "two sessions", func() bool { return len(a.Links()) == 2 })
	c := a.client(r2.key.ID())
	waitFor(t, "the session with the second relay", func() bool { return a.connected(r2.key.ID()) })
	g.stall(true)
	if err := a.SendVia(r2.key.ID(), b.id, ChannelWireGuard, []byte("under way")); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the packet's leaving", func() bool { return c.queue().sent.Load() > 0 })
	c.setNeed(needNone)
	if a.connected(r2.key.ID()) {
		t.Error("the session counts though it is given up")
	}
	if err := a.SendVia(r2.key.ID(), b.id, ChannelWireGuard, []byte("late")); err == nil {
		t.Error("a session that is given up took a packet")
	}
	g.stall(false)
	b.want(t, got{a.id, ChannelWireGuard, "under way"})
	if s := c.stats(); s.LastError != "" {
		t.Errorf("the relay counts as failed: %s", s.LastError)
	}
}

// TestASessionThatJustCarriedIsKept asks for a plan right after a packet, before the session's own look at its use.
func TestASessionThatJustCarriedIsKept(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	c := a.client(r.key.ID())
	if err := a.Send(b.id, ChannelGossip, []byte("gossip")); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{a.id, ChannelGossip, "gossip"})
	if s := c.standing(false); s.used != 0 {
		t.Errorf("gossip counts as use, at %s", s.used)
	}
	before := a.now()
	if err := a.Send(b.id, ChannelWireGuard, []byte("data")); err != nil {
		t.Fatal(err)
	}
	if s := c.standing(false); s.used < before {
		t.Errorf("the session was last used at %s, want after %s", s.used, before)
	}
}

// TestPendingQueueLosesNothingToAReleaseThatCameTooEarly is of a packet that finds no session, while one begins before
// it is kept.
func TestPendingQueueLosesNothingToAReleaseThatCameTooEarly(t *testing.T) {
	var q pendingQueue
	w := waiting{payload: []byte("first")}
	tried := q.released()
	if all := q.take(0); len(all) != 0 {
		t.Fatalf("an empty queue releases %d packets", len(all))
	}
	if q.keep(0, w, tried) {
		t.Error("kept a packet whose release has been")
	}
	if !q.keep(0, w, q.released()) {
		t.Error("did not keep a packet that nothing carries")
	}
	if all := q.take(0); len(all) != 1 {
		t.Errorf("released %d packets, want the one that was kept", len(all))
	}
}

func TestDeadAddressDelaysLittle(t *testing.T) {
	m := newMembers()
	r, wrong := startRelay(t, m), startRelay(t, m)
	mute, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and never says a word
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	n := newNode(t, m, newKey(t))
	began := time.Now()
	n.SetRelays([]Relay{{ID: r.key.ID(), Addresses: []string{closed.Addr().String(), mute.Addr().String(), wrong.address,
		r.address}, Key: r.key.Public()}})
	waitFor(t, "the session", func() bool { return n.connected(r.key.ID()) })
	if d := time.Since(began); d > 2*time.Second {
		t.Errorf("took %s past a closed, a mute and a wrong address", d)
	}
}

func TestSlowReaderCostsOthersNothing(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m, func(c *ServerConfig) { c.IdleTimeout = 2 * time.Second })
	slowKey := newKey(t)
	slow := rawSession(t, r, slowKey, identity.ALPNRelay) // never reads again
	a, b := startNode(t, m, r), startNode(t, m, r)
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
				_, _ = slow.Write(appendToken(nil, framePing, 1))
			}
		}
	})
	defer func() { close(stop); wg.Wait() }()
	big := make([]byte, 1400)
	worst := time.Duration(0)
	for i := range 200 {
		for range 200 {
			_ = a.Send(slowKey.ID(), ChannelWireGuard, big)
		}
		began := time.Now()
		if err := a.Send(b.id, ChannelWireGuard, binary.BigEndian.AppendUint64(nil, uint64(i))); err != nil {
			t.Fatal(err)
		}
		b.want(t, got{a.id, ChannelWireGuard, string(binary.BigEndian.AppendUint64(nil, uint64(i)))})
		worst = max(worst, time.Since(began))
		if s := r.server.session(slowKey.ID()); s != nil {
			s.q.mu.Lock()
			if l := s.q.lanes[laneBulk]; l.bytes > l.maxBytes || l.packets > l.maxCount {
				t.Errorf("%d packets, %d bytes wait for a slow reader", l.packets, l.bytes)
			}
			s.q.mu.Unlock()
		}
	}
	if worst > 500*time.Millisecond {
		t.Errorf("a packet past the slow reader took %s", worst)
	}
	waitFor(t, "the slow reader's end", func() bool { return !r.server.Connected(slowKey.ID()) })
	if _, err := io.Copy(io.Discard, slow); err == nil {
		t.Log("the slow reader saw a clean end")
	}
}

// TestFloodCostsOthersLittle floods the same destination that another node talks to.
func TestFloodCostsOthersLittle(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b, flooder := startNode(t, m, r), newNode(t, m, newKey(t)), startNode(t, m, r)
	arrived := make(chan struct{}, 1)
	b.cfg.OnPacket = func(from identity.ID, _ byte, _ []byte) {
		if from == a.id {
			arrived <- struct{}{}
		}
	}
	b.use(r)
	waitFor(t, "session", func() bool { return b.connected(r.key.ID()) })
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		big := make([]byte, 1400)
		for {
			select {
			case <-stop:
				return
			default:
				_ = flooder.Send(b.id, ChannelWireGuard, big)
			}
		}
	})
	defer func() { close(stop); wg.Wait() }()
	waitFor(t, "the flood", func() bool { return r.server.Stats().Packets > 10000 })
	worst := time.Duration(0)
	for i := range 200 {
		began := time.Now()
		if err := a.Send(b.id, ChannelWireGuard, []byte("ping")); err != nil {
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
	if !b.connected(r.key.ID()) || !a.connected(r.key.ID()) {
		t.Error("a session became suspect under the flood: control frames starve")
	}
}

// A stream through a relay that has gone silent ends with the session, on both sides: whoever waits for it dials
// another way.
func TestStreamsEndWithTheirRelay(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	g := startGate(t, r.address)
	a, b := newNode(t, m, newKey(t)), newNode(t, m, newKey(t))
	for _, n := range []*testNode{a, b} {
		n.SetRelays([]Relay{{ID: r.key.ID(), Addresses: []string{g.Addr().String()}, Key: r.key.Public()}})
		waitFor(t, "the session", func() bool { return len(n.Links()) == 1 })
	}
	ca, err := a.Dial(t.Context(), b.id)
	if err != nil {
		t.Fatal(err)
	}
	cb := <-b.streams
	if _, err := ca.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(cb, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	g.stall(true)
	began := time.Now()
	for _, c := range []net.Conn{ca, cb} {
		_ = c.SetReadDeadline(began.Add(10 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		c.Close()
	}
	t.Logf("ended after %s", time.Since(began).Round(time.Millisecond))
}
