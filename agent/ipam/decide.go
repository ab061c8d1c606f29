package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

const (
	youngFor   = time.Minute      // age below which a lease is not leaked: its ADD may be running
	auditSpace = 30 * time.Second // least time between the two audits that find a leak
	auditEvery = 45 * time.Second // while nothing is missing; a pod that ends is noticed within auditEvery + auditSpace
	auditSoon  = time.Second      // least time until the next audit
)

// ask is a request with the matching pool or static address from the log.
type ask struct {
	Request
	pool   string      // pool that the address comes from
	static *staticView // reserved for this pod, and to be assigned
}

type needKind uint8

const (
	needBlock needKind = iota + 1
	needGrant
	needClaim
)

// need is what the log must grant before an address can be assigned.
type need struct {
	kind      needKind
	pool      string
	namespace string     // of a grant
	static    staticView // to be claimed
}

// assign decides on a request: a record to apply, a need, or a refusal.
func (c *core) assign(q ask, now time.Time) (record, *need, *Error) {
	if h := c.leases[q.Key]; h != nil {
		return record{}, nil, &Error{Exists, fmt.Sprintf("interface %s of container %.12s has %s already", q.Key.Interface,
			q.Key.ContainerID, pair(h.IPv4, h.IPv6)),
			"take it back first (CNI DEL)"}
	}
	if q.static != nil {
		return c.assignStatic(q)
	}
	s, ok := c.view.Pools[q.pool]
	if !ok {
		return record{}, nil, &Error{Unavailable, fmt.Sprintf("there is no address pool %s", q.pool),
			fmt.Sprintf("create it with skein pool create %s --subnet CIDR", q.pool)}
	}
	if s.Draining {
		return record{}, nil, &Error{Exhausted, fmt.Sprintf("pool %s is being drained and gives nothing new", q.pool),
			"name another pool for this namespace, or run skein pool drain " + q.pool + " --undo"}
	}
	if limit, ok := s.Quotas[q.Namespace]; ok {
		k := quotaKey{q.pool, q.Namespace}
		if limit == 0 {
			return record{}, nil, &Error{Exhausted, fmt.Sprintf("namespace %s may have no address of pool %s: its quota is 0",
				q.Namespace, q.pool), "raise the namespace's quota with skein pool set " + q.pool + " --quota"}
		}
		if c.quota[k]+1 > c.granted(k) {
			return record{}, &need{kind: needGrant, pool: q.pool, namespace: q.Namespace}, nil
		}
	}
	for _, b := range c.byPool[q.pool] {
		b.sweep(now, s)
	}
	if len(q.Addresses) > 0 {
		return c.assignWanted(q, s, now)
	}
	if b, off, ok := c.waiting(q, s, now); ok {
		return c.giveAt(q, b, off), nil, nil
	}
	b, off, ok := c.choose(q, s, now)
	if !ok {
		return record{}, &need{kind: needBlock, pool: q.pool}, nil
	}
	return c.giveAt(q, b, off), nil, nil
}

func (c *core) giveAt(q ask, b *block, off uint32) record {
	l := Lease{Attachment: q.Attachment, Network: q.Network, Pool: b.view.Key.Pool}
	l.IPv4, l.IPv6 = b.addrs(off)
	r := giveRecord(l)
	r.Number, r.Offset, r.InBlock = b.view.Key.Number, off, true
	return r
}

// waiting is the address that this pod released recently and that still waits for it (sticky).
func (c *core) waiting(q ask, s poolView, now time.Time) (*block, uint32, bool) {
	p := c.last[podKey{q.pool, q.Namespace, q.Pod}]
	if p == nil || !p.waitsFor(q.Request, s, now) {
		return nil, 0, false
	}
	b, off := c.find(p.lease.any())
	if b == nil || b.leaving != "" || b.rests[off] != p || b.held[off] > 0 {
		return nil, 0, false
	}
	return b, off, true
}

// waitsFor reports whether a released address waits for the pod of a request.
func (p *past) waitsFor(r Request, s poolView, now time.Time) bool {
	return r.Pod != "" && p.lease.Pod == r.Pod && p.lease.Namespace == r.Namespace && !p.fast &&
		now.Before(p.freed.Add(s.Sticky))
}

