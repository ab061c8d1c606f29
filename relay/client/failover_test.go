package client_test

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
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/wire"
)

// TestFailover runs traffic both ways through one of two relays, takes that relay away, and measures the gap.
func TestFailover(t *testing.T) {
	for _, how := range []string{"killed", "stops reading"} {
		t.Run(how, func(t *testing.T) {
			m := relaytest.NewMembers()
			relays := map[identity.ID]*relaytest.Relay{}
			gates := map[identity.ID]*relaytest.Gate{}
			var list []client.Relay
			for range 2 {
				r := relaytest.StartRelay(t, m)
				g := relaytest.StartGate(t, r.Address)
				relays[r.Key.ID()], gates[r.Key.ID()] = r, g
				list = append(list, client.Relay{ID: r.Key.ID(), Addresses: []string{g.Addr().String()}, Key: r.Key.Public()})
			}
			a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.NewNode(t, m, relaytest.NewKey(t))
			for _, n := range []*relaytest.Node{a, b} {
				n.SetRelays(list)
				relaytest.WaitFor(t, "both sessions", func() bool { return len(n.Links()) == 2 })
			}
			a.SetPeerLinks(b.ID, b.Links())
			b.SetPeerLinks(a.ID, a.Links())
			used := a.Choice(b.ID)
			relaytest.WaitFor(t, "both ends to use one relay", func() bool {
				_ = b.SendVia(used, a.ID, wire.ChannelSignal, nil)
				return b.Choice(a.ID) == used || len(a.Packets) > 0
			})

			stop := make(chan struct{})
			var wg sync.WaitGroup
			for _, way := range [][2]*relaytest.Node{{a, b}, {b, a}} {
				wg.Go(func() {
					tick := time.NewTicker(5 * time.Millisecond)
					defer tick.Stop()
					for i := uint64(0); ; i++ {
						select {
						case <-stop:
							return
						case <-tick.C:
							_ = way[0].Send(way[1].ID, wire.ChannelWireGuard, binary.BigEndian.AppendUint64(nil, i))
						}
					}
				})
			}
			defer func() { close(stop); wg.Wait() }()
			for _, n := range []*relaytest.Node{a, b} {
				for range 20 {
					<-n.Packets
				}
			}
			if how == "killed" {
				gates[used].Close()
				relays[used].Kill()
			} else {
				gates[used].Stall(true)
			}
			lost := time.Now()
			var gaps sync.WaitGroup
			for _, n := range []*relaytest.Node{a, b} {
				gaps.Go(func() { gap(t, n, lost) })
			}
			gaps.Wait()
			if now := a.Choice(b.ID); now == used {
				t.Errorf("still uses relay %s", now)
			}
		})
	}
}

