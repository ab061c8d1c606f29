package gossip

import (
	"errors"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

// What memberlist's delegate checks before a node is admitted.
func TestOnlyMembersAreTakenIn(t *testing.T) {
	member, other, stranger := simKey(0).ID(), simKey(1).ID(), simKey(9).ID()
	g := bareGossip(newRoster(simKey(0), simKey(1)))
	node := func(id identity.ID, change func(*memberlist.Node)) *memberlist.Node {
		at := syntheticAddr(id)
		n := &memberlist.Node{Name: id.String(), Addr: at.Addr().AsSlice(), Port: at.Port(), Meta: encodeMeta(mark{ID: id},
			false), State: memberlist.StateAlive}
		if change != nil {
			change(n)
		}
		return n
	}
	d := (*delegate)(g.wide.Load())
	for name, c := range map[string]struct {
		n  *memberlist.Node
		in bool
	}{
		"a member":   {node(member, nil), true},
		"itself":     {node(g.cfg.Self, nil), true},
		"a stranger": {node(stranger, nil), false},
		"no ID":      {node(member, func(n *memberlist.Node) { n.Name = "dc1" }), false},
		"another's address": {node(member, func(n *memberlist.Node) {
			n.Addr = syntheticAddr(other).Addr().AsSlice()
		}), false},
		"another port": {node(member, func(n *memberlist.Node) { n.Port++ }), false},
		"no metadata":  {node(member, func(n *memberlist.Node) { n.Meta = nil }), false},
		"another's metadata": {node(member, func(n *memberlist.Node) {
			n.Meta = encodeMeta(mark{ID: other}, false)
		}), false},
		"metadata of a version": {node(member, func(n *memberlist.Node) { n.Meta[0] = 2 }), false},
	} {
		if err := d.NotifyAlive(c.n); (err == nil) != c.in {
			t.Errorf("%s: %v", name, err)
		}
	}
	dead := node(member, func(n *memberlist.Node) { n.State = memberlist.StateDead })
	for name, c := range map[string]struct {
		mesh []*memberlist.Node
		in   bool
	}{
		"a mesh with a member":      {[]*memberlist.Node{node(stranger, nil), node(member, nil)}, true},
		"strangers":                 {[]*memberlist.Node{node(stranger, nil)}, false},
		"strangers and a dead node": {[]*memberlist.Node{node(stranger, nil), dead}, false},
		"nobody":                    {nil, false},
	} {
		if err := d.NotifyMerge(c.mesh); (err == nil) != c.in || !c.in && !errors.Is(err, errNotMember) {
			t.Errorf("merge with %s: %v", name, err)
		}
	}
}

// A node that is asked for a version sends that one or a newer one, and nothing else.
func TestOldVersionsAreNotSent(t *testing.T) {
	table := newTable()
	held := mark{ID: identity.ID{1}, Epoch: 2, Seq: 5}
	table.put(Entry{}, held)
	for _, c := range []struct {
		asked mark
		want  int
	}{{held, 1}, {mark{ID: held.ID, Epoch: 2, Seq: 4}, 1}, {mark{ID: held.ID, Epoch: 2, Seq: 6}, 0},
		{mark{ID: held.ID, Epoch: 3}, 0}, {mark{ID: identity.ID{2}}, 0}} {
		if got := len(table.newerThan([]mark{c.asked})); got != c.want {
			t.Errorf("asked for %+v: %d records, want %d", c.asked, got, c.want)
		}
	}
}

// Two pairs are apart for an hour: each of the four nodes keeps trying, however often it has failed.
func TestRejoinNeverSlowsDownForLong(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 4, 22)
		defer s.end()
		s.formed()
		s.net.mu.Lock()
		for _, n := range s.nodes[2:] {
			s.net.side[n.key.ID()] = 1
		}
		s.net.mu.Unlock()
		time.Sleep(time.Hour)
		s.net.mu.Lock()
		clear(s.net.side)
		s.net.mu.Unlock()
		t.Logf("healed after %s", s.within(15*time.Second, "all alive again", s.meshed(s.nodes)))
	})
}

