package relay

import (
	"net"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// farRelays are two relays whose nodes can reach each other, as agents that relay are.
func farRelays(t *testing.T, m *members) (r1, r2 *testRelay, pool1 *Pool) {
	t.Helper()
	var all [2]*testRelay
	var pools [2]*Pool
	isRelay := func(id identity.ID) bool { return id == all[0].key.ID() || id == all[1].key.ID() }
	for i := range all {
		all[i] = startRelay(t, m, func(c *ServerConfig) {
			c.Relay = isRelay
			c.Forward = func(relay, origin, node identity.ID, channel byte, b []byte) bool {
				return pools[i].Forward(relay, origin, node, channel, b)
			}
		})
		m.allow(all[i].key.ID())
	}
	for i, r := range all {
		pools[i] = NewPool(PoolConfig{Self: r.key.ID(), Key: r.key, OnNoWay: r.server.NoWay})
		t.Cleanup(func() { pools[i].Close() })
		pools[i].SetRelays([]Relay{all[0].relay(), all[1].relay()})
	}
	return all[0], all[1], pools[0]
}

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

// unreachable is a relay as a node sees it that cannot connect to it.
func unreachable(t *testing.T, r *testRelay) Relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	return Relay{ID: r.key.ID(), Addresses: []string{l.Addr().String()}, Key: r.key.Public()}
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

// Only relays hand packets over, only for members, and only to the clients of the relay that gets them.
func TestHandedOverByRelaysOnly(t *testing.T) {
	m := newMembers()
	r1, r2, pool1 := farRelays(t, m)
	b := newNode(t, m, newKey(t))
	b.SetRelays([]Relay{r2.relay()})
	waitFor(t, "the session", func() bool { return len(b.Links()) == 1 })
	victim := newKey(t)
	m.allow(victim.ID())
	liar := rawSession(t, r2, newKey(t), identity.ALPNRelay)
	unroutable := func() uint64 { return r2.server.Stats().Unroutable }
	before := unroutable()
	if _, err := liar.Write(appendFar(nil, frameForwarded, victim.ID(), b.id, ChannelSignal, []byte("as if from the victim"))); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "a member that is no relay to be refused", func() bool { return unroutable() == before+1 })
	pool1.Close() // its session would replace the one below
	asRelay := rawSession(t, r2, r1.key, identity.ALPNRelay)
	stranger := newKey(t)
	if _, err := asRelay.Write(appendFar(nil, frameForwarded, stranger.ID(), b.id, ChannelSignal, []byte("from no member"))); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "an origin that is no member to be refused", func() bool { return unroutable() == before+2 })
	// To a node that is not there: it goes back, and no further, though the origin is a client here.
	other := newKey(t)
	if _, err := asRelay.Write(appendFar(nil, frameForwarded, b.id, other.ID(), ChannelSignal, []byte("loop?"))); err != nil {
		t.Fatal(err)
	}
	_ = asRelay.SetReadDeadline(time.Now().Add(10 * time.Second))
	body, err := readFrame(asRelay, frameNoWay)
	if err != nil {
		t.Fatal(err)
	}
	if identity.ID(body[:8]) != b.id || identity.ID(body[8:16]) != other.ID() || body[16] != noWayGone {
		t.Errorf("answer %x", body)
	}
	if len(b.packets) != 0 {
		t.Errorf("b got %v", <-b.packets)
	}
}

// Gossip for a peer that is at another relay begins no session with that; a packet of WireGuard's does.
func TestGossipBeginsNoSession(t *testing.T) {
	m := newMembers()
	relays := []*testRelay{startRelay(t, m), startRelay(t, m), startRelay(t, m)}
	a := newNode(t, m, newKey(t))
	third := a.settle(t, relays)
	b := startNode(t, m, third)
	a.SetPeerLinks(b.id, b.Links())
	for range 20 {
		_ = a.Send(b.id, ChannelGossip, []byte("news")) // lost, or over two relays
	}
	a.applyPlan()
	if need := a.needOf(third); need != string(needNone) {
		t.Errorf("gossip makes a session with the peer's relay: %s", need)
	}
	if err := a.Send(b.id, ChannelWireGuard, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{a.id, ChannelWireGuard, "hello"})
}
