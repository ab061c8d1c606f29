package ipam

import (
	"net/netip"
	"slices"
	"time"
)

const (
	// how long an empty block beyond the spare is kept, unless configured
	idleFor     = 5 * time.Minute
	unusedFor   = time.Hour       // how long a pool without leases counts as in use
	grantWindow = 5 * time.Minute // a grant shrinks to the peak use within this time
	grantAhead  = 4               // addresses requested beyond the need
	releaseMost = 16              // blocks returned at once, at most
	giveUpAfter = 2 * time.Second // how long a static address stays after its pod is gone
	// giveUpFirst replaces giveUpAfter for an address whose pod this run has not seen: its ADD may have been running.
	giveUpFirst = time.Minute
)

type taskKind uint8

const (
	taskAllocate taskKind = iota + 1
	taskRelease
	taskGrant
	taskClaim
	taskGiveUp
)

// taskKey distinguishes proposals that may run at the same time.
type taskKey struct {
	kind      taskKind
	pool      string
	namespace string     // of a grant
	addr      netip.Addr // of a claim or a give-up
}

// task is a change to propose to the log.
type task struct {
	taskKey
	total   uint32      // allocate
	blocks  []blockView // release
	reason  string
	id      string     // request ID, for commands whose late copy would do harm
	grant   uint32     // the new grant
	static  staticView // claim, give up
	lowered bool       // the grant becomes smaller
}

type grantUse struct {
	peak  uint32
	since time.Time
}

// granted is how many addresses this node may use for a namespace.
func (c *core) granted(k quotaKey) uint32 {
	n := c.view.Grants[k]
	if limit, ok := c.caps[k]; ok {
		n = min(n, limit)
	}
	return n
}

// plan lists the background tasks. Argument waiting names the pools for which requests wait.
func (c *core) plan(now time.Time, waiting map[string]bool) (tasks []task) {
	for name, s := range c.view.Pools {
		c.touch(name, now)
		if t, ok := c.spare(name, s, now); ok {
			tasks = append(tasks, t)
		}
		if t, ok := c.giveBack(name, s, now, waiting[name]); ok {
			tasks = append(tasks, t)
		}
	}
	tasks = append(tasks, c.shrink(now)...)
	return append(tasks, c.giveUps(now)...)
}

// touch records that a pool is in use.
func (c *core) touch(pool string, now time.Time) {
	for _, b := range c.byPool[pool] {
		if len(b.held) > 0 {
			c.uses[pool] = now
			return
		}
	}
}

// inUse reports whether a pool had a lease within unusedFor.
func (c *core) inUse(pool string, now time.Time) bool {
	at, ok := c.uses[pool]
	return ok && now.Sub(at) < unusedFor
}

// spare requests a spare block when there is none.
func (c *core) spare(pool string, s poolView, now time.Time) (task, bool) {
	if s.Draining || !c.inUse(pool, now) {
		return task{}, false
	}
	have := uint32(len(c.byPool[pool]))
	if s.MaxBlocks > 0 && have >= s.MaxBlocks {
		return task{}, false
	}
	for _, b := range c.byPool[pool] {
		if b.leaving == "" && len(b.held) == 0 && b.available(now, s) > 0 {
			return task{}, false
		}
	}
	return task{taskKey: taskKey{kind: taskAllocate, pool: pool}, total: have + 1}, true
}

// wanted is how many blocks the node needs in total to serve this many requests that find nothing free.
func (c *core) wanted(pool string, requests int, now time.Time) uint32 {
	s := c.view.Pools[pool]
	for _, b := range c.byPool[pool] {
		if b.leaving == "" {
			requests -= b.available(now, s)
		}
	}
	have := uint32(len(c.byPool[pool]))
	if requests <= 0 {
		return have
	}
	size := max(min(s.BlockSize, maxBlockSize), 1)
	total := have + uint32((uint64(requests)+size-1)/size)
	if s.MaxBlocks > 0 {
		total = min(total, max(s.MaxBlocks, have+1)) // one too many is refused, which gives the user the reason
	}
	return total
}

