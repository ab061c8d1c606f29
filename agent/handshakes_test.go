package agent

import (
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/roster"
	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
)

// A peer's signal makes a keepalive for it, as the data plane is told.
func TestHandshakeSignal(t *testing.T) {
	self, peer := newHost(t, "a"), newHost(t, "b")
	a := newTestAgent(self, newWorld(t, self, peer).state)
	s := &skeinv1.Signal{From: peer.key.ID().String(), Body: &skeinv1.Signal_HandshakeRequest_{
		HandshakeRequest: &skeinv1.Signal_HandshakeRequest{}}}
	b, err := proto.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	a.handleSignal(self.key.ID(), b) // in another's name
	if left := a.handshakes.Requested(time.Now()); len(left) != 0 {
		t.Fatalf("a signal in another's name: %v", left)
	}
	a.handleSignal(peer.key.ID(), b)
	if !a.handshakes.Requested(time.Now())[peer.key.ID()] {
		t.Error("the peer's wish is not noted")
	}
}

// A member that is not a peer for a moment, since another leader was chosen, is sent handshakes when it is one again.
func TestPeersThatLeaveAreNoted(t *testing.T) {
	self, peer := newHost(t, "a"), newHost(t, "b")
	a := newTestAgent(self, newWorld(t, self, peer).state)
	a.loop.unprobed, a.proxies = map[identity.ID]roster.Member{}, &client.Proxies{}
	none := func(identity.ID) time.Time { return time.Time{} }
	id := peer.key.ID()
	for _, c := range []struct {
		peers map[identity.ID]bool
		noted bool
	}{{map[identity.ID]bool{id: true}, false}, {nil, true}, {map[identity.ID]bool{id: true}, true}} {
		a.reach.Store(&sitemesh.Reach{Reach: sites.NewReach("", c.peers, nil, nil, nil)})
		a.syncPeers()
		if noted := slices.Contains(a.handshakes.Parted(time.Now(), none), id); noted != c.noted {
			t.Errorf("peers %v: noted %t", c.peers, noted)
		}
	}
}

func TestKnownPeers(t *testing.T) {
	ids := []identity.ID{{1}, {2}, {3}}
	peers := &sitemesh.Reach{Reach: sites.NewReach("", map[identity.ID]bool{{1}: true, {3}: true, {4}: true}, nil,
		nil, nil)}
	for _, c := range []struct {
		r    *sitemesh.Reach
		want []identity.ID
	}{{nil, ids}, {&sitemesh.Reach{}, ids}, {peers, []identity.ID{{1}, {3}}}} {
		if got := slices.Collect(knownPeers(ids, c.r)); !slices.Equal(got, c.want) {
			t.Errorf("%v, want %v", got, c.want)
		}
	}
}
