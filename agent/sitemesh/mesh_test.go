package sitemesh

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// meshOf is host a1's part in a mesh of sites a and b, of three nodes each, of which the first two lead.
type meshOf struct {
	t              *testing.T
	m              Mesh
	leaders, peers sites.Memory
	ids            map[string]identity.ID
	all            []identity.ID
	paths          map[identity.ID]path.Path
	handshakes     map[identity.ID]time.Time
	silent         []string // leaders that their witnesses find silent
	now            time.Time
}

func newMeshOf(t *testing.T) *meshOf {
	w := &meshOf{t: t, ids: map[string]identity.ID{}, paths: map[identity.ID]path.Path{},
		handshakes: map[identity.ID]time.Time{}, now: time.Unix(1e9, 0)}
	for i, name := range []string{"a1", "a2", "a3", "b1", "b2", "b3"} {
		w.ids[name] = identity.ID{byte(i + 1)}
		w.all = append(w.all, w.ids[name])
		w.paths[w.ids[name]] = path.Path{Kind: path.Direct, Alive: true, Since: w.now}
	}
	return w
}

// plan plans anew as the settings are now, for one of the nodes.
func (w *meshOf) plan(self, topology string) *Reach {
	in := sites.Input{Self: w.ids[self], Settings: &skeinv1.Settings{Topology: topology},
		Alive:   func(identity.ID) bool { return true },
		Records: map[identity.ID]*skeinv1.Record{}, Recent: w.leaders.Recent(w.now), Peered: w.peers.Recent(w.now)}
	var nodes []*skeinv1.Node
	for name, id := range w.ids {
		nodes = append(nodes, &skeinv1.Node{Id: id.String(), Name: name})
		r := &skeinv1.Record{Site: name[:1], LeaderWish: name[1] < '3'}
		if r.LeaderWish {
			r.Leads = 1
		}
		in.Records[id] = r
		for _, leader := range w.silent {
			if leader != name && leader[0] == name[0] {
				r.SilentLeaders = append(r.SilentLeaders, &skeinv1.SilentLeader{NodeId: w.ids[leader].String(), Kinds: 1})
			}
		}
	}
	in.Members = sites.NewMembers(nodes, nil, nil)
	p := sites.Make(in)
	w.leaders.Note(p.Acting(), w.now)
	w.peers.Note(p.Peering(), w.now)
	w.m.Follow(p, w.now)
	if p.Full && !w.m.Switching() {
		return &Reach{}
	}
	w.m.NoteReturned(p, w.paths, func(id identity.ID) time.Time { return w.handshakes[id] }, w.now)
	return &Reach{w.m.ReachBy(w.paths, nil, func(id identity.ID) time.Time { return w.handshakes[id] }, w.now)}
}

func (w *meshOf) later(d time.Duration) { w.now = w.now.Add(d) }

// way is how packets for a node travel: "direct", "via NAME" or "none". "direct+" means that others' packets are
// encapsulated to the node, "NAME+" that they are encapsulated to another node that forwards them.
func (w *meshOf) way(r *Reach, to string) string {
	id := w.ids[to]
	way, ok := r.Way(id)
	switch {
	case r.Full(), !ok && r.Peer(id):
		return "direct"
	case !ok:
		return "none"
	case way.Passed && way.Via == id:
		return "direct+"
	case way.Passed:
		return w.name(way.Via) + "+"
	}
	return "via " + w.name(way.Via)
}

func (w *meshOf) name(id identity.ID) string {
	for name, one := range w.ids {
		if one == id {
			return name
		}
	}
	return id.String()
}

// brings returns whose packets a node may bring.
func (w *meshOf) brings(r *Reach, from string) string {
	for _, g := range r.Guards {
		if g.From == w.ids[from] {
			var names []string
			for _, id := range g.Of {
				names = append(names, w.name(id))
			}
			slices.Sort(names)
			return fmt.Sprint(names)
		}
	}
	return "[]"
}

func (w *meshOf) want(what, have, want string) {
	w.t.Helper()
	if have != want {
		w.t.Errorf("%s: %s, want %s", what, have, want)
	}
}

