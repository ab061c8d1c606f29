package sites_test

import (
	"container/heap"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// world is a mesh in virtual time. Every host has its own view of it, to which news come after a delay of their own. It
// follows its own plans, and its data plane follows after another delay. Nothing in it runs concurrently.
type world struct {
	t      *testing.T
	rng    *rand.Rand
	seed   uint64
	delays delays
	now    time.Time
	queue  eventQueue
	turn   uint64 // of the next event
	hosts  []*simHost
	ids    []identity.ID
	index  map[identity.ID]int
	log    []logState // by version
	cut    map[string]bool
	tunnel [][]tunnel // [a][b], a < b
	moved  bool       // ways or tunnels have changed since packets were sent last
	ticks  bool       // witnesses check each second
	story  []string
	quiet  bool // nothing is sent
	strict bool // nothing may be lost
	late   bool // news may arrive after all hosts have stopped to wait for them

	anyMoved bool // some host has moved to another place

	faulted time.Time // when the last fault happened

	sent, losses int
}

// delays are the longest ones.
type delays struct{ log, record, apply time.Duration }

const home = "a" // the place where the log is decided

const (
	handshakes   = 1200 * time.Millisecond // a new tunnel takes at most
	pathFailover = time.Second             // a path machine takes at most to find a peer dead
	failover     = 1200 * time.Millisecond // the same with a round of the loop
	deathHeard   = 5 * time.Second         // gossip takes at most to find a node dead
	returnHeard  = 1500 * time.Millisecond // and to find it back
	resyncs      = 3 * time.Second         // and to bring what was missed
)

type logState struct {
	settings *skeinv1.Settings
	nodes    []*skeinv1.Node
	at       time.Time
}

// tunnel joins two hosts that have each other as peers and can send to each other.
type tunnel struct {
	up      bool
	ready   time.Time
	changed int
}

// simHost is a host: what it sees, what it remembers, and what its data plane does.
type simHost struct {
	i  int
	id identity.ID

	log     int
	records []*skeinv1.Record
	seqs    []int
	alive   []bool
	paths   []bool

	course   sites.Course
	follower sites.Follower
	plan     *sites.Plan
	started  time.Time

	switchView map[string]uint64 // of the plan before the topology changed

	up      bool
	upSince time.Time // or down
	moved   time.Time // to another place
	woke    time.Time // after it was frozen

	heardLate time.Time // when it heard of something long after other hosts
	zombie    bool      // it forwards nothing
	noUplink  bool      // it reaches no host outside of its place
	still     bool      // for a moment nothing goes to it or from it, and its sessions stay
	place     string    // where it stands
	site      string    // that its configuration names
	wish      bool
	public    bool
	silent    map[int]time.Time // leaders that it finds silent, and when it did so last
	misses    map[int]int
	passed    map[int]bool

	seq                  int
	published            time.Time
	life                 int // events of an earlier one are void
	due, applying, dirty bool
	wakes                int

	plane plane
}

// plane is what a host's data plane does.
type plane struct {
	peers  []bool
	via    []int // -1: none
	passed []bool
	takes  [][]bool // by whom, of whom
	view   map[string]uint64
	before map[string]uint64 // the view when the topology changed, while that is so lately that it matters
	alive  []bool            // in the same view
}

type event struct {
	at   time.Time
	turn uint64
	do   func()
}

type eventQueue []event

func (q eventQueue) Len() int { return len(q) }
func (q eventQueue) Less(i, j int) bool {
	if !q[i].at.Equal(q[j].at) {
		return q[i].at.Before(q[j].at)
	}
	return q[i].turn < q[j].turn
}
func (q eventQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *eventQueue) Push(e any)   { *q = append(*q, e.(event)) }
func (q *eventQueue) Pop() any {
	old := *q
	e := old[len(old)-1]
	*q = old[:len(old)-1]
	return e
}

func (w *world) after(d time.Duration, do func()) {
	w.turn++
	heap.Push(&w.queue, event{w.now.Add(d), w.turn, do})
}

// between is a random time.
func (w *world) between(least, most time.Duration) time.Duration {
	return least + time.Duration(w.rng.Int64N(int64(most-least)+1))
}

// run lets time pass. Packets are sent whenever ways or tunnels have changed.
func (w *world) run(d time.Duration) {
	end := w.now.Add(d)
	for len(w.queue) > 0 && !w.queue[0].at.After(end) {
		w.now = w.queue[0].at
		for len(w.queue) > 0 && w.queue[0].at.Equal(w.now) {
			heap.Pop(&w.queue).(event).do()
		}
		if w.moved {
			w.moved = false
			w.send()
		}
	}
	w.now = end
}

func (w *world) tell(format string, args ...any) {
	w.story = append(w.story, fmt.Sprintf("%8.3f ", w.now.Sub(simStart).Seconds())+fmt.Sprintf(format, args...))
}

func (w *world) fail(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("seed %d, at %.3f: %s\n%s\n%s", w.seed, w.now.Sub(simStart).Seconds(), fmt.Sprintf(format, args...),
		strings.Join(w.story, "\n"), w.situation())
}

// situation is what each host sees and does.
func (w *world) situation() string {
	var b strings.Builder
	for _, h := range w.hosts {
		fmt.Fprintf(&b, "%s id %s up %v log %d/%d forwards %v told %d", w.name(h.i), h.id, h.up, h.log, len(w.log)-1,
			h.plan != nil && h.plan.Forwards, h.course.Told())
		if h.plan != nil {
			for _, site := range slices.Sorted(maps.Keys(h.plan.Leaders)) {
				fmt.Fprintf(&b, " %q:", site)
				for _, l := range h.plan.Leaders[site] {
					fmt.Fprintf(&b, " %s/%d", w.name(w.index[l.ID]), l.Term)
					for flag, set := range map[string]bool{"+": l.Acting, "r": l.Reserve, "s": l.Silent, "h": l.HandsOver} {
						if set {
							b.WriteString(flag)
						}
					}
				}
			}
		}
		fmt.Fprintf(&b, " away %v dead %v via %v\n", w.without(h.alive), w.without(h.paths), h.plane.via)
	}
	return b.String()
}

func (w *world) without(set []bool) (out []string) {
	for i, in := range set {
		if !in {
			out = append(out, w.name(i))
		}
	}
	return out
}

func (w *world) name(i int) string { return fmt.Sprintf("%s%d", w.hosts[i].place, i) }

// Who reaches whom.

func (w *world) connected(a, b *simHost) bool {
	return a.place == b.place || !w.cut[a.place] && !w.cut[b.place] && !a.noUplink && !b.noUplink
}

func (w *world) physical(a, b *simHost) bool { return a.up && b.up && w.connected(a, b) }

// outside reports whether any host at a place reaches hosts elsewhere.
func (w *world) outside(place string) bool {
	return !w.cut[place] && slices.ContainsFunc(w.hosts, func(h *simHost) bool {
		return h.place == place && h.up && !h.noUplink
	})
}

// gossips reports whether news get from one host to the other, over any hosts between.
func (w *world) gossips(a, b *simHost) bool {
	return a.up && b.up && (a.place == b.place || w.outside(a.place) && w.outside(b.place))
}

func (w *world) tunnelOf(a, b int) *tunnel { return &w.tunnel[min(a, b)][max(a, b)] }

// usable reports whether packets of a tunnel arrive.
func (w *world) usable(a, b int) bool {
	t := w.tunnelOf(a, b)
	return t.up && !w.now.Before(t.ready)
}

// retunnel makes a host's tunnels follow its peers, and which hosts reach each other.
func (w *world) retunnel(h *simHost) {
	w.moved = true
	for _, o := range w.hosts {
		if o == h {
			continue
		}
		t, up := w.tunnelOf(h.i, o.i), w.physical(h, o) && h.plane.peers[o.i] && o.plane.peers[h.i]
		if up == t.up {
			continue
		}
		t.up = up
		t.changed++
		version := t.changed
		t.ready = w.now.Add(w.between(20*time.Millisecond, handshakes))
		for _, end := range [][2]*simHost{{h, o}, {o, h}} {
			self, other := end[0], end[1]
			at := w.between(pathFailover/2, pathFailover)
			if up {
				at = t.ready.Sub(w.now) + w.between(0, 300*time.Millisecond)
				w.after(t.ready.Sub(w.now), func() { w.moved = true })
			}
			w.after(at, func() {
				if t.changed == version && self.up && self.paths[other.i] != up {
					self.paths[other.i] = up
					w.kick(self)
				}
			})
		}
	}
}

// standStill stops all packets to and from a host, for less time than gossip takes to notice. Each other host gives the
// path up if its own patience ends before that. A host that is cut off, and does not merely stand still, does the same.
func (w *world) standStill(h *simHost, d time.Duration, cutOff bool) {
	w.tell("%s stands still for %s, and is cut off: %v", w.name(h.i), d, cutOff)
	h.still, h.upSince, w.moved = true, w.now, true
	note := func(self, other *simHost, alive bool) {
		t := w.tunnelOf(self.i, other.i)
		if self.up && t.up && h.still != alive && self.plane.peers[other.i] && self.paths[other.i] != alive {
			self.paths[other.i] = alive
			w.kick(self)
		}
	}
	for _, o := range w.hosts {
		if o == h {
			continue
		}
		w.after(w.between(pathFailover/2, pathFailover), func() { note(o, h, false) })
		if cutOff {
			w.after(w.between(pathFailover/2, pathFailover), func() { note(h, o, false) })
		}
		back := d + w.between(0, 300*time.Millisecond)
		w.after(back, func() { note(o, h, true); note(h, o, true) })
	}
	w.after(failover, func() { w.moved = true })
	w.after(d, func() { h.still, w.moved = false, true })
}

// News.

// publish makes a host's record say what holds now.
func (w *world) publish(h *simHost) {
	r := &skeinv1.Record{Site: h.site, LeaderWish: h.wish, Leads: h.course.Told()}
	if h.public {
		r.ForcedEndpoint = "198.18.0.1:51820"
	}
	for _, l := range slices.Sorted(maps.Keys(h.silent)) {
		r.SilentLeaders = append(r.SilentLeaders, &skeinv1.SilentLeader{NodeId: w.ids[l].String(), Kinds: 1})
	}
	if old := h.records[h.i]; old != nil && old.GetSite() == r.GetSite() && old.GetLeaderWish() == r.GetLeaderWish() &&
		old.GetLeads() == r.GetLeads() && len(old.GetSilentLeaders()) == len(r.GetSilentLeaders()) &&
		slices.EqualFunc(old.GetSilentLeaders(), r.GetSilentLeaders(), func(a, b *skeinv1.SilentLeader) bool {
			return a.GetNodeId() == b.GetNodeId()
		}) {
		return
	}
	if wait := time.Second - w.now.Sub(h.published); wait > 0 { // a record's changes are published in turn
		life := h.life
		w.after(wait, func() {
			if h.life == life {
				w.kick(h)
			}
		})
		return
	}
	h.published = w.now
	h.seq++
	h.records[h.i], h.seqs[h.i] = r, h.seq
	h.dirty = true
	seq := h.seq
	for _, o := range w.hosts {
		if o != h {
			w.after(w.between(10*time.Millisecond, w.delays.record), func() {
				if w.gossips(h, o) {
					w.hear(o, h.i, r, seq)
				}
			})
		}
	}
}

func (w *world) hear(h *simHost, of int, r *skeinv1.Record, seq int) {
	if seq > h.seqs[of] {
		h.records[of], h.seqs[of] = r, seq
		w.kick(h)
	}
}

// commit changes the log.
func (w *world) commit(change func(*logState)) {
	last := w.log[len(w.log)-1]
	next := logState{settings: &skeinv1.Settings{Topology: last.settings.GetTopology(),
		SiteTopology: maps.Clone(last.settings.GetSiteTopology()), LeadersPerSite: last.settings.GetLeadersPerSite()}}
	for _, n := range last.nodes {
		s := n.GetSettings()
		next.nodes = append(next.nodes, &skeinv1.Node{Id: n.GetId(), Draining: n.GetDraining(),
			Settings: &skeinv1.NodeSettings{Leader: s.GetLeader()}})
	}
	next.at = w.now
	change(&next)
	w.log = append(w.log, next)
	version := len(w.log) - 1
	for _, h := range w.hosts {
		w.after(w.between(10*time.Millisecond, w.delays.log), func() { w.hearLog(h, version) })
	}
}

func (w *world) hearLog(h *simHost, version int) {
	if h.up && h.log < version && (h.place == home || w.outside(h.place) && !w.cut[home]) {
		if w.now.Sub(w.log[h.log+1].at) > sites.ForwardOn {
			h.heardLate = w.now
		}
		h.log = version
		w.kick(h)
	}
}

// reachable updates all that depends on which hosts reach each other.
func (w *world) reachable() {
	for _, h := range w.hosts {
		w.retunnel(h)
		for _, o := range w.hosts {
			there := w.gossips(h, o)
			if o == h || !h.up || h.alive[o.i] == there {
				continue
			}
			wait, life := w.between(deathHeard/3, deathHeard), h.life
			if there {
				wait = w.between(50*time.Millisecond, returnHeard)
			}
			w.after(wait, func() {
				if h.life == life && h.up && w.gossips(h, o) == there && h.alive[o.i] != there {
					h.alive[o.i] = there
					w.kick(h)
				}
			})
		}
		w.after(w.between(resyncs/10, resyncs), func() {
			for _, o := range w.hosts {
				if o == h || !w.gossips(h, o) {
					continue
				}
				for i := range w.hosts {
					w.hear(h, i, o.records[i], o.seqs[i])
				}
			}
			w.hearLog(h, len(w.log)-1)
		})
	}
}

// Rounds.

// kick makes a host run a round soon.
func (w *world) kick(h *simHost) {
	if !h.up {
		return
	}
	h.dirty = true
	if h.due || h.applying {
		return
	}
	h.due = true
	life := h.life
	w.after(w.between(time.Millisecond, 20*time.Millisecond), func() {
		if h.life == life && h.up {
			h.due = false
			w.round(h)
		}
	})
}

// round is what an agent's loop does.
func (w *world) round(h *simHost) {
	h.dirty = false
	log := w.log[h.log]
	in := sites.Input{Self: h.id, Settings: log.settings, Members: sites.NewMembers(log.nodes, nil, nil),
		Records: make(map[identity.ID]*skeinv1.Record, len(w.ids)),
		Alive:   func(id identity.ID) bool { return h.alive[w.index[id]] }}
	for i, r := range h.records {
		if r != nil {
			in.Records[w.ids[i]] = r
		}
	}
	hasPath := func(id identity.ID) bool { return h.paths[w.index[id]] }
	p, wait := h.course.Plan(in, h.started, hasPath, w.now)
	if h.plan != nil && !h.plan.SameTopology(p) {
		h.switchView = h.plane.view
	}
	h.plan = p
	h.follower.Follow(p, w.now)
	next := plane{peers: make([]bool, len(w.ids)), via: make([]int, len(w.ids)), passed: make([]bool, len(w.ids)),
		takes: make([][]bool, len(w.ids)), view: w.digest(h), alive: slices.Clone(h.alive)}
	for i := range next.via {
		next.via[i] = -1
	}
	if h.follower.Switching() {
		next.before = h.switchView
	}
	if p.Full && !h.follower.Switching() {
		for i := range next.peers {
			next.peers[i] = i != h.i
		}
	} else {
		shunned := w.shunned(h)
		r := h.follower.Reach(hasPath, hasPath, func(p *sites.Plan, to identity.ID) (sites.Way, bool) {
			return p.Way(to, func(id identity.ID) bool { return shunned[w.index[id]] || !hasPath(id) })
		}, w.now)
		for id := range r.Peers() {
			next.peers[w.index[id]] = true
		}
		for id, n := range r.Ways() {
			next.via[w.index[id]], next.passed[w.index[id]] = w.index[n.Via], n.Passed
		}
		for _, g := range r.Guards {
			of := make([]bool, len(w.ids))
			for _, id := range g.Of {
				of[w.index[id]] = true
			}
			next.takes[w.index[g.From]] = of
		}
	}
	for i := range h.paths {
		h.paths[i] = h.paths[i] && next.peers[i]
	}
	w.publish(h)
	w.wake(h, wait)
	h.applying = true
	life := h.life
	w.after(w.between(time.Millisecond, w.delays.apply), func() {
		if h.life != life || !h.up {
			return
		}
		h.applying, h.plane = false, next
		w.retunnel(h)
		if h.course.Tell() || h.dirty {
			w.kick(h)
		}
	})
}

// wake makes a host run a round when something is due.
func (w *world) wake(h *simHost, wait time.Duration) {
	if at, ok := h.follower.Again(w.now); ok && (wait == 0 || at.Sub(w.now) < wait) {
		wait = at.Sub(w.now)
	}
	h.wakes++
	if wait > 0 {
		wakes, life := h.wakes, h.life
		w.after(wait, func() {
			if h.life == life && h.wakes == wakes {
				w.kick(h)
			}
		})
	}
}

// shunned returns the leaders of its site that a host itself finds silent, if it reaches another one.
func (w *world) shunned(h *simHost) []bool {
	out := make([]bool, len(w.ids))
	for l := range h.silent {
		out[l] = true
	}
	for _, l := range h.plan.Leaders[h.plan.Site] {
		if i := w.index[l.ID]; l.Acting && !out[i] && (i == h.i || h.paths[i]) {
			return out
		}
	}
	return make([]bool, len(w.ids))
}

// digest returns, for each site, a host's view of it: its topology, its nodes, and what is known of them.
func (w *world) digest(h *simHost) map[string]uint64 {
	out := map[string]uint64{}
	log := w.log[h.log]
	add := func(site string, v uint64) {
		if out[site] == 0 {
			out[site] = uint64(len(sites.Topology(log.settings, site)))*31 + uint64(log.settings.GetLeadersPerSite()) + 1
		}
		out[site] = (out[site] ^ v) * 0x9e3779b97f4a7c15
	}
	for i, n := range log.nodes {
		if r := h.records[i]; r != nil {
			v := uint64(i)<<40 | uint64(h.seqs[i])<<8
			for bit, set := range []bool{n.GetDraining(), n.GetSettings().GetLeader() == "yes",
				n.GetSettings().GetLeader() == "no",
				i == h.i || h.alive[i]} {
				if set {
					v |= 1 << bit
				}
			}
			add(r.GetSite(), v)
		}
	}
	return out
}

// witness makes the witnesses of leaders check, each second while anything is wrong.
func (w *world) witness() {
	if w.ticks {
		return
	}
	w.ticks = true
	var tick func()
	tick = func() {
		wrong := false
		for _, h := range w.hosts {
			if h.up && h.plan != nil {
				w.look(h)
			}
			wrong = wrong || h.zombie || h.noUplink || len(h.silent) > 0
		}
		if w.ticks = wrong; wrong {
			w.after(time.Second, tick)
		}
	}
	w.after(time.Second, tick)
}

func (w *world) look(h *simHost) {
	for _, t := range h.plan.Watched() {
		l := w.index[t.Leader]
		if !h.paths[l] {
			continue
		}
		echoed := func(by int) bool {
			return slices.ContainsFunc(t.Mirrors, func(m identity.ID) bool {
				return (by == h.i || w.usable(h.i, by) && !w.hosts[by].zombie) && w.usable(by, w.index[m])
			})
		}
		if echoed(l) {
			h.passed[l], h.misses[l] = true, 0
			continue
		}
		h.misses[l]++
		others := slices.ContainsFunc(t.Others, func(id identity.ID) bool { return echoed(w.index[id]) })
		if others && h.misses[l] >= 2 || len(t.Others) == 0 && h.passed[l] && h.misses[l] >= 15 {
			if _, said := h.silent[l]; !said {
				w.kick(h)
			}
			h.silent[l] = w.now
		}
	}
	for l, at := range h.silent {
		if w.now.Sub(at) >= 30*time.Second {
			delete(h.silent, l)
			w.kick(h)
		}
	}
}
