package ipam

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

// maxPast limits the number of remembered past leases that have rested.
const maxPast = 2048

// held is a lease with its place in a block.
type held struct {
	Lease
	block   blockKey
	off     uint32
	inBlock bool // block and off are set
	born    time.Time
}

// seen is a foreign address: the kernel has it, and no lease explains it.
type seen struct {
	addr    netip.Addr
	link    string
	key     podnet.Key // from the link's alias; zero: not a link of this agent
	ofCoil  bool       // the alias is Coil's
	since   time.Time
	missing time.Time // since when scans no longer find it
}

type podKey struct{ Pool, Namespace, Pod string }

type span struct {
	start netip.Addr
	block *block
}

// core is a node's knowledge of its addresses, and its methods decide. Only apply changes what must outlive a
// restart; the rest comes from the log (follow) and the kernel (adopt). No clock, no file, no lock.
type core struct {
	self    string
	view    view
	blocks  map[blockKey]*block
	byPool  map[string][]*block // by number
	spans   [2][]span           // IPv4 and IPv6, by start
	leases  map[podnet.Key]*held
	byAddr  map[netip.Addr]*held
	seen    map[netip.Addr]*seen
	past    []*past
	last    map[podKey]*past // each pod's last lease
	cursors map[blockKey]uint32
	uses    map[string]time.Time     // pool → when it last had a lease
	quota   map[quotaKey]uint32      // leases that count against quotas
	missing map[podnet.Key]time.Time // leases that an audit did not find in the kernel

	forgetAt int // length of past at which it is shortened

	grants  map[quotaKey]*grantUse
	caps    map[quotaKey]uint32      // grants that are being lowered
	statics map[netip.Addr]time.Time // static addresses held without a lease, since when
	leaving map[netip.Addr]string    // static addresses being given up, with the request ID

	idleFor time.Duration // how long an empty block beyond the spare is kept
}

func newCore(self string) *core {
	return &core{
		self:    self,
		blocks:  map[blockKey]*block{},
		byPool:  map[string][]*block{},
		leases:  map[podnet.Key]*held{},
		byAddr:  map[netip.Addr]*held{},
		seen:    map[netip.Addr]*seen{},
		last:    map[podKey]*past{},
		cursors: map[blockKey]uint32{},
		uses:    map[string]time.Time{},
		quota:   map[quotaKey]uint32{},
		missing: map[podnet.Key]time.Time{},
		grants:  map[quotaKey]*grantUse{},
		caps:    map[quotaKey]uint32{},
		statics: map[netip.Addr]time.Time{},
		leaving: map[netip.Addr]string{},
		idleFor: idleFor,
	}
}

// apply executes a record; at is when it was made, by this run's clock.
func (c *core) apply(r record, at time.Time) {
	switch r.Op {
	case opGive:
		c.give(r, at)
	case opFree:
		c.free(r, at)
	case opPast:
		l := r.lease()
		l.Since, l.Until = time.Unix(0, r.Since), time.Unix(0, r.Until)
		c.remember(&past{lease: l, freed: at, fast: r.Fast})
	case opCursor:
		c.cursors[blockKey{r.Pool, r.Number}] = r.Offset
	case opUse:
		c.uses[r.Pool] = at
	case opUnused:
		delete(c.uses, r.Pool)
	}
}

func (c *core) give(r record, at time.Time) {
	if c.leases[r.key()] != nil {
		return
	}
	h := &held{Lease: r.lease(), block: blockKey{r.Pool, r.Number}, off: r.Offset, inBlock: r.InBlock, born: at}
	c.leases[h.Key] = h
	for _, a := range []netip.Addr{h.IPv4, h.IPv6} {
		if a.IsValid() {
			c.byAddr[a] = h
			delete(c.seen, a)
		}
	}
	if !h.Static {
		c.quota[quotaKey{h.Pool, h.Namespace}]++
		c.uses[h.Pool] = at
	}
	if h.inBlock {
		c.cursors[h.block] = h.off
		if b := c.blocks[h.block]; b != nil {
			delete(b.rests, h.off)
		}
	}
	c.resettle(h.IPv4, h.IPv6)
}