// giveBack chooses empty blocks to return. Only one batch is pending at a time, and it stays the same until it is
// decided.
func (c *core) giveBack(pool string, s poolView, now time.Time, waiting bool) (task, bool) {
	t := task{taskKey: taskKey{kind: taskRelease, pool: pool}, reason: "empty"}
	for _, b := range c.byPool[pool] {
		if b.leaving != "" {
			t.blocks, t.id = append(t.blocks, b.view), b.leaving
		}
	}
	if len(t.blocks) > 0 {
		return t, true
	}
	if waiting {
		return t, false
	}
	if s.Draining {
		t.reason = "empty, and the pool is being drained"
	}
	var spare *block
	if !s.Draining && c.inUse(pool, now) {
		for _, b := range c.byPool[pool] {
			if len(b.held) == 0 && (spare == nil || b.available(now, s) > spare.available(now, s)) {
				spare = b
			}
		}
	}
	for _, b := range c.byPool[pool] {
		ripe := s.Draining || now.Sub(b.idle) >= c.idleFor && !b.sticky(now, s)
		if len(b.held) == 0 && b != spare && ripe && len(t.blocks) < releaseMost {
			t.blocks = append(t.blocks, b.view)
		}
	}
	t.id = releaseID(c.self, t.blocks)
	return t, len(t.blocks) > 0
}

// sticky reports whether an address in the block waits for its pod.
func (b *block) sticky(now time.Time, s poolView) bool {
	for _, p := range b.rests {
		if s.Sticky > 0 && p.lease.Pod != "" && !p.fast && now.Before(p.freed.Add(s.Sticky)) {
			return true
		}
	}
	return false
}

// leave stops assigning from blocks until the log has decided on their return.
func (c *core) leave(t task) {
	for _, v := range t.blocks {
		if b := c.blocks[v.Key]; b != nil && len(b.held) == 0 {
			b.leaving = t.id
		}
	}
}

// stay resumes the use of blocks whose return was refused.
func (c *core) stay(t task) {
	for _, v := range t.blocks {
		if b := c.blocks[v.Key]; b != nil && b.leaving == t.id {
			b.leaving = ""
			b.idle = b.idle.Add(max(c.idleFor, backoffMax))
		}
	}
}

// shrink lowers grants to their peak use within grantWindow.
func (c *core) shrink(now time.Time) (tasks []task) {
	for k := range c.grants {
		if _, ok := c.view.Grants[k]; !ok {
			delete(c.grants, k)
			delete(c.caps, k)
		}
	}
	for k, n := range c.view.Grants {
		key := taskKey{kind: taskGrant, pool: k.Pool, namespace: k.Namespace}
		used := c.quota[k]
		if limit, ok := c.caps[k]; ok {
			tasks = append(tasks, task{taskKey: key, grant: max(limit, used), lowered: true})
			continue
		}
		g := c.grants[k]
		if g == nil {
			g = &grantUse{peak: used, since: now}
			c.grants[k] = g
		}
		g.peak = max(g.peak, used)
		if now.Sub(g.since) < grantWindow {
			continue
		}
		if n > g.peak {
			tasks = append(tasks, task{taskKey: key, grant: g.peak, lowered: true})
		}
		g.peak, g.since = used, now
	}
	return tasks
}

// giveUps lists static addresses that this node holds without having their pods.
func (c *core) giveUps(now time.Time) (tasks []task) {
	for _, s := range c.view.Held {
		a := s.addr()
		if c.byAddr[s.IPv4] != nil || c.byAddr[s.IPv6] != nil || c.seen[s.IPv4] != nil || c.seen[s.IPv6] != nil {
			delete(c.statics, a)
			continue
		}
		since, ok := c.statics[a]
		if !ok {
			since = now
			c.statics[a] = now
		}
		wait := giveUpFirst
		if p := c.last[podKey{s.Pool, s.Namespace, s.Pod}]; p != nil {
			wait = giveUpAfter
		}
		if c.leaving[a] != "" || now.Sub(since) >= wait {
			tasks = append(tasks, c.givingUp(s))
		}
	}
	return tasks
}

// givingUp is the task that gives up a static address; every attempt has the same request ID.
func (c *core) givingUp(s staticView) task {
	id := c.leaving[s.addr()]
	if id == "" {
		id = giveUpID(c.self, s)
	}
	return task{taskKey: taskKey{kind: taskGiveUp, pool: s.Pool, addr: s.addr()}, static: s, id: id}
}

// sortTasks puts allocations first, since pods may wait for them.
func sortTasks(tasks []task) {
	slices.SortFunc(tasks, func(a, b task) int {
		if a.kind != b.kind {
			return int(a.kind) - int(b.kind)
		}
		if a.pool < b.pool {
			return -1
		}
		if a.pool > b.pool {
			return 1
		}
		return 0
	})
}
