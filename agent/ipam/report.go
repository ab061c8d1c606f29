package ipam

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/skeinmesh/skein/dataplane/podnet"

	"github.com/skeinmesh/skein/events"
)

// LocalPool is this node's share of a pool. All fields but Blocks count addresses; one of each family counts as one.
type LocalPool struct {
	Blocks, Used, Free, Resting uint32
}

// Problem is a lasting condition that the user should know.
type Problem struct{ Subject, Message, Advice string }

// Lookup returns an attachment's lease.
func (m *Manager) Lookup(k podnet.Key) (Lease, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h := m.core.leases[k]; h != nil {
		return h.Lease, true
	}
	return Lease{}, false
}

// Leases are the addresses in use, sorted. Addresses that only the kernel knows are included: such a lease is
// Adopted, has no container ID, and its interface is the link's name on the host.
func (m *Manager) Leases() []Lease {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]Lease, 0, len(m.core.leases)+len(m.core.seen))
	for _, h := range m.core.leases {
		out = append(out, h.Lease)
	}
	for _, s := range m.core.seen {
		out = append(out, m.core.seenLease(s))
	}
	slices.SortFunc(out, compareLeases)
	return out
}

// Holders are the present and the remembered past leases of an address, oldest first.
func (m *Manager) Holders(a netip.Addr) []Lease {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []Lease
	for _, p := range m.core.past {
		if p.lease.IPv4 == a || p.lease.IPv6 == a {
			out = append(out, p.lease)
		}
	}
	slices.SortStableFunc(out, func(x, y Lease) int { return x.Since.Compare(y.Since) })
	if h := m.core.byAddr[a]; h != nil {
		out = append(out, h.Lease)
	}
	if s := m.core.seen[a]; s != nil {
		out = append(out, m.core.seenLease(s))
	}
	return out
}

// Pools returns this node's share of each pool of which it has blocks.
func (m *Manager) Pools() map[string]LocalPool {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.cfg.Now()
	out := map[string]LocalPool{}
	for name, blocks := range m.core.byPool {
		s := m.core.view.Pools[name]
		var l LocalPool
		for _, b := range blocks {
			used, free := uint32(len(b.held)), uint32(b.available(now, s))
			l.Blocks++
			l.Used += used
			l.Free += free
			l.Resting += b.size - used - free
		}
		out[name] = l
	}
	return out
}

// BlockUse is how many addresses of one of this node's blocks are in use.
func (m *Manager) BlockUse(pool string, number uint64) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.core.blocks[blockKey{pool, number}]; b != nil {
		return len(b.held)
	}
	return 0
}

// Ready reports why a pod without special wishes could not get an address now; nil: it could. The error is an *Error.
func (m *Manager) Ready() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.blind(); err != nil {
		return err
	}
	if m.fileErr != nil {
		return &Error{Unavailable, fmt.Sprintf("addresses that are given cannot be written down: %v", m.fileErr),
			"see that the state directory can be written"}
	}
	now := m.cfg.Now()
	q := ask{pool: events.DefaultPool}
	if p := m.state.PoolOfNamespace(""); p != nil {
		q.pool = p.GetName()
	}
	_, need, err := m.core.assign(q, now)
	switch {
	case err != nil:
		return err
	case need == nil:
		return nil
	}
	k := need.key()
	if err := m.hopeless(*need, k, now); err != nil {
		return err
	}
	if m.failure != nil {
		return m.refused(*need, m.failure)
	}
	if r, ok := m.refusals[k]; ok && m.backoffs[k].until.After(now) {
		return r.err
	}
	return nil
}

// Problems are the problems with this node's addresses, sorted.
func (m *Manager) Problems() []Problem {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []Problem
	if m.fileErr != nil {
		out = append(out, Problem{"pod addresses", fmt.Sprintf("%s cannot be written: %v", m.cfg.File, m.fileErr),
			"no pod gets an address before it can: see that there is room in the state directory"})
	}
	if m.state == nil {
		return out
	}
	out = append(out, m.strays()...)
	now := m.cfg.Now()
	for k, r := range m.refusals {
		if k.kind == taskAllocate && m.backoffs[k].until.After(now) {
			out = append(out, Problem{"pool " + k.pool, r.err.Message, cmp.Or(r.err.Advice, "pods that are there keep their "+
				"addresses; new ones get what becomes free")})
		}
	}
	if m.failure != nil {
		out = append(out, Problem{"pod addresses", fmt.Sprintf("no server decided about what this node asked for: %v",
			m.failure), "addresses in this node's blocks are still given out; see skein status for the servers"})
	}
	slices.SortFunc(out, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Subject, b.Subject), cmp.Compare(a.Message, b.Message))
	})
	return out
}

// strays are problems with addresses in use that do not belong to this node.
func (m *Manager) strays() (out []Problem) {
	users := map[string][]string{}
	why := map[string]string{}
	note := func(a netip.Addr, l Lease) {
		if b, _ := m.core.find(a); b != nil || !a.IsValid() {
			return
		}
		if l.Static && slices.ContainsFunc(m.core.view.Held, func(s staticView) bool { return s.has(a) }) {
			return
		}
		subject, reason := m.place(a)
		users[subject] = append(users[subject], fmt.Sprintf("%s of %s", a, called(l)))
		why[subject] = reason
	}
	for _, h := range m.core.leases {
		note(h.IPv4, h.Lease)
		note(h.IPv6, h.Lease)
	}
	for a, s := range m.core.seen {
		note(a, m.core.seenLease(s))
		if h := m.core.byAddr[a]; h != nil {
			out = append(out, Problem{"address " + a.String(), fmt.Sprintf("it belongs to %s, and the kernel has it on link %s",
				called(h.Lease), s.link), "remove one of the two pods"})
		}
	}
	for subject, list := range users {
		slices.Sort(list)
		const most = 5
		if n := len(list) - most; n > 0 {
			list = append(list[:most:most], fmt.Sprintf("%d more", n))
		}
		out = append(out, Problem{subject, why[subject] + ", and in use here: " + strings.Join(list, ", "),
			"restart these pods, so that they get other addresses"})
	}
	return out
}

// place names the block of an address outside this node's blocks, and the owner of that block.
func (m *Manager) place(a netip.Addr) (subject, reason string) {
	p, n, b := m.state.BlockAt(a)
	if p == nil {
		return "address " + a.String(), "it lies in no address pool"
	}
	v4, v6, _ := m.state.BlockPrefixes(p.GetName(), n)
	at := v4
	if a.Is6() {
		at = v6
	}
	subject = fmt.Sprintf("block %s of pool %s", at, p.GetName())
	switch {
	case b == nil:
		return subject, "it no longer belongs to this node"
	case b.GetNodeId() == "":
		return subject, fmt.Sprintf("it is reserved (%s)", b.GetReason())
	}
	return subject, fmt.Sprintf("it belongs to node %s", m.nodeName(b.GetNodeId()))
}
