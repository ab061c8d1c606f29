package sites_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

var simStart = time.Unix(1e9, 0)

// Hosts of a mesh in sites see every change at different times. Histories are random: leaders and sites are chosen,
// drained, killed, frozen, cut off and moved, and settings change. Whenever anything has changed at any host, each host
// sends a packet to each other one, and each step is judged by what the data planes of its two ends know by then.
//
// SKEIN_TEST_SEED runs and prints one history of each kind; SKEIN_TEST_SEEDS runs so many.
func histories(t *testing.T, n uint64, short uint64, one func(*world)) {
	first := uint64(1)
	if v, err := strconv.ParseUint(os.Getenv("SKEIN_TEST_SEED"), 10, 64); err == nil {
		first, n = v, 1
	} else if v, err := strconv.ParseUint(os.Getenv("SKEIN_TEST_SEEDS"), 10, 64); err == nil {
		n = v
	} else if testing.Short() {
		n = short
	}
	sent, lost := 0, 0
	for seed := first; seed < first+n; seed++ {
		w := newWorld(t, seed)
		one(w)
		sent, lost = sent+w.sent, lost+w.losses
	}
	t.Logf("%d histories, %d packets, of which %d were lost", n, sent, lost)
	if n >= short && sent == 0 {
		t.Error("nothing was sent")
	}
}

// A planned change loses nothing as long as news arrive within the times that hosts allow for them.
func TestPlannedChangesLoseNothing(t *testing.T) {
	histories(t, 2000, 200, func(w *world) {
		w.delays = delays{log: 2500 * time.Millisecond, record: 1500 * time.Millisecond, apply: 150 * time.Millisecond}
		// Where settings change again before all have heard of the first change, hosts do so in different orders, and
		// each needs time for what the others have and have not heard.
		quick := w.rng.IntN(2) == 0
		if quick {
			w.delays.log = 550 * time.Millisecond
		}
		w.begin()
		w.strict = true
		for range 1 + w.rng.IntN(6) {
			w.plannedChange()
			pause := w.pause()
			if !quick {
				pause += 2 * sites.SwitchAfter
			}
			w.run(pause)
		}
		w.settle()
	})
}

// Where hosts die, freeze, do not forward, move or are cut off, packets are lost only while the hosts on their way see
// different things, or until the path to the dead host is given up.
func TestPacketsAreLostOnlyWhileViewsDiffer(t *testing.T) {
	histories(t, 2000, 200, func(w *world) {
		w.delays = delays{log: 2500 * time.Millisecond, record: 1500 * time.Millisecond, apply: 150 * time.Millisecond}
		w.begin()
		for range 1 + w.rng.IntN(6) {
			if w.rng.IntN(3) == 0 {
				w.plannedChange()
			} else {
				w.fault()
			}
			w.run(w.pause())
		}
		w.repair()
		w.settle()
	})
}

// A leader stands still for a moment, or is cut off, and is back before gossip notices. Some hosts have given its path
// up, others have not, and it may have given up all paths itself. Only what is sent to it meanwhile is lost and, if
// there is another leader, for no longer than with a dead one. In the end all hosts use the same leaders as before.
func TestLeaderStandsStillForAMoment(t *testing.T) {
	passedOver := 0
	histories(t, 1000, 200, func(w *world) {
		w.delays = delays{log: 100 * time.Millisecond, record: 1500 * time.Millisecond, apply: 150 * time.Millisecond}
		w.begin()
		leading := func() (out []string) {
			for _, h := range w.hosts {
				for _, site := range slices.Sorted(maps.Keys(h.plan.Leaders)) {
					out = append(out, fmt.Sprint(w.name(h.i), site, h.plan.Leaders[site], h.plane.via))
				}
			}
			return out
		}
		var leaders []*simHost
		for _, h := range w.hosts {
			if h.course.Told() > 0 {
				leaders = append(leaders, h)
			}
		}
		if len(leaders) == 0 {
			return // topology full
		}
		before := leading()
		w.strict = true
		for range 1 + w.rng.IntN(3) {
			h := leaders[w.rng.IntN(len(leaders))]
			w.standStill(h, w.between(100*time.Millisecond, deathHeard/3), w.rng.IntN(2) == 0)
			for range 20 {
				w.run(60 * time.Millisecond)
				if now := leading(); h.still && !slices.Equal(now, before) {
					passedOver++
					break
				}
			}
			w.run(pathFailover + w.between(time.Second, 20*time.Second))
		}
		w.settle()
		if after := leading(); !slices.Equal(after, before) {
			w.fail("before %v\nafter %v", before, after)
		}
	})
	if passedOver == 0 && os.Getenv("SKEIN_TEST_SEED") == "" {
		t.Error("nobody was passed over")
	}
}

