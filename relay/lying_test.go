package relay

import (
	"testing"

	"github.com/skeinmesh/skein/identity"
)

// A relay that sends what only clients may loses the session; answers to what nobody asked are not heeded.
func TestALyingRelay(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	n := startNode(t, m, r)
	x := r.server.SessionOf(n.id)
	for name, frame := range map[string][]byte{
		"connect":          AppendNode(nil, FrameConnect, n.id),
		"another version":  AppendHello(nil, Hello{Version: 2}),
		"a pong unasked":   AppendToken(nil, FramePong, 7),
		"no way for whom?": AppendNoWay(nil, identity.ID{}, identity.ID{}, NoWayGone),
	} {
		before := n.Stats()[0].Reconnects
		x.Say(frame)
		ends := name == "connect" || name == "another version"
		if ends {
			waitFor(t, name+": the end of the session", func() bool {
				return n.Stats()[0].Reconnects > before && n.connected(r.key.ID()) && r.server.SessionOf(n.id) != x
			})
			x = r.server.SessionOf(n.id)
			continue
		}
		peer := startNode(t, m, r)
		if err := peer.Send(n.id, ChannelSignal, []byte(name)); err != nil {
			t.Fatal(err)
		}
		n.want(t, got{peer.id, ChannelSignal, name})
		if n.Stats()[0].Reconnects != before {
			t.Errorf("%s ended the session", name)
		}
	}
}
