package agent

import (
	"maps"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// shunFor is how long a node is not asked to pass packets on after the path to it has died, though a relay may
// reach it.
const shunFor = 10 * time.Second

// sessionLasts is how long after a handshake WireGuard surely has a session.
const sessionLasts = 170 * time.Second

// siteMesh is how this host follows its plans. It belongs to the agent's loop.
type siteMesh struct {
	sites.Follower
	returned    returned
	replaceable map[identity.ID]bool // as the paths know it
	replaceIn   *sites.Plan          // by which they do
	timer       *time.Timer          // looks again
	last        lastReach
}

// lastReach is what the newest Reach was made of, where nothing but a plan and faults counted: among ten thousand
// members most rounds make the same one.
type lastReach struct {
	plan   *sites.Plan // nil: more counted
	faults map[identity.ID]uint8
	reach  *sites.Reach
}

// reach is how the other members are reached, as the newest round of the loop has it. It is not changed, and the same
// one stays as long as it says the same.
type reach struct {
	*sites.Reach // nil: every member is a peer
}

// via is the peer that passes packets on to a member; false: the member is a peer itself, or nobody does.
func (r *reach) via(id identity.ID) (identity.ID, bool) {
	if r == nil {
		return identity.ID{}, false
	}
	w, ok := r.Way(id)
	return w.Via, ok && !w.Passed
}

// peer reports whether a member is a peer.
func (r *reach) peer(id identity.ID) bool { return r == nil || r.Peer(id) }

// full reports whether every member is a peer.
func (r *reach) full() bool { return r == nil || r.Reach == nil }

// followPlan has the newest plan decide who is a peer, and how the others are reached.
func (a *Agent) followPlan(now time.Time) {
	m, p := &a.loop.mesh, a.sitePlan.Load()
	if p == nil {
		return
	}
	m.Follow(p, now)
	a.tellReplaceable(p)
	if p.Full && !m.Switching() {
		m.returned = nil
		if r := a.reach.Load(); r == nil || !r.full() {
			a.reach.Store(&reach{})
		}
		return
	}
	paths := a.currentPaths()
	m.noteReturned(p, paths, a.handshake, now)
	r := m.reach(paths, shunned(p, a.witnesses.said(), paths), a.handshake, now)
	if old := a.reach.Load(); old.full() || old.Reach != r {
		a.reach.Store(&reach{r})
	}
	m.wake(now, a.wakeUp)
}

// tellReplaceable has the paths suspect leaders sooner in whose place others can carry.
func (a *Agent) tellReplaceable(p *sites.Plan) {
	m := &a.loop.mesh
	if a.paths == nil || m.replaceIn == p {
		return
	}
	m.replaceIn = p
	if ids := p.Replaceable(); !maps.Equal(ids, m.replaceable) {
		m.replaceable = ids
		a.paths.SetReplaceable(ids)
	}
}

// handshake is when the last one with a peer was, as WireGuard's counters had it lately.
func (a *Agent) handshake(id identity.ID) time.Time {
	p, _ := a.stats.Load().Of(dataplane.Key(a.loop.members[id]))
	return p.LastHandshake
}

// deadPath reports whether nothing goes by a peer for its path.
func deadPath(p path.Path, now time.Time) bool {
	return !p.Alive || p.FollowsDead() && now.Sub(p.Since) < shunFor
}

// noteReturned finds the peers that have come back.
func (m *siteMesh) noteReturned(p *sites.Plan, paths map[identity.ID]path.Path,
	handshake func(identity.ID) time.Time, now time.Time) {
	kept := returned{}
	for id := range p.Peers() {
		way := paths[id]
		m.returned.note(id, way, deadPath(way, now), handshake(id), now)
		if a, ok := m.returned[id]; ok {
			kept[id] = a
		}
	}
	m.returned = kept
}

// trouble is what may be the matter with a node by which packets could be sent; each reports whether it is.
type trouble struct {
	lost    func(identity.ID) bool // it is not reached at all
	dead    func(identity.ID) bool // nor over the path that it should have, as deadPath has it
	suspect func(identity.ID) bool // it has not answered for a moment
	shunned func(identity.ID) bool // this host finds that it does not forward
}

// way is how a plan has this host send to a node: by a leader with which nothing is the matter. A leader that was out
// of reach a moment ago probably forwards, and comes next, then one that does not answer just now. One that does not
// lead yet, or is found silent, drops what comes, and is the last.
func (m *siteMesh) way(p *sites.Plan, to identity.ID, is trouble) (w sites.Way, ok bool) {
	idle := func(id identity.ID) bool { return is.shunned(id) || !p.Carries(id) }
	dead := func(id identity.ID) bool { return is.shunned(id) || is.dead(id) }
	doubted := m.returned.doubted
	for _, passOver := range []func(identity.ID) bool{
		func(id identity.ID) bool { return idle(id) || is.dead(id) || is.suspect(id) || doubted(id) },
		func(id identity.ID) bool { return idle(id) || is.dead(id) || is.suspect(id) },
		func(id identity.ID) bool { return idle(id) || is.dead(id) },
		func(id identity.ID) bool { return idle(id) || is.lost(id) },
		func(id identity.ID) bool { return dead(id) || doubted(id) },
		dead,
	} {
		if w, ok = p.Way(to, passOver); !ok || !w.Hop || !passOver(w.Via) {
			break
		}
	}
	return w, ok
}

// reach is how the plan that is followed has this host reach the others. Nothing goes by those that are shunned while
// there is another.
func (m *siteMesh) reach(paths map[identity.ID]path.Path, shunned map[identity.ID]bool,
	handshake func(identity.ID) time.Time, now time.Time) *sites.Reach {
	alive := func(id identity.ID) bool { return paths[id].Alive }
	stands := func(id identity.ID) bool { return alive(id) && now.Sub(handshake(id)) < sessionLasts }
	is := trouble{
		lost:    func(id identity.ID) bool { return !alive(id) },
		dead:    func(id identity.ID) bool { return deadPath(paths[id], now) },
		suspect: func(id identity.ID) bool { return paths[id].Suspect },
		shunned: func(id identity.ID) bool { return shunned[id] },
	}
	steady := !m.Switching() && m.returned.until().IsZero()
	var faults map[identity.ID]uint8
	if steady {
		faults = is.among(paths, shunned)
		if m.last.plan == m.Plan() && maps.Equal(m.last.faults, faults) {
			return m.last.reach
		}
	}
	r := m.Reach(alive, stands, func(p *sites.Plan, to identity.ID) (sites.Way, bool) { return m.way(p, to, is) }, now)
	m.last = lastReach{}
	if steady {
		m.last = lastReach{m.Plan(), faults, r}
	}
	return r
}

// among are the faults of all nodes that have a path, or are shunned; others have the same faults each.
func (is trouble) among(paths map[identity.ID]path.Path, shunned map[identity.ID]bool) map[identity.ID]uint8 {
	out := make(map[identity.ID]uint8, len(paths))
	note := func(id identity.ID) {
		faults := uint8(0)
		for i, has := range []func(identity.ID) bool{is.lost, is.dead, is.suspect, is.shunned} {
			if has(id) {
				faults |= 1 << i
			}
		}
		out[id] = faults
	}
	for id := range paths {
		note(id)
	}
	for id := range shunned {
		note(id)
	}
	return out
}

// wake has the loop look again when what is left of the plan before ends, or a doubt.
func (m *siteMesh) wake(now time.Time, wake func()) {
	if m.timer != nil {
		m.timer.Stop()
	}
	next, ok := m.Again(now)
	if end := m.returned.until(); !end.IsZero() && (!ok || end.Before(next)) {
		next, ok = end, true
	}
	if ok {
		m.timer = time.AfterFunc(next.Sub(now), wake)
	}
}
