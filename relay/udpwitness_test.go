package relay

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/nattest"
)

var (
	hereAddr      = netip.MustParseAddr("127.0.0.1")
	bystanderAddr = netip.MustParseAddr("198.51.100.200")
)

func TestARelayTellsWhereAPeersPacketsComeFrom(t *testing.T) {
	n, m := nattest.New(t), newMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "userspace")
	a, b := startEnd(t, m, n.Host(nattest.PortRestricted), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
	stranger := newKey(t).ID()
	for _, c := range []struct {
		name  string
		peer  identity.ID
		at    netip.Addr
		seen  bool
		error string
	}{
		{"where its session comes from", b.id, hereAddr, true, ""},
		{"a victim's address", b.id, bystanderAddr, false, "it says 198.51.100.200, and is seen at 127.0.0.1"},
		{"where its UDP comes from, without UDP", b.id, b.host.Outside, false, "is seen at 127.0.0.1"},
		{"somebody without a session", stranger, bystanderAddr, false, "none has a session of it"},
	} {
		err := a.Attest(t.Context(), c.peer, c.at)
		if c.seen && err != nil || !c.seen && (!errors.Is(err, ErrUnattested) || !strings.Contains(err.Error(), c.error)) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	join(t, a, b)
	for _, x := range []struct{ asker, peer *udpEnd }{{a, b}, {b, a}} {
		if err := x.asker.Attest(t.Context(), x.peer.id, x.peer.host.Outside); err != nil {
			t.Errorf("where UDP of the peer comes from: %v", err)
		}
		if err := x.asker.Attest(t.Context(), x.peer.id, r.host.Addr); !errors.Is(err, ErrUnattested) {
			t.Errorf("the relay's own address: %v", err)
		}
	}
	m.revoke(b.id)
	r.server.Kick(b.id)
	waitFor(t, "the end of the session", func() bool { return !r.server.Connected(b.id) })
	if err := a.Attest(t.Context(), b.id, b.host.Outside); !errors.Is(err, ErrUnattested) {
		t.Errorf("a node that was revoked: %v", err)
	}
}
