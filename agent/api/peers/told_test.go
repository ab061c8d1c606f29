package peers

import (
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/api/apitest"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// What another node says of its peers is shown with the log's names, of members alone, each once, and in known words.
func TestTold(t *testing.T) {
	st, names := apitest.Members(t, "dc1", "home1", "cloud1")
	var ids []identity.ID
	for _, n := range names {
		id, err := identity.ParseID(n)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	dc1, home1, cloud1 := ids[0], ids[1], ids[2]
	r := told(st, home1, []*skeinv1.PeerPath{
		{NodeId: cloud1.String(), Path: "relay", Relay: dc1.String(), Detail: "udp", Alive: true,
			Rule: "relay-udp", RttNanos: -5},
		{NodeId: dc1.String(), Path: "direct", Rule: "\x1b[31m"}, {NodeId: dc1.String(), Path: "relay"},
		{NodeId: home1.String(), Path: "direct"}, {NodeId: "ffffffffffffffff", Path: "direct"}, {NodeId: "rubbish"},
	})
	var have []string
	for _, p := range r.GetPeers() {
		have = append(have, strings.Join([]string{p.GetName(), p.GetPath(), p.GetRelayName(), p.GetDetail(),
			p.GetRule()}, " "))
	}
	if got, want := strings.Join(have, "; "), "cloud1 relay dc1 udp relay-udp; dc1 direct   "; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if tr := r.GetPeerTransports(); len(tr) != 2 || tr["cloud1"] != "relay" || tr["dc1"] != "down" ||
		r.GetPeers()[0].GetRttNanos() != 0 {
		t.Errorf("transports %v, RTT %d", tr, r.GetPeers()[0].GetRttNanos())
	}
}
