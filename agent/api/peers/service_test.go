package peers

import (
	"testing"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/identity"
)

// Each peer has a transport of its own, by its name.
func TestPeerTransports(t *testing.T) {
	self, far, hidden, away := identity.ID{1}, identity.ID{2}, identity.ID{3}, identity.ID{4}
	ways := &sitemesh.Reach{Reach: sites.NewReach("", nil,
		map[identity.ID]sites.Next{hidden: {Via: far}}, nil, nil)}
	paths := map[identity.ID]path.Path{
		self: {Kind: path.Relay, Alive: true}, far: {Kind: path.Direct, Alive: true},
		away: {Kind: path.Direct},
	}
	for id, want := range map[identity.ID]string{
		self: "relay", far: "direct", away: "down", hidden: "down",
	} {
		if have := transport(nil, id, paths); have != want {
			t.Errorf("in the topology full: %q, want %q", have, want)
		}
	}
	if have := transport(ways, hidden, paths); have != "hop" {
		t.Errorf("by a leader that is reached: %q", have)
	}
}
