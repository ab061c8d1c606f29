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
	// PassAsBefore is how long others' packets are passed on as before. They are taken for Linger.
	PassAsBefore = Linger - 5*time.Second
)

// Follower is how a host follows its plans: by one of them, and by several while the topology changes. It is not safe
// for concurrent use; the zero value has no plan.
type Follower struct {
	plan     *Plan
	before   []former // for Linger after the topology changed last, the newest last
	used     int      // of those, the one by which packets went when it began to change
	switched time.Time
}

// former is a plan of before the topology changed.
type former struct {
	plan  *Plan
	now   *Plan // by its topology and what this host sees now: leaders may change meanwhile
	brief bool  // the topology changed again before anybody's packets can have gone by it
}

// mostBefore is how many plans of before count when the topology changes again and again.
const mostBefore = 8

// Reach is how a host reaches the other members, and who may bring it packets of whom.
type Reach struct {
	Peers  map[identity.ID]bool
	Ways   map[identity.ID]Next
	Guards []Bring
}

// Next is where packets for a member go that do not, or not all, go to it as they are.
type Next struct {
	Via identity.ID // a peer: the member itself, or the one that passes packets on
	// Passed is set when the way is for packets alone that this host passes on for others.
	Passed bool
}

// Bring lets a peer bring packets whose source is one of some members.
type Bring struct {
	From identity.ID
	Of   []identity.ID
}

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
	if f.Switching() && now.Sub(f.switched) >= Linger {
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
	return f.switched.Add(Linger), true
}

// Reach is the plan, with what is left of those before it. Way is how a plan has this host send to a node, with what it
// finds dead; alive are those that its paths reach, and stands tells of whom the tunnel has a session as well: the
// first packets of one that begins are easily lost.
func (f *Follower) Reach(members []identity.ID, alive, stands func(identity.ID) bool,
	way func(*Plan, identity.ID) (Way, bool), now time.Time) *Reach {
	r := &Reach{Peers: map[identity.ID]bool{}, Ways: map[identity.ID]Next{}, Guards: f.guards(members)}
	delivers := slices.ContainsFunc(f.plans(), (*Plan).Delivers)
	for _, id := range members {
		if id == f.plan.Self {
			continue
		}
		if f.plan.Peer(id) || slices.ContainsFunc(f.before, func(b former) bool { return b.now.Peer(id) }) {
			r.Peers[id] = true
		}
		w, ok := way(f.plan, id)
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
			r.Ways[id] = Next{Via: w.Via}
		case w.Deliver:
			r.Ways[id] = Next{Via: others, Passed: true}
		}
	}
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
func (f *Follower) guards(members []identity.ID) (out []Bring) {
	of := map[identity.ID]map[identity.ID]bool{}
	for _, p := range f.plans() {
		for _, g := range p.Guards {
			set := of[g.From]
			if set == nil {
				set = map[identity.ID]bool{}
				of[g.From] = set
			}
			from, _ := p.SiteOf(g.From)
			for _, id := range members {
				site, known := p.SiteOf(id)
				through := known && (g.Site && site == from || g.Foreign && site != p.Site)
				if id != p.Self && (g.Own && id == g.From || through) {
					set[id] = true
				}
			}
		}
	}
	for from, set := range of {
		out = append(out, Bring{From: from, Of: slices.Collect(maps.Keys(set))})
	}
	return out
}
