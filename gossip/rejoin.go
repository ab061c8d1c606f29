package gossip

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	rejoinTick = 500 * time.Millisecond
	rejoinRest = 5 * time.Second // while nothing is due; a node that leaves or is admitted wakes it at once
	// attempts at once, and begun per tick, while no node is alive; else one, since one success brings the others along
	maxRejoins     = 4
	rejoinFirst    = 500 * time.Millisecond
	rejoinMost     = 10 * time.Second
	rejoinEach     = 2 * time.Second        // for each missing member: many are off, or each of them tries too
	rejoinTogether = 8                      // so many live nodes together try hardly more often than one alone
	rejoinAlone    = 3 * time.Second        // at most, while no other node is alive
	rejoinNew      = 3 * time.Second        // a member that was just admitted contacts the others itself
	rejoinShare    = 100 * time.Millisecond // for each live node: any of them may be the one that succeeds
	rejoinSettled  = 2 * time.Second        // after a join that worked, until memberlist should see the member
	outsideSpacing = 10 * time.Second       // between exchanges with other sites, while no live node of this site is wide
	heardSpacing   = time.Second            // between attempts caused by packets from a node that is thought dead
)

type attempt struct {
	next    time.Time
	started time.Time
	failed  time.Time     // when the last one failed
	late    time.Duration // added to the next pause, since this process woke late
	fails   int
	busy    bool
}

// due returns when the next attempt begins. The pause was set by how many members were missing when the last attempt
// failed. If fewer are missing now, the pause becomes shorter: the last missing member of a healed mesh does not wait
// as long as if all were still missing.
func (a *attempt) due(missing, alive int) time.Time {
	if a.fails == 0 {
		return a.next
	}
	latest := a.failed.Add(pauseAfter(a.fails-1, missing, alive)*3/2 + a.late) // the longest that jitter gives
	if a.next.Before(latest) {
		return a.next
	}
	return latest
}

// rejoiner contacts members that memberlist does not see alive, for ever. memberlist itself forgets dead nodes, and two
// halves of a mesh that have forgotten each other would stay apart.
type rejoiner struct {
	p    *pool
	g    *Gossip
	wake chan struct{}
	wg   sync.WaitGroup

	mu       sync.Mutex
	attempts map[identity.ID]*attempt
	missing  int
	busy     int
	outside  time.Time // when this node contacts another site again; zero: it need not
}

func newRejoiner(p *pool) *rejoiner {
	return &rejoiner{p: p, g: p.g, wake: make(chan struct{}, 1), attempts: make(map[identity.ID]*attempt)}
}

func (r *rejoiner) wakeUp() { signal(r.wake) }

