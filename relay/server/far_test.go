package server_test

import (
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/wire"
)

// Only relays hand packets over, only for members, and only to the clients of the relay that gets them.
func TestHandedOverByRelaysOnly(t *testing.T) {
	m := relaytest.NewMembers()
	r1, r2, pool1 := relaytest.TwoInARow(t, m)
	b := relaytest.NewNode(t, m, relaytest.NewKey(t))
	b.SetRelays([]client.Relay{r2.Entry()})
	relaytest.WaitFor(t, "the session", func() bool { return len(b.Links()) == 1 })
	victim := relaytest.NewKey(t)
	m.Allow(victim.ID())
	liar := relaytest.RawSession(t, r2, relaytest.NewKey(t), identity.ALPNRelay)
	unroutable := func() uint64 { return r2.Server.Stats().Unroutable }
	before := unroutable()
	if _, err := liar.Write(wire.AppendFar(nil, wire.FrameForwarded, victim.ID(), b.ID, wire.ChannelSignal,
		[]byte("as if from the victim"))); err != nil {
		t.Fatal(err)
	}
	relaytest.WaitFor(t, "a member that is not a relay to be refused", func() bool { return unroutable() == before+1 })
	pool1.Close() // its session would replace the one below
	asRelay := relaytest.RawSession(t, r2, r1.Key, identity.ALPNRelay)
	stranger := relaytest.NewKey(t)
	if _, err := asRelay.Write(wire.AppendFar(nil, wire.FrameForwarded, stranger.ID(), b.ID, wire.ChannelSignal,
		[]byte("from no member"))); err != nil {
		t.Fatal(err)
	}
	relaytest.WaitFor(t, "an origin that is not a member to be refused", func() bool { return unroutable() == before+2 })
	// To a node that is not there: it goes back, and no further, though the origin is a client here.
	other := relaytest.NewKey(t)
	if _, err := asRelay.Write(wire.AppendFar(nil, wire.FrameForwarded, b.ID, other.ID(), wire.ChannelSignal,
		[]byte("loop?"))); err != nil {
		t.Fatal(err)
	}
	_ = asRelay.SetReadDeadline(time.Now().Add(10 * time.Second))
	body, err := wire.ReadFrame(asRelay, wire.FrameNoWay)
	if err != nil {
		t.Fatal(err)
	}
	if origin, node, code := wire.DecodeNoWay(body); origin != b.ID || node != other.ID() || code != wire.NoWayOrigin {
		t.Errorf("answer %x", body)
	}
	if len(b.Packets) != 0 {
		t.Errorf("b got %v", <-b.Packets)
	}
}
