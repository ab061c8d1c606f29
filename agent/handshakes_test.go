package agent

import (
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
)

// A peer that is there and answers no handshake is asked to begin one; one that is slow, or talks, or is away is not.
func TestUnansweredHandshakes(t *testing.T) {
	id, start := identity.ID{1}, time.Now()
	type reading struct{ rx, tx uint64 }
	const once = initiationSize
	for _, c := range []struct {
		name     string
		away     bool
		readings []reading // a second apart, after one of 1000 and 1000
		asked    int
	}{
		{"silence", false, []reading{{1000, 1000}, {1000, 1000}, {1000, 1000}}, 0},
		{"one initiation", false, []reading{{1000, 1000 + once}, {1000, 1000 + once}}, 0},
		{"two of them", false, []reading{{1000, 1000 + once}, {1000, 1000 + once}, {1000, 1000 + 2*once}}, 1},
		{"two between two readings", false, []reading{{1000, 1000 + 2*once}}, 1},
		{"two, and the way is dead", true, []reading{{1000, 1000 + 2*once}, {1000, 1000 + 3*once}}, 0},
		{"an answer between them", false, []reading{{1000, 1000 + once}, {1092, 1000 + once}, {1092, 1000 + 2*once}}, 0},
		{"packets between them", false, []reading{{1000, 1000 + once}, {1000, 1100 + once}, {1000, 1100 + 2*once}}, 0},
		{"packets that are as large as four together", false, []reading{{1000, 1000 + 4*once}, {1000, 1000 + 4*once}}, 0},
		{"another device", false, []reading{{0, 2 * once}, {0, 3 * once}}, 0},
		{"many, and not asked at each", false, []reading{
			{1000, 1000 + 2*once}, {1000, 1000 + 3*once}, {1000, 1000 + 4*once}, {1000, 1000 + 5*once}}, 1},
	} {
		var u unanswered
		asked := 0
		for i, r := range append([]reading{{1000, 1000}}, c.readings...) {
			now := start.Add(time.Duration(i) * time.Second)
			counters := map[identity.ID]path.Counters{id: {RxBytes: r.rx, TxBytes: r.tx}}
			if who, ok := u.look(counters, func(identity.ID) bool { return !c.away }, now); ok {
				if asked++; who != id {
					t.Errorf("%s: %s is asked", c.name, who)
				}
			}
		}
		if asked != c.asked {
			t.Errorf("%s: asked %d times, want %d", c.name, asked, c.asked)
		}
	}
}

// When nobody answers, which is a fault of this host's, one peer is asked at each reading, and all in time.
func TestUnansweredByAll(t *testing.T) {
	var u unanswered
	start, asked := time.Now(), map[identity.ID]int{}
	for i := range uint64(14) {
		counters := map[identity.ID]path.Counters{}
		for n := range byte(10) {
			counters[identity.ID{n}] = path.Counters{TxBytes: i * initiationSize}
		}
		who, ok := u.look(counters, func(identity.ID) bool { return true }, start.Add(time.Duration(i)*time.Second))
		if ok {
			asked[who]++
		}
	}
	for id, n := range asked {
		if n != 1 {
			t.Errorf("%s is asked %d times in 14 seconds", id, n)
		}
	}
	if len(asked) != 10 {
		t.Errorf("%d of ten are asked", len(asked))
	}
}

// Wishes stand for a while, and so many at a time.
func TestHandshakesAreKept(t *testing.T) {
	var k handshakes
	now := time.Now()
	for n := range byte(2 * handshakesMost) {
		if granted := k.take(identity.ID{n}, now); granted != (n < handshakesMost) {
			t.Errorf("wish %d: granted is %v", n, granted)
		}
	}
	if k.take(identity.ID{0}, now) || len(k.standing(now)) != handshakesMost {
		t.Errorf("%d wishes stand", len(k.standing(now)))
	}
	later := now.Add(handshakeKeepFor)
	if left := k.standing(later); len(left) != 0 {
		t.Errorf("%v stand for ever", left)
	}
	if !k.take(identity.ID{99}, later) || !k.standing(later)[identity.ID{99}] {
		t.Error("old wishes leave no room for a new one")
	}
}

// A peer that was none for a while is sent handshakes until there was a handshake, as long as it may have a session of
// before.
func TestWhoComesBackGetsAHandshake(t *testing.T) {
	var k handshakes
	id, left := identity.ID{1}, time.Unix(1e9, 0)
	handshake := left.Add(-time.Second)
	at := func(now time.Time) bool {
		return slices.Contains(k.parted(now, func(identity.ID) time.Time { return handshake }), id)
	}
	if at(left) {
		t.Error("one that was always a peer")
	}
	k.leave(id, left)
	if !at(left.Add(time.Second)) || !at(left.Add(sessionEnds-time.Second)) {
		t.Error("not one that has left, and may be back")
	}
	handshake = left.Add(time.Minute)
	if at(left.Add(time.Minute)) {
		t.Error("one that has a session again")
	}
	handshake = time.Time{}
	k.leave(id, left)
	if at(left.Add(sessionEnds)) || len(k.left) > 0 {
		t.Error("one whose session of before has ended")
	}
}

// A peer's signal makes a keepalive for it, as the data plane is told.
func TestHandshakeSignal(t *testing.T) {
	self, peer := newHost(t, "a"), newHost(t, "b")
	a := newTestAgent(self, newWorld(t, self, peer).state)
	s := &skeinv1.Signal{From: peer.key.ID().String(), Body: &skeinv1.Signal_Knock_{Knock: &skeinv1.Signal_Knock{}}}
	b, err := proto.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	a.takeSignal(self.key.ID(), b) // in another's name
	if left := a.handshakes.standing(time.Now()); len(left) != 0 {
		t.Fatalf("a signal in another's name: %v", left)
	}
	a.takeSignal(peer.key.ID(), b)
	if !a.handshakes.standing(time.Now())[peer.key.ID()] {
		t.Error("the peer's wish is not noted")
	}
}

// A member that is no peer for a moment, since another leader was chosen, is sent handshakes when it is one again.
func TestPeersThatLeaveAreNoted(t *testing.T) {
	self, peer := newHost(t, "a"), newHost(t, "b")
	a := newTestAgent(self, newWorld(t, self, peer).state)
	a.loop.unprobed, a.proxies = map[identity.ID]member{}, &client.Proxies{}
	none := func(identity.ID) time.Time { return time.Time{} }
	id := peer.key.ID()
	for _, c := range []struct {
		peers map[identity.ID]bool
		noted bool
	}{{map[identity.ID]bool{id: true}, false}, {nil, true}, {map[identity.ID]bool{id: true}, true}} {
		a.reach.Store(&reach{sites.NewReach("", c.peers, nil, nil, nil)})
		a.syncPeers()
		if noted := slices.Contains(a.handshakes.parted(time.Now(), none), id); noted != c.noted {
			t.Errorf("peers %v: noted %t", c.peers, noted)
		}
	}
}

func TestKnownPeers(t *testing.T) {
	ids := []identity.ID{{1}, {2}, {3}}
	peers := &reach{sites.NewReach("", map[identity.ID]bool{{1}: true, {3}: true, {4}: true}, nil, nil, nil)}
	for _, c := range []struct {
		r    *reach
		want []identity.ID
	}{{nil, ids}, {&reach{}, ids}, {peers, []identity.ID{{1}, {3}}}} {
		if got := slices.Collect(knownPeers(ids, c.r)); !slices.Equal(got, c.want) {
			t.Errorf("%v, want %v", got, c.want)
		}
	}
}