// choose finds an address: in the used block with the fewest free ones; else in the empty block left longest ago;
// else the one released longest ago of those that should still rest.
func (c *core) choose(q ask, s poolView, now time.Time) (*block, uint32, bool) {
	var best *block
	for _, b := range c.byPool[q.pool] {
		if b.leaving == "" && b.nbusy < b.size && (best == nil || b.before(best)) {
			best = b
		}
	}
	if best != nil {
		cursor, used := c.cursors[best.view.Key]
		off, ok := best.next(cursor, used)
		return best, off, ok
	}
	var off uint32
	var oldest *past
	for _, b := range c.byPool[q.pool] {
		if b.leaving != "" {
			continue
		}
		for o, p := range b.rests {
			ready := !now.Before(p.freed.Add(p.hard(s))) || p.waitsFor(q.Request, s, now)
			if b.held[o] == 0 && ready && (oldest == nil || p.freed.Before(oldest.freed)) {
				best, off, oldest = b, o, p
			}
		}
	}
	return best, off, best != nil
}

// before reports whether b should be used before o.
func (b *block) before(o *block) bool {
	used, other := len(b.held), len(o.held)
	if (used > 0) != (other > 0) {
		return used > 0
	}
	if used > 0 {
		return used > other
	}
	return b.freed.Before(o.freed)
}

// assignWanted assigns the requested addresses.
func (c *core) assignWanted(q ask, s poolView, now time.Time) (record, *need, *Error) {
	b, off := c.find(q.Addresses[0])
	for _, a := range q.Addresses[1:] {
		if b2, off2 := c.find(a); b2 != b || off2 != off {
			return record{}, nil, &Error{Invalid, fmt.Sprintf("%s and %s are not one pod's two addresses", q.Addresses[0], a),
				"ask for one of the two: the other follows from it"}
		}
	}
	if b == nil || b.view.Key.Pool != q.pool {
		return record{}, nil, &Error{Denied, fmt.Sprintf("%s is in no block of pool %s that this node has",
			q.Addresses[0], q.pool), ""}
	}
	if b.leaving != "" {
		return record{}, nil, &Error{Unavailable, fmt.Sprintf("block %s is being given back", b.view.prefix()),
			"try again later"}
	}
	if b.held[off] > 0 {
		return record{}, nil, &Error{Denied, c.whoHas(b, off), "remove that pod first, or ask for another address"}
	}
	if p := b.rests[off]; p != nil {
		end := p.freed.Add(p.hard(s))
		if now.Before(end) && !p.waitsFor(q.Request, s, now) {
			return record{}, nil, &Error{Unavailable, fmt.Sprintf("%s was given back by %s and rests for %s more",
				q.Addresses[0], called(p.lease), end.Sub(now).Round(time.Second)),
				"try again later, or ask for another address"}
		}
	}
	return c.giveAt(q, b, off), nil, nil
}

// whoHas says who occupies an offset.
func (c *core) whoHas(b *block, off uint32) string {
	v4, v6 := b.addrs(off)
	for _, a := range []netip.Addr{v4, v6} {
		if h := c.byAddr[a]; h != nil {
			return fmt.Sprintf("%s belongs to %s since %s", a, called(h.Lease), h.Since.UTC().Format(time.RFC3339))
		}
		if s := c.seen[a]; s != nil {
			return fmt.Sprintf("%s is in use: the kernel has a route for it to %s", a, s.link)
		}
	}
	return fmt.Sprintf("%s is in use", pair(v4, v6))
}

// assignStatic assigns a pod's static address, once this node holds it.
func (c *core) assignStatic(q ask) (record, *need, *Error) {
	s := *q.static
	for _, a := range []netip.Addr{s.IPv4, s.IPv6} {
		if h := c.byAddr[a]; h != nil && a.IsValid() {
			return record{}, nil, &Error{Unavailable, fmt.Sprintf("%s, reserved for pod %s/%s, is still used by %s", a,
				s.Namespace, s.Pod, called(h.Lease)),
				"it is free when that container is gone: try again later"}
		}
		if f := c.seen[a]; f != nil {
			return record{}, nil, &Error{Unavailable, fmt.Sprintf("%s, reserved for pod %s/%s, is in use: the kernel has a "+
				"route for it to %s", a, s.Namespace, s.Pod, f.link),
				"remove that link, or wait until it is gone"}
		}
	}
	switch {
	case c.leaving[s.addr()] != "" || s.Holder == "":
		return record{}, &need{kind: needClaim, pool: s.Pool, static: s}, nil
	case s.Holder != c.self:
		return record{}, nil, &Error{Unavailable, fmt.Sprintf("%s, reserved for pod %s/%s, is held by node %s", s.addr(),
			s.Namespace, s.Pod, s.Holder),
			"it is free when that node has taken it back from the pod there: try again later"}
	}
	l := Lease{Attachment: q.Attachment, Network: q.Network, Pool: s.Pool, Static: true}
	l.IPv4, l.IPv6 = s.IPv4, s.IPv6
	return giveRecord(l), nil, nil
}

