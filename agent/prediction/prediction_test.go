package prediction

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/birthday"
	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

func rewriteTo(local uint16, remote string) dataplane.PortRewrite {
	return dataplane.PortRewrite{Local: local, Remote: netip.MustParseAddrPort(remote)}
}

// A rewrite stays while a path uses it and for some time after, so that a path that died can return.
func TestRewritesLiveAsLongAsTheirPaths(t *testing.T) {
	var w rewrites
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	peer, a := identity.ID{7}, rewriteTo(40001, "198.51.100.1:51820")
	w.add(rewrite{PortRewrite: a, peer: peer, used: start, event: birthday.Event{Phase: birthday.Hit, Local: a.Local,
		Remote: a.Remote}})
	if n := w.news(nil); len(n) != 0 {
		t.Fatalf("told before the data plane holds it: %+v", n)
	}
	if n := w.news(w.list()); len(n) != 1 || n[0].peer != peer || n[0].event.Remote != a.Remote {
		t.Fatalf("news %+v", n)
	}
	for i, want := range []bool{true, false, true} { // the peer's pings that come this way are passed on, now and then
		if r, ok := w.heard(peer, a.Remote, start.Add(time.Duration(i)*heardEvery/2)); ok != want ||
			ok && r.event.Remote != a.Remote {
			t.Errorf("ping %d is passed on: %t, want %t", i, ok, want)
		}
	}
	if _, ok := w.heard(identity.ID{8}, a.Remote, start.Add(time.Hour)); ok {
		t.Error("another peer's ping is taken for this one's")
	}
	if n := w.news(w.list()); len(n) != 0 {
		t.Errorf("told twice: %+v", n)
	}
	direct := map[identity.ID]path.Path{peer: {Kind: path.Direct, Endpoint: a.Remote, Alive: true}}
	relay := map[identity.ID]path.Path{peer: {Kind: path.Relay}}
	now := start
	for _, step := range []struct {
		paths map[identity.ID]path.Path
		after time.Duration
		kept  bool
	}{{direct, time.Hour, true}, {relay, rewriteRests - time.Second, true}, {direct, time.Second, true},
		{relay, rewriteRests - time.Second, true}, {relay, time.Second, false}} {
		now = now.Add(step.after)
		w.expire(step.paths, now)
		if got := len(w.list()) == 1; got != step.kept {
			t.Fatalf("%s after the start, with %v: kept %t, want %t", now.Sub(start), step.paths, got, step.kept)
		}
	}
}

// A rewrite of an earlier run is kept for a minute, and longer once its peer is known; the peer's path is then
// informed.
func TestRewritesOfAFormerRun(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	a, b := rewriteTo(40001, "198.51.100.1:51820"), rewriteTo(40002, "198.51.100.2:51820")
	var w rewrites
	w.adopt([]dataplane.PortRewrite{a, b}, start)
	if len(w.list()) != 2 || len(w.news(w.list())) != 0 || len(w.strays()) != 2 {
		t.Fatalf("after the start: %v", w.list())
	}
	peer := identity.ID{7}
	w.claim(a.Remote, peer, birthday.Event{Phase: birthday.Hit, Remote: a.Remote})
	if n := w.news(w.list()); len(n) != 1 || n[0].peer != peer || n[0].Local != a.Local {
		t.Errorf("the peer is told %+v", n)
	}
	if s := w.strays(); !slices.Equal(s, []netip.AddrPort{b.Remote}) {
		t.Errorf("strays %v", s)
	}
	w.expire(nil, start.Add(adoptedFor))
	if l := w.list(); !slices.Equal(l, []dataplane.PortRewrite{a}) {
		t.Errorf("a minute later %v are kept", l)
	}
	// A new hit to the same address takes its place.
	c := rewriteTo(40003, "198.51.100.1:51820")
	w.add(rewrite{PortRewrite: c, peer: peer, used: start})
	if l := w.list(); !slices.Equal(l, []dataplane.PortRewrite{c}) {
		t.Errorf("after another hit %v", l)
	}
	if at := w.through(c.Remote); at != c.Remote {
		t.Errorf("WireGuard sends to %s", at)
	}
}

func TestBehindOneAddress(t *testing.T) {
	r := &skeinv1.Record{Candidates: []*skeinv1.Candidate{
		{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: "203.0.113.9:51820"},
		{Type: skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, Address: "203.0.113.1:40000"},
	}}
	if !behind(r, netip.MustParseAddr("203.0.113.1")) || behind(r, netip.MustParseAddr("203.0.113.9")) ||
		behind(r, netip.Addr{}) {
		t.Error("who is behind an address is told by what others see of it")
	}
}

// After a change of this host's network a rewrite lives only while a live path uses it: behind another NAT, its
// packets would arrive at the peer from a port that it does not know.
func TestRewritesOfAnotherNetwork(t *testing.T) {
	var w rewrites
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	peer, a := identity.ID{7}, rewriteTo(40001, "198.51.100.1:51820")
	w.add(rewrite{PortRewrite: a, peer: peer, used: start})
	w.networkChanged()
	for _, step := range []struct {
		path path.Path
		kept bool
	}{
		{path.Path{Kind: path.Direct, Endpoint: a.Remote, Alive: true}, true},
		{path.Path{Kind: path.Direct, Endpoint: a.Remote}, false},
	} {
		w.expire(map[identity.ID]path.Path{peer: step.path}, start.Add(time.Second))
		if got := len(w.list()) == 1; got != step.kept {
			t.Fatalf("with %+v: kept %t, want %t", step.path, got, step.kept)
		}
	}
}
