package sites_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// id is a node's ID, as random as real ones are.
func id(i int) identity.ID {
	var out identity.ID
	r := rand.New(rand.NewPCG(uint64(i), 1))
	binary.BigEndian.PutUint64(out[:], r.Uint64())
	return out
}

// view is what one host knows.
type view struct {
	settings *skeinv1.Settings
	nodes    []*skeinv1.Node
	records  map[identity.ID]*skeinv1.Record
	away     map[identity.ID]bool // that gossip does not see alive
	recent   map[identity.ID]bool
	sliced   bool // members are bound by slices
	led      bool
	dead     map[identity.ID]bool   // by this host's path machines
	places   map[identity.ID]string // of members without a record here
}

func (v *view) clone() *view {
	c := *v
	c.settings = &skeinv1.Settings{Topology: v.settings.GetTopology(), LeadersPerSite: v.settings.GetLeadersPerSite(),
		SiteTopology: maps.Clone(v.settings.GetSiteTopology())}
	c.records, c.away, c.recent, c.dead = map[identity.ID]*skeinv1.Record{}, maps.Clone(v.away), maps.Clone(v.recent),
		maps.Clone(v.dead)
	for id, r := range v.records {
		c.records[id] = &skeinv1.Record{Site: r.GetSite(), LeaderWish: r.GetLeaderWish(),
			ForcedEndpoint: r.GetForcedEndpoint(), Leads: r.GetLeads(), LeaderSlot: r.GetLeaderSlot(), Role: r.GetRole(),
			SilentLeaders: r.GetSilentLeaders()}
	}
	return &c
}

func (v *view) plan(self identity.ID) *sites.Plan {
	in := sites.Input{
		Self: self, Settings: v.settings, Records: v.records,
		Alive: func(id identity.ID) bool { return !v.away[id] }, Recent: v.recent, Led: v.led,
		Elsewhere: func(id identity.ID) (string, bool) { site, ok := v.places[id]; return site, ok },
	}
	var slice sites.Slicer
	if v.sliced {
		slice = func(_ *skeinv1.Node, id identity.ID, _ string) int { return int(id[0]) % events.Slices }
	}
	in.Members = sites.NewMembers(v.nodes, nil, slice)
	return sites.Make(in)
}

// numbered returns n members.
func numbered(n int) *sites.Members {
	var nodes []*skeinv1.Node
	for i := range n {
		nodes = append(nodes, &skeinv1.Node{Id: id(i).String()})
	}
	return sites.NewMembers(nodes, nil, nil)
}

// recorded returns members that have records.
func recorded(records map[identity.ID]*skeinv1.Record) *sites.Members {
	var nodes []*skeinv1.Node
	for id := range records {
		nodes = append(nodes, &skeinv1.Node{Id: id.String()})
	}
	return sites.NewMembers(nodes, nil, nil)
}

func (v *view) ids() (out []identity.ID) {
	for _, n := range v.nodes {
		i, _ := identity.ParseID(n.GetId())
		out = append(out, i)
	}
	return out
}

// mesh is a view of up to five sites.
func mesh(t *rapid.T) *view {
	v := &view{settings: &skeinv1.Settings{Topology: sites.Site, SiteTopology: map[string]string{}},
		records: map[identity.ID]*skeinv1.Record{},
		away:    map[identity.ID]bool{}, dead: map[identity.ID]bool{}}
	if rapid.IntRange(0, 9).Draw(t, "topology") == 0 {
		v.settings.Topology = sites.Full
	}
	v.sliced = rapid.Bool().Draw(t, "sliced")
	v.settings.LeadersPerSite = rapid.Uint32Range(0, 4).Draw(t, "leaders")
	for i := range rapid.IntRange(1, 5).Draw(t, "sites") {
		site := []string{"", "dc", "home", "cloud", "lab"}[i]
		if rapid.IntRange(0, 3).Draw(t, "override") == 0 {
			v.settings.SiteTopology[site] = rapid.SampledFrom([]string{sites.Full, sites.Site}).Draw(t,
				"topology of "+site)
		}
		for range rapid.IntRange(1, 6).Draw(t, "nodes") {
			n := id(len(v.nodes))
			v.nodes = append(v.nodes, &skeinv1.Node{Id: n.String(), Draining: rapid.IntRange(0, 9).Draw(t,
				"drains") == 0})
			r := &skeinv1.Record{Site: site, LeaderWish: rapid.IntRange(0, 3).Draw(t, "wish") == 0,
				Leads: rapid.Uint64Range(0, 3).Draw(t, "leads"), LeaderSlot: rapid.Uint32Range(0, 5).Draw(t, "slot")}
			if rapid.Bool().Draw(t, "public") {
				r.ForcedEndpoint = "198.18.0.1:51820"
			}
			v.records[n] = r
		}
	}
	if rapid.IntRange(0, 2).Draw(t, "findings") == 0 {
		for _, w := range v.ids() {
			for _, l := range v.ids() {
				if rapid.IntRange(0, 2).Draw(t, "silent") == 0 {
					v.records[w].SilentLeaders = append(v.records[w].SilentLeaders,
						&skeinv1.SilentLeader{NodeId: l.String(), Kinds: 1})
				}
			}
		}
	}
	return v
}

