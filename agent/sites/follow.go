package sites

import (
	"maps"
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// When the topology has changed, hosts hear of it one after the other. The times between these are for that.
const (
	// SwitchAfter is how long packets go on as before: by then every host that the log reaches takes them by the new
	// ways too.
	SwitchAfter = 3 * time.Second
	// MissingPath is how long they go by leaders as before where the own path is not there yet.
	MissingPath = ForwardOn
	// PassAsBefore is how long others' packets are passed on as before. They are taken for Grace.
	PassAsBefore = Grace - 5*time.Second
)

// Follower is how a host follows its plans: by one of them, and by several while the topology changes. It is not safe
// for concurrent use; the zero value has no plan.
type Follower struct {
	plan     *Plan
	before   []former // for Grace after the topology changed last, the newest last
	used     int      // of those, the one by which packets went when it began to change
	switched time.Time
	reach    *Reach // the newest one
	unused   *Reach // its arrays are for the next one
}

// former is a plan of before the topology changed.
type former struct {
	plan  *Plan
	now   *Plan // by its topology and what this host sees now: leaders may change meanwhile
	brief bool  // the topology changed again before anybody's packets can have gone by it
}

// mostBefore is how many plans of before count when the topology changes again and again.
const mostBefore = 8

// Follow takes a new plan.
func (f *Follower) Follow(p *Plan, now time.Time) {
	if f.plan != nil && !f.plan.SameTopology(p) {
		lasted := now.Sub(f.switched)
		if !f.Switching() || lasted >= SwitchAfter {
			f.used = len(f.before) // else packets have not gone by that one yet
		}
		f.before = append(f.before, former{plan: f.plan, brief: f.Switching() && lasted < SwitchAfter/2})
		f.switched = now
		if more := len(f.before) - mostBefore; more > 0 {
			f.before, f.used = f.before[more:], max(f.used-more, 0)
		}
	}
	if f.Switching() && now.Sub(f.switched) >= Grace {
		f.before = nil
	}
	f.plan = p
	for i := range f.before {
		f.before[i].now = f.before[i].plan.remade(p)
	}
}

// remade is a plan of before as of what the host sees now, unless it has moved. Where nobody's record names a term any
// more, since the site is full now, those lead that did.
func (p *Plan) remade(now *Plan) *Plan {
	if p.Site != now.Site {
		return p
	}
	in := now.in
	in.Settings, in.leaders = p.in.Settings, map[string][]Leader{}
	for site, l := range p.Leaders {
		if now.Topology(site) == Full {
			in.leaders[site] = l
		}
	}
	return Make(in)
}

// Plan is the newest plan.
func (f *Follower) Plan() *Plan { return f.plan }

// Switching reports whether the topology has changed so lately that the plans before it count.
func (f *Follower) Switching() bool { return len(f.before) > 0 }

// Again is when what is left of the plans before changes next; false: there is nothing left.
func (f *Follower) Again(now time.Time) (time.Time, bool) {
	if !f.Switching() {
		return time.Time{}, false
	}
	for _, d := range []time.Duration{SwitchAfter, MissingPath, PassAsBefore} {
		if at := f.switched.Add(d); at.After(now) {
			return at, true
		}
	}
	return f.switched.Add(Grace), true
}

// Reach is the plan, with what is left of those before it; the same one as before if it says the same. Way is how a
// plan has this host send to a node, with what it finds dead; alive are those that its paths reach, and stands tells of
// whom the tunnel has a session as well: the first packets of one that begins are easily lost.
func (f *Follower) Reach(alive, stands func(identity.ID) bool, way func(*Plan, identity.ID) (Way, bool),
	now time.Time) *Reach {
	members := f.plan.in.Members
	r := f.emptyReach(len(members.ids))
	r.Site, r.Guards, r.members, r.nodes = f.plan.Site, f.guards(), members, f.plan.nodes
	delivers := slices.ContainsFunc(f.plans(), (*Plan).Delivers)
	type found struct {
		Way
		ok bool
	}
	grouped := map[group]found{} // by the plan
	for i, id := range members.ids {
		n := &f.plan.nodes[i]
		if id == f.plan.Self {
			continue
		}
		r.peers[i] = f.plan.Full || n.peer || n.kept ||
			slices.ContainsFunc(f.before, func(b former) bool { return b.now.Peer(id) })
		g, many := f.plan.group(i)
		by, known := grouped[g]
		if !many || !known {
			by.Way, by.ok = way(f.plan, id)
		}
		if many && !known {
			grouped[g] = by
		}
		w, ok := by.Way, by.ok
		others := passOn(w, id)
		if f.Switching() {
			since := now.Sub(f.switched)
			last, had := way(f.before[f.used].now, id)
			switch {
			case !had, ok && !alive(last.Via) && alive(w.Via):
			case since < SwitchAfter,
				since < MissingPath && ok && !w.Hop && last.Hop && !stands(id) && alive(last.Via):
				w.Via, w.Hop, ok = last.Via, last.Hop, true
			}
			w.Deliver = !w.Hop && delivers
			others = f.others(id, way, since)
		}
		switch {
		case !ok:
		case w.Hop:
			r.next[i] = Next{Via: w.Via}
		case w.Deliver:
			r.next[i] = Next{Via: others, Passed: true}
		}
	}
	if f.reach != nil && f.reach.Equal(r) {
		f.unused = r
	} else {
		f.reach, f.unused = r, nil
	}
	return f.reach
}

// emptyReach is one for n members that says nothing yet.
func (f *Follower) emptyReach(n int) *Reach {
	r := f.unused
	if r == nil || cap(r.peers) < n {
		return &Reach{peers: make([]bool, n), next: make([]Next, n)}
	}
	f.unused, r.peers, r.next = nil, r.peers[:n], r.next[:n]
	clear(r.peers)
	clear(r.next)
	return r
}

// passOn is where packets for a node go that come from others, by one plan.
func passOn(w Way, to identity.ID) identity.ID {
	if w.Hop {
		return w.Via
	}
	return to
}

// others is where packets for a node go that come from others while the topology changes. Hosts switch one after the
// other, and what comes from one that sends by leaders is passed on by leaders: the node takes it from those of its own
// site, and not from another's, which it would come from if this host sent others' packets as its own. A plan by which
// this host passed nothing on has the way of its own packets alone.
func (f *Follower) others(to identity.ID, way func(*Plan, identity.ID) (Way, bool), since time.Duration) identity.ID {
	if used := f.before[f.used].now; since < SwitchAfter && used.Forwards {
		if w, ok := way(used, to); ok {
			return passOn(w, to)
		}
	}
	plans := []*Plan{f.plan}
	for i := len(f.before) - 1; i >= 0 && since < PassAsBefore; i-- {
		if !f.before[i].brief {
			plans = append(plans, f.before[i].now)
		}
	}
	for _, p := range plans {
		if w, ok := way(p, to); ok && p.Forwards && w.Hop {
			return w.Via
		}
	}
	return to
}

// plans are all that count.
func (f *Follower) plans() []*Plan {
	out := []*Plan{f.plan}
	for _, b := range f.before {
		out = append(out, b.now)
	}
	return out
}

// guards are who may bring packets of whom, by the plan and by those before it.
func (f *Follower) guards() (out []Bring) {
	if !f.Switching() {
		return f.plan.brought()
	}
	of := map[identity.ID]map[identity.ID]bool{}
	for _, p := range f.plans() {
		for _, b := range p.brought() {
			if of[b.From] == nil {
				of[b.From] = map[identity.ID]bool{}
			}
			for _, id := range b.Of {
				if _, member := f.plan.member(id); member {
					of[b.From][id] = true
				}
			}
		}
	}
	for from, set := range of {
		out = append(out, Bring{From: from, Of: slices.SortedFunc(maps.Keys(set), identity.ID.Compare)})
	}
	slices.SortFunc(out, func(a, b Bring) int { return a.From.Compare(b.From) })
	return out
}

// brings are who may bring packets of whom, by From. Lists that are the same are shared.
func (p *Plan) brings() []Bring {
	out := make([]Bring, 0, len(p.Guards))
	bySite, foreign := map[string][]identity.ID{}, []identity.ID(nil)
	some := slices.ContainsFunc(p.Guards, func(g Guard) bool { return g.Site })
	all := slices.ContainsFunc(p.Guards, func(g Guard) bool { return g.Foreign })
	for i, id := range p.in.Members.ids {
		n := &p.nodes[i]
		if !n.known || id == p.Self || !some && !all {
			continue
		}
		if some {
			bySite[n.site] = append(bySite[n.site], id)
		}
		if all && n.site != p.Site {
			foreign = append(foreign, id)
		}
	}
	for _, g := range p.Guards {
		n, _ := p.member(g.From)
		b := Bring{From: g.From}
		switch {
		case g.Foreign:
			b.Of = foreign
		case g.Site:
			b.Of = bySite[n.site]
		}
		if at, has := slices.BinarySearchFunc(b.Of, g.From, identity.ID.Compare); g.Own && !has && g.From != p.Self {
			b.Of = slices.Insert(slices.Clone(b.Of), at, g.From)
		}
		out = append(out, b)
	}
	return out
}
