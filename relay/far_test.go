package relay

import (
	"net"
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// farRelays are two relays whose nodes can reach each other, as agents that relay are.
func farRelays(t *testing.T, m *members) (r1, r2 *testRelay, pool1 *Pool) {
	t.Helper()
	all, pools := relaysInARow(t, m, 2)
	return all[0], all[1], pools[0]
}

// relaysInARow are relays whose nodes can all reach each other.
func relaysInARow(t *testing.T, m *members, n int, change ...func(*ServerConfig)) ([]*testRelay, []*Pool) {
	t.Helper()
	all, pools := make([]*testRelay, n), make([]*Pool, n)
	isRelay := func(id identity.ID) bool {
		return slices.ContainsFunc(all, func(r *testRelay) bool { return r.key.ID() == id })
	}
	for i := range all {
		all[i] = startRelay(t, m, append(change, func(c *ServerConfig) {
			c.Relay = isRelay
			c.Forward = func(relay, origin, node identity.ID, channel byte, b []byte) bool {
				return pools[i].Forward(relay, origin, node, channel, b)
			}
		})...)
		m.allow(all[i].key.ID())
	}
	var list []Relay
	for _, r := range all {
		list = append(list, r.relay())
	}
	for i, r := range all {
		pools[i] = NewPool(PoolConfig{Self: r.key.ID(), Key: r.key, OnNoWay: func(far, client, node identity.ID) {
			r.noWays.Add(1)
			r.server.NoWay(far, client, node)
		}})
		t.Cleanup(func() { pools[i].Close() })
		pools[i].SetRelays(list)
	}
	return all, pools
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
	if _, err := liar.Write(appendFar(nil, frameForwarded, victim.ID(), b.id, ChannelSignal,
		[]byte("as if from the victim"))); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "a member that is no relay to be refused", func() bool { return unroutable() == before+1 })
	pool1.Close() // its session would replace the one below
	asRelay := rawSession(t, r2, r1.key, identity.ALPNRelay)
	stranger := newKey(t)
	if _, err := asRelay.Write(appendFar(nil, frameForwarded, stranger.ID(), b.id, ChannelSignal,
		[]byte("from no member"))); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "an origin that is no member to be refused", func() bool { return unroutable() == before+2 })
	// To a node that is not there: it goes back, and no further, though the origin is a client here.
	other := newKey(t)
	if _, err := asRelay.Write(appendFar(nil, frameForwarded, b.id, other.ID(), ChannelSignal,
		[]byte("loop?"))); err != nil {
		t.Fatal(err)
	}
	_ = asRelay.SetReadDeadline(time.Now().Add(10 * time.Second))
	body, err := readFrame(asRelay, frameNoWay)
	if err != nil {
		t.Fatal(err)
	}
	if identity.ID(body[:8]) != b.id || identity.ID(body[8:16]) != other.ID() || body[16] != noWayOrigin {
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

// soon is well below what a relay's word, or a way back, used to count.
const soon = 15 * time.Second

// arrives sends to another node again and again until a packet arrives, and tells how long that took.
func (n *testNode) arrives(t *testing.T, to *testNode, payload string) time.Duration {
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
	if took := a.arrives(t, b, "welcome back"); took > soon {
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
		s := a.peer(b.id)
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.far.refused) > 0 && r1.server.Stats().Unroutable > refused
	})
	pool1.SetRelays([]Relay{r1.relay(), r2.relay()})
	b.SetRelays([]Relay{unreachable(t, r1), r2.relay()})
	waitFor(t, "the peer's session", func() bool { return r2.server.Connected(b.id) })
	if took := a.arrives(t, b, "welcome back"); took > soon {
		t.Errorf("the way was tried again after %s", took)
	}
}

// Each further word counts twice as long, up to a bound; what is about packets sent before does not, and a word that
// comes long after the last is a first one.
func TestRefusalsLast(t *testing.T) {
	var r refusal
	now := 10 * time.Second
	if r.stands(now) {
		t.Fatal("a way that nobody has refused is refused")
	}
	for _, hold := range []time.Duration{500, 1000, 2000, 4000, 8000, 16000, 30000, 30000} {
		hold *= time.Millisecond
		r = r.next(now, farHold)
		if !r.stands(now) || !r.stands(now+hold-1) || r.stands(now+hold) {
			t.Fatalf("want it to stand for %s, got %s", hold, r.hold)
		}
		if r.next(now+hold-1, farHold) != r {
			t.Fatal("a second word about the same packets counts")
		}
		now += hold
	}
	if r = r.next(now+farHold+1, farHold); r.hold != refusalFirst {
		t.Errorf("a word long after the last counts for %s", r.hold)
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
			b.arrives(t, a, "hello")
			b.use()
			waitFor(t, "the end of the peer's session", func() bool { return !old.server.Connected(b.id) })
			rawSession(t, old, key, identity.ALPNRelay) // reads nothing that it gets
			b.SetRelays([]Relay{unreachable(t, near), next.relay()})
			waitFor(t, "the peer's new session", func() bool { return next.server.Connected(b.id) })
			a.SetPeerLinks(b.id, at(next))
			if took := a.arrives(t, b, "welcome back"); took > soon {
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
		waitFor(t, "the relay's word", func() bool { return a.client(r.key.ID()).gone.Load() > 0 })
	}
	waitFor(t, "the peer's absence", func() bool { return a.Absent(b.id) })
	cut := startGate(t, r2.address)
	a.SetRelays([]Relay{r1.relay(), {ID: r2.key.ID(), Addresses: []string{cut.Addr().String()}, Key: r2.key.Public()}})
	a.client(r2.key.ID()).wire.Load().end(errClosed)
	waitFor(t, "a session that can be stalled", func() bool {
		cut.mu.Lock()
		defer cut.mu.Unlock()
		return len(cut.conns) > 0 && a.connected(r2.key.ID())
	})
	cut.stall(true)
	a.SetPeerLinks(b.id, []Link{{r2.key.ID(), time.Millisecond}}) // the relay is asked, and does not hear it
	b.SetRelays([]Relay{unreachable(t, r1), r2.relay()})
	waitFor(t, "the peer's session", func() bool { return r2.server.Connected(b.id) })
	if took := a.arrives(t, b, "welcome back"); took > soon {
		t.Errorf("the way over two relays was taken after %s", took)
	}
}

// A relay that could not be reached when it was last dialed is dialed again for what a client has for it.
func TestForwardedPacketsHaveTheRelayDialed(t *testing.T) {
	m := newMembers()
	r1, r2, pool1 := farRelays(t, m)
	pool1.mu.RLock()
	c := pool1.relays[r2.key.ID()]
	pool1.mu.RUnlock()
	waitFor(t, "the session between the relays", func() bool { return c.queue() != nil })
	pool1.SetRelays([]Relay{r1.relay(), unreachable(t, r2)})
	r2.kill()
	waitFor(t, "a dial that fails", c.failing)
	c.used.Store(0)
	if pool1.Forward(r2.key.ID(), r1.key.ID(), newKey(t).ID(), ChannelSignal, []byte("hello")) {
		t.Error("a packet was taken for a relay that cannot be reached")
	}
	if c.used.Load() == 0 {
		t.Error("nobody has the relay dialed again")
	}
}