// News may take longer than any host waits for them. Then packets are lost, but none loops, and all packets arrive once
// all hosts have the news.
func TestNothingGoesRoundHoweverLateNewsAre(t *testing.T) {
	histories(t, 1000, 100, func(w *world) {
		w.delays = delays{log: 50 * time.Second, record: 40 * time.Second, apply: time.Second}
		w.late = true
		w.begin()
		for range 1 + w.rng.IntN(6) {
			if w.rng.IntN(2) == 0 {
				w.plannedChange()
			} else {
				w.fault()
			}
			w.run(w.pause())
		}
		w.repair()
		w.run(time.Minute)
		w.settle()
	})
}

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 7)), now: simStart, index: map[identity.ID]int{},
		cut: map[string]bool{}}
	first := logState{settings: &skeinv1.Settings{Topology: sites.Site, SiteTopology: map[string]string{},
		LeadersPerSite: uint32(w.rng.IntN(4))}}
	if w.rng.IntN(4) == 0 {
		first.settings.Topology = sites.Full
	}
	places := []string{"a", "b", "c"}[:2+w.rng.IntN(2)]
	for _, place := range places {
		if w.rng.IntN(5) == 0 {
			first.settings.SiteTopology[place] = []string{sites.Full, sites.Site}[w.rng.IntN(2)]
		}
		chosen := w.rng.IntN(3) == 0
		for range 1 + w.rng.IntN(7-2*len(places)) {
			h := &simHost{i: len(w.hosts), id: id(int(seed)*100 + len(w.hosts)), place: place, site: place, up: true,
				wish: w.rng.IntN(3) == 0, public: w.rng.IntN(2) == 0}
			n := &skeinv1.Node{Id: h.id.String(), Settings: &skeinv1.NodeSettings{}}
			if chosen && w.rng.IntN(2) == 0 {
				n.Settings.Leader = "yes"
			}
			w.hosts, w.ids, first.nodes = append(w.hosts, h), append(w.ids, h.id), append(first.nodes, n)
			w.index[h.id] = h.i
		}
	}
	w.log = []logState{first}
	for range w.hosts {
		w.tunnel = append(w.tunnel, make([]tunnel, len(w.hosts)))
	}
	return w
}

// begin starts all hosts with the same view, and lets them run for a while.
func (w *world) begin() {
	for _, h := range w.hosts {
		h.started, h.upSince, h.published = w.now.Add(-time.Hour), w.now.Add(-time.Hour), w.now.Add(-time.Hour)
		h.alive, h.paths = make([]bool, len(w.ids)), make([]bool, len(w.ids))
		w.forget(h)
		for i := range h.alive {
			h.alive[i] = i != h.i
		}
		h.records, h.seqs = make([]*skeinv1.Record, len(w.ids)), make([]int, len(w.ids))
	}
	for _, h := range w.hosts {
		h.seq = 1
		r := &skeinv1.Record{Site: h.site, LeaderWish: h.wish}
		if h.public {
			r.ForcedEndpoint = "198.18.0.1:51820"
		}
		for _, o := range w.hosts {
			o.records[h.i], o.seqs[h.i] = r, 1
		}
		w.kick(h)
	}
	w.quiet = true
	w.run(time.Minute)
	w.quiet = false
}

// forget is what a host's memory and data plane lose when it dies.
func (w *world) forget(h *simHost) {
	h.course, h.follower, h.plan = sites.Course{}, sites.Follower{}, nil
	h.silent, h.misses, h.passed = map[int]time.Time{}, map[int]int{}, map[int]bool{}
	h.plane = plane{peers: make([]bool, len(w.ids)), via: make([]int, len(w.ids)), passed: make([]bool, len(w.ids)),
		takes: make([][]bool, len(w.ids)), alive: make([]bool, len(w.ids))}
	for i := range w.ids {
		h.alive[i], h.paths[i], h.plane.via[i] = false, false, -1
	}
}

