package client_test

import (
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/wire"
)

// The near relay returns a question about a peer. It is not asked again there, although packets go by it to the far
// relay.
func TestQuestionIsAskedOnce(t *testing.T) {
	m := relaytest.NewMembers()
	r1, r2, _ := relaytest.TwoInARow(t, m)
	a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.NewNode(t, m, relaytest.NewKey(t))
	a.SetRelays([]client.Relay{r1.Entry(), relaytest.Unreachable(t, r2)})
	b.SetRelays([]client.Relay{r2.Entry()})
	relaytest.WaitFor(t, "a session each", func() bool { return len(a.Links()) == 1 && len(b.Links()) == 1 })
	a.SetPeerLinks(b.ID, b.Links())
	a.Ask(b.ID)
	relaytest.WaitFor(t, "the near relay's word", func() bool { return r1.Server.Stats().Unroutable > 0 })
	for range 30 { // as long as the question might circulate
		if err := a.Send(b.ID, wire.ChannelWireGuard, []byte("there")); err != nil {
			t.Fatal(err)
		}
		b.Want(t, a.ID, wire.ChannelWireGuard, "there")
		if err := b.Send(a.ID, wire.ChannelWireGuard, []byte("and back")); err != nil {
			t.Fatal(err)
		}
		a.Want(t, b.ID, wire.ChannelWireGuard, "and back")
	}
	if n := r1.Server.Stats().Unroutable; n > 3 {
		t.Errorf("the near relay was asked %d times about a peer that it does not have", n)
	}
}