// A node that comes up while everybody else is away must not dial a whole fleet at once.
func TestRejoinDialsFewAtOnce(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := &sim{t: t, net: newSimNet(23), roster: newRoster()}
		defer s.end()
		for i := range 100 {
			s.roster.add(simKey(i))
		}
		s.start(0, Config{})
		time.Sleep(time.Minute)
		s.net.mu.Lock()
		defer s.net.mu.Unlock()
		if s.net.mostDials == 0 || s.net.mostDials > maxRejoins {
			t.Errorf("%d streams were dialled at once, want at most %d", s.net.mostDials, maxRejoins)
		}
	})
}

// In a mesh of which most members are off, the few others try them at a rate that costs little. A node that comes back
// is still found, since it tries too.
func TestManyAreOff(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 3, 12)
		defer s.end()
		const off = 200
		for i := range off {
			s.roster.add(simKey(3 + i))
		}
		s.net.mu.Lock()
		s.net.refuse = true
		s.net.mu.Unlock()
		for _, n := range s.nodes {
			n.g.RosterChanged()
		}
		s.within(10*time.Second, "those that are there are alive", s.meshed(s.nodes))
		time.Sleep(30 * time.Minute)
		before := s.nodes[0].g.Stats().RejoinFail
		const while = 10 * time.Minute
		time.Sleep(while)
		tried, most := int(s.nodes[0].g.Stats().RejoinFail-before), int(while/rejoinEach)
		if tried > most*5/4 || tried < most/4 {
			t.Errorf("%d attempts in %s at %d members that are off, want some %d", tried, while, off, most)
		}
		s.start(3, Config{})
		t.Logf("one is back after %s", s.within(time.Minute, "one is back", s.meshed(s.nodes)))
	})
}

// If most members are off, a node that starts with their records soon finds those that relay, which others find as
// well, and in its site's pool those that all nodes know.
func TestLikelyOnesAreTriedFirst(t *testing.T) {
	const members, hub, wide = 400, 201, 301
	home := func(identity.ID) (string, bool) { return "a", true }
	for what, c := range map[string]struct {
		there int
		place Place
		say   func(*skeinv1.Record)
	}{
		"relay": {hub, Place{}, func(r *skeinv1.Record) {
			r.Relay = &skeinv1.RelayOffer{Addresses: []string{"198.51.100.7:7443"}}
		}},
		"leader": {wide, Place{Sited: true, Site: "a", Home: home}, func(r *skeinv1.Record) {
			r.Leads, r.Scope = 1, skeinv1.RecordScope_RECORD_SCOPE_BOTH
		}},
		"wide": {wide, Place{Sited: true, Site: "a", Home: home}, func(r *skeinv1.Record) {
			r.Scope = skeinv1.RecordScope_RECORD_SCOPE_BOTH
		}},
	} {
		t.Run(what, func(t *testing.T) {
			simtime.Test(t, func(t *testing.T) {
				s := newSim(t, 0, 14)
				defer s.end()
				s.net.refuse = true
				dir := t.TempDir()
				var records []*skeinv1.SignedRecord
				for i := range members {
					s.roster.add(simKey(i))
					r := simRecord("a")
					r.NodeId, r.Epoch, r.Seq = simKey(i).ID().String(), 1, 1
					if c.place.Sited {
						r.Scope = skeinv1.RecordScope_RECORD_SCOPE_SITE
					}
					if i == c.there {
						c.say(r)
					}
					signed, err := Sign(simKey(i), r)
					if err != nil {
						t.Fatal(err)
					}
					records = append(records, signed)
				}
				n := s.startSilent(0, Config{Place: c.place, Dir: dir})
				if taken, errs := n.g.Merge(records[1:]); taken != members-1 || errs != nil {
					t.Fatalf("%d records were taken: %v", taken, errs)
				}
				n.g.Close()
				there := c.place
				there.Wide = there.Sited
				s.startSilent(c.there, Config{Place: there, Epoch: 2})
				time.Sleep(time.Second)
				back := s.startSilent(0, Config{Place: c.place, Dir: dir, Epoch: 2})
				s.within(time.Second, "it has met the one that is there", func() bool { return back.g.Alive(simKey(c.there).ID()) })
			})
		})
	}
}