// run is the course of a packet.
type run struct {
	way  []identity.ID
	end  string // "": it arrived; else why it did not
	loop bool   // it passed one host twice
}

func (r run) String() string { return fmt.Sprint(r.way, " ", r.end) }

const ttl = 64

// walk sends a packet, each host by its own plan, as the data plane does: a plain packet is accepted from its source
// only, an encapsulated one by the guards.
func walk(plans map[identity.ID]*sites.Plan, views func(identity.ID) *view, from, to identity.ID) run {
	r := run{way: []identity.ID{from}}
	at := from
	for range ttl {
		way, ok := plans[at].Way(to, func(id identity.ID) bool { return views(at).dead[id] })
		if !ok {
			r.end = fmt.Sprintf("%s has no way", at)
			return r
		}
		next := plans[way.Via]
		switch wrapped := way.Hop || way.Deliver && from != at; {
		case !way.Hop && way.Via != to:
			r.end = "a plain packet to somebody else"
		case !plans[at].Peer(way.Via) || !next.Peer(at):
			r.end = fmt.Sprintf("%s and %s are not peers", at, way.Via)
		case !wrapped && from != at:
			r.end = fmt.Sprintf("%s sends another's packet plain", at)
		case wrapped && !takes(next, at, from):
			r.end = fmt.Sprintf("%s does not take it from %s", way.Via, at)
		}
		r.loop = r.loop || r.end == "" && slices.Contains(r.way, way.Via)
		r.way = append(r.way, way.Via)
		if at = way.Via; r.end != "" || at == to {
			return r
		}
	}
	r.end = "TTL"
	return r
}

func takes(p *sites.Plan, by, source identity.ID) bool {
	i := slices.IndexFunc(p.Guards, func(g sites.Guard) bool { return g.From == by })
	if i < 0 {
		return false
	}
	g := p.Guards[i]
	of, known := p.SiteOf(source)
	bySite, _ := p.SiteOf(by)
	return g.Own && source == by || g.Site && known && of == bySite || g.Foreign && known && of != p.Site
}

func plansOf(all *view, of func(identity.ID) *view) map[identity.ID]*sites.Plan {
	out := map[identity.ID]*sites.Plan{}
	for _, n := range all.ids() {
		out[n] = of(n).plan(n)
	}
	return out
}

func same(v *view) func(identity.ID) *view { return func(identity.ID) *view { return v } }

func TestSameViewOneWay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := mesh(t)
		for _, n := range v.ids() {
			if rapid.IntRange(0, 9).Draw(t, "away") == 0 {
				v.away[n] = true
			}
		}
		plans := plansOf(v, same(v))
		for _, a := range v.ids() {
			for _, b := range v.ids() {
				if a == b || v.away[a] || v.away[b] {
					continue
				}
				if plans[a].Peer(b) != plans[b].Peer(a) {
					t.Fatalf("%s and %s disagree on being peers", a, b)
				}
				there, back := walk(plans, same(v), a, b), walk(plans, same(v), b, a)
				if there.end != "" || there.loop || len(there.way) > 4 {
					t.Fatalf("%s", there)
				}
				slices.Reverse(back.way)
				if !slices.Equal(there.way, back.way) {
					t.Fatalf("there %s, back %s", there, back)
				}
				for _, n := range there.way {
					if s := v.records[n].GetSite(); s != v.records[a].GetSite() && s != v.records[b].GetSite() {
						t.Fatalf("%s enters the site %q", there, s)
					}
				}
			}
		}
	})
}

// Every node of one view elects the same, whatever the order in which it learned of the members.
func TestSameViewSameLeaders(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := mesh(t)
		for _, n := range v.ids() {
			v.away[n] = rapid.Bool().Draw(t, "away")
		}
		var want map[string][]sites.Leader
		for _, n := range v.ids() {
			if v.away[n] {
				continue
			}
			v.nodes = rapid.Permutation(v.nodes).Draw(t, "order")
			got := v.plan(n).Leaders
			if want == nil {
				want = got
			}
			if !maps.EqualFunc(want, got, func(a, b []sites.Leader) bool { return slices.Equal(a, b) }) {
				t.Fatalf("%v and %v", want, got)
			}
		}
	})
}

// A leader that a host finds dead is passed by while another one is there.
func TestDeadLeadersArePassedBy(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := mesh(t)
		some := v.plan(v.ids()[0])
		for _, site := range slices.Sorted(maps.Keys(some.Leaders)) {
			for i, l := range some.Leaders[site] {
				v.dead[l.ID] = i > 0 && rapid.Bool().Draw(t, "dead") // the best stays
			}
		}
		plans := plansOf(v, same(v))
		for _, a := range v.ids() {
			for _, b := range v.ids() {
				if a == b || v.dead[a] || v.dead[b] {
					continue
				}
				r := walk(plans, same(v), a, b)
				if r.end != "" || slices.ContainsFunc(r.way, func(n identity.ID) bool { return v.dead[n] }) {
					t.Fatalf("%s with %v dead", r, v.dead)
				}
				back := walk(plans, same(v), b, a)
				if slices.Reverse(back.way); !slices.Equal(r.way, back.way) {
					t.Fatalf("there %s, back %s, with %v dead", r, back, v.dead)
				}
			}
		}
	})
}

