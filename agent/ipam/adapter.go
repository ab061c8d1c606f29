package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// sources are the entities of the agreed state that matter to this node. Entities are replaced and never modified, so
// comparing pointers shows changes.
type sources struct {
	pools   []*skeinv1.Pool
	blocks  []*skeinv1.Block
	statics []*skeinv1.StaticAddress
	grants  []*skeinv1.Grant
}

func readSources(s *events.State, self string) sources {
	return sources{pools: s.Pools(), blocks: s.BlocksOf(self), statics: s.StaticsOf(self), grants: s.GrantsOf(self)}
}

func (s sources) equal(o sources) bool {
	return slices.Equal(s.pools, o.pools) && slices.Equal(s.blocks, o.blocks) && slices.Equal(s.statics, o.statics) &&
		slices.Equal(s.grants, o.grants)
}

func (s sources) view(index uint64) view {
	v := view{Index: index, Pools: make(map[string]poolView, len(s.pools)),
		Grants: make(map[quotaKey]uint32, len(s.grants))}
	for _, p := range s.pools {
		v.Pools[p.GetName()] = poolView{
			Name: p.GetName(), Draining: p.GetDraining(), BlockSize: 1 << p.GetBlockSizeBits(),
			MaxBlocks: p.GetMaxBlocksPerNode(),
			Cooldown:  time.Duration(p.GetCooldownSeconds()) * time.Second,
			Sticky:    time.Duration(p.GetStickySeconds()) * time.Second,
			Quotas:    p.GetQuotas(),
		}
	}
	for _, b := range s.blocks {
		v.Blocks = append(v.Blocks, blockView{Key: blockKey{b.GetPool(), b.GetNumber()}, IPv4: prefix(b.GetIpv4()),
			IPv6: prefix(b.GetIpv6()), Index: b.GetIndex()})
	}
	for _, a := range s.statics {
		v.Held = append(v.Held, static(a))
	}
	for _, g := range s.grants {
		v.Grants[quotaKey{g.GetPool(), g.GetNamespace()}] = g.GetAddresses()
	}
	return v
}

// prefix parses a prefix that Fold has checked; an empty string gives an invalid one.
func prefix(s string) netip.Prefix {
	p, _ := netip.ParsePrefix(s)
	return p
}

func static(a *skeinv1.StaticAddress) staticView {
	v4, _ := netip.ParseAddr(a.GetIpv4())
	v6, _ := netip.ParseAddr(a.GetIpv6())
	return staticView{Pool: a.GetPool(), Namespace: a.GetNamespace(), Pod: a.GetPod(), IPv4: v4, IPv6: v6,
		Holder: a.GetNodeId(), Index: a.GetIndex()}
}

// ask finds the pool or the static address that serves a request.
func (m *Manager) ask(r Request) (ask, error) {
	q := ask{Request: r}
	if r.Pod != "" {
		q.static = pickStatic(m.state.StaticOf(r.Namespace, r.Pod), r)
	}
	switch {
	case q.static != nil:
		q.pool = q.static.Pool
		return q, nil
	case r.Pool != "":
		q.pool = r.Pool
	case len(r.Addresses) > 0:
		p, _, _ := m.state.BlockAt(r.Addresses[0])
		if p == nil {
			return q, &Error{Invalid, fmt.Sprintf("%s, which was asked for, lies in no address pool", r.Addresses[0]),
				"ask for an address of a pool: skein pool list shows them"}
		}
		q.pool = p.GetName()
	case r.NamespacePool != "":
		q.pool = r.NamespacePool
		return q, nil
	default:
		q.pool = events.DefaultPool
		if p := m.state.PoolOfNamespace(r.Namespace); p != nil {
			q.pool = p.GetName()
		}
		return q, nil
	}
	if m.state.Pool(q.pool) != nil && !m.state.MayUse(r.Namespace, q.pool) {
		return q, &Error{Denied, fmt.Sprintf("namespace %q may not use pool %s", r.Namespace, q.pool),
			"let the pool allow that namespace, or name another"}
	}
	return q, nil
}

// pickStatic is the static address that a pod gets: the requested one, else one of the requested pool, else the pod's
// first.
func pickStatic(all []*skeinv1.StaticAddress, r Request) *staticView {
	var pick *staticView
	for _, a := range all {
		v := static(a)
		if len(r.Addresses) > 0 {
			if !slices.ContainsFunc(r.Addresses, func(a netip.Addr) bool { return !v.has(a) }) {
				return &v
			}
			continue
		}
		if pick == nil || r.Pool != "" && v.Pool == r.Pool && pick.Pool != r.Pool {
			pick = &v
		}
	}
	return pick
}

// explain says who owns a requested address that is in no block of this node.
func (m *Manager) explain(q ask, err *Error) error {
	if len(q.Addresses) == 0 || q.static != nil || err.Advice != "" {
		return err
	}
	a := q.Addresses[0]
	p, _, b := m.state.BlockAt(a)
	if p == nil {
		return &Error{Invalid, fmt.Sprintf("%s, which was asked for, lies in no address pool", a), "ask for an address of " +
			"a pool: skein pool list shows them"}
	}
	if p.GetName() != q.pool {
		return &Error{Invalid, fmt.Sprintf("%s, which was asked for, lies in pool %s and not in %s", a, p.GetName(), q.pool),
			"name that pool, or no pool"}
	}
	if s := m.state.Static(p.GetName(), a); s != nil {
		return &Error{Denied, fmt.Sprintf("%s is reserved for pod %s/%s", a, s.GetNamespace(), s.GetPod()),
			"ask for another address, or release that one first"}
	}
	const advice = "reserve the address for this pod, or ask for one of this node's blocks: skein block list shows them"
	switch {
	case b == nil:
		return &Error{Denied, fmt.Sprintf("%s lies in a block of pool %s that no node has", a, p.GetName()), advice}
	case b.GetNodeId() == "":
		return &Error{Denied, fmt.Sprintf("%s lies in a reserved block of pool %s (%s)", a, p.GetName(),
			b.GetReason()), advice}
	}
	return &Error{Denied, fmt.Sprintf("%s lies in a block of node %s", a, m.nodeName(b.GetNodeId())), advice}
}

// nodeName is the node's name for users.
func (m *Manager) nodeName(id string) string {
	for _, n := range m.state.Nodes() {
		if n.GetId() == id {
			return n.GetName()
		}
	}
	return id
}
