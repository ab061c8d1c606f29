package gossip

import (
	"bytes"
	"maps"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Place says with which nodes a node gossips. The zero value: with all, as in a mesh without sites.
type Place struct {
	Sited bool   // there is a pool for this node's site
	Site  string // this node's site
	Wide  bool   // this node is in the mesh pool too; it always is if !Sited
	Left  bool   // without Sited: this node has also left the site of its pool, and no longer speaks for it
	// Home returns the site that the log alone implies for a member; ok is false where it implies none. It may be called
	// from any goroutine and always gives the same answers: a change comes with another Place. nil: the log implies none.
	Home func(identity.ID) (site string, ok bool)
	// Chosen reports whether the log makes a member a leader of a site; the same rules hold. nil: the log chooses nobody.
	Chosen func(id identity.ID, site string) bool
}

// home calls Home, which may be nil.
func (p *Place) home(id identity.ID) (site string, ok bool) {
	if p.Home == nil {
		return "", false
	}
	return p.Home(id)
}

// weight returns how much a voice counts among those of its site: a node that claims to lead counts less than one that
// the log has chosen, and any other node least.
func (p *Place) weight(v voice) int {
	switch {
	case v.record.GetLeads() == 0:
		return 0
	case p.Chosen != nil && p.Chosen(v.id, v.record.GetSite()):
		return 2
	}
	return 1
}

// isWide reports whether a node at this place is in the mesh pool.
func (p *Place) isWide() bool { return !p.Sited || p.Wide }

// scope returns the scope of this node's record, and the site that the record then names; empty: the site that the user
// gave stays. After a change of topology, a node speaks for its site as long as it is in the site's pool, since others
// may not have heard of the change.
func (g *Gossip) scope(p *Place) (scope skeinv1.RecordScope, site string) {
	near := g.near.Load()
	switch {
	case !p.isWide():
		return skeinv1.RecordScope_RECORD_SCOPE_SITE, p.Site
	case p.Sited:
		return skeinv1.RecordScope_RECORD_SCOPE_BOTH, p.Site
	case near != nil:
		return skeinv1.RecordScope_RECORD_SCOPE_BOTH, near.site
	}
	return skeinv1.RecordScope_RECORD_SCOPE_MESH, ""
}

// carried holds the nodes that were alive when the place changed.
type carried struct {
	until time.Time
	alive map[identity.ID]bool
}

// SetPlace changes with which nodes this node gossips. It may be called at any time. Held records are kept until newer
// ones come. This node's record is published again if its scope or site has changed.
func (g *Gossip) SetPlace(next Place) {
	g.poolMu.Lock()
	defer g.poolMu.Unlock()
	if g.stopped || g.ctx.Err() != nil {
		return
	}
	last := g.place.Load()
	moved := last.Sited != next.Sited || last.Left != next.Left ||
		next.Sited && (last.Site != next.Site || last.Wide != next.Wide)
	if moved {
		alive := map[identity.ID]bool{}
		for _, id := range g.roster.Members() {
			if g.Alive(id) {
				alive[id] = true
			}
		}
		g.carried.Store(&carried{time.Now().Add(carryFor), alive})
		g.after(carryFor, func() { signal(g.changed) })
		wait := strayFor
		if !next.Sited { // other nodes may still have to publish their records for everybody
			wait += nearGrace
		}
		g.after(wait, g.dropStrays)
	}
	g.place.Store(&next)
	if moved {
		if err := g.setPools(&next); err != nil {
			g.log.Error("cannot gossip with the site", "site", next.Site, "error", err)
		}
	}
	g.placeChanged()
	for _, p := range g.pools() {
		p.rejoin.wakeUp()
	}
	if moved {
		g.pull.syncRandom()
		g.touched()
		signal(g.awayDue)
	}
}

// after runs f after d, unless gossip has ended by then.
func (g *Gossip) after(d time.Duration, f func()) {
	time.AfterFunc(d, func() {
		if g.ctx.Err() == nil {
			f()
		}
	})
}

// SiteOf returns the site of a member: as its newest record says, otherwise as the log implies.
func (g *Gossip) SiteOf(id identity.ID) (site string, ok bool) {
	place := g.place.Load()
	if id == g.cfg.Self && place.Sited {
		return place.Site, true
	}
	near, hasNear := g.local.get(id)
	far, hasFar := g.table.get(id)
	switch {
	case hasNear && (!hasFar || near.mark.newer(far.mark)):
		return near.Record.GetSite(), true
	case hasFar:
		return place.siteIn(far.Record, id), true
	}
	return place.home(id)
}

// Placed returns the sites of members that have told everybody that they are elsewhere than the log implies. If the
// record of such a member is here, the record counts instead. The caller must not change the map.
func (g *Gossip) Placed() map[identity.ID]string { return g.table.placed() }

// siteIn returns the site in which a record puts its owner. A record of scope MESH has the configured site, and the log
// overrides it; all other records have the site that results from both.
func (p *Place) siteIn(r *skeinv1.Record, id identity.ID) string {
	if r.GetScope() == skeinv1.RecordScope_RECORD_SCOPE_MESH {
		if home, ok := p.home(id); ok {
			return home
		}
	}
	return r.GetSite()
}

// isAt reports whether a member is in a site, as far as this node knows.
func (g *Gossip) isAt(id identity.ID, site string) bool {
	at, ok := g.SiteOf(id)
	return ok && at == site
}

// maybeWide reports whether a member is in the mesh pool, or may be: its record says so, or this node has no record of
// it and no node speaks for its site.
func (g *Gossip) maybeWide(id identity.ID) bool {
	if r, ok := g.table.get(id); ok {
		return Wide(r.Record)
	}
	site, ok := g.place.Load().home(id)
	return !ok || len(g.table.speaking()[site]) == 0
}

// homes holds where the log alone implies that members are. It is made when needed, and immutable.
type homes struct {
	place    *Place
	roster   uint64        // version of the roster
	near     []identity.ID // in this node's site
	homeless []identity.ID // for which the log implies no site
	others   map[string][]identity.ID
}

// homesOf reads the whole roster once for each change of the place or the roster.
func (g *Gossip) homesOf() *homes {
	place, version := g.place.Load(), g.roster.version()
	if h := g.homes.Load(); h != nil && h.place == place && h.roster == version {
		return h
	}
	h := &homes{place: place, roster: version, others: map[string][]identity.ID{}}
	for _, id := range g.roster.Members() {
		switch site, ok := place.home(id); {
		case !ok:
			h.homeless = append(h.homeless, id)
		case place.Sited && site == place.Site:
			h.near = append(h.near, id)
		case place.isWide():
			h.others[site] = append(h.others[site], id)
		}
	}
	g.homes.Store(h)
	return h
}

// candidates returns the members that may belong to a pool, as far as this node knows.
func (p *pool) candidates() (ids []identity.ID) {
	g, h := p.g, p.g.homesOf()
	mesh := g.table.entries()
	if p.near {
		for _, id := range h.near {
			if p.speaksTo(id) {
				ids = append(ids, id)
			}
		}
		for _, entries := range []map[identity.ID]Entry{mesh, g.local.entries()} {
			for id, e := range entries {
				maybe := e.Record.GetSite() == p.site || e.Record.GetScope() == skeinv1.RecordScope_RECORD_SCOPE_MESH
				if maybe && id != g.cfg.Self && p.speaksTo(id) {
					ids = append(ids, id)
				}
			}
		}
		if p.alive.count() == 0 { // a member with neither record nor home may be in this site
			for _, id := range h.homeless {
				if _, ok := g.SiteOf(id); !ok {
					ids = append(ids, id)
				}
			}
		}
		slices.SortFunc(ids, identity.ID.Compare)
		return slices.Compact(ids)
	}
	for id, e := range mesh {
		if Wide(e.Record) && id != g.cfg.Self && g.roster.member(id) {
			ids = append(ids, id)
		}
	}
	unheard := func(of []identity.ID) {
		for _, id := range of {
			if _, ok := mesh[id]; !ok {
				ids = append(ids, id)
			}
		}
	}
	unheard(h.homeless)
	voices := g.table.speaking()
	if len(voices[h.place.Site]) == 0 {
		unheard(h.near)
	}
	for site, of := range h.others {
		if len(voices[site]) == 0 {
			unheard(of)
		}
	}
	return ids
}

// Alive reports whether a member is alive. It is a hint and lags by seconds. For members of a pool that this node is
// in, it follows memberlist; for others, the nodes that speak for their site.
func (g *Gossip) Alive(id identity.ID) bool {
	if id == g.cfg.Self {
		return true
	}
	if !g.roster.member(id) {
		return false
	}
	met := false
	for _, p := range g.pools() {
		if p.alive.has(id) {
			return true
		}
		met = met || p.alive.met(id) && p.admits(id)
	}
	if c := g.carried.Load(); c != nil && !met && c.alive[id] && time.Now().Before(c.until) {
		return true
	}
	return g.byHearsay(id, met)
}

// byHearsay is Alive for a member that no pool of this node sees alive. A member that a pool has met is away. A member
// of this node's own site is away too, because the site's pool would see it.
func (g *Gossip) byHearsay(id identity.ID, met bool) bool {
	voices := g.table.speaking()
	if met || len(voices) == 0 {
		return false
	}
	place := g.place.Load()
	site, ok := g.SiteOf(id)
	if !ok || place.Sited && site == place.Site {
		return false
	}
	if r, ok := g.table.get(id); ok && Wide(r.Record) && !place.isWide() {
		return g.reported(id)
	}
	return place.anyVoice(voices[site], id, func(v identity.ID) bool {
		if place.isWide() {
			wide := g.wide.Load()
			return wide != nil && wide.alive.has(v)
		}
		return g.reported(v)
	})
}

// reported reports whether the nodes that speak for this node's site see a wide node of another site alive.
func (g *Gossip) reported(id identity.ID) bool {
	near := g.near.Load()
	return near != nil && g.place.Load().anyVoice(g.table.speaking()[near.site], id, near.alive.has)
}

// anyVoice reports whether a live node that speaks for a site does not report the given node as away. While leaders of
// the site are among them, only these count, and of these only the ones that the log has chosen, if any is alive.
func (p *Place) anyVoice(voices []voice, of identity.ID, alive func(identity.ID) bool) bool {
	there, most := false, -1
	for _, v := range voices {
		if v.id == of || !alive(v.id) {
			continue
		}
		says := !calledAway(v.record, of)
		if w := p.weight(v); w > most {
			there, most = says, w
		} else if w == most {
			there = there || says
		}
	}
	return there
}

// calledAway searches a record's list of away nodes, which is sorted.
func calledAway(r *skeinv1.Record, id identity.ID) bool {
	_, found := slices.BinarySearchFunc(r.GetAway(), id[:], bytes.Compare)
	return found
}

// Held counts the records that this node holds for everybody and for its site.
type Held struct {
	Mesh, Site int
	SiteHash   [32]byte // like Hash, of the site's records; zero while there is no pool for the site
}

// Held returns how many records this node holds.
func (g *Gossip) Held() Held {
	h := Held{Mesh: g.table.count(), Site: g.local.count()}
	if g.place.Load().Sited {
		h.SiteHash = g.local.hash()
	}
	return h
}

// Records returns the newest record that this node holds of each member, as an immutable snapshot: in a mesh of sites
// the records of its own site's nodes and of all wide ones.
func (g *Gossip) Records() map[identity.ID]Entry {
	near, nearVersion := g.local.show()
	far, farVersion := g.table.show()
	if len(near) == 0 {
		return far
	}
	if s := g.shown.Load(); s != nil && s.near == nearVersion && s.far == farVersion {
		return s.entries
	}
	all := make(map[identity.ID]Entry, len(near)+len(far))
	maps.Copy(all, far)
	maps.Copy(all, near) // put drops superseded ones
	g.shown.Store(&shown{near: nearVersion, far: farVersion, entries: all})
	return all
}

// shown caches the last result of Records.
type shown struct {
	near, far uint64
	entries   map[identity.ID]Entry
}