// A leader is replaceable if another one of its site leads: a host that passes over that leader alone still reaches all
// nodes that it reached through it.
func TestReplaceablePeers(t *testing.T) {
	some := false
	rapid.Check(t, func(t *rapid.T) {
		v := mesh(t)
		plans := plansOf(v, same(v))
		for _, a := range v.ids() {
			can := plans[a].Replaceable()
			for _, l := range v.ids() {
				if can[l] && (!plans[a].Peer(l) || !plans[a].Carries(l)) {
					t.Fatalf("%s can be replaced for %s, and is not a peer that leads", l, a)
				}
				alone := v.clone()
				alone.dead[l] = true
				for _, b := range v.ids() {
					by, ok := plans[a].Way(b, func(identity.ID) bool { return false })
					if a == b || a == l || b == l || !ok || !by.Hop || by.Via != l || !plans[a].Carries(l) {
						continue
					}
					then, _ := plans[a].Way(b, func(id identity.ID) bool { return id == l || !plans[a].Carries(id) })
					its, _ := plans[a].SiteOf(l)
					site, _ := plans[a].SiteOf(then.Via)
					if then.Hop && then.Via != l && site == its && plans[a].Carries(then.Via) && !can[l] {
						t.Fatalf("%s sends to %s by %s, or by %s, which is as good", a, b, l, then.Via)
					}
					if !can[l] {
						continue
					}
					some = true
					r := walk(plans, func(id identity.ID) *view {
						if id == a {
							return alone
						}
						return v
					}, a, b)
					if r.end != "" || r.loop {
						t.Fatalf("%s passes %s over: %s", a, l, r)
					}
				}
			}
		}
	})
	if !some {
		t.Error("nobody was replaceable")
	}
}

// Views differ: who is alive, who says that it leads, which paths are dead. No packet loops. Once all hosts see the
// same again, whatever each remembers, all packets arrive.
func TestDifferingViews(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := mesh(t)
		views := map[identity.ID]*view{}
		for _, n := range v.ids() {
			w := v.clone()
			for _, o := range v.ids() {
				w.away[o] = rapid.IntRange(0, 3).Draw(t, "away") == 0
				w.dead[o] = rapid.IntRange(0, 3).Draw(t, "dead") == 0
				if rapid.IntRange(0, 2).Draw(t, "else") == 0 {
					w.records[o].Leads = rapid.Uint64Range(0, 4).Draw(t, "leads")
					w.records[o].LeaderSlot = rapid.Uint32Range(0, 5).Draw(t, "slot")
				}
			}
			w.sliced = rapid.Bool().Draw(t, "sliced") // of another version, or not as far in the log
			views[n] = w
		}
		own := func(n identity.ID) *view { return views[n] }
		plans := plansOf(v, own)
		all(v, func(a, b identity.ID) {
			if r := walk(plans, own, a, b); r.loop || len(r.way) > 5 {
				t.Fatalf("%s goes round", r)
			}
		})
		recent := map[identity.ID]bool{}
		for _, p := range plans {
			for l := range p.Acting() {
				recent[l] = true
			}
		}
		for _, n := range v.ids() {
			w := v.clone()
			w.recent, w.led = recent, recent[n] && plans[n].Forwards
			views[n] = w
		}
		plans = plansOf(v, own)
		all(v, func(a, b identity.ID) {
			if r := walk(plans, own, a, b); r.end != "" || r.loop {
				t.Fatalf("%s with one view", r)
			}
		})
	})
}

// Views differ in everything, also in settings and sites: a packet still ends with its TTL.
func TestDisagreementOnSites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := mesh(t)
		names := []string{"", "dc", "home"}
		views := map[identity.ID]*view{}
		for _, n := range v.ids() {
			w := v.clone()
			w.settings.Topology = rapid.SampledFrom([]string{sites.Full, sites.Site}).Draw(t, "topology")
			for _, o := range v.ids() {
				switch rapid.IntRange(0, 5).Draw(t, "else") {
				case 0:
					delete(w.records, o)
				case 1:
					w.records[o].Site = rapid.SampledFrom(names).Draw(t, "site")
				case 2:
					w.records[o].Leads = rapid.Uint64Range(0, 4).Draw(t, "leads")
				}
			}
			views[n] = w
		}
		plans := plansOf(v, func(n identity.ID) *view { return views[n] })
		all(v, func(a, b identity.ID) {
			if r := walk(plans, func(n identity.ID) *view { return views[n] }, a, b); len(r.way) > ttl+1 {
				t.Fatalf("%s", r)
			}
		})
	})
}

func all(v *view, f func(a, b identity.ID)) {
	for _, a := range v.ids() {
		for _, b := range v.ids() {
			if a != b {
				f(a, b)
			}
		}
	}
}

