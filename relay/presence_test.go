package relay

import (
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// A relay's word that a peer is away stands until the relay says otherwise: neither time, nor a late record, nor a new
// session with the relay makes it a way again. Asking tells without a packet to lose.
func TestAbsenceIsSticky(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a := startNode(t, m, r)
	b := newNode(t, m, newKey(t))
	a.SetPeerLinks(b.id, []Link{{r.key.ID(), time.Millisecond}})
	chosen := func() bool { _, _, ok := a.Choose(b.id); return ok }
	if !chosen() || a.Absent(b.id) {
		t.Fatal("a listed relay is not chosen")
	}
	for len(a.Changed()) > 0 {
		<-a.Changed()
	}
	a.Ask(b.id)
	waitFor(t, "the relay's word", func() bool { return a.Absent(b.id) && !chosen() })
	select {
	case <-a.Changed():
	case <-time.After(5 * time.Second):
		t.Fatal("absence is not told")
	}
	asked := func() uint64 { return a.Stats()[0].Gone }
	before := asked()
	a.SetPeerLinks(b.id, []Link{{r.key.ID(), 2 * time.Millisecond}}) // a record that was under way
	if chosen() {
		t.Error("a late record undoes the relay's word")
	}
	waitFor(t, "the relay to be asked after a record", func() bool { return asked() > before })
	before = asked()
	a.ClientOf(r.key.ID()).Cut()
	waitFor(t, "the relay to be asked in a new session", func() bool { return asked() > before })
	if chosen() || !a.Absent(b.id) {
		t.Error("a new session undoes the relay's word")
	}
	before = asked()
	a.AgeAbsence(r.key.ID(), b.id) // as if that long had passed
	a.ChooseAnew()
	waitFor(t, "the relay to be asked after a while", func() bool { chosen(); return asked() > before })
	if n := a.AskedAgain(r.key.ID(), b.id); n != 1 {
		t.Errorf("asked once since the session began, it counts %d", n)
	}
	if chosen() {
		t.Error("time undoes the relay's word")
	}
	b.use(r)
	waitFor(t, "the peer to be there", func() bool { return chosen() && !a.Absent(b.id) })
	waitFor(t, "the peer's own end of its session", func() bool { return len(b.Links()) > 0 })
	b.Ask(a.id)
	waitFor(t, "an answer about a present peer", func() bool { return b.HasSeen(r.key.ID(), a.id) })
	if len(a.packets) > 0 || len(b.packets) > 0 {
		t.Error("a question was delivered as a packet")
	}
	if n := a.ClientOf(r.key.ID()).TunnelCount(); n > 0 {
		t.Errorf("%d questions count as traffic, which keeps an idle session busy with pings", n)
	}
}

// Asking goes on to the next relay when the first says no.
func TestAskFindsTheRelayThatHasThePeer(t *testing.T) {
	m := newMembers()
	r1, r2 := startRelay(t, m), startRelay(t, m)
	a := startNode(t, m, r1, r2)
	b := startNode(t, m, r2)
	a.SetPeerLinks(b.id, []Link{{r1.key.ID(), time.Microsecond}, {r2.key.ID(), time.Second}})
	if id, _, _ := a.Choose(b.id); id != r1.key.ID() {
		t.Fatalf("chose %s, want the near relay", id)
	}
	a.Ask(b.id)
	waitFor(t, "the relay that has the peer", func() bool {
		id, _, ok := a.Choose(b.id)
		return ok && id == r2.key.ID() && id != identity.ID{}
	})
}

// TestTheWordOfAGivenUpRelayIsForgotten has a peer come to a relay that called it absent, after the session was given
// up in which the relay would have told.
func TestTheWordOfAGivenUpRelayIsForgotten(t *testing.T) {
	m := newMembers()
	relays := []*testRelay{startRelay(t, m), startRelay(t, m), startRelay(t, m)}
	third := relays[2]
	a, b := newNode(t, m, newKey(t)), newNode(t, m, newKey(t))
	var order []Relay
	for i, r := range relays {
		order = append(order, r.relay())
		order[i].Order = int64(i + 1)
	}
	a.SetRelays(order)
	c := a.ClientOf(third.key.ID())
	c.Demand() // the others are warm
	for _, r := range relays {
		waitFor(t, "a session", func() bool { return a.connected(r.key.ID()) })
		if err := a.SendVia(r.key.ID(), b.id, ChannelWireGuard, nil); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the relay's word", func() bool { return a.ClientOf(r.key.ID()).GoneCount() > 0 })
	}
	release := a.HoldPlans()
	c.StandBy()
	waitFor(t, "the session's end", func() bool {
		return c.IsOver() && !third.server.Connected(a.id) // neither side holds one
	})
	c.LastUse() // counts the question as use
	c.ForgetUse()
	release()
	b.use(third)
	waitFor(t, "the peer's session", func() bool { return b.connected(third.key.ID()) })
	if err := a.Send(b.id, ChannelWireGuard, []byte("found")); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{a.id, ChannelWireGuard, "found"})
}

// TestPacketsLeaveARelayThatThePeerNoLongerUses has a peer's session at a relay that its record does not list end
// without the relay's notice. Its packets of before do not keep others from the relay that the record lists.
func TestPacketsLeaveARelayThatThePeerNoLongerUses(t *testing.T) {
	m := newMembers()
	old := startRelay(t, m, func(c *ServerConfig) { c.IdleTimeout = time.Minute }) // a dead session stays
	next := startRelay(t, m)
	key := newKey(t)
	a, b := startNode(t, m, old, next), newNode(t, m, key)
	b.use(old)
	waitFor(t, "the peer's session", func() bool { return len(b.Links()) > 0 })
	a.SetPeerLinks(b.id, []Link{{next.key.ID(), time.Second}}) // farther than the other would be
	arrives(t, b, a, "hello")
	waitFor(t, "the answer's way", func() bool { return a.choice(b.id) == old.key.ID() })
	b.use()
	waitFor(t, "the end of the peer's session", func() bool { return !old.server.Connected(b.id) })
	rawSession(t, old, key, identity.ALPNRelay) // reads nothing that it gets
	b.use(next)
	waitFor(t, "the peer's new session", func() bool { return next.server.Connected(b.id) })
	asking := make(chan struct{})
	defer close(asking)
	go func() { // as an agent does whose path is silent; the relay says each time that the peer is there
		for tick := time.NewTicker(100 * time.Millisecond); ; {
			select {
			case <-tick.C:
				a.Ask(b.id)
			case <-asking:
				tick.Stop()
				return
			}
		}
	}()
	if took := arrives(t, a, b, "welcome back"); took > soon {
		t.Errorf("the relay was left after %s", took)
	}
}
