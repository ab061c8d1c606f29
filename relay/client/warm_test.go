package client_test

import (
	"slices"
	"testing"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/wire"
)

func sessions(n *relaytest.Node) (ids []identity.ID) {
	for _, s := range n.Stats() {
		if s.Connected {
			ids = append(ids, s.Relay)
		}
	}
	return ids
}

// A node keeps two sessions of five: with the relays admitted first, since all are equally near. It uses another one
// when one is lost, and returns when that is back.
func TestTwoRelaysStayWarm(t *testing.T) {
	m := relaytest.NewMembers()
	var list []*relaytest.Relay
	var relays []client.Relay
	for i := range 5 {
		r := relaytest.StartRelay(t, m)
		list = append(list, r)
		known := r.Entry()
		known.Order = int64(5 - i)
		relays = append(relays, known)
	}
	n := relaytest.NewNode(t, m, relaytest.NewKey(t))
	n.SetRelays(relays)
	only := func(want ...*relaytest.Relay) func() bool {
		return func() bool {
			warm := 0
			for _, s := range n.Stats() {
				if s.Need == client.NeedWarm && s.Connected && s.RTT > 0 {
					warm++
				}
			}
			ids := sessions(n)
			for _, r := range want {
				if !slices.Contains(ids, r.Key.ID()) {
					return false
				}
			}
			return warm == 2 && len(ids) == 2 && len(n.Links()) == 2
		}
	}
	relaytest.WaitFor(t, "the two that were admitted first", only(list[4], list[3]))
	list[4].Kill()
	relaytest.WaitFor(t, "another instead of the lost one", func() bool {
		ids := sessions(n)
		return len(ids) == 2 && !slices.Contains(ids, list[4].Key.ID())
	})
	list[4].Listen(t, list[4].Address)
	n.Retry(list[4].Key.ID())
	relaytest.WaitFor(t, "the lost one is back, and its substitute goes", only(list[4], list[3]))
}

// Peers without a common session meet at a relay that one of them dials for it.
func TestARelayIsDialedForAPeer(t *testing.T) {
	m := relaytest.NewMembers()
	r1, r2, r3 := relaytest.StartRelay(t, m), relaytest.StartRelay(t, m), relaytest.StartRelay(t, m)
	a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.NewNode(t, m, relaytest.NewKey(t))
	a.Use(r1, r2, r3)
	relaytest.WaitFor(t, "two warm sessions", func() bool { return len(sessions(a)) == 2 && len(a.Links()) == 2 })
	third := r1
	for _, r := range []*relaytest.Relay{r1, r2, r3} {
		if !slices.Contains(sessions(a), r.Key.ID()) {
			third = r
		}
	}
	b.Use(third)
	relaytest.WaitFor(t, "the peer's session", func() bool { return b.Connected(third.Key.ID()) })
	a.SetPeerLinks(b.ID, b.Links())
	if err := a.Send(b.ID, wire.ChannelWireGuard, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	b.Want(t, a.ID, wire.ChannelWireGuard, "hello")
	if c := a.Choice(b.ID); c != third.Key.ID() {
		t.Errorf("goes by %s, want %s where the peer is", c, third.Key.ID())
	}
	if a.Absent(b.ID) {
		t.Error("the peer counts as absent")
	}
	// The peer answers by the relay where it was reached, without any record.
	if err := b.Send(a.ID, wire.ChannelWireGuard, []byte("and back")); err != nil {
		t.Fatal(err)
	}
	a.Want(t, b.ID, wire.ChannelWireGuard, "and back")
	// All relays are asked for a peer of which nothing is known.
	c := relaytest.NewNode(t, m, relaytest.NewKey(t))
	c.Use(third)
	relaytest.WaitFor(t, "the stranger's session", func() bool { return c.Connected(third.Key.ID()) })
	d := relaytest.NewNode(t, m, relaytest.NewKey(t))
	d.Use(r1, r2, r3)
	if err := d.Send(c.ID, wire.ChannelSignal, []byte("anybody?")); err != nil {
		t.Fatal(err)
	}
	c.Want(t, d.ID, wire.ChannelSignal, "anybody?")
}
