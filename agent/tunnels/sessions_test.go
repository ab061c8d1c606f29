package tunnels

import (
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/identity"
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
		var u Unanswered
		asked := 0
		for i, r := range append([]reading{{1000, 1000}}, c.readings...) {
			now := start.Add(time.Duration(i) * time.Second)
			counters := map[identity.ID]path.Counters{id: {RxBytes: r.rx, TxBytes: r.tx}}
			if who, ok := u.Look(counters, func(identity.ID) bool { return !c.away }, now); ok {
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
	var u Unanswered
	start, asked := time.Now(), map[identity.ID]int{}
	for i := range uint64(14) {
		counters := map[identity.ID]path.Counters{}
		for n := range byte(10) {
			counters[identity.ID{n}] = path.Counters{TxBytes: i * initiationSize}
		}
		who, ok := u.Look(counters, func(identity.ID) bool { return true }, start.Add(time.Duration(i)*time.Second))
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

// Requests stand for a while, and so many at a time.
func TestHandshakesAreKept(t *testing.T) {
	var k Handshakes
	now := time.Now()
	for n := range byte(2 * handshakesMost) {
		if granted := k.Request(identity.ID{n}, now); granted != (n < handshakesMost) {
			t.Errorf("request %d: granted is %v", n, granted)
		}
	}
	if k.Request(identity.ID{0}, now) || len(k.Requested(now)) != handshakesMost {
		t.Errorf("%d requests stand", len(k.Requested(now)))
	}
	later := now.Add(handshakeKeepFor)
	if left := k.Requested(later); len(left) != 0 {
		t.Errorf("%v stand for ever", left)
	}
	if !k.Request(identity.ID{99}, later) || !k.Requested(later)[identity.ID{99}] {
		t.Error("requests that have ended leave no room for a new one")
	}
}

// A peer that was none for a while is sent handshakes until there was a handshake, as long as it may have a session of
// before.
func TestWhoComesBackGetsAHandshake(t *testing.T) {
	var k Handshakes
	id, left := identity.ID{1}, time.Unix(1e9, 0)
	handshake := left.Add(-time.Second)
	at := func(now time.Time) bool {
		return slices.Contains(k.Parted(now, func(identity.ID) time.Time { return handshake }), id)
	}
	if at(left) {
		t.Error("one that was always a peer")
	}
	k.Leave(id, left)
	if !at(left.Add(time.Second)) || !at(left.Add(sessionEnds-time.Second)) {
		t.Error("not one that has left, and may be back")
	}
	handshake = left.Add(time.Minute)
	if at(left.Add(time.Minute)) {
		t.Error("one that has a session again")
	}
	handshake = time.Time{}
	k.Leave(id, left)
	if at(left.Add(sessionEnds)) || len(k.left) > 0 {
		t.Error("one whose session of before has ended")
	}
}
