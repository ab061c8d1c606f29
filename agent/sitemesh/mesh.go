// Package sitemesh follows plans of sites: by whom this host sends to each member, as paths and sessions are now.
package sitemesh

import (
	"maps"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/agent/witness"
	"github.com/skeinmesh/skein/identity"
)

// ShunFor is how long a node is not asked to pass packets on after the path to it has died, though a relay may
// reach it.
const ShunFor = 10 * time.Second

// sessionLasts is how long after a handshake WireGuard surely has a session.
const sessionLasts = 170 * time.Second

// Mesh is how this host follows its plans. It belongs to the agent's loop.
type Mesh struct {
	sites.Follower
	Returned returned
	timer    *time.Timer // looks again
	last     lastReach
}

// lastReach is what the newest Reach was made of, where nothing but a plan and faults counted: among ten thousand
// members most rounds make the same one.
type lastReach struct {
	plan   *sites.Plan // nil: more counted
	faults map[identity.ID]uint8
	reach  *sites.Reach
}

// Reach is how the other members are reached, as the newest round of the loop has it. It is not changed, and the same
// one stays as long as it says the same.
type Reach struct {
	*sites.Reach // nil: every member is a peer
}

// Via is the peer that passes packets on to a member; false: the member is a peer itself, or nobody does.
func (r *Reach) Via(id identity.ID) (identity.ID, bool) {
	if r == nil {
		return identity.ID{}, false
	}
	w, ok := r.Way(id)
	return w.Via, ok && !w.Passed
}

// Peer reports whether a member is a peer.
func (r *Reach) Peer(id identity.ID) bool { return r.Full() || r.Reach.Peer(id) }

// Full reports whether every member is a peer.
func (r *Reach) Full() bool { return r == nil || r.Reach == nil }

// deadPath reports whether nothing goes by a peer for its path.
func deadPath(p path.Path, now time.Time) bool {
	return !p.Alive || p.FollowsDead() && now.Sub(p.Since) < ShunFor
}

// NoteReturned finds the peers that have come back.
func (m *Mesh) NoteReturned(p *sites.Plan, paths map[identity.ID]path.Path,
	handshake func(identity.ID) time.Time, now time.Time) {
	kept := returned{}
	for id := range p.Peers() {
		way := paths[id]
		m.Returned.note(id, way, deadPath(way, now), handshake(id), now)
		if a, ok := m.Returned[id]; ok {
			kept[id] = a
		}
	}
	m.Returned = kept
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
func (m *Mesh) way(p *sites.Plan, to identity.ID, is trouble) (w sites.Way, ok bool) {
	idle := func(id identity.ID) bool { return is.shunned(id) || !p.Carries(id) }
	dead := func(id identity.ID) bool { return is.shunned(id) || is.dead(id) }
	unproven := m.Returned.unproven
	for _, passOver := range []func(identity.ID) bool{
		func(id identity.ID) bool { return idle(id) || is.dead(id) || is.suspect(id) || unproven(id) },
		func(id identity.ID) bool { return idle(id) || is.dead(id) || is.suspect(id) },
		func(id identity.ID) bool { return idle(id) || is.dead(id) },
		func(id identity.ID) bool { return idle(id) || is.lost(id) },
		func(id identity.ID) bool { return dead(id) || unproven(id) },
		dead,
	} {
		if w, ok = p.Way(to, passOver); !ok || !w.Hop || !passOver(w.Via) {
			break
		}
	}
	return w, ok
}

// ReachBy is how the plan that is followed has this host reach the others. Nothing goes by those that are shunned while
// there is another.
func (m *Mesh) ReachBy(paths map[identity.ID]path.Path, shunned map[identity.ID]bool,
	handshake func(identity.ID) time.Time, now time.Time) *sites.Reach {
	alive := func(id identity.ID) bool { return paths[id].Alive }
	stands := func(id identity.ID) bool { return alive(id) && now.Sub(handshake(id)) < sessionLasts }
	is := trouble{
		lost:    func(id identity.ID) bool { return !alive(id) },
		dead:    func(id identity.ID) bool { return deadPath(paths[id], now) },
		suspect: func(id identity.ID) bool { return paths[id].Suspect },
		shunned: func(id identity.ID) bool { return shunned[id] },
	}
	steady := !m.Switching() && m.Returned.until().IsZero()
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

// Wake has the loop look again when what is left of the plan before ends, or when a peer counts as proven.
func (m *Mesh) Wake(now time.Time, wake func()) {
	if m.timer != nil {
		m.timer.Stop()
	}
	next, ok := m.Again(now)
	if end := m.Returned.until(); !end.IsZero() && (!ok || end.Before(next)) {
		next, ok = end, true
	}
	if ok {
		m.timer = time.AfterFunc(next.Sub(now), wake)
	}
}

// Shunned are the leaders of its own site that this host does not send by, since it finds that they do not forward. It
// does not wait for the other witnesses: its own packets would be lost. Where it reaches no other leader, there are
// none.
func Shunned(p *sites.Plan, said []witness.Said, paths map[identity.ID]path.Path) map[identity.ID]bool {
	out := map[identity.ID]bool{}
	for _, s := range said {
		out[s.Leader] = true
	}
	for _, l := range p.Leaders[p.Site] {
		if l.Acting && !out[l.ID] && (l.ID == p.Self || paths[l.ID].Alive) {
			return out
		}
	}
	return nil
}