// heard is called for every packet: a node that sends but is not seen alive is worth an attempt now.
func (r *rejoiner) heard(id identity.ID) {
	if r.p.alive.has(id) || id == r.g.cfg.Self {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	a, ok := r.attempts[id]
	if !ok || a.busy || time.Since(a.started) < heardSpacing || !a.next.After(time.Now()) {
		return
	}
	a.next, a.fails = time.Now(), 0
	signal(r.wake)
}

func (r *rejoiner) run() {
	defer r.wg.Wait()
	for {
		next := r.dispatch(time.Now())
		select {
		case <-r.p.ctx.Done():
			return
		case <-time.After(jitter(next)):
		case <-r.wake:
			// Not sooner than this, however often wake is signalled.
			select {
			case <-r.p.ctx.Done():
				return
			case <-time.After(rejoinTick / 10):
			}
		}
	}
}

// dispatch begins the attempts that are due, and returns how long to wait before the next call.
func (r *rejoiner) dispatch(now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	var due []identity.ID
	alive := r.p.alive.count()
	missing := make(map[identity.ID]bool)
	for _, id := range r.p.candidates() {
		if r.p.alive.has(id) {
			continue
		}
		missing[id] = true
		if r.attempts[id] == nil {
			a := &attempt{next: now}
			if alive > 0 {
				a.next = now.Add(jitter(rejoinNew + rejoinShare*time.Duration(alive)))
			}
			r.attempts[id] = a
		}
	}
	r.missing = len(missing)
	for id := range missing {
		a := r.attempts[id]
		if a.next = a.due(len(missing), alive); !a.busy && !a.next.After(now) {
			due = append(due, id)
		}
	}
	for id, a := range r.attempts {
		if !missing[id] && !a.busy {
			delete(r.attempts, id)
		}
	}
	r.lookOutside(now)
	rand.Shuffle(len(due), func(i, j int) { due[i], due[j] = due[j], due[i] })
	if alive == 0 {
		r.likelyFirst(due)
	}
	most := maxRejoins
	if alive > 0 || r.g.cfg.Lag.Late(now) > lateForStreams {
		most = 1
	}
	for _, id := range due[:min(len(due), max(0, most-r.busy))] {
		a := r.attempts[id]
		a.busy, a.started = true, now
		r.busy++
		r.wg.Go(func() { r.join(id) })
	}
	next := rejoinRest
	switch {
	case r.busy >= most: // the end of an attempt wakes run
		return next
	case r.busy > 0:
		return rejoinTick
	}
	for _, a := range r.attempts {
		next = min(next, a.next.Sub(now))
	}
	if !r.outside.IsZero() {
		next = min(next, r.outside.Sub(now))
	}
	return max(next, rejoinTick)
}

// likelyFirst puts first the nodes that others contact as well. By the records of before, these are nodes that relay,
// among them all servers, and in a site's pool those that everybody knows, such as its leaders. Half of the attempts go
// to them. So in a mesh or a site that has started as a whole, few nodes soon know all the others, even if most members
// are off. The other half of the attempts go to any missing node, since those first ones may be off as well. Nodes
// without a record come last.
func (r *rejoiner) likelyFirst(due []identity.ID) {
	var first, known, rest []identity.ID
	for _, id := range due {
		e, ok := r.g.newest(id)
		switch {
		case !ok:
			rest = append(rest, id)
		case e.Record.GetRelay() != nil, e.Record.GetLeads() > 0, r.p.near && Wide(e.Record):
			first = append(first, id)
		default:
			known = append(known, id)
		}
	}
	rest = append(known, rest...)
	for i := range due {
		if len(rest) == 0 || i%2 == 0 && len(first) > 0 {
			due[i], first = first[0], first[1:]
		} else {
			due[i], rest = rest[0], rest[1:]
		}
	}
}

// pauseAfter returns the pause after a failed attempt at a missing member, after fails earlier ones. Each live node may
// be the one that finds the member. However many members are missing, all live nodes together make at most four
// attempts a second. An attempt at a node that is off costs a TLS connection with a relay.
func pauseAfter(fails, missing, alive int) time.Duration {
	fails = min(fails, 12)
	if alive == 0 {
		return min(rejoinAlone, rejoinFirst<<fails)
	}
	first := rejoinFirst + rejoinShare*time.Duration(alive)
	each := rejoinEach * time.Duration(1+alive/rejoinTogether)
	return min(max(rejoinMost, 2*first, each*time.Duration(missing)), first<<fails)
}

func (r *rejoiner) join(id identity.ID) {
	var err error
	if r.g.place.Load().Sited { // so that each end knows the other's place, and admits it
		_, err = r.g.pull.stream(r.p.ctx, id, meshTable, nil)
	}
	if err == nil {
		_, err = r.p.ml.Join([]string{joinName(id)})
	}
	s := &r.g.stats
	if err == nil {
		s.add(&s.Rejoins)
	} else {
		s.add(&s.RejoinFail)
	}
	defer r.wakeUp()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy--
	a := r.attempts[id]
	a.busy = false
	if err == nil {
		a.fails, a.next = 0, time.Now().Add(rejoinSettled)
		return
	}
	a.failed = time.Now()
	a.late = 4 * r.g.cfg.Lag.Late(a.failed)
	a.next = a.failed.Add(jitter(pauseAfter(a.fails, r.missing, r.p.alive.count())) + a.late)
	a.fails++
}

// lookOutside makes a local node that sees no wide node in its site exchange digests of the records for everybody with
// a node elsewhere. Otherwise it would learn nothing of other sites, and they would not learn where it is.
func (r *rejoiner) lookOutside(now time.Time) {
	if !r.p.near || r.g.place.Load().isWide() || r.wideNearby() {
		r.outside = time.Time{}
		return
	}
	if r.outside.After(now) {
		return
	}
	spacing := outsideSpacing
	if r.p.alive.count() == 0 {
		spacing = rejoinAlone
	}
	r.outside = now.Add(jitter(spacing))
	if id, ok := r.someoneOutside(); ok {
		r.g.pull.syncSoon(meshTable, id)
	}
}

func (r *rejoiner) wideNearby() bool {
	for _, v := range r.g.table.speaking()[r.p.site] {
		if r.p.alive.has(v.id) {
			return true
		}
	}
	return false
}

// someoneOutside returns a node that is wide by its record; while none is known, any member.
func (r *rejoiner) someoneOutside() (identity.ID, bool) {
	var ids []identity.ID
	for id, e := range r.g.table.entries() {
		if Wide(e.Record) && id != r.g.cfg.Self && r.g.roster.member(id) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		ids = r.g.roster.Members()
	}
	if len(ids) == 0 {
		return identity.ID{}, false
	}
	return ids[rand.IntN(len(ids))], true
}
