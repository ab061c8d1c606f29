package agent

import (
	"maps"
	"time"

	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// followPlan has the newest plan decide who is a peer, and how the others are reached.
func (a *Agent) followPlan(now time.Time) {
	m, p := &a.loop.mesh, a.sitePlan.Load()
	if p == nil {
		return
	}
	m.Follow(p, now)
	a.setReplaceable(p)
	if p.Full && !m.Switching() {
		m.Returned = nil
		if r := a.reach.Load(); r == nil || !r.Full() {
			a.reach.Store(&sitemesh.Reach{})
		}
		return
	}
	paths := a.currentPaths()
	m.NoteReturned(p, paths, a.handshake, now)
	r := m.ReachBy(paths, sitemesh.Shunned(p, a.witnesses.said(), paths), a.handshake, now)
	if old := a.reach.Load(); old.Full() || old.Reach != r {
		a.reach.Store(&sitemesh.Reach{Reach: r})
	}
	m.Wake(now, a.wakeUp)
}

// setReplaceable tells the paths which leaders they may suspect: those whose traffic others can carry.
func (a *Agent) setReplaceable(p *sites.Plan) {
	if a.paths == nil || a.loop.replaceIn == p {
		return
	}
	a.loop.replaceIn = p
	if ids := p.Replaceable(); !maps.Equal(ids, a.loop.replaceable) {
		a.loop.replaceable = ids
		a.paths.SetReplaceable(ids)
	}
}

// handshake is when the last one with a peer was, as WireGuard's counters had it lately.
func (a *Agent) handshake(id identity.ID) time.Time {
	p, _ := a.stats.Load().Of(dataplane.Key(a.loop.members[id]))
	return p.LastHandshake
}
