package gossip

import (
	"bytes"
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	// awaySettle is how long both pools must have been open before a node reports others as away: it has to meet them
	// first.
	awaySettle = 8 * time.Second
	// awayHold is how long a node must be away before it is reported: a node that restarts is back by then.
	awayHold = 2 * time.Second
	// awaySpacing is the least time between two versions of the list, and so of the record because of the list.
	awaySpacing = 2 * time.Second
	// awayFirst is how long the first change waits for further ones.
	awayFirst = 300 * time.Millisecond
)

// awaySoon makes watchAway update the list, if this node may have to report others.
func (g *Gossip) awaySoon() {
	if g.near.Load() != nil && g.place.Load().isWide() {
		signal(g.awayDue)
	}
}

// watchAway keeps the list of away nodes in this node's record, while the node speaks for its site.
func (g *Gossip) watchAway() {
	gone := map[identity.ID]time.Time{}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-g.awayDue:
			if !sleep(g.ctx.Done(), awayFirst) {
				return
			}
		case <-timer.C:
		}
		now := time.Now()
		list, next := g.away(gone, now)
		spacing := awaySpacing
		if !g.callAway(list) {
			spacing = 0
		}
		if next > 0 {
			timer.Reset(max(next, awayFirst))
		} else {
			timer.Reset(time.Hour)
		}
		if !sleep(g.ctx.Done(), spacing) {
			return
		}
	}
}

func sleep(done <-chan struct{}, d time.Duration) bool {
	select {
	case <-done:
		return false
	case <-time.After(d):
		return true
	}
}

// away returns the nodes that this node reports as away: members of its own site, and wide nodes of other sites, that
// have not been alive for awayHold. If they are more than maxAway, those of its site come first, and the others count
// as alive. gone holds since when each has been away. next is when the list changes by time alone; zero: it does not.
func (g *Gossip) away(gone map[identity.ID]time.Time, now time.Time) (list [][]byte, next time.Duration) {
	place, near, wide := g.place.Load(), g.near.Load(), g.wide.Load()
	if !place.isWide() || near == nil || wide == nil || !g.speaks(near) {
		clear(gone)
		return nil, 0
	}
	last := near.opened
	if wide.opened.After(last) {
		last = wide.opened
	}
	if wait := awaySettle - now.Sub(last); wait > 0 {
		return nil, wait
	}
	seen := map[identity.ID]bool{}
	var own, far []identity.ID
	look := func(id identity.ID, list *[]identity.ID) {
		if id == g.cfg.Self || seen[id] || g.Alive(id) {
			return
		}
		seen[id] = true
		since, ok := gone[id]
		if !ok {
			since, gone[id] = now, now
		}
		if wait := awayHold - now.Sub(since); wait > 0 {
			if next == 0 || wait < next {
				next = wait
			}
			return
		}
		*list = append(*list, id)
	}
	for _, id := range near.candidates() {
		look(id, &own)
	}
	for id, e := range g.table.entries() {
		if Wide(e.Record) && g.roster.member(id) {
			look(id, &far)
		}
	}
	for id := range gone {
		if !seen[id] {
			delete(gone, id)
		}
	}
	slices.SortFunc(own, identity.ID.Compare)
	slices.SortFunc(far, identity.ID.Compare)
	named := slices.Concat(own, far)
	named = named[:min(len(named), maxAway)]
	slices.SortFunc(named, identity.ID.Compare)
	for _, id := range named {
		list = append(list, slices.Clone(id[:]))
	}
	return list, next
}

// speaks reports whether this node's report about others counts: it leads its site, or no live node does.
func (g *Gossip) speaks(near *pool) bool {
	g.own.mu.Lock()
	leads := g.own.last.GetLeads() > 0
	g.own.mu.Unlock()
	if leads {
		return true
	}
	return !slices.ContainsFunc(g.table.speaking()[near.site], func(v voice) bool {
		return v.record.GetLeads() > 0 && near.alive.has(v.id)
	})
}

// callAway publishes a list if it differs from the last one.
func (g *Gossip) callAway(list [][]byte) (changed bool) {
	g.own.mu.Lock()
	defer g.own.mu.Unlock()
	if slices.EqualFunc(g.own.away, list, bytes.Equal) {
		return false
	}
	g.own.away = list
	if g.own.last == nil {
		return false
	}
	g.publishSoon(publishSpacing - time.Since(g.own.at))
	return true
}