// One of n leaders less, or one more, moves about 1/n of the nodes, and none between two that stay.
func TestFewMove(t *testing.T) {
	const nodes = 4000
	for n := 2; n <= 8; n++ {
		var leaders []sites.Leader
		for i := range n {
			leaders = append(leaders, sites.Leader{ID: id(1_000_000*n + i), Acting: true})
		}
		share := map[identity.ID]int{}
		moved := 0
		for i := range nodes {
			with, without := sites.Order(leaders, id(i))[0], sites.Order(leaders[1:], id(i))[0]
			share[with]++
			if with != without {
				moved++
				if with != leaders[0].ID {
					t.Errorf("%d leaders: a node moves from %s, which stays, to %s", n, with, without)
				}
			}
		}
		if f := float64(moved) / nodes; f > 1/float64(n)+0.05 {
			t.Errorf("%d leaders: %.0f %% of the nodes move", n, 100*f)
		}
		for l, s := range share {
			if f := float64(s) / nodes; f < 1/float64(n)-0.05 || f > 1/float64(n)+0.05 {
				t.Errorf("%d leaders: %s has %.1f %% of the nodes", n, l, 100*f)
			}
		}
	}
}

// Nodes of different versions must come to the same order.
func TestOrderIsPinned(t *testing.T) {
	leaders := []sites.Leader{{ID: identity.ID{1}, Acting: true}, {ID: identity.ID{2}, Acting: true},
		{ID: identity.ID{3}, Acting: true}}
	var got strings.Builder
	for i := range byte(12) {
		fmt.Fprint(&got, sites.Order(leaders, identity.ID{7: i})[0][0])
	}
	if want := "333211211332"; got.String() != want {
		t.Errorf("%s, want %s", got.String(), want)
	}
}

func TestElection(t *testing.T) {
	node := func(i byte, change func(*sites.Node)) sites.Node {
		n := sites.Node{ID: identity.ID{i}, Site: "dc", Alive: true}
		if change != nil {
			change(&n)
		}
		return n
	}
	wish := func(n *sites.Node) { n.Wish = true }
	public := func(n *sites.Node) { n.Public = true }
	chosen := func(n *sites.Node) { n.Chosen = true }
	both := func(n *sites.Node) { n.Wish, n.Public = true, true }
	term := func(v uint64) func(*sites.Node) { return func(n *sites.Node) { n.Term = v } }
	for _, c := range []struct {
		name    string
		nodes   []sites.Node
		perSite int
		want    string // IDs; r: reserve, i: does not act
	}{
		{"nobody", nil, 2, ""},
		{"lowest ID", []sites.Node{node(3, nil), node(1, nil), node(2, nil)}, 2, "1 2"},
		{"one at least", []sites.Node{node(3, nil), node(1, nil)}, 0, "1"},
		{"wish before public before the rest", []sites.Node{node(1, nil), node(2, public), node(3, wish)}, 3,
			"3 2r 1r"},
		{"a public one carries all, and another stands by", []sites.Node{node(1, nil), node(2, public)}, 2, "2 1r"},
		{"of those that wish the public ones first", []sites.Node{node(1, wish), node(2, both), node(3, both)}, 2,
			"2 3"},
		{"every node wishes", []sites.Node{node(1, wish), node(2, wish), node(3, wish)}, 2, "1 2"},
		{"where the log has chosen, only those lead", []sites.Node{node(1, wish), node(2, both), node(3, chosen)}, 2, "3"},
		{"two of three that it has chosen", []sites.Node{node(1, wish), node(2, chosen), node(3, chosen), node(4, chosen)}, 2,
			"2 3"},
		{"unless none of them is alive", []sites.Node{node(1, wish), node(2, nil), node(3, func(n *sites.Node) {
			n.Chosen, n.Alive = true, false
		})}, 2,
			"1 2r"},
		{"or all of them drain", []sites.Node{node(1, wish), node(3, func(n *sites.Node) {
			n.Chosen, n.Reluctant = true, true
		})}, 1, "1"},
		{"who leads goes on", []sites.Node{node(1, nil), node(2, nil), node(3, term(4))}, 1, "3"},
		{"the newest term first", []sites.Node{node(1, term(3)), node(2, term(4)), node(3, term(4))}, 2, "2 3"},
		{"who is away does not lead", []sites.Node{node(1, func(n *sites.Node) { n.Alive = false }), node(2, nil)}, 1,
			"2"},
		{"unless all are", []sites.Node{node(1, func(n *sites.Node) { n.Alive = false }), node(2,
			func(n *sites.Node) { n.Alive = false })}, 1, "1"},
		{"who drains comes last", []sites.Node{node(1, func(n *sites.Node) { n.Wish, n.Reluctant = true, true }),
			node(2, nil), node(3, nil)}, 2, "2 3"},
		{"and leads alone where nobody else can", []sites.Node{node(1, func(n *sites.Node) { n.Reluctant = true }),
			node(2, func(n *sites.Node) { n.Unfit = true })}, 2, "1"},
		{"one that begins does not act beside one that leads", []sites.Node{node(1, wish), node(2, term(1))}, 2,
			"1i 2"},
	} {
		var got []string
		for _, l := range sites.Elect(c.nodes, c.perSite)["dc"] {
			text := fmt.Sprint(l.ID[0])
			if l.Reserve {
				text += "r"
			}
			if !l.Acting {
				text += "i"
			}
			got = append(got, text)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %s, want %s", c.name, strings.Join(got, " "), c.want)
		}
	}
}