func (c *core) release(h *held, reason string) record {
	return record{Op: opFree, Container: h.Key.ContainerID, Interface: h.Key.Interface, Text: reason,
		Fast: reason == AddFailed}
}

// adopt compares the kernel's addresses with the leases. It returns records of leases that only the kernel knew and
// of foreign addresses that have ended, and the foreign addresses that changed. A link of this agent that was read
// before it had its alias looks foreign, until the kernel has the address only on its lease's link.
func (c *core) adopt(found []podnet.Found, now time.Time) (records []record, changed []netip.Addr) {
	here := make(map[netip.Addr]bool, len(found))
	leased, others := map[netip.Addr]bool{}, map[netip.Addr]bool{} // found on its lease's link, and on any other
	var made []podnet.Key
	fresh := map[podnet.Key]*Lease{}
	for _, f := range found {
		k := f.Key
		here[f.Addr] = true
		if h := c.byAddr[f.Addr]; h != nil && h.Key == k {
			leased[f.Addr] = true
			continue
		}
		others[f.Addr] = true
		own := k.ContainerID != "" && k.Interface != "" && !f.OfCoil
		ended := own && c.justFreed(k, f.Addr, now)
		if ended && c.byAddr[f.Addr] != nil {
			continue // the scan is older than the release, and another attachment has the address now
		}
		if own && !ended && c.byAddr[f.Addr] == nil && c.leases[k] == nil {
			if l := fresh[k]; l == nil {
				made, fresh[k] = append(made, k), &Lease{Attachment: podnet.Attachment{Key: k, Namespace: f.Namespace, Pod: f.Pod}}
			}
			if l := fresh[k]; f.Addr.Is4() && !l.IPv4.IsValid() {
				l.IPv4 = f.Addr
				continue
			} else if !f.Addr.Is4() && !l.IPv6.IsValid() {
				l.IPv6 = f.Addr
				continue
			}
		}
		if s := c.seen[f.Addr]; s == nil {
			c.seen[f.Addr] = &seen{addr: f.Addr, link: f.Link, key: k, ofCoil: f.OfCoil, since: now}
			changed = append(changed, f.Addr)
		} else if s.missing = (time.Time{}); s.link != f.Link || s.key != k {
			s.link, s.key, s.ofCoil = f.Link, k, f.OfCoil
			changed = append(changed, f.Addr)
		}
	}
	for _, k := range made {
		records = append(records, c.rebuilt(*fresh[k]))
	}
	for a := range leased {
		if c.seen[a] != nil && !others[a] {
			delete(c.seen, a)
			changed = append(changed, a)
		}
	}
	over, vanished := c.vanished(here, now)
	changed = append(changed, vanished...)
	c.quiet(now, changed...)
	return append(records, over...), changed
}

// rebuilt is the record of a lease that the kernel knew and the file did not.
func (c *core) rebuilt(l Lease) record {
	r := giveRecord(l)
	for _, a := range []netip.Addr{l.IPv4, l.IPv6} {
		if b, off := c.find(a); b != nil {
			r.Pool, r.Number, r.Offset, r.InBlock = b.view.Key.Pool, b.view.Key.Number, off, true
			return r
		}
		for _, s := range c.view.Held {
			if s.has(a) {
				r.Pool, r.Static = s.Pool, true
				return r
			}
		}
	}
	return r
}

