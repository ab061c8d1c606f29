package tunnels

import (
	"net/netip"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane"
)

func TestRoamingIsPutRight(t *testing.T) {
	direct, proxy := netip.MustParseAddrPort("203.0.113.2:51820"), netip.MustParseAddrPort("127.0.0.1:40001")
	key := dataplane.Key{1}
	want := func(e netip.AddrPort) map[dataplane.Key]dataplane.Peer {
		return map[dataplane.Key]dataplane.Peer{key: {Endpoint: e}}
	}
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var r Roaming
	look := func(w, have netip.AddrPort, ms int) bool {
		t.Helper()
		at := start.Add(time.Duration(ms) * time.Millisecond)
		return r.Look(want(w), []dataplane.PeerStatus{{PublicKey: key, Endpoint: have}}, nil, at)
	}
	if look(direct, direct, 0) || look(proxy, direct, 250) || look(proxy, direct, 300) {
		t.Error("a peer that has just been switched is put back at once")
	}
	if !look(proxy, direct, 500) {
		t.Error("a late packet moved it to the old path, and it stays there")
	}
	if look(direct, direct, 600) || look(direct, proxy, 650) || !look(direct, proxy, 900) {
		t.Error("a new decision has to wait because of what befell the one before")
	}
	if look(proxy, proxy, 950) || look(netip.AddrPort{}, direct, 1000) {
		t.Error("a peer at its place, or with none, is put back")
	}
	times := 0
	for ms := 2000; ms < 62000; ms += 250 { // the peer sends another way, for good
		if look(direct, proxy, ms) {
			times++
		}
	}
	if times < 3 || times > 6 {
		t.Errorf("put back %d times in a minute, want few", times)
	}
	mapped := netip.AddrPortFrom(netip.AddrFrom16(direct.Addr().As16()), direct.Port())
	if look(direct, mapped, 63000) || look(direct, mapped, 200000) {
		t.Error("one address written in two ways is taken for two")
	}
	if look(direct, proxy, 201000) || !look(direct, proxy, 201250) {
		t.Error("after a calm time the patience is not short again")
	}
	r.Look(nil, nil, nil, start)
	if len(r) != 0 {
		t.Error("a peer that left is remembered")
	}
}

// A path that died in one direction brings packets in the other until the peer notices, and each moves WireGuard back.
func TestRoamingToADeadPathIsPutRightAtEachLook(t *testing.T) {
	direct, proxy := netip.MustParseAddrPort("203.0.113.2:51820"), netip.MustParseAddrPort("127.0.0.1:40001")
	key, other := dataplane.Key{1}, dataplane.Key{2}
	want := map[dataplane.Key]dataplane.Peer{key: {Endpoint: proxy}, other: {Endpoint: proxy}}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var r Roaming
	look := func(at netip.AddrPort, gone ...dataplane.Key) bool {
		now = now.Add(GoneEvery)
		set := map[dataplane.Key]bool{}
		for _, k := range gone {
			set[k] = true
		}
		have := []dataplane.PeerStatus{{PublicKey: key, Endpoint: at}, {PublicKey: other, Endpoint: proxy}}
		return r.Look(want, have, set, now)
	}
	for i := range 4 {
		if !look(direct, key) {
			t.Errorf("look %d leaves WireGuard at the path that has just died", i)
		}
		if look(proxy, key) {
			t.Errorf("look %d puts right what is right", i)
		}
	}
	if look(direct, other) {
		t.Error("the death of another peer's path is taken for this one's")
	}
	for i := range 4 { // both ends have noticed: from here on a peer is put back as any other
		if put := look(direct); put != (i == 3) {
			t.Errorf("look %d of a peer whose path is no longer newly dead: put back %v, want it after %v", i, put, roamFor)
		}
	}
}