// resettle recounts the holders of the offsets of some addresses.
func (c *core) resettle(addrs ...netip.Addr) {
	for _, a := range addrs {
		b, off := c.find(a)
		if b == nil {
			continue
		}
		v4, v6 := b.addrs(off)
		n := 0
		h4, h6 := c.byAddr[v4], c.byAddr[v6]
		if h4 != nil {
			n++
		}
		if h6 != nil && h6 != h4 {
			n++
		}
		if c.seen[v4] != nil || c.seen[v6] != nil {
			n++
		}
		if n == 0 {
			delete(b.held, off)
			b.clearBusy(off)
		} else {
			b.held[off] = n
			b.set(off)
		}
	}
}

func (c *core) free(r record, at time.Time) {
	h := c.leases[r.key()]
	if h == nil {
		return
	}
	delete(c.leases, h.Key)
	delete(c.missing, h.Key)
	for _, a := range []netip.Addr{h.IPv4, h.IPv6} {
		if c.byAddr[a] == h {
			delete(c.byAddr, a)
		}
	}
	l := h.Lease
	l.Until = time.Unix(0, r.At)
	p := &past{lease: l, freed: at, fast: r.Fast}
	if !h.Static {
		c.uncount(h)
		c.uses[h.Pool] = at
	}
	c.remember(p)
	c.quiet(at, h.IPv4, h.IPv6)
}

// quiet resettles addresses and notes which of their blocks have become empty.
func (c *core) quiet(at time.Time, addrs ...netip.Addr) {
	c.resettle(addrs...)
	for _, a := range addrs {
		if b, _ := c.find(a); b != nil && len(b.held) == 0 {
			b.idle = at
		}
	}
}

// remember keeps a past lease, and makes its address rest.
func (c *core) remember(p *past) {
	c.past = append(c.past, p)
	if p.lease.Pod != "" && !p.fast {
		c.last[podKey{p.lease.Pool, p.lease.Namespace, p.lease.Pod}] = p
	}
	c.rest(p)
	if len(c.past) > max(c.forgetAt, maxPast+maxPast/4) {
		c.forget(p.freed)
		c.forgetAt = len(c.past) + maxPast/4 // not after every record
	}
}

func (c *core) rest(p *past) {
	if p.lease.Static {
		return
	}
	b, off := c.find(p.lease.any())
	if b == nil {
		return
	}
	if p.fast {
		p = c.stricter(p)
	}
	if old := b.rests[off]; old == nil || old.fast || !p.freed.Before(old.freed) {
		b.rest(off, p, c.view.Pools[b.view.Key.Pool])
	}
}

// stricter is the last lease of the address by a pod, which determines the rest even if a failed ADD came later; else
// p.
func (c *core) stricter(p *past) *past {
	for _, o := range slices.Backward(c.past) {
		if !o.fast && o.lease.any() == p.lease.any() && !o.freed.After(p.freed) {
			return o
		}
	}
	return p
}

// forget drops the oldest past leases that have rested or whose address was assigned again.
func (c *core) forget(now time.Time) {
	drop := len(c.past) - maxPast
	c.past = slices.DeleteFunc(c.past, func(p *past) bool {
		if drop <= 0 || c.matters(p, now) {
			return false
		}
		drop--
		if k := (podKey{p.lease.Pool, p.lease.Namespace, p.lease.Pod}); c.last[k] == p {
			delete(c.last, k)
		}
		return true
	})
}

// matters reports whether an address rests because of p.
func (c *core) matters(p *past, now time.Time) bool {
	if p.lease.Static || !now.Before(p.freed.Add(p.soft(c.view.Pools[p.lease.Pool]))) {
		return false
	}
	b, off := c.find(p.lease.any())
	return b == nil || b.rests[off] == p
}

