// Package sitemesh follows the plans of package sites: it decides through which peer this host sends to each member,
// given its present paths and sessions.
package sitemesh

import (
	"maps"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/agent/witness"
	"github.com/skeinmesh/skein/identity"
)

// ShunFor is how long a node forwards nothing for this host after its direct path or its relay has died, even if
// another relay reaches it.
const ShunFor = 10 * time.Second

// sessionLasts is how long after a handshake WireGuard certainly has a session; it ends one after 180 s.
const sessionLasts = 170 * time.Second

// Mesh is how this host follows its plans. Only the agent's loop uses it.
type Mesh struct {
	sites.Follower
	Returned returned
	timer    *time.Timer // wakes the loop; see Wake
	last     lastReach
}

// lastReach keeps the newest Reach and its inputs, if these were only a plan and faults. Among ten thousand members
// most rounds have the same inputs.
type lastReach struct {
	plan   *sites.Plan // nil: the Reach had other inputs too, and is not used again
	faults map[identity.ID]uint8
	reach  *sites.Reach
}

// Reach is how the other members are reached, as of the loop's newest round. It is immutable, and the same value as
// long as its content is the same.
type Reach struct {
	*sites.Reach // nil: every member is a peer
}

// Via returns the peer that forwards packets to a member; false: the member is a peer itself, or no node forwards to
// it.
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

// deadPath reports whether the path to a peer rules it out for forwarding.
func deadPath(p path.Path, now time.Time) bool {
	return !p.Alive || p.FollowsDead() && now.Sub(p.Since) < ShunFor
}

// NoteReturned updates Returned with what this round of the loop sees of each peer.
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

// trouble tests what may be wrong with a node that could forward packets.
type trouble struct {
	lost    func(identity.ID) bool // no path reaches it
	dead    func(identity.ID) bool // no path reaches it, or its own path died lately; see deadPath
	suspect func(identity.ID) bool // it has not answered just now
	shunned func(identity.ID) bool // this host finds that it does not forward
}

// way returns how a plan has this host send to a node: through a leader without trouble, if there is one. Next comes a
// leader that was out of reach a moment ago, since it probably forwards, then one that has not answered just now, then
// one that only a relay still reaches. A leader that does not lead yet, or is found silent, drops packets, and comes
// last.
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

// ReachBy computes how the current plan has this host reach the other members. Shunned leaders forward nothing while
// there is another one.
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

// among returns the faults of each node that has a path or is shunned, one bit for each test. All other nodes have the
// same faults.
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

// Wake makes the loop run again when the effect of former plans changes, or when a returned peer counts as proven.
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

// Shunned returns the leaders of its own site through which this host does not send, because it finds that they do not
// forward. It does not wait for the other witnesses, since its own packets would be lost meanwhile. If it reaches no
// other leader, it shuns none.
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