// The Reach that is kept from the last round equals what a new round would compute, whatever happens to paths.
func TestARememberedReachIsTheSame(t *testing.T) {
	for _, self := range []string{"a1", "a3"} {
		w := newMeshOf(t)
		w.plan(self, sites.Site)
		hand := func(id identity.ID) time.Time { return w.handshakes[id] }
		r, remembered := rand.New(rand.NewPCG(1, 2)), 0
		for range 2000 {
			w.later(time.Duration(r.IntN(3000)) * time.Millisecond)
			p, id := w.m.Plan(), w.all[r.IntN(len(w.all))]
			shunned := map[identity.ID]bool{}
			switch now := w.paths[id]; r.IntN(8) {
			case 0:
				now.Alive, now.Since = !now.Alive, w.now
				w.paths[id] = now
			case 1:
				now.Suspect = !now.Suspect
				w.paths[id] = now
			case 2:
				now.Kind, now.Since = path.Relay, w.now
				w.paths[id] = now
			case 3:
				shunned[id] = true
			case 4:
				w.handshakes[id] = w.now
			}
			w.m.NoteReturned(p, w.paths, hand, w.now)
			last := w.m.last
			have := w.m.ReachBy(w.paths, shunned, hand, w.now)
			if last.plan != nil && w.m.last.reach == last.reach && have == last.reach {
				remembered++
			}
			w.m.last = lastReach{}
			if want := w.m.ReachBy(w.paths, shunned, hand, w.now); have != want { // the same value if it has the same content
				t.Fatalf("from %s: what is remembered is another one", self)
			}
		}
		if remembered < 500 {
			t.Errorf("from %s: only %d of 2000 rounds said the same", self, remembered)
		}
	}
}

// TestTopologyIsSwitchedWithoutALoss: packets go as before until every host accepts them by the new ways, and packets
// by the old ways are accepted for a while longer.
func TestTopologyIsSwitchedWithoutALoss(t *testing.T) {
	w := newMeshOf(t)
	w.want("full", w.way(w.plan("a3", ""), "b3"), "direct")
	w.later(time.Hour)
	w.plan("a3", "") // as the loop does from time to time
	r := w.plan("a3", sites.Site)
	w.want("just switched", w.way(r, "b3"), "direct")
	w.want("a leader may bring at once", w.brings(r, "a1"), "[b1 b2 b3]")
	w.later(sites.SwitchAfter)
	r = w.plan("a3", sites.Site)
	if got := w.way(r, "b3"); got != "via a1" && got != "via a2" {
		t.Errorf("after the switch: %s", got)
	}
	w.want("own site", w.way(r, "a1"), "direct")
	if !r.Peer(w.ids["b3"]) {
		t.Error("a peer of before is none any more while others may send by it")
	}
	w.later(sites.Grace)
	r = w.plan("a3", sites.Site)
	if r.Peer(w.ids["b3"]) || r.Peer(w.ids["b1"]) || !r.Peer(w.ids["a1"]) {
		t.Errorf("peers %v", slices.Collect(r.Peers()))
	}

	w.later(time.Hour) // and back
	hop := w.way(r, "b3")
	w.paths[w.ids["b3"]] = path.Path{} // no path yet
	w.want("just switched back", w.way(w.plan("a3", ""), "b3"), hop)
	w.later(sites.SwitchAfter + time.Second)
	r = w.plan("a3", "")
	w.want("while there is no path", w.way(r, "b3"), hop)
	w.want("a leader may still bring", w.brings(r, "a1"), "[b1 b2 b3]")
	w.paths[w.ids["b3"]] = path.Path{Kind: path.Relay, Alive: true}
	w.want("with a path, and no session", w.way(w.plan("a3", ""), "b3"), hop)
	w.handshakes[w.ids["b3"]] = w.now
	w.want("with a session", w.way(w.plan("a3", ""), "b3"), "direct")
	w.handshakes[w.ids["b3"]] = w.now.Add(-sessionLasts)
	w.want("with one of long ago", w.way(w.plan("a3", ""), "b3"), hop)
	w.later(sites.MissingPath)
	w.want("not for ever", w.way(w.plan("a3", ""), "b3"), "direct")
	w.later(sites.Grace)
	if r = w.plan("a3", ""); !r.Full() {
		t.Errorf("long after: %+v", r)
	}
}

