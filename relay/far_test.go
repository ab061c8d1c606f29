package relay

import (
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// A question that the near relay hands back is not asked there again because packets go on by it to the far one.
func TestQuestionIsAskedOnce(t *testing.T) {
	m := newMembers()
	r1, r2, _ := farRelays(t, m)
	a, b := newNode(t, m, newKey(t)), newNode(t, m, newKey(t))
	a.SetRelays([]Relay{r1.relay(), unreachable(t, r2)})
	b.SetRelays([]Relay{r2.relay()})
	waitFor(t, "a session each", func() bool { return len(a.Links()) == 1 && len(b.Links()) == 1 })
	a.SetPeerLinks(b.id, b.Links())
	a.Ask(b.id)
	waitFor(t, "the near relay's word", func() bool { return r1.server.Stats().Unroutable > 0 })
	for range 30 { // as long as the question might go round
		if err := a.Send(b.id, ChannelWireGuard, []byte("there")); err != nil {
			t.Fatal(err)
		}
		b.want(t, got{a.id, ChannelWireGuard, "there"})
		if err := b.Send(a.id, ChannelWireGuard, []byte("and back")); err != nil {
			t.Fatal(err)
		}
		a.want(t, got{b.id, ChannelWireGuard, "and back"})
	}
	if n := r1.server.Stats().Unroutable; n > 3 {
		t.Errorf("the near relay was asked %d times about a peer that it does not have", n)
	}
}

// Two nodes that share no relay which both can reach meet over two.
func TestTwoRelaysInARow(t *testing.T) {
	m := newMembers()
	r1, r2, _ := farRelays(t, m)
	a, b := newNode(t, m, newKey(t)), newNode(t, m, newKey(t))
	a.SetRelays([]Relay{r1.relay(), unreachable(t, r2)})
	b.SetRelays([]Relay{unreachable(t, r1), r2.relay()})
	waitFor(t, "a session each", func() bool { return len(a.Links()) == 1 && len(b.Links()) == 1 })
	a.SetPeerLinks(b.id, b.Links())
	b.SetPeerLinks(a.id, a.Links())
	for range 3 {
		if err := a.Send(b.id, ChannelWireGuard, []byte("there")); err != nil {
			t.Fatal(err)
		}
		b.want(t, got{a.id, ChannelWireGuard, "there"})
		if err := b.Send(a.id, ChannelSignal, []byte("and back")); err != nil {
			t.Fatal(err)
		}
		a.want(t, got{b.id, ChannelSignal, "and back"})
	}
	if via, _, ok := a.Choose(b.id); !ok || via != r1.key.ID() || a.Absent(b.id) {
		t.Errorf("the way is told as %s, %t, absent %t; want the near relay", via, ok, a.Absent(b.id))
	}
	// One who only hears of the other answers by the way that the packets came.
	c := newNode(t, m, newKey(t))
	c.SetRelays([]Relay{r2.relay()})
	waitFor(t, "its session", func() bool { return len(c.Links()) == 1 })
	a.SetPeerLinks(c.id, c.Links())
	if err := a.Send(c.id, ChannelWireGuard, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	c.want(t, got{a.id, ChannelWireGuard, "hello"})
	if err := c.Send(a.id, ChannelWireGuard, []byte("hello yourself")); err != nil {
		t.Fatal(err)
	}
	a.want(t, got{c.id, ChannelWireGuard, "hello yourself"})
	// The peer is gone: its relay says so over both hops.
	b.use()
	waitFor(t, "the end of its session", func() bool { return !r2.server.Connected(b.id) })
	waitFor(t, "the word of its absence", func() bool {
		_ = a.Send(b.id, ChannelWireGuard, []byte("?"))
		return a.Absent(b.id)
	})
	if n := r1.server.Stats().Packets + r2.server.Stats().Packets; n == 0 {
		t.Error("no packet was counted")
	}
}

// A relay's word that a node is not there reaches the origin, and ends there: three relays are clients of each other,
// and the word went round among them for as long as they lived.
func TestNoWayEndsAtTheOrigin(t *testing.T) {
	m := newMembers()
	all, pools := relaysInARow(t, m, 3)
	waitFor(t, "sessions of each relay with both others", func() bool {
		return !slices.ContainsFunc(pools, func(p *Pool) bool { return len(p.Links()) < 2 })
	})
	absent := newKey(t)
	m.allow(absent.ID())
	told := func() (n uint64) {
		for _, r := range all {
			n += r.noWays.Load()
		}
		return n
	}
	for i := range uint64(30) {
		waitFor(t, "a packet to be handed over", func() bool {
			return pools[0].Forward(all[1].key.ID(), all[2].key.ID(), absent.ID(), ChannelSignal, []byte("?"))
		})
		waitFor(t, "the word to be told on", func() bool { return told() > i })
	}
	if n := told(); n != 30 {
		t.Errorf("after 30 packets the word was told on %d times", n)
	}
	if all[0].noWays.Load() != 30 {
		t.Errorf("the relay that handed the packets over told it on %d times", all[0].noWays.Load())
	}
}

// Gossip for a peer that is at another relay begins no session with that; a packet of WireGuard's does.
func TestGossipBeginsNoSession(t *testing.T) {
	m := newMembers()
	relays := []*testRelay{startRelay(t, m), startRelay(t, m), startRelay(t, m)}
	a := newNode(t, m, newKey(t))
	third := settle(t, a, relays)
	b := startNode(t, m, third)
	a.SetPeerLinks(b.id, b.Links())
	for range 20 {
		_ = a.Send(b.id, ChannelGossip, []byte("news")) // lost, or over two relays
	}
	a.Plan()
	if need := needOf(a, third); need != NeedNone {
		t.Errorf("gossip makes a session with the peer's relay: %s", need)
	}
	if err := a.Send(b.id, ChannelWireGuard, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{a.id, ChannelWireGuard, "hello"})
}

// soon is well below what a relay's word, or a way back, used to count.
const soon = 15 * time.Second

// arrives sends to another node again and again until a packet arrives, and tells how long that took.
func arrives(t *testing.T, n, to *testNode, payload string) time.Duration {
	t.Helper()
	began := time.Now()
	waitFor(t, "a packet "+payload, func() bool {
		if err := n.Send(to.id, ChannelWireGuard, []byte(payload)); err != nil {
			t.Fatal(err)
		}
		for len(to.packets) > 0 {
			if have := <-to.packets; have == (got{n.id, ChannelWireGuard, payload}) {
				return true
			}
		}
		return false
	})
	return time.Since(began)
}

// A far relay's word that it does not have a peer is forgotten soon after: the peer may come a moment later, and nobody
// tells of that over two relays.
func TestRefusedWayIsTriedAgain(t *testing.T) {
	m := newMembers()
	r1, r2, _ := farRelays(t, m)
	a, b := newNode(t, m, newKey(t)), newNode(t, m, newKey(t))
	a.SetRelays([]Relay{r1.relay(), unreachable(t, r2)})
	waitFor(t, "a session", func() bool { return len(a.Links()) == 1 })
	a.SetPeerLinks(b.id, []Link{{r2.key.ID(), time.Millisecond}}) // a record from before the peer's restart
	waitFor(t, "the far relay's word", func() bool {
		_ = a.Send(b.id, ChannelWireGuard, []byte("?"))
		return a.Absent(b.id)
	})
	b.SetRelays([]Relay{unreachable(t, r1), r2.relay()})
	waitFor(t, "the peer's session", func() bool { return r2.server.Connected(b.id) })
	if took := arrives(t, a, b, "welcome back"); took > soon {
		t.Errorf("the way was tried again after %s", took)
	}
}

// A relay's word that it cannot reach another is forgotten soon, too: that one may just be starting.
func TestWayOverARestartedRelayIsTriedAgain(t *testing.T) {
	m := newMembers()
	r1, r2, pool1 := farRelays(t, m)
	a, b := newNode(t, m, newKey(t)), newNode(t, m, newKey(t))
	a.SetRelays([]Relay{r1.relay(), unreachable(t, r2)})
	waitFor(t, "a session", func() bool { return len(a.Links()) == 1 })
	pool1.SetRelays([]Relay{r1.relay()}) // the near relay has lost the far one
	a.SetPeerLinks(b.id, []Link{{r2.key.ID(), time.Millisecond}})
	refused := r1.server.Stats().Unroutable
	waitFor(t, "the near relay's word", func() bool {
		_ = a.Send(b.id, ChannelWireGuard, []byte("?"))
		return a.Refused(b.id) > 0 && r1.server.Stats().Unroutable > refused
	})
	pool1.SetRelays([]Relay{r1.relay(), r2.relay()})
	b.SetRelays([]Relay{unreachable(t, r1), r2.relay()})
	waitFor(t, "the peer's session", func() bool { return r2.server.Connected(b.id) })
	if took := arrives(t, a, b, "welcome back"); took > soon {
		t.Errorf("the way was tried again after %s", took)
	}
}

// The way back by which a peer's packets came is left when its record says that it is elsewhere, or, where the record
// never listed that relay, when nothing more comes by it: what the relay has may be a dead session.
func TestWayBackIsLeft(t *testing.T) {
	for name, listedFirst := range map[string]bool{"the record changes": true, "the record never listed it": false} {
		t.Run(name, func(t *testing.T) {
			m := newMembers()
			all, _ := relaysInARow(t, m, 3, func(c *ServerConfig) { c.IdleTimeout = time.Minute }) // a dead session stays
			near, old, next := all[0], all[1], all[2]
			key := newKey(t)
			a, b := newNode(t, m, newKey(t)), newNode(t, m, key)
			a.SetRelays([]Relay{near.relay(), unreachable(t, old), unreachable(t, next)})
			b.SetRelays([]Relay{unreachable(t, near), old.relay(), unreachable(t, next)})
			waitFor(t, "a session each", func() bool { return len(a.Links()) == 1 && len(b.Links()) == 1 })
			at := func(r *testRelay) []Link { return []Link{{r.key.ID(), time.Millisecond}} }
			b.SetPeerLinks(a.id, at(near))
			if a.SetPeerLinks(b.id, at(next)); listedFirst {
				a.SetPeerLinks(b.id, at(old))
			}
			arrives(t, b, a, "hello")
			b.use()
			waitFor(t, "the end of the peer's session", func() bool { return !old.server.Connected(b.id) })
			rawSession(t, old, key, identity.ALPNRelay) // reads nothing that it gets
			b.SetRelays([]Relay{unreachable(t, near), next.relay()})
			waitFor(t, "the peer's new session", func() bool { return next.server.Connected(b.id) })
			a.SetPeerLinks(b.id, at(next))
			if took := arrives(t, a, b, "welcome back"); took > soon {
				t.Errorf("the way back was left after %s", took)
			}
		})
	}
}

// A record that lists a relay is newer than that relay's word of before, which counts no more once its session is lost.
func TestRecordIsNewerThanTheWordOfALostSession(t *testing.T) {
	m := newMembers()
	r1, r2, _ := farRelays(t, m)
	a, b := newNode(t, m, newKey(t)), newNode(t, m, newKey(t))
	a.SetRelays([]Relay{r1.relay(), r2.relay()})
	waitFor(t, "both sessions", func() bool { return len(a.Links()) == 2 })
	for _, r := range []*testRelay{r1, r2} {
		_ = a.SendVia(r.key.ID(), b.id, ChannelWireGuard, nil)
		waitFor(t, "the relay's word", func() bool { return a.ClientOf(r.key.ID()).GoneCount() > 0 })
	}
	waitFor(t, "the peer's absence", func() bool { return a.Absent(b.id) })
	cut := startGate(t, r2.address)
	a.SetRelays([]Relay{r1.relay(), {ID: r2.key.ID(), Addresses: []string{cut.Addr().String()}, Key: r2.key.Public()}})
	a.ClientOf(r2.key.ID()).Cut()
	waitFor(t, "a session that can be stalled", func() bool {
		return cut.passes() && a.connected(r2.key.ID())
	})
	cut.stall(true)
	a.SetPeerLinks(b.id, []Link{{r2.key.ID(), time.Millisecond}}) // the relay is asked, and does not hear it
	b.SetRelays([]Relay{unreachable(t, r1), r2.relay()})
	waitFor(t, "the peer's session", func() bool { return r2.server.Connected(b.id) })
	if took := arrives(t, a, b, "welcome back"); took > soon {
		t.Errorf("the way over two relays was taken after %s", took)
	}
}

// A relay that could not be reached when it was last dialed is dialed again for what a client has for it.
func TestForwardedPacketsHaveTheRelayDialed(t *testing.T) {
	m := newMembers()
	r1, r2, pool1 := farRelays(t, m)
	c := pool1.ClientOf(r2.key.ID())
	waitFor(t, "the session between the relays", c.HasSession)
	pool1.SetRelays([]Relay{r1.relay(), unreachable(t, r2)})
	r2.kill()
	waitFor(t, "a dial that fails", c.IsFailing)
	c.ForgetUse()
	if pool1.Forward(r2.key.ID(), r1.key.ID(), newKey(t).ID(), ChannelSignal, []byte("hello")) {
		t.Error("a packet was taken for a relay that cannot be reached")
	}
	if c.NotedUse() == 0 {
		t.Error("nobody has the relay dialed again")
	}
}