// Nodes of a site come and go. Each publishes the term that Term gives it. Among equals, no node that returns, even
// with the record of a leader, replaces one that has led meanwhile, and in the end all name the same term.
func TestWhoReturnsDoesNotReclaim(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		perSite := rapid.IntRange(1, 3).Draw(t, "leaders per site")
		nodes := make([]sites.Node, rapid.IntRange(perSite+1, 6).Draw(t, "nodes"))
		for i := range nodes {
			nodes[i] = sites.Node{ID: id(i), Site: "dc", Alive: true}
		}
		settle := func() []identity.ID {
			for range 10 {
				changed := false
				order := make([]int, len(nodes))
				for i := range order {
					order[i] = i
				}
				for _, i := range rapid.Permutation(order).Draw(t, "turns") {
					if !nodes[i].Alive {
						continue // the node is frozen or gone, and its record stays
					}
					term := sites.Term(nodes, sites.Elect(nodes, perSite)["dc"], nodes[i].ID)
					changed = changed || nodes[i].Term != term
					nodes[i].Term = term
				}
				if !changed {
					var out []identity.ID
					for _, l := range sites.Elect(nodes, perSite)["dc"] {
						if !l.Acting {
							t.Fatalf("%s does not act", l.ID)
						}
						out = append(out, l.ID)
					}
					return out
				}
			}
			t.Fatalf("terms come to no rest: %v", nodes)
			return nil
		}
		leaders := settle()
		for range rapid.IntRange(1, 10).Draw(t, "changes") {
			i := rapid.IntRange(0, len(nodes)-1).Draw(t, "node")
			alive := 0
			for _, n := range nodes {
				if n.Alive {
					alive++
				}
			}
			if nodes[i].Alive && alive == 1 {
				continue
			}
			nodes[i].Alive = !nodes[i].Alive
			next := settle()
			for _, l := range leaders {
				if gone := l == nodes[i].ID && !nodes[i].Alive; !gone && !slices.Contains(next, l) {
					t.Fatalf("%s leads no more after %s came or went: %v, then %v", l, nodes[i].ID, leaders, next)
				}
			}
			leaders = next
		}
	})
}

// A record may name any number: a node that names the highest one leads like any other.
func TestTermsEnd(t *testing.T) {
	nodes := []sites.Node{{ID: id(1), Site: "dc", Alive: true, Wish: true}, {ID: id(2), Site: "dc", Alive: true,
		Term: 1<<64 - 1}}
	if got := sites.Term(nodes, sites.Elect(nodes, 1)["dc"], id(1)); got != 1<<64-1 {
		t.Errorf("the term is %d", got)
	}
}

func TestMemory(t *testing.T) {
	var m sites.Memory
	at := time.Unix(1000, 0)
	m.Note(slices.Values([]identity.ID{id(1), id(2)}), at)
	m.Note(slices.Values([]identity.ID{id(2)}), at.Add(20*time.Second))
	for _, c := range []struct {
		after      time.Duration
		one, two   bool
		forwarding bool // of two
	}{{0, true, true, true}, {29 * time.Second, true, true, true}, {30 * time.Second, false, true, true},
		{35 * time.Second, false, true, false}, {50 * time.Second, false, false, false}} {
		r := m.Recent(at.Add(c.after))
		if r[id(1)] != c.one || r[id(2)] != c.two || m.Within(id(2), sites.ForwardOn, at.Add(c.after)) != c.forwarding {
			t.Errorf("after %s: %v", c.after, r)
		}
	}
	if got := m.Expires(at.Add(20 * time.Second)); !got.Equal(at.Add(sites.Grace)) {
		t.Errorf("the first expires at %s", got)
	}
	if got := m.Expires(at); !got.IsZero() {
		t.Errorf("those that were noted just now expire at %s", got)
	}
}

// What the log says of a node comes before its record.
func TestDescribe(t *testing.T) {
	r := &skeinv1.Record{Site: "home", LeaderWish: true, Candidates: []*skeinv1.Candidate{
		{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: "192.168.1.4:51820", Source: "interface"},
		{Type: skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, Address: "198.18.1.1:51820", Source: "stun"},
	}}
	for _, c := range []struct {
		name   string
		node   *skeinv1.Node
		record *skeinv1.Record
		want   sites.Node
		known  bool
	}{
		{"nothing known", &skeinv1.Node{}, nil, sites.Node{Unfit: true}, false},
		{"by its record", &skeinv1.Node{}, r, sites.Node{Site: "home", Wish: true}, true},
		{"by the log", &skeinv1.Node{Settings: &skeinv1.NodeSettings{SiteSet: true, Leader: "no",
			ForceEndpoint: "a.example:1"}}, r, sites.Node{Reluctant: true, Public: true}, true},
		{"by the log alone", &skeinv1.Node{Settings: &skeinv1.NodeSettings{SiteSet: true, Site: "dc", Leader: "yes"}},
			nil, sites.Node{Site: "dc", Chosen: true, Unfit: true}, true},
		{"a relay", &skeinv1.Node{Draining: true}, &skeinv1.Record{Role: sites.RoleRelay}, sites.Node{Unfit: true,
			Reluctant: true}, true},
		{"a router forwards to it", &skeinv1.Node{},
			&skeinv1.Record{Candidates: []*skeinv1.Candidate{{Address: "198.18.1.1:51820", Source: "pcp"}}},
			sites.Node{Public: true}, true},
	} {
		if got, known := sites.Describe(identity.ID{}, c.node, c.record, false); got != c.want || known != c.known {
			t.Errorf("%s: %+v, %t", c.name, got, known)
		}
	}
}