// TestALeaderDeliversWhileOthersSendByIt: whether the topology becomes site or full, a leader encapsulates what it
// forwards to a node of its site as long as others may send through it.
func TestALeaderDeliversWhileOthersSendByIt(t *testing.T) {
	w := newMeshOf(t)
	w.plan("a1", "")
	for _, topology := range []string{sites.Site, "full"} {
		w.later(time.Hour)
		for after := range sites.Grace / time.Second {
			r := w.plan("a1", topology)
			w.want(fmt.Sprintf("%s, %d s after", topology, after), w.way(r, "a3"), "direct+")
			w.later(time.Second)
		}
	}
	w.want("long after", w.way(w.plan("a1", ""), "a3"), "direct")
}

// TestALeaderPassesOnAsOthersSend: while the topology changes, a leader sends its own packets as before, or directly.
// It forwards those of others to a leader of the other site, whichever hosts have switched already, because nodes
// accept such packets from no other node.
func TestALeaderPassesOnAsOthersSend(t *testing.T) {
	w := newMeshOf(t)
	w.plan("a1", "")
	for _, topology := range []string{sites.Site, "full"} {
		w.later(time.Hour)
		for after := range sites.PassAsBefore / time.Second {
			if got := w.way(w.plan("a1", topology), "b3"); !slices.Contains([]string{"b1+", "b2+", "via b1", "via b2"}, got) {
				t.Errorf("%s, %d s after: others' packets go %s", topology, after, got)
			}
			w.later(time.Second)
		}
	}
	w.later(sites.Grace)
	w.want("long after", w.way(w.plan("a1", ""), "b3"), "direct")
}

// TestADeadLeaderIsPassedOver: it is passed over as soon as its path is given up, until it has proved itself again.
func TestADeadLeaderIsPassedOver(t *testing.T) {
	w := newMeshOf(t)
	bound := w.way(w.plan("a3", sites.Site), "b3")[len("via "):]
	other := map[string]string{"a1": "a2", "a2": "a1"}[bound]
	w.later(sites.Grace)
	for _, c := range []struct {
		what  string
		path  path.Path
		after time.Duration
		via   string
	}{
		{"no answer", path.Path{Kind: path.Direct}, 0, other},
		{"on a relay since its direct path died", path.Path{Kind: path.Relay, Alive: true, Rule: path.RuleDirectDead},
			time.Second, other},
		{"still there after a while", path.Path{Kind: path.Relay, Alive: true, Rule: path.RuleDirectDead}, ShunFor, bound},
		{"on a relay as ever", path.Path{Kind: path.Relay, Alive: true}, 0, bound},
		{"alive", path.Path{Kind: path.Direct, Alive: true}, 0, bound},
		{"on a relay since a relay's port died",
			path.Path{Kind: path.Relay, Alive: true, Rule: path.RuleRelayDead}, time.Second, other},
	} {
		c.path.Since = w.now
		w.paths[w.ids[bound]] = c.path
		w.later(c.after)
		w.want(c.what, w.way(w.plan("a3", sites.Site), "b3"), "via "+other[:0]+c.via)
	}
}

// TestASuspectedLeaderIsPassedOver: while a leader does not answer, and until it has proved itself, others carry its
// packets, at both ends. A leader that is dead, does not forward, or is suspected as well is no better choice.
func TestASuspectedLeaderIsPassedOver(t *testing.T) {
	direct := path.Path{Kind: path.Direct, Alive: true}
	suspected := path.Path{Kind: path.Direct, Alive: true, Suspect: true}
	dead := path.Path{Kind: path.Direct}
	for self, to := range map[string]string{"a4": "b3", "b1": "a4"} { // one of its site, and another site's leader
		w := newMeshOf(t)
		w.ids["a4"] = identity.ID{7}
		w.all = append(w.all, w.ids["a4"])
		bound := w.way(w.plan(self, sites.Site), to)[len("via "):]
		other := map[string]string{"a1": "a2", "a2": "a1"}[bound]
		w.later(sites.Grace)
		for _, c := range []struct {
			what         string
			bound, other path.Path
			silent       bool // the other one
			shake        bool // there is a handshake with the bound one
			after        time.Duration
			carries      string
		}{
			{what: "it is suspected", bound: suspected, other: direct, carries: other},
			{what: "it answers", bound: direct, other: direct, after: time.Second, carries: other},
			{what: "it answers still", bound: direct, other: direct, after: unprovenFor - 2*time.Second, carries: other},
			{what: "long enough", bound: direct, other: direct, after: 2 * time.Second, carries: bound},
			{what: "it is suspected again", bound: suspected, other: direct, carries: other},
			{what: "a handshake", bound: direct, other: direct, after: time.Second, shake: true, carries: bound},
			{what: "both are suspected", bound: suspected, other: suspected, carries: bound},
			{what: "the bound one answers", bound: direct, other: suspected, carries: bound},
			{what: "the other one answers, and not this", bound: suspected, other: direct, carries: other},
			{what: "the other one is dead", bound: suspected, other: dead, carries: bound},
			{what: "it is dead, and the other one suspected", bound: dead, other: suspected, carries: other},
			{what: "the other one is found silent", bound: suspected, other: direct, silent: true, carries: bound},
		} {
			if w.silent = nil; c.silent {
				w.silent = []string{other}
			}
			w.later(c.after)
			if c.shake {
				w.handshakes[w.ids[bound]] = w.now
			}
			w.paths[w.ids[bound]], w.paths[w.ids[other]] = c.bound, c.other
			w.want(self+": "+c.what, w.way(w.plan(self, sites.Site), to), "via "+c.carries)
		}
	}
}

