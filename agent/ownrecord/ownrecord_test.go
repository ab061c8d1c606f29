package ownrecord

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/identity"
)

func TestSameObserved(t *testing.T) {
	a := &skeinv1.Record{NodeId: "1", Epoch: 1, Seq: 2, Time: 3, AppliedIndex: 4, StateHash: []byte("h"), PeersDirect: 5,
		TransportMode: "mixed", Site: "dc"}
	b := proto.CloneOf(a)
	b.NodeId, b.Epoch, b.Seq, b.Time, b.AppliedIndex, b.StateHash, b.PeersDirect, b.PeersRelay, b.TransportMode = "", 0, 0,
		0, 0, nil, 0, 9, ""
	if !sameObserved(a, b) {
		t.Error("a summary is no news")
	}
	b.Site = "home"
	if sameObserved(a, b) {
		t.Error("another site is news")
	}
	if a.GetSeq() != 2 || len(a.GetStateHash()) == 0 {
		t.Error("comparing changed a record")
	}
}

// Round-trip times are news when they differ much, and not every second.
func TestRoundTripTimesAreSeldomNews(t *testing.T) {
	record := func(rtts ...uint32) *skeinv1.Record {
		r := &skeinv1.Record{}
		for i, rtt := range rtts {
			r.RelayLinks = append(r.RelayLinks, &skeinv1.RelayLink{NodeId: fmt.Sprint("relay", i), RttMicros: rtt})
		}
		return r
	}
	for name, tt := range map[string]struct {
		next, old, want *skeinv1.Record
		notYet, changed bool
	}{
		"the first":               {record(20_000), record(), record(20_000), false, false},
		"a little":                {record(24_999, 44_000), record(20_000, 40_000), record(20_000, 40_000), false, false},
		"much":                    {record(25_000, 44_000), record(20_000, 40_000), record(25_000, 40_000), false, true},
		"much less":               {record(15_000, 400_000), record(20_000, 400_000), record(15_000, 400_000), false, true},
		"much, but no time yet":   {record(900_000), record(20_000), record(20_000), true, false},
		"a new one needs no time": {record(900_000, 7_000), record(20_000), record(20_000, 7_000), true, false},
	} {
		if changed := steadyRTTs(tt.next, tt.old, tt.notYet); changed != tt.changed || !proto.Equal(tt.next, tt.want) {
			t.Errorf("%s: %v, changed %t; want %v, %t", name, tt.next, changed, tt.want, tt.changed)
		}
	}
}

// Changes of a record take turns in a large mesh: three at once, then one for so long; in a small one nobody waits.
func TestRecordsTakeTurns(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var c Clock
	at, spacing := start, 40*turnPerMember
	for i, want := range []time.Duration{0, 0, 0, spacing, spacing, spacing} {
		wait := c.turn(at, 40)
		if wait != want {
			t.Errorf("change %d waits %s, want %s", i, wait, want)
		}
		if at = at.Add(wait); wait > 0 && c.turn(at, 40) != 0 {
			t.Errorf("change %d waits longer than it was told", i)
		}
	}
	if wait := c.turn(at.Add(time.Hour), 40); wait != 0 {
		t.Errorf("after an hour without a change one waits %s", wait)
	}
	var small Clock
	for i := range 3 {
		if wait := small.turn(start, 3); wait != 0 {
			t.Errorf("of three members, change %d waits %s", i, wait)
		}
	}
	if a, b := unhurried(3), unhurried(1000); a >= time.Second || b != unhurriedMost {
		t.Errorf("unhurried changes of three are %s apart, of a thousand %s", a, b)
	}
}

// Each node has a moment of its own in each ten minutes for changes that nobody waits for, wherever the last one was.
func TestMomentsOfUnhurriedChanges(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	const nodes, every = 100, 10 * time.Minute
	var inFirstMinute int
	for i := range nodes {
		sum := sha256.Sum256([]byte{byte(i)})
		id := identity.ID(sum[:len(identity.ID{})])
		var at []time.Duration
		last := start
		for d := time.Duration(0); d < 4*every; d += time.Second {
			if ownMoment(id, last, start.Add(d), every) {
				at, last = append(at, d), start.Add(d)
			}
		}
		if len(at) != 4 || at[0] >= every {
			t.Fatalf("node %d has its moments at %s", i, at)
		}
		for n := range at[1:] {
			if at[n+1]-at[n] != every {
				t.Errorf("node %d: %s after its last moment", i, at[n+1]-at[n])
			}
		}
		if at[0] < time.Minute {
			inFirstMinute++
		}
	}
	if inFirstMinute == 0 || inFirstMinute > nodes/4 {
		t.Errorf("%d of %d nodes have their moment in the first of ten minutes", inFirstMinute, nodes)
	}
	if !ownMoment(identity.ID{}, time.Time{}, start, every) {
		t.Error("a node that has said nothing yet waits")
	}
}

