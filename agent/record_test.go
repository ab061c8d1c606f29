package agent

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

// nowhere is a control net that reaches nobody.
type nowhere struct{ closed chan struct{} }

var errNowhere = errors.New("nobody is there")

func (nowhere) SendPacket(identity.ID, []byte) error { return errNowhere }
func (nowhere) Dial(context.Context, identity.ID, string) (net.Conn, error) {
	return nil, errNowhere
}
func (n nowhere) Accept() (net.Conn, error) { <-n.closed; return nil, net.ErrClosed }
func (n nowhere) Close() error              { close(n.closed); return nil }
func (nowhere) Addr() net.Addr              { return &net.TCPAddr{} }

func TestRecordIsPublished(t *testing.T) {
	h, other := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, h)
	replica := newReplica(t, w)
	simtime.Test(t, func(t *testing.T) {
		a := newTestAgent(h, w.state)
		a.replica = replica
		defer a.withGossip(t, h.key, w.state)()
		published := func() *skeinv1.Record { return a.gossip.Records()[a.id].Record }
		seq := func() uint64 { return published().GetSeq() }

		a.publish()
		first := published()
		if first.GetVersion() != a.opts.Version || len(first.GetWireguardKey()) != 32 || len(first.GetStateHash()) != 0 {
			t.Errorf("the first record is %v", first)
		}
		for range 50 { // an agent that idles says nothing
			time.Sleep(100 * time.Millisecond)
			a.publish()
		}
		quietSeq := seq()
		if quietSeq > first.GetSeq()+1 || published().GetAppliedIndex() != w.state.Index() ||
			len(published().GetStateHash()) != stateHashSize {
			t.Errorf("after five quiet seconds the record is number %d, was %d: %v", quietSeq, first.GetSeq(), published())
		}

		// What paths depend on goes out at once.
		a.netcheck.Store(&candidate.Result{NATReport: candidate.NATReport{NAT: skeinv1.NatType_NAT_TYPE_SYMMETRIC}})
		a.publish()
		if seq() != quietSeq+1 || published().GetNatType() != skeinv1.NatType_NAT_TYPE_SYMMETRIC {
			t.Errorf("a new NAT type is not published at once: %v", published())
		}

		// A busy log is not: its index waits until it rests.
		before := seq()
		for i := range 30 {
			if i == 0 {
				w.must(w.admission(other))
			} else {
				w.must(&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
					Id: testTokenID[:14] + string(rune('a'+i/16)) + "0123456789abcdef"[i%16:][:1], SecretHash: testSecret,
					LifetimeNanos: int64(time.Hour), Uses: 1,
				}}})
			}
			a.loop.state = w.state
			a.publish()
			time.Sleep(100 * time.Millisecond)
		}
		if seq() != before || published().GetAppliedIndex() == w.state.Index() {
			t.Errorf("thirty events made %d records", seq()-before)
		}
		time.Sleep(quietForHash)
		a.publish()
		if seq() != before+1 || published().GetAppliedIndex() != w.state.Index() {
			t.Errorf("the index at rest is %d, the record says %d", w.state.Index(), published().GetAppliedIndex())
		}
	})
}

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

func TestCheckHash(t *testing.T) {
	h, other := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, h, other)
	a := newTestAgent(h, w.state)
	a.loop.state = w.state
	index, id := w.state.Index(), other.key.ID()
	good := a.hashAt(w.state)
	a.checkHash(id, &skeinv1.Record{AppliedIndex: index, StateHash: good})
	a.checkHash(id, &skeinv1.Record{AppliedIndex: index + 100, StateHash: []byte("of the future...")})
	if l := a.problems.list(); len(l) != 0 {
		t.Errorf("equal states are a problem: %v", l)
	}
	a.checkHash(id, &skeinv1.Record{AppliedIndex: index, StateHash: []byte("another history.")})
	l := a.problems.list()
	if len(l) != 1 || l[0].GetSubject() != "state of b" || l[0].GetSeverity() != failure || l[0].GetAdvice() == "" {
		t.Errorf("a different state is told as %v", l)
	}
	a.checkHash(id, &skeinv1.Record{AppliedIndex: index, StateHash: good})
	if l := a.problems.list(); len(l) != 0 {
		t.Errorf("it stays a problem: %v", l)
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
	var c recordClock
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
	var small recordClock
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
		var clock recordClock
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
		var c recordClock
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
	have := withOwn(networks, addrs)
	if want := []string{"10.0.0.0/24", "192.168.7.4/32", "fd00::7/128"}; !slices.Equal(have, want) {
		t.Errorf("%q, want %q", have, want)
	}
	if len(networks) != 1 {
		t.Errorf("the configuration became %q", networks)
	}
}
