package agent

import (
	"testing"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/identity"
)

// Each peer has a transport of its own, by its name.
func TestPeerTransports(t *testing.T) {
	self, far, hidden, away := newHost(t, "self"), newHost(t, "far"), newHost(t, "hidden"), newHost(t, "away")
	a := &Agent{}
	ways := &sitemesh.Reach{Reach: sites.NewReach("", nil,
		map[identity.ID]sites.Next{hidden.key.ID(): {Via: far.key.ID()}}, nil, nil)}
	paths := map[identity.ID]path.Path{
		self.key.ID(): {Kind: path.Relay, Alive: true}, far.key.ID(): {Kind: path.Direct, Alive: true},
		away.key.ID(): {Kind: path.Direct},
	}
	for id, want := range map[identity.ID]string{
		self.key.ID(): "relay", far.key.ID(): "direct", away.key.ID(): "down", hidden.key.ID(): "down",
	} {
		if have := a.transport(id, paths); have != want {
			t.Errorf("in the topology full: %q, want %q", have, want)
		}
	}
	a.reach.Store(ways)
	if have := a.transport(hidden.key.ID(), paths); have != "hop" {
		t.Errorf("by a leader that is reached: %q", have)
	}
}