// When the topology changes, the former peers stay for a while, and no longer.
func TestFormerPeersStay(t *testing.T) {
	v := large(2, 5)
	ids := v.ids()
	v.settings.Topology = sites.Full
	var m sites.Memory
	now := time.Unix(1000, 0)
	make := func() *sites.Plan {
		p := sites.Make(sites.Input{Self: ids[4], Settings: v.settings, Members: sites.NewMembers(v.nodes, nil, nil),
			Records: v.records,
			Alive:   func(identity.ID) bool { return true }, Peered: m.Recent(now)})
		m.Note(p.Peering(), now)
		return p
	}
	if make(); len(m.Recent(now)) != 9 {
		t.Fatalf("%d peers of ten nodes", len(m.Recent(now)))
	}
	v.settings.Topology = sites.Site
	for range 29 {
		now = now.Add(time.Second)
		if p := make(); !p.Peer(ids[9]) {
			t.Fatalf("a former peer is none after %s", now)
		}
	}
	now = now.Add(time.Second)
	if p := make(); p.Peer(ids[9]) || !p.Peer(ids[0]) {
		t.Errorf("half a minute later the peers are %v", m.Recent(now))
	}
}

// Ten sites of a hundred nodes: the number of peers, and what a plan costs.
func TestStateIsSmall(t *testing.T) {
	v := large(10, 100)
	for i, n := range v.ids() {
		p, peers := v.plan(n), 0
		for _, o := range v.ids() {
			if p.Peer(o) {
				peers++
			}
		}
		want := 99
		if p.Elected {
			want += 9 * sites.DefaultLeaders
		}
		if peers != want {
			t.Fatalf("node %d has %d peers, want %d", i, peers, want)
		}
		if i > 100 {
			break
		}
	}
}

func large(sitesN, each int) *view {
	v := &view{settings: &skeinv1.Settings{Topology: sites.Site}, records: map[identity.ID]*skeinv1.Record{}}
	for i := range sitesN * each {
		n := id(i)
		v.nodes = append(v.nodes, &skeinv1.Node{Id: n.String()})
		v.records[n] = &skeinv1.Record{Site: fmt.Sprint("s", i/each)}
	}
	return v
}

func BenchmarkPlan(b *testing.B) {
	v := large(10, 100)
	ids := v.ids()
	for b.Loop() {
		p := v.plan(ids[0])
		for _, n := range ids {
			p.Way(n, func(identity.ID) bool { return false })
		}
	}
}

// TestAddressesTellOfSites: a member whose record has not come counts as in the site of its address, if a leader of
// that site is known. A host without any records guesses nothing, since it must reach some node to get them.
func TestAddressesTellOfSites(t *testing.T) {
	in := sites.Input{Settings: &skeinv1.Settings{Topology: sites.Site, LeadersPerSite: 1},
		Alive:   func(identity.ID) bool { return true },
		Records: map[identity.ID]*skeinv1.Record{}}
	ranges := map[identity.ID]string{}
	in.Elsewhere = func(n identity.ID) (string, bool) { return ranges[n], ranges[n] != "" }
	in.Members = numbered(7)
	for i, of := range []string{"a", "a", "b", "b", "b", "c", ""} {
		ranges[id(i)] = of
		if i < 4 {
			in.Records[id(i)] = &skeinv1.Record{Site: of}
		}
	}
	in.Records[id(0)].Leads, in.Records[id(2)].Leads = 1, 1
	in.Self = id(1)
	p := sites.Make(in)
	for i, want := range []bool{true, false, false, false, false, true, true} {
		if p.Peer(id(i)) != want {
			t.Errorf("node %d is a peer: %t", i, !want)
		}
	}
	if site, known := p.SiteOf(id(4)); site != "b" || !known {
		t.Errorf("node 4 is at %q, %t", site, known)
	}
	in.Self, in.Records = id(4), map[identity.ID]*skeinv1.Record{id(4): {Site: "b"}}
	if p = sites.Make(in); slices.ContainsFunc([]int{0, 1, 2, 3, 5, 6}, func(i int) bool { return !p.Peer(id(i)) }) {
		t.Error("who knows nobody does not peer with everybody")
	}
}

// TestMembersWithoutRecordsAreNotAskedAfter: among many members, a plan asks whether a member is alive only if the
// member may lead or be a witness.
func TestMembersWithoutRecordsAreNotAskedAfter(t *testing.T) {
	in := sites.Input{Self: id(0), Settings: &skeinv1.Settings{Topology: sites.Site, LeadersPerSite: 1},
		Records: map[identity.ID]*skeinv1.Record{}}
	asked := map[identity.ID]bool{}
	in.Alive = func(n identity.ID) bool { asked[n] = true; return true }
	in.Outdated = func(n identity.ID) bool { asked[n] = true; return false }
	in.Elsewhere = func(identity.ID) (string, bool) { return "a", true }
	in.Members = numbered(100)
	for i := range 5 {
		in.Records[id(i)] = &skeinv1.Record{Site: "a"}
	}
	in.Records[id(1)].Leads = 1
	p := sites.Make(in)
	for n := range asked {
		if in.Records[n] == nil {
			t.Errorf("node %s has no record, and is asked after", n)
		}
	}
	if l := p.Leaders["a"]; len(asked) < 4 || len(l) != 1 || l[0].ID != id(1) || !p.Peer(id(50)) {
		t.Errorf("%d nodes were asked after, and %v lead", len(asked), l)
	}
}