// TestALeaderThatStandsStillForAMoment: each host that sends through the leader gives it up when its own patience ends,
// or not at all. Whichever hosts have noticed, no packet goes to a host that returns it. No host uses a leader while it
// suspects it, and each host changes to the other leader and back once.
func TestALeaderThatStandsStillForAMoment(t *testing.T) {
	const step = 10 * time.Millisecond
	direct := path.Path{Kind: path.Direct, Alive: true}
	ends := map[string]string{"a3": "b3", "b1": "a3", "b2": "a3"}
	for _, stop := range []time.Duration{300 * time.Millisecond, 550 * time.Millisecond, 700 * time.Millisecond} {
		first := newMeshOf(t)
		bound := first.way(first.plan("a3", sites.Site), "b3")[len("via "):]
		for i, self := range []string{"a3", "b1", "b2"} {
			patience := 500*time.Millisecond + time.Duration(i)*100*time.Millisecond
			w := newMeshOf(t)
			w.want(self+" before", w.way(w.plan(self, sites.Site), ends[self]), "via "+bound)
			w.later(sites.Grace)
			var by []string // leaders used, in order
			for after := time.Duration(0); after < 2*unprovenFor; after += step {
				p := direct
				p.Suspect = after >= patience && after < stop
				w.paths[w.ids[bound]] = p
				via := w.way(w.plan(self, sites.Site), ends[self])[len("via "):]
				if p.Suspect && via == bound {
					t.Errorf("%s, %s of %s: goes by a leader that it suspects", self, after, stop)
				}
				if via[0] != 'a' {
					t.Errorf("%s, %s of %s: goes by %s", self, after, stop, via)
				}
				if len(by) == 0 || by[len(by)-1] != via {
					by = append(by, via)
				}
				w.later(step)
			}
			want := 1
			if stop > patience {
				want = 3
			}
			if len(by) != want || by[0] != by[len(by)-1] {
				t.Errorf("%s, patient for %s, a stop of %s: goes by %v", self, patience, stop, by)
			}
		}
	}
}

// TestWhomALeaderBelieves: a leader accepts nodes of its site for themselves, leaders of other sites for their site,
// and nobody else.
func TestWhomALeaderBelieves(t *testing.T) {
	w := newMeshOf(t)
	w.plan("a1", sites.Site)
	w.later(sites.Grace + sites.SwitchAfter)
	r := w.plan("a1", sites.Site)
	for _, c := range []struct{ from, brings, way string }{
		{"a3", "[a3]", "direct+"},
		{"a2", "[a2 b1 b2 b3]", "direct+"},
		{"b1", "[b1 b2 b3]", "direct+"},
		{"b3", "[]", ""},
	} {
		w.want(c.from+" brings", w.brings(r, c.from), c.brings)
		if c.way != "" {
			w.want("to "+c.from, w.way(r, c.from), c.way)
		}
	}
	if got := w.way(r, "b3"); got != "via b1" && got != "via b2" {
		t.Errorf("to b3: %s", got)
	}
	if _, ok := r.Way(w.ids["b3"]); !ok {
		t.Error("no way to b3")
	}
}

