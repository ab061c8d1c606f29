package client_test

import (
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/wire"
)

// A relay's statement that a peer is away stands until the relay says otherwise: neither time, nor a late record, nor a
// new session with the relay changes it. Ask finds out without risking a packet.
func TestAbsenceIsSticky(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a := relaytest.StartNode(t, m, r)
	b := relaytest.NewNode(t, m, relaytest.NewKey(t))
	a.SetPeerLinks(b.ID, []client.Link{{r.Key.ID(), time.Millisecond}})
	chosen := func() bool { _, _, ok := a.Choose(b.ID); return ok }
	if !chosen() || a.Absent(b.ID) {
		t.Fatal("a listed relay is not chosen")
	}
	for len(a.Changed()) > 0 {
		<-a.Changed()
	}
	a.Ask(b.ID)
	relaytest.WaitFor(t, "the relay's word", func() bool { return a.Absent(b.ID) && !chosen() })
	select {
	case <-a.Changed():
	case <-time.After(5 * time.Second):
		t.Fatal("absence is not told")
	}
	asked := func() uint64 { return a.Stats()[0].Gone }
	before := asked()
	a.SetPeerLinks(b.ID, []client.Link{{r.Key.ID(), 2 * time.Millisecond}}) // a record that was under way
	if chosen() {
		t.Error("a late record undoes the relay's word")
	}
	relaytest.WaitFor(t, "the relay to be asked after a record", func() bool { return asked() > before })
	before = asked()
	a.ClientOf(r.Key.ID()).Cut()
	relaytest.WaitFor(t, "the relay to be asked in a new session", func() bool { return asked() > before })
	if chosen() || !a.Absent(b.ID) {
		t.Error("a new session undoes the relay's word")
	}
	before = asked()
	a.AgeAbsence(r.Key.ID(), b.ID) // as if that long had passed
	a.ChooseAnew()
	relaytest.WaitFor(t, "the relay to be asked after a while", func() bool { chosen(); return asked() > before })
	if n := a.AskedAgain(r.Key.ID(), b.ID); n != 1 {
		t.Errorf("asked once since the session began, it counts %d", n)
	}
	if chosen() {
		t.Error("time undoes the relay's word")
	}
	b.Use(r)
	relaytest.WaitFor(t, "the peer to be there", func() bool { return chosen() && !a.Absent(b.ID) })
	relaytest.WaitFor(t, "the peer's own end of its session", func() bool { return len(b.Links()) > 0 })
	b.Ask(a.ID)
	relaytest.WaitFor(t, "an answer about a present peer", func() bool { return b.HasSeen(r.Key.ID(), a.ID) })
	if len(a.Packets) > 0 || len(b.Packets) > 0 {
		t.Error("a question was delivered as a packet")
	}
	if n := a.ClientOf(r.Key.ID()).TunnelCount(); n > 0 {
		t.Errorf("%d questions count as traffic, which keeps an idle session busy with pings", n)
	}
}

// Ask continues with the next relay when the first says no.
func TestAskFindsTheRelayThatHasThePeer(t *testing.T) {
	m := relaytest.NewMembers()
	r1, r2 := relaytest.StartRelay(t, m), relaytest.StartRelay(t, m)
	a := relaytest.StartNode(t, m, r1, r2)
	b := relaytest.StartNode(t, m, r2)
	a.SetPeerLinks(b.ID, []client.Link{{r1.Key.ID(), time.Microsecond}, {r2.Key.ID(), time.Second}})
	if id, _, _ := a.Choose(b.ID); id != r1.Key.ID() {
		t.Fatalf("chose %s, want the near relay", id)
	}
	a.Ask(b.ID)
	relaytest.WaitFor(t, "the relay that has the peer", func() bool {
		id, _, ok := a.Choose(b.ID)
		return ok && id == r2.Key.ID() && id != identity.ID{}
	})
}

// TestTheWordOfAGivenUpRelayIsForgotten: a peer comes to a relay that called it absent, after the session in which the
// relay would have reported that was given up.
func TestTheWordOfAGivenUpRelayIsForgotten(t *testing.T) {
	m := relaytest.NewMembers()
	relays := []*relaytest.Relay{relaytest.StartRelay(t, m), relaytest.StartRelay(t, m), relaytest.StartRelay(t, m)}
	third := relays[2]
	a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.NewNode(t, m, relaytest.NewKey(t))
	var order []client.Relay
	for i, r := range relays {
		order = append(order, r.Entry())
		order[i].Order = int64(i + 1)
	}
	a.SetRelays(order)
	c := a.ClientOf(third.Key.ID())
	c.Demand() // the others are warm
	for _, r := range relays {
		relaytest.WaitFor(t, "a session", func() bool { return a.Connected(r.Key.ID()) })
		if err := a.SendVia(r.Key.ID(), b.ID, wire.ChannelWireGuard, nil); err != nil {
			t.Fatal(err)
		}
		relaytest.WaitFor(t, "the relay's word", func() bool { return a.ClientOf(r.Key.ID()).GoneCount() > 0 })
	}
	release := a.HoldPlans()
	c.StandBy()
	relaytest.WaitFor(t, "the session's end", func() bool {
		return c.IsOver() && !third.Server.Connected(a.ID) // neither side holds one
	})
	c.LastUse() // counts the question as use
	c.ForgetUse()
	release()
	b.Use(third)
	relaytest.WaitFor(t, "the peer's session", func() bool { return b.Connected(third.Key.ID()) })
	if err := a.Send(b.ID, wire.ChannelWireGuard, []byte("found")); err != nil {
		t.Fatal(err)
	}
	b.Want(t, a.ID, wire.ChannelWireGuard, "found")
}

// TestPacketsLeaveARelayThatThePeerNoLongerUses: a peer's session at a relay that its record does not list ends, and
// the relay does not notice. The peer's earlier packets from there do not keep others from the relay that the record
// lists.
func TestPacketsLeaveARelayThatThePeerNoLongerUses(t *testing.T) {
	m := relaytest.NewMembers()
	old := relaytest.StartRelay(t, m, func(c *server.Config) { c.IdleTimeout = time.Minute }) // a dead session stays
	next := relaytest.StartRelay(t, m)
	key := relaytest.NewKey(t)
	a, b := relaytest.StartNode(t, m, old, next), relaytest.NewNode(t, m, key)
	b.Use(old)
	relaytest.WaitFor(t, "the peer's session", func() bool { return len(b.Links()) > 0 })
	a.SetPeerLinks(b.ID, []client.Link{{next.Key.ID(), time.Second}}) // farther than the other would be
	arrives(t, b, a, "hello")
	relaytest.WaitFor(t, "the answer's way", func() bool { return a.Choice(b.ID) == old.Key.ID() })
	b.Use()
	relaytest.WaitFor(t, "the end of the peer's session", func() bool { return !old.Server.Connected(b.ID) })
	relaytest.RawSession(t, old, key, identity.ALPNRelay) // reads nothing that it gets
	b.Use(next)
	relaytest.WaitFor(t, "the peer's new session", func() bool { return next.Server.Connected(b.ID) })
	asking := make(chan struct{})
	defer close(asking)
	go func() { // as an agent does whose path is silent; the relay says each time that the peer is there
		for tick := time.NewTicker(100 * time.Millisecond); ; {
			select {
			case <-tick.C:
				a.Ask(b.ID)
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
