package gossip

import (
	"context"
	"crypto/sha256"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/skeinmesh/skein/identity"
)

// labelSize is how many bytes of a site's hash name its pool in each packet, and at the head of each stream.
const labelSize = 8

// siteLabel names a site's pool. memberlist authenticates the name, so that pools of two sites cannot merge, even where
// nodes are wrong about who is in which site. The mesh pool has no name.
func siteLabel(site string) string {
	h := sha256.Sum256([]byte("skein site pool v1\x00" + site))
	return string(h[:labelSize])
}

// pool is one memberlist with all that it needs: the mesh pool of all wide nodes, or the pool of this node's site.
type pool struct {
	g      *Gossip
	near   bool   // the pool is that of this node's site
	site   string // the site of a site's pool
	label  string
	opened time.Time
	net    *mlTransport
	ml     *memberlist.Memberlist
	queue  *memberlist.TransmitLimitedQueue
	alive  aliveSet
	rejoin *rejoiner
	pace   atomic.Pointer[pacer] // nil while memberlist is being created
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	ended  sync.Once

	renewed chan struct{} // this node's number changed: announce it
	crowded chan struct{} // news of members left no room for records
	grace   *time.Timer   // the pool closes when it fires; under Gossip.poolMu
	leaving atomic.Bool   // all others are to learn that this node leaves the pool
}

// newPool makes a pool that does not run yet.
func newPool(g *Gossip, near bool, site string) *pool {
	p := &pool{g: g, near: near, site: site, opened: time.Now(),
		renewed: make(chan struct{}, 1), crowded: make(chan struct{}, 1)}
	if near {
		p.label = siteLabel(site)
	}
	p.ctx, p.cancel = context.WithCancel(g.ctx)
	p.net = newTransport(g.cfg.Self, g.cfg.Transport, p.speaksTo, &g.stats, g.late)
	// Even the smallest mesh gets the retransmissions of a hundred nodes: they cost little there, and
	// without them one broadcast in twenty misses a node.
	p.queue = &memberlist.TransmitLimitedQueue{RetransmitMult: retransmitMult,
		NumNodes: func() int { return max(10, p.alive.count()) }}
	p.rejoin = newRejoiner(p)
	return p
}

// open starts the pool's memberlist and contacts its members.
func (p *pool) open() (err error) {
	if p.ml, err = memberlist.Create(p.memberlistConfig()); err != nil {
		p.cancel()
		return err
	}
	if pace, err := newPacer(p.ml, p.queue, p.g.cfg.Lag); err != nil {
		p.g.log.Warn("gossip polls for news ten times a second, even while it is idle", "error", err)
	} else {
		p.pace.Store(pace)
	}
	p.wg.Go(p.announce)
	p.wg.Go(p.spread)
	p.wg.Go(p.rejoin.run)
	return nil
}

// close ends the pool, with a goodbye if leave is set, otherwise as a crash would.
func (p *pool) close(leave bool) {
	p.ended.Do(func() {
		if leave {
			p.pace.Load().news() // the goodbye
			if err := p.ml.Leave(leaveTimeout); err != nil {
				p.g.log.Debug("could not say goodbye to everybody", "error", err)
			}
		}
		p.pace.Load().end()
		p.cancel()
		_ = p.ml.Shutdown()
		p.wg.Wait()
	})
}

// table is the table whose digests go along with this pool's push/pull.
func (p *pool) table() tableKind {
	if p.near {
		return siteTable
	}
	return meshTable
}

// speaksTo reports whether packets and streams of this pool may go to a node. In the mesh pool they may go to any
// member, even to one that the pool does not admit; such a member does not answer.
func (p *pool) speaksTo(id identity.ID) bool {
	return p.g.roster.member(id) && (!p.near || p.g.isAt(id, p.site))
}

// admits reports whether a node may be in this pool.
func (p *pool) admits(id identity.ID) bool {
	if p.near {
		return p.speaksTo(id)
	}
	return p.g.roster.member(id) && p.g.maybeWide(id)
}

// sendTo sends a user message to one node of the pool, best effort.
func (p *pool) sendTo(node identity.ID, b []byte) {
	to := memberlist.Address{Addr: syntheticAddr(node).String(), Name: node.String()}
	if err := p.ml.SendToAddress(to, b); err != nil {
		p.g.stats.add(&p.g.stats.SendErrors)
	}
}