func (w *world) pause() time.Duration {
	return w.between(0, []time.Duration{3 * time.Second, 20 * time.Second, time.Minute}[w.rng.IntN(3)])
}

// plannedChange makes a change as an admin would.
func (w *world) plannedChange() {
	h := w.hosts[w.rng.IntN(len(w.hosts))]
	switch w.rng.IntN(8) {
	case 0, 1:
		drains := !w.log[len(w.log)-1].nodes[h.i].GetDraining()
		w.tell("%s drains: %v", w.name(h.i), drains)
		w.commit(func(l *logState) { l.nodes[h.i].Draining = drains })
	case 2:
		leader := []string{"yes", "no", ""}[w.rng.IntN(3)]
		w.tell("%s is to lead: %q", w.name(h.i), leader)
		w.commit(func(l *logState) { l.nodes[h.i].Settings.Leader = leader })
	case 3, 4: // another one of the site is to lead instead of those that are
		w.tell("%s is to lead alone", w.name(h.i))
		w.commit(func(l *logState) { l.nodes[h.i].Settings.Leader = "yes" })
		if w.rng.IntN(2) == 0 {
			w.run(w.between(0, 3*time.Second))
		}
		w.commit(func(l *logState) {
			for _, o := range w.hosts {
				if n := l.nodes[o.i].GetSettings(); o != h && o.site == h.site && n.GetLeader() == "yes" {
					n.Leader = []string{"no", ""}[w.rng.IntN(2)]
				}
			}
		})
	case 5:
		topology := []string{sites.Full, sites.Site}[w.rng.IntN(2)]
		w.tell("topology %s", topology)
		w.commit(func(l *logState) { l.settings.Topology = topology })
	case 6:
		topology := []string{sites.Full, sites.Site}[w.rng.IntN(2)]
		w.tell("site topology %s=%s", h.site, topology)
		w.commit(func(l *logState) { l.settings.SiteTopology = map[string]string{h.site: topology} })
	case 7:
		leaders := uint32(1 + w.rng.IntN(3))
		w.tell("%d leaders per site", leaders)
		w.commit(func(l *logState) { l.settings.LeadersPerSite = leaders })
	}
}

// fault makes a change that nobody plans.
func (w *world) fault() {
	h := w.hosts[w.rng.IntN(len(w.hosts))]
	w.faulted = w.now
	switch n := w.rng.IntN(8); {
	case !h.up:
		w.revive(h)
	case n < 2:
		w.stop(h, n == 0)
	case n == 2:
		h.zombie = !h.zombie
		w.tell("%s passes nothing on: %v", w.name(h.i), h.zombie)
		h.upSince, w.moved = w.now, true
		w.witness()
	case n == 3:
		h.noUplink = !h.noUplink
		w.tell("%s has no uplink: %v", w.name(h.i), h.noUplink)
		h.upSince = w.now
		w.reachable()
		w.witness()
	case n < 6:
		w.cut[h.place] = !w.cut[h.place]
		w.tell("place %s is cut off: %v", h.place, w.cut[h.place])
		for _, o := range w.hosts {
			o.upSince = w.now
		}
		w.reachable()
	case n == 6:
		h.wish = !h.wish
		w.tell("%s wishes to lead: %v", w.name(h.i), h.wish)
		w.kick(h)
	default:
		to := w.hosts[w.rng.IntN(len(w.hosts))].place
		w.tell("%s moves to %s", w.name(h.i), to)
		h.place, h.site, h.upSince, h.moved, w.anyMoved = to, to, w.now, w.now, true
		w.reachable()
		w.kick(h)
	}
}

func (w *world) stop(h *simHost, dies bool) {
	w.tell("%s stops, dies: %v", w.name(h.i), dies)
	h.up, h.upSince = false, w.now
	h.life++
	h.due, h.applying = false, false
	if dies {
		w.forget(h)
	}
	w.reachable()
}

