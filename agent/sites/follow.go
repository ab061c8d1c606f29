package sites

import (
	"maps"
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// Hosts learn of a changed topology one after another. These times, counted from the change, bridge the difference.
const (
	// SwitchAfter is how long a host keeps sending as before. By then every host that the log reaches accepts packets by
	// the new plan as well.
	SwitchAfter = 3 * time.Second
	// MissingPath is how long a host keeps sending to a node through leaders as before, if its own path is not up yet.
	MissingPath = ForwardOn
	// PassAsBefore is how long a host forwards others' packets as before. Such packets are accepted for Grace.
	PassAsBefore = Grace - 5*time.Second
)

// Follower is how a host follows its plans: one of them, and several while the topology changes. It is not safe for
// concurrent use; the zero value has no plan.
type Follower struct {
	plan     *Plan
	before   []former // kept for Grace after the last change of topology, the newest last
	used     int      // index in before of the plan by which packets went when the change began
	switched time.Time
	reach    *Reach // the newest one
	unused   *Reach // the next Reach reuses its arrays
}

// former is a plan from before a change of topology.
type former struct {
	plan  *Plan
	now   *Plan // plan's topology with what this host sees now, since leaders may change meanwhile
	brief bool  // the topology changed again before any host can have sent by it
}

// mostBefore is the most former plans that count when the topology changes again and again.
const mostBefore = 8

// Follow makes a new plan the current one.
func (f *Follower) Follow(p *Plan, now time.Time) {
	if f.plan != nil && !f.plan.SameTopology(p) {
		lasted := now.Sub(f.switched)
		if !f.Switching() || lasted >= SwitchAfter {
			f.used = len(f.before) // otherwise no packets have gone by f.plan yet
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

// remade makes a former plan again from what the host sees now. If the host has moved to another site, the former plan
// stays as it was. In a site that is full now, no record names a term any more, so its former leaders are kept.
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

// Switching reports whether the topology changed within Grace, so that former plans still count.
func (f *Follower) Switching() bool { return len(f.before) > 0 }

// Again returns when the effect of the former plans changes next; false: no former plan is left.
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

// Reach combines the plan with what is left of the former ones. It returns the former value if nothing has changed. way
// computes how a plan has this host send to a node, with what it finds dead. alive reports whether a path to a node is
// alive; stands reports whether the tunnel has a session with it as well: a new session easily loses its first packets.
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
	grouped := map[group]found{} // ways by the current plan
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

// emptyReach returns an empty Reach for n members.
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

// passOn returns where this host forwards others' packets for a node, by one plan.
func passOn(w Way, to identity.ID) identity.ID {
	if w.Hop {
		return w.Via
	}
	return to
}

// others returns where this host forwards others' packets for a node while the topology changes. Hosts switch one after
// another, and packets of a host that sends through leaders must go on through leaders: the node accepts them from the
// leaders of its own site, but not from another site's leader, which this host would be if it sent them like its own. A
// plan by which this host forwards nothing describes only the way of its own packets, so it is skipped.
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

// plans returns the current plan and the former ones.
func (f *Follower) plans() []*Plan {
	out := []*Plan{f.plan}
	for _, b := range f.before {
		out = append(out, b.now)
	}
	return out
}

// guards returns who may bring packets of whom, by the current plan and the former ones.
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

// brings returns who may bring packets of whom, by From. Equal lists are shared.
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
