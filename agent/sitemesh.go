package agent

import (
	"maps"
	"slices"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

const (
	// switchAfter is how long packets go on as before when the topology has changed: by then every host that the log
	// reaches takes them by the new ways too.
	switchAfter = 3 * time.Second
	// shunFor is how long a node is not asked to pass packets on after the direct path to it has died, though a relay
	// may reach it.
	shunFor = 10 * time.Second
)

// siteMesh is how this host follows its plans. It belongs to the agent's loop.
type siteMesh struct {
	plan     *sites.Plan // nil: none was made yet
	before   *sites.Plan // the plan before the topology changed last, for sites.Linger; else nil
	switched time.Time
	returned returned
	timer    *time.Timer // looks again
}

// reach is how the other members are reached, as the newest round of the loop has it. It is not changed.
type reach struct {
	full  bool // every member is a peer
	peers map[identity.ID]bool
	ways  map[identity.ID]projection.Way
	// guards are who may bring packets of whom.
	guards []projection.Guard
	site   string                 // this host's
	sites  map[identity.ID]string // those of the others, as far as they are known
}

// via is the peer that passes packets on to a member; false: the member is a peer itself, or nobody does.
func (r *reach) via(id identity.ID) (identity.ID, bool) {
	if r == nil || r.full {
		return identity.ID{}, false
	}
	w, ok := r.ways[id]
	return w.Via, ok && !w.Passed
}

// peer reports whether a member is a peer.
func (r *reach) peer(id identity.ID) bool { return r == nil || r.full || r.peers[id] }

// followPlan has the newest plan decide who is a peer, and how the others are reached.
func (a *Agent) followPlan(now time.Time) {
	m, p := &a.loop.mesh, a.sitePlan.Load()
	if p == nil {
		return
	}
	m.follow(p, now)
	if p.Full && m.before == nil {
		m.returned = nil
		if r := a.reach.Load(); r == nil || !r.full {
			a.reach.Store(&reach{full: true})
		}
		return
	}
	paths := a.currentPaths()
	members := a.roster.Members()
	m.noteReturned(members, paths, a.handshake, now)
	a.reach.Store(m.reach(members, paths, shunned(p, a.witnesses.said(), paths), now))
	m.wake(now, a.wakeUp)
}

// follow takes a new plan.
func (m *siteMesh) follow(p *sites.Plan, now time.Time) {
	if m.plan != nil && !m.plan.SameTopology(p) {
		m.before, m.switched = m.plan, now
	}
	if m.before != nil && now.Sub(m.switched) >= sites.Linger {
		m.before = nil
	}
	m.plan = p
}

// handshake is when the last one with a peer was, as WireGuard's counters had it lately.
func (a *Agent) handshake(id identity.ID) time.Time {
	stats := a.stats.Load()
	if stats == nil {
		return time.Time{}
	}
	return (*stats)[dataplane.Key(a.loop.members[id])].LastHandshake
}

// deadPath reports whether nothing goes by a peer for its path.
func deadPath(p path.Path, now time.Time) bool {
	return !p.Alive || p.Kind == path.Relay && p.Rule == path.RuleDirectDead && now.Sub(p.Since) < shunFor
}

// noteReturned finds the peers that have come back.
func (m *siteMesh) noteReturned(members []identity.ID, paths map[identity.ID]path.Path,
	handshake func(identity.ID) time.Time, now time.Time) {
	kept := returned{}
	for _, id := range members {
		if id == m.plan.Self || !m.plan.Peer(id) {
			continue
		}
		p := paths[id]
		m.returned.note(id, p, deadPath(p, now), handshake(id), now)
		if a, ok := m.returned[id]; ok {
			kept[id] = a
		}
	}
	m.returned = kept
}

// way is how a plan has this host send to a node. Those that have come back and are still doubted are passed over like
// dead ones, while another can do it.
func (m *siteMesh) way(p *sites.Plan, to identity.ID, dead func(identity.ID) bool) (sites.Way, bool) {
	doubted := func(id identity.ID) bool { return dead(id) || m.returned.doubted(id) }
	w, ok := p.Way(to, doubted)
	if ok && doubted(w.Via) {
		return p.Way(to, dead)
	}
	return w, ok
}

// reach is the plan, with what is left of the one before it. Nothing goes by those that are shunned while there is another.
func (m *siteMesh) reach(members []identity.ID, paths map[identity.ID]path.Path, shunned map[identity.ID]bool, now time.Time) *reach {
	r := &reach{peers: map[identity.ID]bool{}, ways: map[identity.ID]projection.Way{}, guards: m.guards(members),
		site: m.plan.Site, sites: make(map[identity.ID]string, len(members))}
	dead := func(id identity.ID) bool { return shunned[id] || deadPath(paths[id], now) }
	for _, id := range members {
		if id == m.plan.Self {
			continue
		}
		if site, known := m.plan.SiteOf(id); known {
			r.sites[id] = site
		}
		if m.plan.Peer(id) {
			r.peers[id] = true
		}
		w, ok := m.way(m.plan, id, dead)
		others := passOn(w, id)
		if m.before != nil {
			last, had := m.way(m.before, id, dead)
			switch {
			case !had:
			case now.Sub(m.switched) < switchAfter,
				ok && !w.Hop && last.Hop && !paths[id].Alive: // the direct path is not there yet
				w.Via, w.Hop, ok = last.Via, last.Hop, true
			}
			w.Deliver = !w.Hop && (m.plan.Delivers() || m.before.Delivers())
			if had && others == id {
				others = passOn(last, id)
			}
			if !m.plan.Forwards && !m.before.Forwards {
				others = id
			}
		}
		switch {
		case !ok:
		case w.Hop:
			r.ways[id] = projection.Way{Via: w.Via}
		case w.Deliver:
			r.ways[id] = projection.Way{Via: others, Passed: true}
		}
	}
	return r
}

// passOn is where packets for a node go that come from others, by one plan. While the topology changes hosts switch
// one after the other, and what comes from one that sends by leaders is passed on by leaders: the node takes it from
// those of its own site, and not from another's, which it would come from if this host sent others' packets as its own.
func passOn(w sites.Way, to identity.ID) identity.ID {
	if w.Hop {
		return w.Via
	}
	return to
}

// guards are who may bring packets of whom, by the plan and by the one before it.
func (m *siteMesh) guards(members []identity.ID) (out []projection.Guard) {
	of := map[identity.ID]map[identity.ID]bool{}
	for _, p := range []*sites.Plan{m.plan, m.before} {
		if p == nil {
			continue
		}
		for _, g := range p.Guards {
			set := of[g.From]
			if set == nil {
				set = map[identity.ID]bool{}
				of[g.From] = set
			}
			from, _ := p.SiteOf(g.From)
			for _, id := range members {
				site, known := p.SiteOf(id)
				if id != p.Self && (g.Own && id == g.From || known && (g.Site && site == from || g.Foreign && site != p.Site)) {
					set[id] = true
				}
			}
		}
	}
	for from, set := range of {
		out = append(out, projection.Guard{From: from, Of: slices.Collect(maps.Keys(set))})
	}
	return out
}

// wake has the loop look again when what is left of the plan before ends, or a doubt.
func (m *siteMesh) wake(now time.Time, wake func()) {
	if m.timer != nil {
		m.timer.Stop()
	}
	next := m.returned.until()
	if m.before != nil {
		end := m.switched.Add(sites.Linger)
		if at := m.switched.Add(switchAfter); at.After(now) {
			end = at
		}
		if next.IsZero() || end.Before(next) {
			next = end
		}
	}
	if !next.IsZero() {
		m.timer = time.AfterFunc(next.Sub(now), wake)
	}
}