// find is this node's block that contains an address, and the offset.
func (c *core) find(a netip.Addr) (*block, uint32) {
	if !a.IsValid() {
		return nil, 0
	}
	spans := c.spans[0]
	if !a.Is4() {
		spans = c.spans[1]
	}
	i, ok := slices.BinarySearchFunc(spans, a, func(s span, a netip.Addr) int { return s.start.Compare(a) })
	if !ok {
		i--
	}
	if i < 0 {
		return nil, 0
	}
	s := spans[i]
	p := s.block.view.IPv4
	if !a.Is4() {
		p = s.block.view.IPv6
	}
	off := minus(a, s.start)
	if !p.Contains(a) || off >= s.block.size {
		return nil, 0
	}
	return s.block, off
}

// follow applies a new view of the log.
func (c *core) follow(v view, now time.Time) {
	old := c.blocks
	c.view = v
	c.blocks = make(map[blockKey]*block, len(v.Blocks))
	c.byPool, c.spans = map[string][]*block{}, [2][]span{}
	fresh := map[*block]bool{}
	for _, bv := range v.Blocks {
		b := old[bv.Key]
		if b == nil || b.view != bv {
			b = newBlock(bv, now)
			fresh[b] = true
		}
		b.sweepAt = now // the pool's settings may have changed
		c.blocks[bv.Key] = b
		c.byPool[bv.Key.Pool] = append(c.byPool[bv.Key.Pool], b)
		if bv.IPv4.IsValid() {
			c.spans[0] = append(c.spans[0], span{bv.IPv4.Addr(), b})
		}
		if bv.IPv6.IsValid() {
			c.spans[1] = append(c.spans[1], span{bv.IPv6.Addr(), b})
		}
	}
	for i := range c.spans {
		slices.SortFunc(c.spans[i], func(a, b span) int { return a.start.Compare(b.start) })
	}
	for _, l := range c.byPool {
		slices.SortFunc(l, func(a, b *block) int { return cmp.Compare(a.view.Key.Number, b.view.Key.Number) })
	}
	c.tidyLeaving(v)
	if len(fresh) > 0 {
		c.occupy(fresh)
	}
}

// tidyLeaving forgets static addresses that the log no longer assigns to this node.
func (c *core) tidyLeaving(v view) {
	holds := map[netip.Addr]bool{}
	for _, s := range v.Held {
		holds[s.addr()] = true
	}
	for a := range c.leaving {
		if !holds[a] {
			delete(c.leaving, a)
		}
	}
	for a := range c.statics {
		if !holds[a] {
			delete(c.statics, a)
		}
	}
}

// occupy marks the offsets of new blocks that leases, the kernel or rests occupy.
func (c *core) occupy(fresh map[*block]bool) {
	mark := func(a netip.Addr) bool {
		b, _ := c.find(a)
		if b == nil || !fresh[b] {
			return false
		}
		c.resettle(a)
		return true
	}
	for _, h := range c.leases {
		for _, a := range []netip.Addr{h.IPv4, h.IPv6} {
			if !mark(a) {
				continue
			}
			if b, off := c.find(a); !h.inBlock {
				h.block, h.off, h.inBlock = b.view.Key, off, true
				c.moveTo(h, b.view.Key.Pool)
			}
		}
	}
	for a := range c.seen {
		mark(a)
	}
	for _, p := range c.past {
		if b, _ := c.find(p.lease.any()); fresh[b] {
			c.rest(p)
		}
	}
}

// moveTo moves a lease to the pool whose block turned out to contain it.
func (c *core) moveTo(h *held, pool string) {
	if h.Pool == pool || h.Static {
		return
	}
	c.uncount(h)
	h.Pool = pool
	c.quota[quotaKey{h.Pool, h.Namespace}]++
	c.uses[pool] = h.born
}

func (c *core) uncount(h *held) {
	q := quotaKey{h.Pool, h.Namespace}
	if c.quota[q]--; c.quota[q] == 0 {
		delete(c.quota, q)
	}
}
