package agent

import (
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// A node says in one word how it reaches its peers, and how many by which transport; one that it does not reach counts
// for nothing.
func TestTransportMode(t *testing.T) {
	direct := path.Path{Kind: path.Direct, Endpoint: netip.MustParseAddrPort("203.0.113.7:51820"), Alive: true}
	relayed := path.Path{Kind: path.Relay, Relay: identity.ID{9}, Alive: true}
	dead := direct
	dead.Alive = false
	for _, c := range []struct {
		name           string
		paths          []path.Path
		direct, relays uint32
		want           string
	}{
		{"no peers", nil, 0, 0, ""},
		{"all direct", []path.Path{direct, direct}, 2, 0, "direct"},
		{"all by relays", []path.Path{relayed}, 0, 1, "relay"},
		{"some of each", []path.Path{direct, relayed, relayed}, 1, 2, "mixed"},
		{"direct, and one that is not reached", []path.Path{direct, dead, {}}, 1, 0, "direct"},
		{"nobody is reached", []path.Path{dead, {}}, 0, 0, ""},
	} {
		paths := map[identity.ID]path.Path{}
		for i, p := range c.paths {
			paths[identity.ID{byte(i + 1)}] = p
		}
		r := &skeinv1.Record{}
		summarise(r, paths)
		if r.GetTransportMode() != c.want || r.GetPeersDirect() != c.direct || r.GetPeersRelay() != c.relays {
			t.Errorf("%s: mode %q, %d direct, %d by relays; want %q, %d, %d", c.name, r.GetTransportMode(), r.GetPeersDirect(),
				r.GetPeersRelay(), c.want, c.direct, c.relays)
		}
	}
}

// Each peer has a transport of its own, by its name.
func TestPeerTransports(t *testing.T) {
	self, far, hidden, away := newHost(t, "self"), newHost(t, "far"), newHost(t, "hidden"), newHost(t, "away")
	a := &Agent{}
	ways := &reach{sites.NewReach("", nil, map[identity.ID]sites.Next{hidden.key.ID(): {Via: far.key.ID()}}, nil, nil)}
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