// Two nodes that share no relay which both can reach meet over two.
func TestTwoRelaysInARow(t *testing.T) {
	m := relaytest.NewMembers()
	r1, r2, _ := relaytest.TwoInARow(t, m)
	a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.NewNode(t, m, relaytest.NewKey(t))
	a.SetRelays([]client.Relay{r1.Entry(), relaytest.Unreachable(t, r2)})
	b.SetRelays([]client.Relay{relaytest.Unreachable(t, r1), r2.Entry()})
	relaytest.WaitFor(t, "a session each", func() bool { return len(a.Links()) == 1 && len(b.Links()) == 1 })
	a.SetPeerLinks(b.ID, b.Links())
	b.SetPeerLinks(a.ID, a.Links())
	for range 3 {
		if err := a.Send(b.ID, wire.ChannelWireGuard, []byte("there")); err != nil {
			t.Fatal(err)
		}
		b.Want(t, a.ID, wire.ChannelWireGuard, "there")
		if err := b.Send(a.ID, wire.ChannelSignal, []byte("and back")); err != nil {
			t.Fatal(err)
		}
		a.Want(t, b.ID, wire.ChannelSignal, "and back")
	}
	if via, _, ok := a.Choose(b.ID); !ok || via != r1.Key.ID() || a.Absent(b.ID) {
		t.Errorf("the way is told as %s, %t, absent %t; want the near relay", via, ok, a.Absent(b.ID))
	}
	// A node that is only the receiver answers by the way that the packets came.
	c := relaytest.NewNode(t, m, relaytest.NewKey(t))
	c.SetRelays([]client.Relay{r2.Entry()})
	relaytest.WaitFor(t, "its session", func() bool { return len(c.Links()) == 1 })
	a.SetPeerLinks(c.ID, c.Links())
	if err := a.Send(c.ID, wire.ChannelWireGuard, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	c.Want(t, a.ID, wire.ChannelWireGuard, "hello")
	if err := c.Send(a.ID, wire.ChannelWireGuard, []byte("hello yourself")); err != nil {
		t.Fatal(err)
	}
	a.Want(t, c.ID, wire.ChannelWireGuard, "hello yourself")
	// The peer is gone: its relay says so over both hops.
	b.Use()
	relaytest.WaitFor(t, "the end of its session", func() bool { return !r2.Server.Connected(b.ID) })
	relaytest.WaitFor(t, "the word of its absence", func() bool {
		_ = a.Send(b.ID, wire.ChannelWireGuard, []byte("?"))
		return a.Absent(b.ID)
	})
	if n := r1.Server.Stats().Packets + r2.Server.Stats().Packets; n == 0 {
		t.Error("no packet was counted")
	}
}

// A relay's statement that a node is not there reaches the origin, and goes no further. Where three relays were clients
// of each other, it circulated among them for as long as they lived.
func TestNoWayEndsAtTheOrigin(t *testing.T) {
	m := relaytest.NewMembers()
	all, pools := relaytest.InARow(t, m, 3)
	relaytest.WaitFor(t, "sessions of each relay with both others", func() bool {
		return !slices.ContainsFunc(pools, func(p *client.Pool) bool { return len(p.Links()) < 2 })
	})
	absent := relaytest.NewKey(t)
	m.Allow(absent.ID())
	told := func() (n uint64) {
		for _, r := range all {
			n += r.NoWays.Load()
		}
		return n
	}
	for i := range uint64(30) {
		relaytest.WaitFor(t, "a packet to be handed over", func() bool {
			return pools[0].Forward(all[1].Key.ID(), all[2].Key.ID(), absent.ID(), wire.ChannelSignal, []byte("?"))
		})
		relaytest.WaitFor(t, "the word to be told on", func() bool { return told() > i })
	}
	if n := told(); n != 30 {
		t.Errorf("after 30 packets the word was told on %d times", n)
	}
	if all[0].NoWays.Load() != 30 {
		t.Errorf("the relay that handed the packets over told it on %d times", all[0].NoWays.Load())
	}
}

// Gossip for a peer at another relay starts no session with that relay; a WireGuard packet does.
func TestGossipBeginsNoSession(t *testing.T) {
	m := relaytest.NewMembers()
	relays := []*relaytest.Relay{relaytest.StartRelay(t, m), relaytest.StartRelay(t, m), relaytest.StartRelay(t, m)}
	a := relaytest.NewNode(t, m, relaytest.NewKey(t))
	third := settle(t, a, relays)
	b := relaytest.StartNode(t, m, third)
	a.SetPeerLinks(b.ID, b.Links())
	for range 20 {
		_ = a.Send(b.ID, wire.ChannelGossip, []byte("news")) // lost, or over two relays
	}
	a.Plan()
	if need := needOf(a, third); need != client.NeedNone {
		t.Errorf("gossip makes a session with the peer's relay: %s", need)
	}
	arrives(t, a, b, "hello") // refused gossip may come before it: it is sent anew by the session that this begins
}

// soon is much shorter than a relay's statement, or a way back, used to count.
const soon = 15 * time.Second

// arrives sends to another node again and again until a packet arrives, and returns how long that took.
func arrives(t *testing.T, n, to *relaytest.Node, payload string) time.Duration {
	t.Helper()
	began := time.Now()
	relaytest.WaitFor(t, "a packet "+payload, func() bool {
		if err := n.Send(to.ID, wire.ChannelWireGuard, []byte(payload)); err != nil {
			t.Fatal(err)
		}
		for len(to.Packets) > 0 {
			if have := <-to.Packets; have.From == n.ID && have.Channel == wire.ChannelWireGuard && have.Payload == payload {
				return true
			}
		}
		return false
	})
	return time.Since(began)
}

// A far relay's statement that it does not have a peer is soon forgotten: the peer may come a moment later, and no
// relay reports that over two relays.
func TestRefusedWayIsTriedAgain(t *testing.T) {
	m := relaytest.NewMembers()
	r1, r2, _ := relaytest.TwoInARow(t, m)
	a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.NewNode(t, m, relaytest.NewKey(t))
	a.SetRelays([]client.Relay{r1.Entry(), relaytest.Unreachable(t, r2)})
	relaytest.WaitFor(t, "a session", func() bool { return len(a.Links()) == 1 })
	a.SetPeerLinks(b.ID, []client.Link{{r2.Key.ID(), time.Millisecond}}) // a record from before the peer's restart
	relaytest.WaitFor(t, "the far relay's word", func() bool {
		_ = a.Send(b.ID, wire.ChannelWireGuard, []byte("?"))
		return a.Absent(b.ID)
	})
	b.SetRelays([]client.Relay{relaytest.Unreachable(t, r1), r2.Entry()})
	relaytest.WaitFor(t, "the peer's session", func() bool { return r2.Server.Connected(b.ID) })
	if took := arrives(t, a, b, "welcome back"); took > soon {
		t.Errorf("the way was tried again after %s", took)
	}
}

// A relay's statement that it cannot reach another relay is soon forgotten too: the other one may just be starting.
func TestWayOverARestartedRelayIsTriedAgain(t *testing.T) {
	m := relaytest.NewMembers()
	r1, r2, pool1 := relaytest.TwoInARow(t, m)
	a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.NewNode(t, m, relaytest.NewKey(t))
	a.SetRelays([]client.Relay{r1.Entry(), relaytest.Unreachable(t, r2)})
	relaytest.WaitFor(t, "a session", func() bool { return len(a.Links()) == 1 })
	pool1.SetRelays([]client.Relay{r1.Entry()}) // the near relay has lost the far one
	a.SetPeerLinks(b.ID, []client.Link{{r2.Key.ID(), time.Millisecond}})
	refused := r1.Server.Stats().Unroutable
	relaytest.WaitFor(t, "the near relay's word", func() bool {
		_ = a.Send(b.ID, wire.ChannelWireGuard, []byte("?"))
		return a.Refused(b.ID) > 0 && r1.Server.Stats().Unroutable > refused
	})
	pool1.SetRelays([]client.Relay{r1.Entry(), r2.Entry()})
	b.SetRelays([]client.Relay{relaytest.Unreachable(t, r1), r2.Entry()})
	relaytest.WaitFor(t, "the peer's session", func() bool { return r2.Server.Connected(b.ID) })
	if took := arrives(t, a, b, "welcome back"); took > soon {
		t.Errorf("the way was tried again after %s", took)
	}
}

// The way back by which a peer's packets came is left when the peer's record says that it is elsewhere. If the record
// never listed that relay, the way is left when no more packets come by it: the relay may hold a dead session.
func TestWayBackIsLeft(t *testing.T) {
	for name, listedFirst := range map[string]bool{"the record changes": true, "the record never listed it": false} {
		t.Run(name, func(t *testing.T) {
			m := relaytest.NewMembers()
			all, _ := relaytest.InARow(t, m, 3, func(c *server.Config) {
				c.IdleTimeout = time.Minute // a dead session stays
			})
			near, old, next := all[0], all[1], all[2]
			key := relaytest.NewKey(t)
			a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.NewNode(t, m, key)
			a.SetRelays([]client.Relay{near.Entry(), relaytest.Unreachable(t, old), relaytest.Unreachable(t, next)})
			b.SetRelays([]client.Relay{relaytest.Unreachable(t, near), old.Entry(), relaytest.Unreachable(t, next)})
			relaytest.WaitFor(t, "a session each", func() bool { return len(a.Links()) == 1 && len(b.Links()) == 1 })
			at := func(r *relaytest.Relay) []client.Link { return []client.Link{{r.Key.ID(), time.Millisecond}} }
			b.SetPeerLinks(a.ID, at(near))
			if a.SetPeerLinks(b.ID, at(next)); listedFirst {
				a.SetPeerLinks(b.ID, at(old))
			}
			arrives(t, b, a, "hello")
			b.Use()
			relaytest.WaitFor(t, "the end of the peer's session", func() bool { return !old.Server.Connected(b.ID) })
			relaytest.RawSession(t, old, key, identity.ALPNRelay) // reads nothing that it gets
			b.SetRelays([]client.Relay{relaytest.Unreachable(t, near), next.Entry()})
			relaytest.WaitFor(t, "the peer's new session", func() bool { return next.Server.Connected(b.ID) })
			a.SetPeerLinks(b.ID, at(next))
			if took := arrives(t, a, b, "welcome back"); took > soon {
				t.Errorf("the way back was left after %s", took)
			}
		})
	}
}

// A record that lists a relay is newer than that relay's earlier statement, which no longer counts once its session is
// lost.
func TestRecordIsNewerThanTheWordOfALostSession(t *testing.T) {
	m := relaytest.NewMembers()
	r1, r2, _ := relaytest.TwoInARow(t, m)
	a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.NewNode(t, m, relaytest.NewKey(t))
	a.SetRelays([]client.Relay{r1.Entry(), r2.Entry()})
	relaytest.WaitFor(t, "both sessions", func() bool { return len(a.Links()) == 2 })
	for _, r := range []*relaytest.Relay{r1, r2} {
		_ = a.SendVia(r.Key.ID(), b.ID, wire.ChannelWireGuard, nil)
		relaytest.WaitFor(t, "the relay's word", func() bool { return a.ClientOf(r.Key.ID()).GoneCount() > 0 })
	}
	relaytest.WaitFor(t, "the peer's absence", func() bool { return a.Absent(b.ID) })
	cut := relaytest.StartGate(t, r2.Address)
	a.SetRelays([]client.Relay{r1.Entry(),
		{ID: r2.Key.ID(), Addresses: []string{cut.Addr().String()}, Key: r2.Key.Public()}})
	c := a.ClientOf(r2.Key.ID())
	answers := c.GoneCount()
	c.Cut()
	relaytest.WaitFor(t, "a session that can be stalled", func() bool {
		return cut.Passes() && a.Connected(r2.Key.ID())
	})
	// The new session begins with the question whether the peer is back. Its answer must not come after the record.
	relaytest.WaitFor(t, "the answer in the new session", func() bool { return c.GoneCount() > answers })
	cut.Stall(true)
	a.SetPeerLinks(b.ID, []client.Link{{r2.Key.ID(), time.Millisecond}}) // the relay is asked, and does not hear it
	b.SetRelays([]client.Relay{relaytest.Unreachable(t, r1), r2.Entry()})
	relaytest.WaitFor(t, "the peer's session", func() bool { return r2.Server.Connected(b.ID) })
	if took := arrives(t, a, b, "welcome back"); took > soon {
		t.Errorf("the way over two relays was taken after %s", took)
	}
}

// A relay that could not be reached at the last dial is dialed again when a client sends to it.
func TestForwardedPacketsHaveTheRelayDialed(t *testing.T) {
	m := relaytest.NewMembers()
	r1, r2, pool1 := relaytest.TwoInARow(t, m)
	c := pool1.ClientOf(r2.Key.ID())
	relaytest.WaitFor(t, "the session between the relays", c.HasSession)
	pool1.SetRelays([]client.Relay{r1.Entry(), relaytest.Unreachable(t, r2)})
	r2.Kill()
	relaytest.WaitFor(t, "a dial that fails", c.IsFailing)
	c.ForgetUse()
	if pool1.Forward(r2.Key.ID(), r1.Key.ID(), relaytest.NewKey(t).ID(), wire.ChannelSignal, []byte("hello")) {
		t.Error("a packet was taken for a relay that cannot be reached")
	}
	if c.NotedUse() == 0 {
		t.Error("nobody has the relay dialed again")
	}
}
