package udp_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/nattest"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
)

var (
	loopback = netip.MustParseAddr("127.0.0.1")
	victim   = netip.MustParseAddr("198.51.100.200")
)

func TestARelayTellsWhereAPeersPacketsComeFrom(t *testing.T) {
	n, m := nattest.New(t), relaytest.NewMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "userspace")
	a, b := startEnd(t, m, n.Host(nattest.PortRestricted), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
	stranger := relaytest.NewKey(t).ID()
	for _, c := range []struct {
		name  string
		peer  identity.ID
		at    netip.Addr
		seen  bool
		error string
	}{
		{"where its session comes from", b.ID, loopback, true, ""},
		{"a victim's address", b.ID, victim, false, "the peer claims 198.51.100.200, and is seen at 127.0.0.1"},
		{"where its UDP comes from, without UDP", b.ID, b.host.Outside, false, "is seen at 127.0.0.1"},
		{"somebody without a session", stranger, victim, false, "none of the 1 relays asked has a session with it"},
	} {
		err := a.Attest(t.Context(), c.peer, c.at)
		if c.seen && err != nil ||
			!c.seen && (!errors.Is(err, client.ErrUnattested) || !strings.Contains(err.Error(), c.error)) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	join(t, a, b)
	for _, x := range []struct{ asker, peer *udpEnd }{{a, b}, {b, a}} {
		if err := x.asker.Attest(t.Context(), x.peer.ID, x.peer.host.Outside); err != nil {
			t.Errorf("where UDP of the peer comes from: %v", err)
		}
		if err := x.asker.Attest(t.Context(), x.peer.ID, r.host.Addr); !errors.Is(err, client.ErrUnattested) {
			t.Errorf("the relay's own address: %v", err)
		}
	}
	m.Revoke(b.ID)
	r.Server.Kick(b.ID)
	relaytest.WaitFor(t, "the end of the session", func() bool { return !r.Server.Connected(b.ID) })
	if err := a.Attest(t.Context(), b.ID, b.host.Outside); !errors.Is(err, client.ErrUnattested) {
		t.Errorf("a node that was revoked: %v", err)
	}
}