// spread sends records in packets of their own while news of members leaves them no room. That lasts many seconds after
// many members have met, since news of members comes first in each packet.
func (p *pool) spread() {
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.crowded:
		}
		for _, b := range p.queue.GetBroadcasts(0, p.g.cfg.PacketBytes-packetReserve) {
			if to, ok := p.alive.any(); ok {
				p.sendTo(to, b)
			}
		}
	}
}

// pools returns the pools that this node is in, the mesh pool first.
func (g *Gossip) pools() (ps []*pool) {
	for _, a := range []*atomic.Pointer[pool]{&g.wide, &g.near} {
		if p := a.Load(); p != nil {
			ps = append(ps, p)
		}
	}
	return ps
}

// alivePeers returns the nodes that this node's pools see alive; for the site table, only those of the site's pool.
func (g *Gossip) alivePeers(t tableKind) []identity.ID {
	wide, near := g.wide.Load(), g.near.Load()
	switch {
	case near == nil && wide == nil:
		return nil
	case near == nil && t == meshTable:
		return wide.alive.others()
	case near == nil:
		return nil
	case wide == nil || t == siteTable:
		return near.alive.others()
	}
	ids := near.alive.others()
	for _, id := range wide.alive.others() {
		if !near.alive.has(id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// sendTo sends a user message to one node through the pool in which it is alive, best effort.
func (g *Gossip) sendTo(node identity.ID, b []byte) {
	pools := g.pools()
	for _, p := range pools {
		if p.alive.has(node) {
			p.sendTo(node, b)
			return
		}
	}
	for _, p := range pools {
		if p.speaksTo(node) {
			p.sendTo(node, b)
			return
		}
	}
}

const (
	// wideGrace is how long after a node has ceased to be wide its last record for everybody still stands, and the node
	// stays in the mesh pool. Nodes hear of a change of topology one after another, and the node's record for its site
	// reaches only those that have heard.
	wideGrace = 20 * time.Second
	// leaveAfter is how long the node then still stays in the mesh pool: by then all know that its record is for its
	// site.
	leaveAfter = 5 * time.Second
	// nearGrace is how long a node stays in its site's pool after the topology is no longer `site`, since not all nodes
	// hear of it at once.
	nearGrace = 30 * time.Second
	// carryFor is how long after a change of place a node that was alive counts as alive, until the new pool has met it.
	carryFor = 15 * time.Second
	// strayFor is how long after a change records of a former site are shown.
	strayFor = 30 * time.Second
)

// setPools opens the pools of a place; pools that are no longer needed stay for a grace period. Callers hold poolMu.
func (g *Gossip) setPools(place *Place) error {
	near, wide := g.near.Load(), g.wide.Load()
	if near != nil && (place.Sited && near.site != place.Site || !place.Sited && place.Left) {
		g.drop(&g.near, near)
		near = nil
	}
	if place.Sited && near == nil {
		if err := g.start(&g.near, newPool(g, true, place.Site)); err != nil {
			return err
		}
	} else if near != nil {
		g.closeAfterGrace(&g.near, near, place.Sited, nearGrace)
	}
	if (!place.Sited || place.Wide) && wide == nil {
		return g.start(&g.wide, newPool(g, false, ""))
	} else if wide != nil {
		g.closeAfterGrace(&g.wide, wide, !place.Sited || place.Wide, wideGrace)
	}
	return nil
}

func (g *Gossip) start(at *atomic.Pointer[pool], p *pool) error {
	if err := p.open(); err != nil {
		return err
	}
	at.Store(p)
	return nil
}

// closeAfterGrace closes a pool that is not needed after wait. If the pool is needed again by then, it stays.
func (g *Gossip) closeAfterGrace(at *atomic.Pointer[pool], p *pool, needed bool, wait time.Duration) {
	switch {
	case needed && p.grace != nil:
		p.grace.Stop()
		p.grace = nil
		p.leaving.Store(false)
	case !needed && p.grace == nil:
		var t *time.Timer
		t = time.AfterFunc(wait, func() {
			g.poolMu.Lock()
			defer g.poolMu.Unlock()
			if p.grace != t || at.Load() != p || g.stopped {
				return
			}
			if !p.near && !p.leaving.Swap(true) {
				t.Reset(leaveAfter)
			} else {
				g.drop(at, p)
			}
			g.placeChanged() // the node announces its place, or no longer speaks for its site
		})
		p.grace = t
	}
}

// drop closes a pool with a goodbye, and does not wait for that. Callers hold poolMu.
func (g *Gossip) drop(at *atomic.Pointer[pool], p *pool) {
	if p.grace != nil {
		p.grace.Stop()
		p.grace = nil
	}
	at.Store(nil)
	g.run(func() { p.close(true) })
	signal(g.changed)
}