// TestWhoDoesNotForwardIsTheLast: a leader is found silent, and another node is elected and does not act yet. The
// silent one is passed over even while the leader that forwards was out of reach a moment ago, is reached by a relay
// only, or has not proven that it has a session.
func TestWhoDoesNotForwardIsTheLast(t *testing.T) {
	direct := path.Path{Kind: path.Direct, Alive: true}
	for self, to := range map[string]string{"a4": "b3", "b1": "a4"} { // one of its site, and another site's leader
		w := newMeshOf(t)
		w.ids["a4"] = identity.ID{7}
		w.all = append(w.all, w.ids["a4"])
		silent := w.way(w.plan(self, sites.Site), to)[len("via "):]
		other := map[string]string{"a1": "a2", "a2": "a1"}[silent]
		w.later(sites.Grace)
		look := func(what string, p path.Path, via string) {
			t.Helper()
			p.Since = w.now
			w.paths[w.ids[other]] = p
			w.later(100 * time.Millisecond)
			w.want(self+": "+what, w.way(w.plan(self, sites.Site), to), "via "+via)
		}
		look("nothing is found", direct, silent)
		w.silent = []string{silent}
		look("one is found silent", direct, other)
		look("nobody reaches the other one", path.Path{Kind: path.Direct}, "a3")
		look("it is back, and unproven", direct, other)
		look("a relay reaches it", path.Path{Kind: path.Relay, Alive: true, Rule: path.RuleDirectDead}, other)
	}
}

// TestALeaderThatComesBackIsUnproven: the leader's path is alive before WireGuard there has a session again. Until
// there was a handshake, others carry its packets, at both ends, as long as there is another leader.
func TestALeaderThatComesBackIsUnproven(t *testing.T) {
	direct := path.Path{Kind: path.Direct, Alive: true}
	relayed := path.Path{Kind: path.Relay, Alive: true, Rule: path.RuleDirectDead}
	for self, to := range map[string]string{"a3": "b3", "b1": "a3"} { // one of its site, and another site's leader
		w := newMeshOf(t)
		bound := w.way(w.plan(self, sites.Site), to)[len("via "):]
		other := map[string]string{"a1": "a2", "a2": "a1"}[bound]
		w.later(sites.Grace)
		look := func(what string, p path.Path, after time.Duration, via string) {
			t.Helper()
			if w.paths[w.ids[bound]].Kind != p.Kind {
				p.Since = w.now
			}
			w.paths[w.ids[bound]] = p
			w.later(after)
			w.want(self+": "+what, w.way(w.plan(self, sites.Site), to), "via "+via)
		}
		shake := func() { w.handshakes[w.ids[bound]] = w.now }

		shake()
		w.later(time.Second)
		look("it is away", path.Path{Kind: path.Direct}, 0, other)
		look("its path answers, and no session", direct, time.Second, other)
		if got, want := w.m.Returned.until(), w.now.Add(unprovenFor); !got.Equal(want) {
			t.Errorf("%s: it is looked at again at %s, want %s", self, got, want)
		}
		counters := map[identity.ID]path.Counters{w.ids[bound]: {Handshake: w.handshakes[w.ids[bound]]}}
		if w.m.Returned.Proven(counters) {
			t.Errorf("%s: the session of before is a proof", self)
		}
		shake()
		if counters[w.ids[bound]] = (path.Counters{Handshake: w.now}); !w.m.Returned.Proven(counters) {
			t.Errorf("%s: a handshake is no proof", self)
		}
		look("a handshake", direct, 0, bound)
		look("long after", direct, time.Hour, bound)

		look("it is away again", path.Path{Kind: path.Relay}, 0, other)
		look("a relay reaches it", path.Path{Kind: path.Relay, Alive: true}, time.Second, other)
		look("nothing has come for a while: it was cut off", path.Path{Kind: path.Relay, Alive: true}, unprovenFor, bound)

		look("direct", direct, 0, bound)
		look("the direct path has died", relayed, time.Second, other)
		shake()
		w.later(time.Second)
		look("it is back, with a handshake by the relay", direct, 0, bound)

		w.paths[w.ids[other]] = path.Path{Kind: path.Direct}
		look("away, and the other one too", path.Path{Kind: path.Direct}, 0, w.way(w.plan(self, sites.Site),
			to)[len("via "):])
		look("it comes back, and there is no other", direct, 0, bound)
		w.paths[w.ids[other]] = direct
		shake()
		look("it is proven, the other one not", direct, time.Second, bound)
	}
}
