package agent

import (
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// What another node says of its peers is shown with the log's names, of members alone, each once, and in known words.
func TestPeersTold(t *testing.T) {
	st := newWorld(t, newHost(t, "dc1"), newHost(t, "home1"), newHost(t, "cloud1")).state
	ids := map[string]identity.ID{}
	for _, n := range st.Nodes() {
		ids[n.GetName()], _ = identity.ParseID(n.GetId())
	}
	dc1, home1, cloud1 := ids["dc1"], ids["home1"], ids["cloud1"]
	r := peersTold(st, home1, []*skeinv1.PeerPath{
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
