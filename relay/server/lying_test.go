package server_test

import (
	"testing"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/wire"
)

// A relay that sends what only clients may loses the session; answers to what nobody asked are not heeded.
func TestALyingRelay(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	n := relaytest.StartNode(t, m, r)
	x := r.Server.SessionOf(n.ID)
	for name, frame := range map[string][]byte{
		"connect":          wire.AppendNode(nil, wire.FrameConnect, n.ID),
		"another version":  wire.AppendHello(nil, wire.Hello{Version: 2}),
		"a pong unasked":   wire.AppendToken(nil, wire.FramePong, 7),
		"no way for whom?": wire.AppendNoWay(nil, identity.ID{}, identity.ID{}, wire.NoWayGone),
	} {
		before := n.Stats()[0].Reconnects
		x.Say(frame)
		ends := name == "connect" || name == "another version"
		if ends {
			relaytest.WaitFor(t, name+": the end of the session", func() bool {
				return n.Stats()[0].Reconnects > before && n.Connected(r.Key.ID()) && r.Server.SessionOf(n.ID) != x
			})
			x = r.Server.SessionOf(n.ID)
			continue
		}
		peer := relaytest.StartNode(t, m, r)
		if err := peer.Send(n.ID, wire.ChannelSignal, []byte(name)); err != nil {
			t.Fatal(err)
		}
		n.Want(t, peer.ID, wire.ChannelSignal, name)
		if n.Stats()[0].Reconnects != before {
			t.Errorf("%s ended the session", name)
		}
	}
}