// TestStrangersAreBounded: a host that does not know the sites of many members peers with some of them: those of its
// own site first, then the newest. If they are few, it peers with all.
func TestStrangersAreBounded(t *testing.T) {
	const known, own, most = 3, 100, sites.Strangers
	in := sites.Input{Self: id(0), Settings: &skeinv1.Settings{Topology: sites.Site, LeadersPerSite: 1},
		Alive: func(identity.ID) bool { return true }, Records: map[identity.ID]*skeinv1.Record{}}
	add := func(n int) {
		var nodes []*skeinv1.Node
		homes := map[identity.ID]string{}
		for i := range n {
			nodes = append(nodes, &skeinv1.Node{Id: id(i).String(), AdmittedAt: int64(n - i)})
			switch {
			case i < known:
				in.Records[id(i)] = &skeinv1.Record{Site: "a"}
			case i >= n-own:
				homes[id(i)] = "a"
			default:
				homes[id(i)] = "b"
			}
		}
		in.Members = sites.NewMembers(nodes, func(n identity.ID) (string, bool) { return homes[n], homes[n] != "" }, nil)
	}
	add(known + most)
	p := sites.Make(in)
	for i := range known + most {
		w, ok := p.Way(id(i), func(identity.ID) bool { return false })
		if want := i > 0; p.Peer(id(i)) != want || ok != want || ok && (w.Hop || w.Via != id(i)) {
			t.Fatalf("of %d strangers node %d is a peer: %t, by %+v", most, i, p.Peer(id(i)), w)
		}
	}
	add(5000)
	p = sites.Make(in)
	for i := range 5000 {
		want := i > 0 && i < known+most-own || i >= 5000-own // the lower ones were admitted later
		if _, ok := p.Way(id(i), func(identity.ID) bool { return false }); p.Peer(id(i)) != want || ok != want {
			t.Fatalf("of %d strangers node %d is a peer: %t, and has a way: %t", 5000-known, i, p.Peer(id(i)), ok)
		}
		if _, known := p.SiteOf(id(i)); known != (i < 3) {
			t.Fatalf("the site of node %d is known: %t", i, known)
		}
	}
	in.Peered = map[identity.ID]bool{id(3000): true} // it stays a peer for a while
	p = sites.Make(in)
	if _, ok := p.Way(id(3000), func(identity.ID) bool { return false }); !ok || !p.Peer(id(3000)) {
		t.Error("a peer of a moment ago has no way")
	}
}

// TestLeaderThatStartsAgainForwards: others may still send through a leader that was away for a moment, since they have
// its former record. The leader itself does not say yet that it leads.
func TestLeaderThatStartsAgainForwards(t *testing.T) {
	back, goesOn, outside := identity.ID{1}, identity.ID{2}, identity.ID{3}
	in := sites.Input{Self: back, Settings: &skeinv1.Settings{Topology: sites.Site, LeadersPerSite: 2},
		Members: sites.NewMembers([]*skeinv1.Node{{Id: back.String()}, {Id: goesOn.String()},
			{Id: outside.String()}}, nil, nil),
		Alive: func(identity.ID) bool { return true },
		Records: map[identity.ID]*skeinv1.Record{
			back:    {Site: "home", LeaderWish: true},
			goesOn:  {Site: "home", LeaderWish: true, Leads: 4},
			outside: {Site: "dc", Leads: 1},
		}}
	if p := sites.Make(in); !p.Elected || p.Forwards {
		t.Errorf("started long ago: elected %v, forwards %v", p.Elected, p.Forwards)
	}
	in.Fresh = true
	p := sites.Make(in)
	if w, ok := p.Way(outside, func(identity.ID) bool { return false }); !p.Forwards || !ok || w.Hop {
		t.Errorf("just started: forwards %v, to the other site by %+v", p.Forwards, w)
	}
	in.Records[back].LeaderWish, in.Settings.LeadersPerSite = false, 1
	if p := sites.Make(in); p.Elected || p.Forwards {
		t.Errorf("just started, and nobody's leader: elected %v, forwards %v", p.Elected, p.Forwards)
	}
}