// gap checks that packets come again within two seconds and go on coming.
func gap(t *testing.T, n *relaytest.Node, lost time.Time) {
	t.Helper()
	longest, last := time.Duration(0), lost
	for time.Since(lost) < 2500*time.Millisecond {
		select {
		case <-n.Packets:
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
	m := relaytest.NewMembers()
	r1, r2, r3 := relaytest.StartRelay(t, m), relaytest.StartRelay(t, m), relaytest.StartRelay(t, m)
	a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.StartNode(t, m, r2)
	a.Use(r1, r2, r3) // a session with two of them is all that it keeps
	relaytest.WaitFor(t, "two sessions", func() bool { return len(a.Links()) == 2 })
	if err := a.Send(b.ID, wire.ChannelWireGuard, []byte("first")); err != nil {
		t.Fatal(err)
	}
	b.Want(t, a.ID, wire.ChannelWireGuard, "first")
	relaytest.WaitFor(t, "the choice of the relay where the peer is", func() bool {
		return a.Choice(b.ID) == r2.Key.ID()
	})
	// The peer moves. What the old relay refuses comes by the new one.
	b.Use(r3)
	relaytest.WaitFor(t, "the peer's new session", func() bool {
		return b.Connected(r3.Key.ID()) && !r2.Server.Connected(b.ID)
	})
	if err := a.Send(b.ID, wire.ChannelWireGuard, []byte("second")); err != nil {
		t.Fatal(err)
	}
	b.Want(t, a.ID, wire.ChannelWireGuard, "second")
	c, err := a.Dial(t.Context(), b.ID)
	if err != nil {
		t.Fatalf("a stream finds the relay too: %v", err)
	}
	c.Close()
}

// TestGivenUpSessionIsReadToItsEnd gives up a session while packets that were sent by it are on their way. The relay
// refuses them, and they must go by another relay.
func TestGivenUpSessionIsReadToItsEnd(t *testing.T) {
	m := relaytest.NewMembers()
	r1, r2 := relaytest.StartRelay(t, m), relaytest.StartRelay(t, m)
	g := relaytest.StartGate(t, r2.Address)
	behind := r2.Entry()
	behind.Addresses = []string{g.Addr().String()}
	a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.StartNode(t, m, r1)
	a.SetRelays([]client.Relay{r1.Entry(), behind})
	relaytest.WaitFor(t, "two sessions", func() bool { return len(a.Links()) == 2 })
	c := a.ClientOf(r2.Key.ID())
	relaytest.WaitFor(t, "the session with the second relay", func() bool { return a.Connected(r2.Key.ID()) })
	g.Stall(true)
	if err := a.SendVia(r2.Key.ID(), b.ID, wire.ChannelWireGuard, []byte("under way")); err != nil {
		t.Fatal(err)
	}
	relaytest.WaitFor(t, "the packet's leaving", func() bool { return c.SentPackets() > 0 })
	c.StandBy()
	if a.Connected(r2.Key.ID()) {
		t.Error("the session counts though it is given up")
	}
	if err := a.SendVia(r2.Key.ID(), b.ID, wire.ChannelWireGuard, []byte("late")); err == nil {
		t.Error("a session that is given up took a packet")
	}
	g.Stall(false)
	b.Want(t, a.ID, wire.ChannelWireGuard, "under way")
	if e := c.LastError(); e != "" {
		t.Errorf("the relay counts as failed: %s", e)
	}
}

// TestASessionThatJustCarriedIsKept makes a plan right after a packet, before watch has noticed that the session is
// used.
func TestASessionThatJustCarriedIsKept(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	c := a.ClientOf(r.Key.ID())
	if err := a.Send(b.ID, wire.ChannelGossip, []byte("gossip")); err != nil {
		t.Fatal(err)
	}
	b.Want(t, a.ID, wire.ChannelGossip, "gossip")
	if used := c.LastUse(); used != 0 {
		t.Errorf("gossip counts as use, at %s", used)
	}
	before := a.Now()
	if err := a.Send(b.ID, wire.ChannelWireGuard, []byte("data")); err != nil {
		t.Fatal(err)
	}
	if used := c.LastUse(); used < before {
		t.Errorf("the session was last used at %s, want after %s", used, before)
	}
}

func TestDeadAddressDelaysLittle(t *testing.T) {
	m := relaytest.NewMembers()
	r, wrong := relaytest.StartRelay(t, m), relaytest.StartRelay(t, m)
	mute, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and never sends anything
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	n := relaytest.NewNode(t, m, relaytest.NewKey(t))
	began := time.Now()
	n.SetRelays([]client.Relay{{ID: r.Key.ID(), Key: r.Key.Public(),
		Addresses: []string{closed.Addr().String(), mute.Addr().String(), wrong.Address, r.Address}}})
	relaytest.WaitFor(t, "the session", func() bool { return n.Connected(r.Key.ID()) })
	if d := time.Since(began); d > 2*time.Second {
		t.Errorf("took %s past a closed, a mute and a wrong address", d)
	}
}

// A stream through a relay that has gone silent ends with the session, at both ends, so that its user dials another
// way.
func TestStreamsEndWithTheirRelay(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	g := relaytest.StartGate(t, r.Address)
	a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.NewNode(t, m, relaytest.NewKey(t))
	for _, n := range []*relaytest.Node{a, b} {
		n.SetRelays([]client.Relay{{ID: r.Key.ID(), Addresses: []string{g.Addr().String()}, Key: r.Key.Public()}})
		relaytest.WaitFor(t, "the session", func() bool { return len(n.Links()) == 1 })
	}
	ca, err := a.Dial(t.Context(), b.ID)
	if err != nil {
		t.Fatal(err)
	}
	cb := <-b.Streams
	if _, err := ca.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(cb, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	g.Stall(true)
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