// justFreed reports whether a lease ended so recently that the scan may be older.
func (c *core) justFreed(k podnet.Key, a netip.Addr, now time.Time) bool {
	for _, p := range slices.Backward(c.past) {
		if now.Sub(p.freed) > youngFor {
			return false
		}
		if p.lease.Key == k && (p.lease.IPv4 == a || p.lease.IPv6 == a) {
			return true
		}
	}
	return false
}

// vanished frees foreign addresses that the kernel no longer has. An address must be missing in two scans, so that
// the replacement of a route does not count as its end.
func (c *core) vanished(here map[netip.Addr]bool, now time.Time) (records []record, changed []netip.Addr) {
	for a, s := range c.seen {
		switch {
		case here[a]:
			s.missing = time.Time{}
		case s.missing.IsZero():
			s.missing = now
		case now.Sub(s.missing) >= auditSpace:
			delete(c.seen, a)
			r := giveRecord(c.seenLease(s))
			r.Op, r.Since, r.Until = opPast, s.since.UnixNano(), now.UnixNano()
			records = append(records, r)
			changed = append(changed, a)
		}
	}
	return records, changed
}

// seenLease presents a foreign address as a lease; its interface is the link's name on the host.
func (c *core) seenLease(s *seen) Lease {
	l := Lease{Adopted: true, Since: s.since}
	l.Key.Interface = s.link
	if s.key != (podnet.Key{}) {
		l.Key = s.key
	}
	if s.ofCoil {
		l.Link = s.link
	}
	if s.addr.Is4() {
		l.IPv4 = s.addr
	} else {
		l.IPv6 = s.addr
	}
	if b, _ := c.find(s.addr); b != nil {
		l.Pool = b.view.Key.Pool
	}
	return l
}

// unfound lists leases without link and address in the kernel that are old enough to be leaked.
func (c *core) unfound(found []podnet.Found, now time.Time) (out []Lease) {
	links := map[podnet.Key]bool{}
	addrs := map[netip.Addr]bool{}
	for _, f := range found {
		addrs[f.Addr] = true
		if f.ContainerID != "" {
			links[f.Key] = true
		}
	}
	for k, h := range c.leases {
		if links[k] || addrs[h.IPv4] || addrs[h.IPv6] || now.Sub(h.born) < youngFor {
			delete(c.missing, k)
			continue
		}
		out = append(out, h.Lease)
	}
	return out
}

// leaked lists the unfound leases whose pods are gone, now and at an earlier audit.
func (c *core) leaked(unfound []Lease, gone map[podnet.Key]bool, now time.Time) (out []*held) {
	for _, l := range unfound {
		h := c.leases[l.Key]
		if h == nil || !h.Since.Equal(l.Since) {
			continue
		}
		first, again := c.missing[l.Key]
		switch {
		case !gone[l.Key]:
			delete(c.missing, l.Key)
		case !again:
			c.missing[l.Key] = now
		case now.Sub(first) >= auditSpace:
			out = append(out, h)
		}
	}
	slices.SortFunc(out, func(a, b *held) int { return compareLeases(a.Lease, b.Lease) })
	return out
}

// nextAudit is the time until the next audit: sooner when something missing could then be freed.
func (c *core) nextAudit(now time.Time) time.Duration {
	wait := auditEvery
	missing := func(since time.Time) {
		if !since.IsZero() {
			wait = min(wait, since.Add(auditSpace).Sub(now))
		}
	}
	for _, s := range c.seen {
		missing(s.missing)
	}
	for _, since := range c.missing {
		missing(since)
	}
	return max(wait, auditSoon)
}

func compareLeases(a, b Lease) int { return a.any().Compare(b.any()) }

// any is one address of a lease: the IPv4 address, if there is one.
func (l Lease) any() netip.Addr {
	if l.IPv4.IsValid() {
		return l.IPv4
	}
	return l.IPv6
}

// called names the holder of a lease for users.
func called(l Lease) string {
	switch {
	case l.Pod != "":
		return fmt.Sprintf("pod %s/%s", l.Namespace, l.Pod)
	case l.Key.ContainerID != "":
		return fmt.Sprintf("container %.12s", l.Key.ContainerID)
	}
	return "somebody else's link " + l.Key.Interface
}

// pair formats one or two addresses.
func pair(a, b netip.Addr) string {
	switch {
	case !a.IsValid():
		return b.String()
	case !b.IsValid():
		return a.String()
	}
	return a.String() + " and " + b.String()
}