// What moves the traffic of others does not wait for other changes to have had their turns.
func TestWhoLeadsHasItsTurnAtOnce(t *testing.T) {
	now := time.Unix(1e9, 0)
	old := &skeinv1.Record{Leads: 1, LeaderSlot: 1}
	for what, c := range map[string]struct {
		next *skeinv1.Record
		wait bool
	}{
		"another address": {&skeinv1.Record{Leads: 1, LeaderSlot: 1, NodeAddresses: []string{"192.0.2.1/32"}}, true},
		"another term":    {&skeinv1.Record{Leads: 2, LeaderSlot: 1}, false},
		"another share":   {&skeinv1.Record{Leads: 1, LeaderSlot: 2}, false},
		"a silent leader": {&skeinv1.Record{Leads: 1, LeaderSlot: 1,
			SilentLeaders: []*skeinv1.SilentLeader{{NodeId: "x", Kinds: 1}}}, false},
	} {
		var clock Clock
		for clock.turn(now, 40) == 0 { // others have had them all
		}
		if wait := clock.due(old, c.next, now, 40); wait > 0 != c.wait {
			t.Errorf("%s waits for %s", what, wait)
		}
	}
}

// A relay whose session was lost stays in the record for a while when no other is listed, or on a late host.
func TestLostLinksStay(t *testing.T) {
	record := func(relays ...string) *skeinv1.Record {
		r := &skeinv1.Record{}
		for _, id := range relays {
			r.RelayLinks = append(r.RelayLinks, &skeinv1.RelayLink{NodeId: id})
		}
		return r
	}
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for name, tt := range map[string]struct {
		next *skeinv1.Record
		late bool
		want []int // links at once, and after linksStay
	}{
		"another is there":           {record("b"), false, []int{1, 1}},
		"another, and the host late": {record("b"), true, []int{2, 1}},
		"none is there":              {record(), false, []int{2, 0}},
	} {
		var c Clock
		old := record("a", "b")
		for i, at := range []time.Time{start, start.Add(linksStay)} {
			next := proto.CloneOf(tt.next)
			c.keepLinks(next, old, tt.late && i == 0, at)
			if got := len(next.GetRelayLinks()); got != tt.want[i] {
				t.Errorf("%s, %s after: %d links, want %d", name, at.Sub(start), got, tt.want[i])
			}
		}
	}
}

func TestWithOwn(t *testing.T) {
	addrs := []netip.Addr{
		netip.MustParseAddr("192.168.7.4"), netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("192.168.7.4"),
		netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("fd00::7"), netip.MustParseAddr("2001:db8::7"),
	}
	networks := []string{"10.0.0.0/24"}
	have := WithOwn(networks, addrs)
	if want := []string{"10.0.0.0/24", "192.168.7.4/32", "fd00::7/128"}; !slices.Equal(have, want) {
		t.Errorf("%q, want %q", have, want)
	}
	if len(networks) != 1 {
		t.Errorf("the configuration became %q", networks)
	}
}

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

// A cloud's address counts as this host's own where nobody outside sees another one.
func TestElastic(t *testing.T) {
	addrs := func(texts ...string) (out []netip.Addr) {
		for _, s := range texts {
			out = append(out, netip.MustParseAddr(s))
		}
		return out
	}
	seen := func(texts ...string) (out []candidate.Observation) {
		for _, s := range texts {
			out = append(out, candidate.Observation{Mapped: netip.MustParseAddrPort(s)})
		}
		return out
	}
	for name, c := range map[string]struct {
		told []netip.Addr
		seen []candidate.Observation
		want string
	}{
		"seen so from outside":       {addrs("203.0.113.7"), seen("203.0.113.7:51820"), "[203.0.113.7]"},
		"seen by nobody":             {addrs("203.0.113.7"), nil, "[203.0.113.7]"},
		"it leaves by a NAT gateway": {addrs("203.0.113.7"), seen("198.51.100.9:4711"), "[]"},
		"one of two": {addrs("203.0.113.7", "203.0.113.8"), seen("203.0.113.8:51820"),
			"[203.0.113.7 203.0.113.8]"},
		"IPv6 says nothing of IPv4": {addrs("203.0.113.7"), seen("[2001:db8::7]:51820"), "[203.0.113.7]"},
		"a private one":             {addrs("10.0.0.7"), nil, "[]"},
		"none is told":              {nil, seen("203.0.113.7:51820"), "[]"},
	} {
		if have := fmt.Sprint(Elastic(&candidate.Result{NATReport: candidate.NATReport{Mapped: c.seen},
			Elastic: c.told})); have != c.want {
			t.Errorf("%s: %s, want %s", name, have, c.want)
		}
	}
	if Elastic(nil) != nil {
		t.Error("an address before anything was found")
	}
}

// The number outside goes with the forwarding host alone.
func TestWithRelayPort(t *testing.T) {
	hosts := []string{"edge.example.com", "203.0.113.7", "192.168.1.2", "2001:db8::7"}
	for outside, want := range map[uint16][]string{
		0:    {"edge.example.com:7443", "203.0.113.7:7443", "192.168.1.2:7443", "[2001:db8::7]:7443"},
		7444: {"edge.example.com:7444", "203.0.113.7:7443", "192.168.1.2:7443", "[2001:db8::7]:7443"},
	} {
		have := WithRelayPort(hosts, "edge.example.com", config.Ports{Relay: 7443, RelayOutside: outside})
		if !slices.Equal(have, want) {
			t.Errorf("outside %d: %s, want %s", outside, have, want)
		}
	}
	have := WithRelayPort(hosts[1:2], "", config.Ports{Relay: 7443, RelayOutside: 7444})
	if have[0] != "203.0.113.7:7443" {
		t.Errorf("nothing is forwarded, and others are told %s", have)
	}
}