func (w *world) revive(h *simHost) {
	w.tell("%s is back", w.name(h.i))
	h.up, h.upSince = true, w.now
	if h.woke = w.now; h.plan == nil { // it was dead, not frozen
		h.started, h.woke = w.now, time.Time{}
	}
	w.reachable()
	w.kick(h)
}

// repair ends all faults, except that some hosts stay dead and some places cut off.
func (w *world) repair() {
	w.faulted = w.now
	delete(w.cut, home)
	for _, h := range w.hosts {
		if h.zombie || h.noUplink {
			w.tell("%s is repaired", w.name(h.i))
			h.zombie, h.noUplink, h.upSince = false, false, w.now
		}
		if !h.up && w.rng.IntN(2) == 0 {
			w.revive(h)
		}
		if w.cut[h.place] && w.rng.IntN(3) > 0 {
			w.tell("place %s is healed", h.place)
			delete(w.cut, h.place)
			for _, o := range w.hosts {
				o.upSince = w.now
			}
		}
	}
	w.reachable()
}

// settle waits until all news have arrived and all times have run out. Then every pair has one way, by the same hosts
// in both directions.
func (w *world) settle() {
	w.run(150 * time.Second)
	w.tell("all is quiet")
	for _, a := range w.hosts {
		for _, b := range w.hosts {
			if a == b || !w.gossips(a, b) || w.cut[a.place] && !w.sameLog(a) {
				continue
			}
			if a.log != b.log || a.plane.view[a.site] != b.plane.view[a.site] {
				w.fail("%s and %s see different things long after", w.name(a.i), w.name(b.i))
			}
			there, back := w.walk(a.i, b.i), w.walk(b.i, a.i)
			if there.lost != "" || len(there.way) > 4 {
				w.fail("long after: %s", w.trip(there))
			}
			if slices.Reverse(back.way); !slices.Equal(there.way, back.way) {
				w.fail("there by %s, and back from there by %s", w.trip(there), w.trip(back))
			}
		}
	}
}

// sameLog reports whether all hosts that a host reaches have the same log. News do not reach a place that is cut off,
// but a host that has moved there may know more than the others.
func (w *world) sameLog(a *simHost) bool {
	return !slices.ContainsFunc(w.hosts, func(h *simHost) bool { return w.gossips(a, h) && h.log != a.log })
}

// trip is the course of a packet.
type trip struct {
	way  []int  // the last one is where it arrived, or was lost
	lost string // "": it arrived
	loop bool   // it passed one host twice
	// unreached is set when the last host is dead or cut off, or a tunnel to it is not there.
	unreached, untunneled bool
}

func (w *world) trip(t trip) string {
	var names []string
	for _, i := range t.way {
		names = append(names, w.name(i))
	}
	return fmt.Sprint(names, " ", t.lost)
}

const mostSteps = 12

// walk sends a packet by the hosts' present data planes: a plain packet is accepted from its source only, and an
// encapsulated one from those that may bring it.
func (w *world) walk(from, to int) trip {
	t := trip{way: make([]int, 1, 5)}
	t.way[0] = from
	at := from
	for at != to {
		h := w.hosts[at]
		next, wrapped := -1, false
		switch via := h.plane.via[to]; {
		case at != from && h.zombie:
			t.lost = "it is not passed on"
			return t
		case via >= 0 && (at != from || !h.plane.passed[to]):
			next, wrapped = via, true
		case !h.plane.peers[to]:
			t.lost = "there is no way"
			return t
		case at != from:
			t.lost = "another's packet is sent plain"
			return t
		default:
			next = to
		}
		o := w.hosts[next]
		again := slices.Contains(t.way, next)
		t.way = append(t.way, next)
		switch {
		case !w.physical(h, o), h.still, o.still:
			t.lost, t.unreached = "the last one is not reached", true
		case !h.plane.peers[next]:
			t.lost = "the last one is not a peer"
		case !o.plane.peers[at]:
			t.lost, t.untunneled = "the last one has not the one before it as a peer", true
		case !w.usable(at, next):
			t.lost, t.untunneled = "the last one has no session yet", true
		case wrapped && (o.plane.takes[at] == nil || !o.plane.takes[at][from]):
			t.lost = "the last one does not take it"
		case len(t.way) > mostSteps:
			t.lost = "it goes round"
		}
		if t.lost != "" {
			return t
		}
		at, t.loop = next, t.loop || again
	}
	return t
}

