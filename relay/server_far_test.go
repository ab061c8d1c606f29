package relay

import (
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

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
	if _, err := liar.Write(AppendFar(nil, FrameForwarded, victim.ID(), b.id, ChannelSignal,
		[]byte("as if from the victim"))); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "a member that is no relay to be refused", func() bool { return unroutable() == before+1 })
	pool1.Close() // its session would replace the one below
	asRelay := rawSession(t, r2, r1.key, identity.ALPNRelay)
	stranger := newKey(t)
	if _, err := asRelay.Write(AppendFar(nil, FrameForwarded, stranger.ID(), b.id, ChannelSignal,
		[]byte("from no member"))); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "an origin that is no member to be refused", func() bool { return unroutable() == before+2 })
	// To a node that is not there: it goes back, and no further, though the origin is a client here.
	other := newKey(t)
	if _, err := asRelay.Write(AppendFar(nil, FrameForwarded, b.id, other.ID(), ChannelSignal,
		[]byte("loop?"))); err != nil {
		t.Fatal(err)
	}
	_ = asRelay.SetReadDeadline(time.Now().Add(10 * time.Second))
	body, err := ReadFrame(asRelay, FrameNoWay)
	if err != nil {
		t.Fatal(err)
	}
	if origin, node, code := DecodeNoWay(body); origin != b.id || node != other.ID() || code != NoWayOrigin {
		t.Errorf("answer %x", body)
	}
	if len(b.packets) != 0 {
		t.Errorf("b got %v", <-b.packets)
	}
}
