package relay

import (
	"slices"
	"testing"

	"github.com/skeinmesh/skein/identity"
)

func sessions(n *testNode) (ids []identity.ID) {
	for _, s := range n.Stats() {
		if s.Connected {
			ids = append(ids, s.Relay)
		}
	}
	return ids
}

// A node keeps two sessions of five: those admitted first, since all are as near as can be. It takes another when one
// is lost, and goes back when that is there again.
func TestTwoRelaysStayWarm(t *testing.T) {
	m := newMembers()
	var list []*testRelay
	var relays []Relay
	for i := range 5 {
		r := startRelay(t, m)
		list = append(list, r)
		known := r.relay()
		known.Order = int64(5 - i)
		relays = append(relays, known)
	}
	n := newNode(t, m, newKey(t))
	n.SetRelays(relays)
	only := func(want ...*testRelay) func() bool {
		return func() bool {
			warm := 0
			for _, s := range n.Stats() {
				if s.Need == NeedWarm && s.Connected && s.RTT > 0 {
					warm++
				}
			}
			ids := sessions(n)
			for _, r := range want {
				if !slices.Contains(ids, r.key.ID()) {
					return false
				}
			}
			return warm == 2 && len(ids) == 2 && len(n.Links()) == 2
		}
	}
	waitFor(t, "the two that were admitted first", only(list[4], list[3]))
	list[4].kill()
	waitFor(t, "another instead of the lost one", func() bool {
		ids := sessions(n)
		return len(ids) == 2 && !slices.Contains(ids, list[4].key.ID())
	})
	list[4].listen(t, list[4].address)
	n.Retry(list[4].key.ID())
	waitFor(t, "the lost one is back, and its substitute goes", only(list[4], list[3]))
}

// Peers without a common session meet at a relay that one of them dials for it.
func TestARelayIsDialedForAPeer(t *testing.T) {
	m := newMembers()
	r1, r2, r3 := startRelay(t, m), startRelay(t, m), startRelay(t, m)
	a, b := newNode(t, m, newKey(t)), newNode(t, m, newKey(t))
	a.use(r1, r2, r3)
	waitFor(t, "two warm sessions", func() bool { return len(sessions(a)) == 2 && len(a.Links()) == 2 })
	third := r1
	for _, r := range []*testRelay{r1, r2, r3} {
		if !slices.Contains(sessions(a), r.key.ID()) {
			third = r
		}
	}
	b.use(third)
	waitFor(t, "the peer's session", func() bool { return b.connected(third.key.ID()) })
	a.SetPeerLinks(b.id, b.Links())
	if err := a.Send(b.id, ChannelWireGuard, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{a.id, ChannelWireGuard, "hello"})
	if c := a.choice(b.id); c != third.key.ID() {
		t.Errorf("goes by %s, want %s where the peer is", c, third.key.ID())
	}
	if a.Absent(b.id) {
		t.Error("the peer counts as absent")
	}
	// The peer answers by the relay where it was reached, without any record.
	if err := b.Send(a.id, ChannelWireGuard, []byte("and back")); err != nil {
		t.Fatal(err)
	}
	a.want(t, got{b.id, ChannelWireGuard, "and back"})
	// A peer of which nothing is known is looked for everywhere.
	c := newNode(t, m, newKey(t))
	c.use(third)
	waitFor(t, "the stranger's session", func() bool { return c.connected(third.key.ID()) })
	d := newNode(t, m, newKey(t))
	d.use(r1, r2, r3)
	if err := d.Send(c.id, ChannelSignal, []byte("anybody?")); err != nil {
		t.Fatal(err)
	}
	c.want(t, got{d.id, ChannelSignal, "anybody?"})
}