// TestLeadershipIsHandedOver: a former leader goes on until the node that was elected in its place says that it leads,
// which it does once its sessions are up. It does not go on if it does not forward, or has gone.
func TestLeadershipIsHandedOver(t *testing.T) {
	before, next := identity.ID{1}, identity.ID{2}
	nodes := func(change func(before, next *sites.Node)) []sites.Node {
		all := []sites.Node{{ID: before, Site: "home", Public: true, Term: 5, Alive: true},
			{ID: next, Site: "home", Wish: true, Alive: true}}
		change(&all[0], &all[1])
		return all
	}
	for name, c := range map[string]struct {
		change func(before, next *sites.Node)
		want   []sites.Leader
		terms  [2]uint64
	}{
		"another one is asked to lead": {func(_, _ *sites.Node) {},
			[]sites.Leader{{ID: next}, {ID: before, Term: 5, Acting: true}}, [2]uint64{5, 5}},
		"it says that it does": {func(_, next *sites.Node) { next.Term = 5 },
			[]sites.Leader{{ID: next, Term: 5, Acting: true}}, [2]uint64{0, 6}},
		"the former one drains": {func(before, _ *sites.Node) { before.Reluctant = true },
			[]sites.Leader{{ID: next}, {ID: before, Term: 5, Acting: true}}, [2]uint64{5, 5}},
		"the former one forwards nothing": {func(before, _ *sites.Node) { before.Silent = true },
			[]sites.Leader{{ID: next, Acting: true}}, [2]uint64{0, 6}},
		"the former one is away": {func(before, _ *sites.Node) { before.Alive = false },
			[]sites.Leader{{ID: next, Acting: true}}, [2]uint64{0, 6}},
		"the log has chosen the next one": {func(before, next *sites.Node) { before.Lawful, next.Chosen = true, true },
			[]sites.Leader{{ID: next}, {ID: before, Term: 5, Acting: true, HandsOver: true}}, [2]uint64{5, 5}},
		"and forbidden the former one": {func(before, next *sites.Node) {
			before.Lawful, before.Reluctant, next.Chosen = true, true, true
		},
			[]sites.Leader{{ID: next}, {ID: before, Term: 5, Acting: true, HandsOver: true}}, [2]uint64{5, 5}},
		"it has chosen the next one, and nobody has seen the former one lead": {func(_, next *sites.Node) {
			next.Chosen = true
		},
			[]sites.Leader{{ID: next, Acting: true}}, [2]uint64{0, 6}},
		"it has chosen the next one, which is ready": {func(before, next *sites.Node) {
			before.Lawful, next.Chosen,
				next.Term = true, true, 5
		},
			[]sites.Leader{{ID: next, Term: 5, Acting: true}}, [2]uint64{0, 6}},
	} {
		all := nodes(c.change)
		leaders := sites.Elect(all, 1)["home"]
		if !slices.Equal(leaders, c.want) {
			t.Errorf("%s: %+v, want %+v", name, leaders, c.want)
		}
		for i, id := range []identity.ID{before, next} {
			if got := sites.Term(all, leaders, id); got != c.terms[i] {
				t.Errorf("%s: node %d is to say term %d, want %d", name, i+1, got, c.terms[i])
			}
		}
	}
}

// TestARecordOfAnEndedRunLeadsNothing: gossip sees a restarted leader alive before its new record has come. Its old
// record does not count: nodes stay with those that lead meanwhile, until the leader says again that it leads.
func TestARecordOfAnEndedRunLeadsNothing(t *testing.T) {
	back, goesOn, self, outside := identity.ID{1}, identity.ID{2}, identity.ID{3}, identity.ID{4}
	outdated := map[identity.ID]bool{}
	in := sites.Input{Settings: &skeinv1.Settings{Topology: sites.Site, LeadersPerSite: 2},
		Alive:    func(identity.ID) bool { return true },
		Outdated: func(id identity.ID) bool { return outdated[id] },
		Records: map[identity.ID]*skeinv1.Record{
			back:    {Site: "home", LeaderWish: true, Leads: 4},
			goesOn:  {Site: "home", LeaderWish: true, Leads: 5},
			self:    {Site: "home"},
			outside: {Site: "dc", Leads: 1},
		}}
	in.Members = recorded(in.Records)
	alive := func(identity.ID) bool { return false }
	for _, c := range []struct {
		what     string
		outdated []identity.ID
		acts     []identity.ID
	}{
		{"both run", nil, []identity.ID{back, goesOn}},
		{"one has started again", []identity.ID{back}, []identity.ID{goesOn}},
		{"both have, and nobody says that it leads", []identity.ID{back, goesOn}, []identity.ID{back, goesOn}},
	} {
		clear(outdated)
		for _, id := range c.outdated {
			outdated[id] = true
		}
		for _, at := range []identity.ID{self, outside} {
			in.Self = at
			p := sites.Make(in)
			var acts []identity.ID
			for _, l := range p.Leaders["home"] {
				if l.Acting {
					acts = append(acts, l.ID)
				}
			}
			slices.SortFunc(acts, func(a, b identity.ID) int { return bytes.Compare(a[:], b[:]) })
			if !slices.Equal(acts, c.acts) {
				t.Errorf("%s: as %s has it %v act, want %v", c.what, at, acts, c.acts)
			}
			if at != outside {
				continue
			}
			if w, ok := p.Way(self, alive); !ok || !slices.Contains(c.acts, w.Via) {
				t.Errorf("%s: to its site by %+v", c.what, w)
			}
			takes := slices.ContainsFunc(p.Guards, func(g sites.Guard) bool { return g.From == back && g.Site })
			if !takes {
				t.Errorf("%s: what it brings is refused", c.what)
			}
		}
	}
}
