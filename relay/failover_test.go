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
	c := a.ClientOf(r2.key.ID())
	waitFor(t, "the session with the second relay", func() bool { return a.connected(r2.key.ID()) })
	g.stall(true)
	if err := a.SendVia(r2.key.ID(), b.id, ChannelWireGuard, []byte("under way")); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the packet's leaving", func() bool { return c.SentPackets() > 0 })
	c.StandBy()
	if a.connected(r2.key.ID()) {
		t.Error("the session counts though it is given up")
	}
	if err := a.SendVia(r2.key.ID(), b.id, ChannelWireGuard, []byte("late")); err == nil {
		t.Error("a session that is given up took a packet")
	}
	g.stall(false)
	b.want(t, got{a.id, ChannelWireGuard, "under way"})
	if e := c.LastError(); e != "" {
		t.Errorf("the relay counts as failed: %s", e)
	}
}

// TestASessionThatJustCarriedIsKept asks for a plan right after a packet, before the session's own look at its use.
func TestASessionThatJustCarriedIsKept(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	c := a.ClientOf(r.key.ID())
	if err := a.Send(b.id, ChannelGossip, []byte("gossip")); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{a.id, ChannelGossip, "gossip"})
	if used := c.LastUse(); used != 0 {
		t.Errorf("gossip counts as use, at %s", used)
	}
	before := a.Now()
	if err := a.Send(b.id, ChannelWireGuard, []byte("data")); err != nil {
		t.Fatal(err)
	}
	if used := c.LastUse(); used < before {
		t.Errorf("the session was last used at %s, want after %s", used, before)
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