// send sends a packet from each host to each other one, and judges its course.
func (w *world) send() {
	if w.quiet {
		return
	}
	for _, a := range w.hosts {
		for _, b := range w.hosts {
			if a == b || !w.gossips(a, b) || a.still || b.still {
				continue
			}
			t := w.walk(a.i, b.i)
			w.sent++
			if t.lost != "" {
				w.losses++
			}
			if why := w.wrong(t, a, b); why != "" {
				w.fail("%s: %s", w.trip(t), why)
			}
		}
	}
}

// wrong returns why a packet must not have gone as it did; "": it may have.
func (w *world) wrong(t trip, a, b *simHost) string {
	differ := w.differ(t, a, b)
	switch {
	case len(t.way) > mostSteps:
		return "it goes round"
	case t.loop && !differ:
		return "a host has it twice"
	case !w.anyMoved && slices.ContainsFunc(t.way, func(i int) bool {
		return w.hosts[i].place != a.place && w.hosts[i].place != b.place
	}):
		return "a third site has it"
	case t.lost == "":
		return ""
	case w.strict && t.unreached && w.excused(w.hosts[t.way[len(t.way)-1]]):
		return ""
	case w.strict:
		return "it is lost, and all was planned"
	case w.late, differ:
		return ""
	}
	last := w.hosts[t.way[len(t.way)-1]]
	if w.now.Sub(last.started) < 2*sites.HandOver && slices.ContainsFunc(t.way,
		func(i int) bool { return w.hosts[i].handsOver() }) {
		return "" // the host has not seen the leaders that hand over lead
	}
	before := w.hosts[t.way[max(0, len(t.way)-2)]]
	switch {
	case t.unreached && (w.now.Sub(last.upSince) < failover || w.now.Sub(before.upSince) < failover ||
		before.plane.alive[last.i] != w.gossips(before, last)), // it is not known yet
		t.untunneled && w.now.Sub(w.faulted) < sites.Grace, // a new node has to lead
		last.zombie || last.noUplink || before.noUplink,    // its witnesses find it, if there is another one
		// it led by what it knew when it was frozen, or was cut off from the log
		w.now.Sub(before.woke) < sites.ForwardOn+resyncs+sites.SwitchAfter, w.now.Sub(before.heardLate) < sites.ForwardOn+
			sites.SwitchAfter:
		return ""
	}
	return "it is lost, and all on its way see the same"
}

// excused reports whether a host has stood still for so short a time that others may still send to it, or is the only
// leader of its site.
func (w *world) excused(h *simHost) bool {
	return h.still && (w.now.Sub(h.upSince) < failover ||
		!slices.ContainsFunc(w.hosts, func(o *simHost) bool { return o != h && o.site == h.site && o.course.Told() > 0 }))
}

// handsOver reports whether a host's plan has a leader that leads only until others do.
func (h *simHost) handsOver() bool {
	for _, leaders := range h.plan.Leaders {
		if slices.ContainsFunc(leaders, func(l sites.Leader) bool { return l.HandsOver }) {
			return true
		}
	}
	return false
}

// differ reports whether the hosts on a packet's way see different things of the sites of its two ends. It also counts
// what they saw when the topology changed, as long as it matters who led then.
func (w *world) differ(t trip, a, b *simHost) bool {
	var first *simHost
	for _, i := range append(slices.Clip(t.way), b.i) {
		h := w.hosts[i]
		if !h.up {
			continue
		}
		if h.plane.view == nil || w.now.Sub(h.moved) < sites.SwitchAfter+w.delays.record {
			return true
		}
		if first == nil {
			first = h
			continue
		}
		if (h.plane.before == nil) != (first.plane.before == nil) { // one of them heard of it long after the other
			return true
		}
		for _, site := range []string{a.site, b.site} {
			if h.plane.view[site] != first.plane.view[site] || h.plane.before[site] != first.plane.before[site] {
				return true
			}
		}
	}
	return false
}
