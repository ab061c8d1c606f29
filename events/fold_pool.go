package events

import (
	"cmp"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// foldPool folds what schema 2 brought.
func (s *State) foldPool(e *skeinv1.Event) {
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_PoolCreated:
		if p := b.PoolCreated.GetPool(); p.GetCreatedIndex() == e.GetIndex() {
			s.makePool(p)
		}
	case *skeinv1.Event_PoolChanged:
		s.changePool(b.PoolChanged.GetPool())
	case *skeinv1.Event_PoolRemoved:
		s.removePool(b.PoolRemoved.GetName())
	case *skeinv1.Event_BlockAllocated:
		v := b.BlockAllocated.GetBlock()
		if find(&s.nodes, v.GetNodeId()) != nil && v.GetIndex() == e.GetIndex() {
			s.allocateBlock(v)
		}
	case *skeinv1.Event_BlockReserved:
		v := b.BlockReserved.GetBlock()
		if v.GetNodeId() == "" && v.GetIndex() == e.GetIndex() {
			s.allocateBlock(v)
		}
	case *skeinv1.Event_BlockReleased:
		s.releaseBlock(b.BlockReleased, e)
	case *skeinv1.Event_AddressReserved:
		v := b.AddressReserved.GetAddress()
		if v.GetNodeId() == "" && v.GetIndex() == e.GetIndex() {
			s.addStatic(v)
		}
	case *skeinv1.Event_AddressClaimed:
		s.claimStatic(b.AddressClaimed, e)
	case *skeinv1.Event_AddressReleased:
		s.dropStatic(b.AddressReleased)
	case *skeinv1.Event_GrantSet:
		if g := b.GrantSet.GetGrant(); g.GetAddresses() == 0 {
			s.dropGrant(g)
		} else if find(&s.nodes, g.GetNodeId()) != nil {
			s.setGrant(g)
		}
	default:
		s.foldEgress(e)
	}
}

// makePool adds a pool, unless its name, an address or a namespace of it is taken; it reports whether it did.
func (s *State) makePool(p *skeinv1.Pool) bool {
	l, err := newLayout(p)
	if err != nil || checkPoolNames(p) != nil || s.cluster == nil || s.poolState(p.GetName()) != nil ||
		!s.apart(l.prefixes()) || !s.namespacesFree(p) {
		return false
	}
	s.setPoolState(&poolState{pool: p, layout: l})
	s.sizes.add(sectionPools, p)
	s.addSpans(p.GetName(), l.prefixes())
	for _, ns := range p.GetNamespaces() {
		s.enter(&s.namespaces, ns, p.GetName())
	}
	i, _ := slices.BinarySearch(s.poolNames, p.GetName())
	s.poolNames = slices.Insert(slices.Clone(s.poolNames), i, p.GetName())
	return true
}

// apart reports whether nobody has an address in the prefixes: no pool, overlay or node, no pods of another CNI, no
// plain peer.
func (s *State) apart(prefixes []netip.Prefix) bool {
	overlays := s.overlays()
	for _, p := range prefixes {
		_, taken := s.overlap(p)
		_, pods := s.podNetOverlapping(p, "")
		_, plain := s.plainNetOverlapping(p, "")
		_, translated := s.translationOver(p, true)
		if taken || pods || plain || translated || slices.ContainsFunc(overlays, p.Overlaps) {
			return false
		}
	}
	within := func(n *skeinv1.Node) bool {
		return slices.ContainsFunc([]string{n.GetIpv4(), n.GetIpv6()}, func(text string) bool {
			a, err := netip.ParseAddr(text)
			return err == nil && slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
		})
	}
	for n := range s.nodes.all() {
		if within(n) {
			return false
		}
	}
	for r := range s.revoked.all() {
		if within(r.GetNode()) {
			return false
		}
	}
	return true
}

// overlays are the prefixes that nodes have their addresses from.
func (s *State) overlays() (out []netip.Prefix) {
	for _, text := range []string{s.Cluster().GetOverlayIpv4(), s.Cluster().GetOverlayIpv6()} {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p)
		}
	}
	return out
}

// pooled reports whether an address lies in a pool.
func (s *State) pooled(text string) bool {
	if len(s.spans) == 0 {
		return false
	}
	a, err := netip.ParseAddr(text)
	return err == nil && s.poolAt(a) != nil
}

func (s *State) namespacesFree(p *skeinv1.Pool) bool {
	for i, ns := range p.GetNamespaces() {
		if ns == "" || s.taken(&s.namespaces, ns, p.GetName()) || slices.Contains(p.GetNamespaces()[:i], ns) {
			return false
		}
	}
	return true
}

func (s *State) addSpans(pool string, prefixes []netip.Prefix) {
	spans := slices.Clone(s.spans)
	for _, p := range prefixes {
		spans = append(spans, span{prefix: p, pool: pool})
	}
	slices.SortFunc(spans, func(x, y span) int { return x.prefix.Addr().Compare(y.prefix.Addr()) })
	s.spans = spans
}

// changePool replaces a pool. Its subnets, whose blocks are numbered, stay; more may follow them.
func (s *State) changePool(p *skeinv1.Pool) {
	old := s.poolState(p.GetName())
	if old == nil || p.GetBlockSizeBits() != old.pool.GetBlockSizeBits() || p.GetCreatedAt() != old.pool.GetCreatedAt() ||
		p.GetCreatedIndex() != old.pool.GetCreatedIndex() || checkPoolNames(p) != nil || !s.namespacesFree(p) {
		return
	}
	l, err := newLayout(p)
	if err != nil || len(l.runs) < len(old.layout.runs) || !slices.Equal(l.runs[:len(old.layout.runs)], old.layout.runs) {
		return
	}
	added := (&layout{runs: l.runs[len(old.layout.runs):]}).prefixes()
	if len(added) > 0 && !s.apart(added) {
		return
	}
	for g := range old.grants.all() {
		sum, _ := old.granted.get(textKey(g.GetNamespace()), g.GetNamespace())
		if quota, ok := p.GetQuotas()[g.GetNamespace()]; !ok || sum > uint64(quota) {
			return
		}
	}
	for _, ns := range old.pool.GetNamespaces() {
		s.namespaces.del(s.own(), textKey(ns), ns)
	}
	for _, ns := range p.GetNamespaces() {
		s.enter(&s.namespaces, ns, p.GetName())
	}
	r := *old
	r.pool, r.layout = p, l
	s.sizes.drop(sectionPools, old.pool)
	s.sizes.add(sectionPools, p)
	s.setPoolState(&r)
	if len(added) > 0 {
		s.addSpans(p.GetName(), added)
	}
}

// removePool takes out a pool in which nobody has anything.
func (s *State) removePool(name string) {
	r := s.poolState(name)
	if r == nil || r.blocks.n > 0 || r.grants.n > 0 {
		return
	}
	for _, ns := range r.pool.GetNamespaces() {
		s.namespaces.del(s.own(), textKey(ns), ns)
	}
	s.spans = slices.DeleteFunc(slices.Clone(s.spans), func(v span) bool { return v.pool == name })
	s.poolNames = slices.DeleteFunc(slices.Clone(s.poolNames), func(v string) bool { return v == name })
	s.numbers -= r.freed.n
	s.sizes[sectionBlocks] -= r.resting
	s.sizes.drop(sectionPools, r.pool)
	s.pools.del(s.own(), textKey(name), name)
	s.dropRanges(name)
}

// allocateBlock gives a free block, or a reserved one to a node. It reports whether it did.
func (s *State) allocateBlock(b *skeinv1.Block) bool {
	old := s.poolState(b.GetPool())
	if old == nil {
		return false
	}
	n := b.GetNumber()
	ipv4, ipv6, ok := old.layout.block(n)
	if !ok || text(ipv4) != b.GetIpv4() || text(ipv6) != b.GetIpv6() {
		return false
	}
	have := old.block(n)
	if have != nil {
		if _, statics := old.staticsIn.get(n, ""); have.GetNodeId() != "" || b.GetNodeId() == "" || statics ||
			s.egressesIn(b.GetPool(), n) > 0 {
			return false
		}
	}
	o, r := s.own(), *old
	if !r.given(n) {
		s.numbers++
	}
	if f, freed := r.freed.get(n, ""); freed {
		r.freed.del(o, n, "")
		r.order.del(o, f.GetIndex(), "")
		r.resting -= entrySize(sectionBlocks, sizeOf(f))
		s.sizes.drop(sectionBlocks, f)
	}
	if have != nil {
		s.sizes.drop(sectionBlocks, have)
	}
	r.blocks.put(o, n, "", b)
	s.sizes.add(sectionBlocks, b)
	if h, ok := hexKey(b.GetNodeId()); ok {
		held, _ := r.holders.get(h, b.GetNodeId())
		held.put(o, n, "", b)
		r.holders.put(o, h, b.GetNodeId(), held)
	}
	r.advance()
	s.setPoolState(&r)
	return true
}

// advance moves the cursors past numbers that were given. Each is passed once, however the pool is used.
func (r *poolState) advance() {
	for r.cursor < r.layout.blocks && r.given(r.cursor) {
		r.cursor++
	}
	for r.outer = max(r.outer, r.cursor); r.outer < r.layout.blocks; r.outer++ {
		if b := r.rangeAt(r.outer); b != nil {
			r.outer = b.last
		} else if !r.given(r.outer) {
			break
		}
	}
}

// releaseBlock takes a block from who has it. It rests from then on.
func (s *State) releaseBlock(e *skeinv1.BlockReleased, at *skeinv1.Event) {
	old := s.poolState(e.GetPool())
	if old == nil {
		return
	}
	n := e.GetNumber()
	b := old.block(n)
	if _, statics := old.staticsIn.get(n, ""); b == nil || b.GetNodeId() != e.GetNodeId() || statics ||
		s.egressesIn(e.GetPool(), n) > 0 {
		return
	}
	o, r := s.own(), *old
	r.blocks.del(o, n, "")
	s.sizes.drop(sectionBlocks, b)
	if h, ok := hexKey(b.GetNodeId()); ok {
		held, _ := r.holders.get(h, b.GetNodeId())
		held.del(o, n, "")
		if held.n == 0 {
			r.holders.del(o, h, b.GetNodeId())
		} else {
			r.holders.put(o, h, b.GetNodeId(), held)
		}
	}
	s.rest(&r, &skeinv1.FreedBlock{Pool: b.GetPool(), Number: n, At: at.GetTime(), Index: at.GetIndex()})
	s.setPoolState(&r)
}

// rest puts a block among those that wait; r is a copy that is not in the state yet.
func (s *State) rest(r *poolState, f *skeinv1.FreedBlock) {
	r.freed.put(s.own(), f.GetNumber(), "", f)
	r.order.put(s.own(), f.GetIndex(), "", f.GetNumber())
	r.resting += entrySize(sectionBlocks, sizeOf(f))
	s.sizes.add(sectionBlocks, f)
}

// addStatic keeps an address for a pod, unless it is kept for one or lies in no reserved block. It reports
// whether it did.
func (s *State) addStatic(v *skeinv1.StaticAddress) bool {
	old := s.poolState(v.GetPool())
	a, err := netip.ParseAddr(cmp.Or(v.GetIpv4(), v.GetIpv6()))
	if old == nil || err != nil || checkPod(v.GetNamespace(), v.GetPod()) != nil || old.static(a) != nil {
		return false
	}
	n, offset, ok := old.layout.find(a)
	if !ok {
		return false
	}
	ipv4, ipv6 := old.layout.pair(n, offset)
	if b := old.block(n); b == nil || b.GetNodeId() != "" || text(ipv4) != v.GetIpv4() || text(ipv6) != v.GetIpv6() {
		return false
	}
	for _, a := range []netip.Addr{ipv4, ipv6} {
		if _, egress := s.EgressAddressAt(a); egress {
			return false
		}
	}
	o, r := s.own(), *old
	key := staticKey(ipv4, ipv6)
	r.statics.put(o, textKey(key), key, v)
	s.sizes.add(sectionStatics, v)
	in, _ := r.staticsIn.get(n, "")
	r.staticsIn.put(o, n, "", in+1)
	s.setPoolState(&r)
	pod := podKey(v.GetNamespace(), v.GetPod())
	refs, _ := s.pods.get(textKey(pod), pod)
	s.pods.put(o, textKey(pod), pod, append(slices.Clone(refs), staticRef{pool: v.GetPool(), address: key}))
	s.staticCount++
	return true
}

// staticNamed is the reservation that an event names.
func (s *State) staticNamed(pool, address string) (*poolState, *skeinv1.StaticAddress, string) {
	r := s.poolState(pool)
	if r == nil {
		return nil, nil, ""
	}
	v, _ := r.statics.get(textKey(address), address)
	return r, v, address
}

// claimStatic gives an address that nobody holds to a node, or takes it from the one that does.
func (s *State) claimStatic(c *skeinv1.AddressClaimed, e *skeinv1.Event) {
	old, v, key := s.staticNamed(c.GetPool(), c.GetAddress())
	if v == nil || (v.GetNodeId() == "") == (c.GetNodeId() == "") || c.GetNodeId() != "" &&
		find(&s.nodes, c.GetNodeId()) == nil {
		return
	}
	next := proto.CloneOf(v)
	next.NodeId, next.Since, next.Index = c.GetNodeId(), e.GetTime(), e.GetIndex()
	r := *old
	r.statics.put(s.own(), textKey(key), key, next)
	s.sizes.drop(sectionStatics, v)
	s.sizes.add(sectionStatics, next)
	s.setPoolState(&r)
}

// dropStatic ends a reservation that no node holds.
func (s *State) dropStatic(c *skeinv1.AddressReleased) {
	old, v, key := s.staticNamed(c.GetPool(), c.GetAddress())
	if v == nil || v.GetNodeId() != "" {
		return
	}
	o, r := s.own(), *old
	r.statics.del(o, textKey(key), key)
	s.sizes.drop(sectionStatics, v)
	n, _, _ := r.layout.find(staticAddr(v))
	if in, _ := r.staticsIn.get(n, ""); in > 1 {
		r.staticsIn.put(o, n, "", in-1)
	} else {
		r.staticsIn.del(o, n, "")
	}
	s.setPoolState(&r)
	pod := podKey(v.GetNamespace(), v.GetPod())
	refs, _ := s.pods.get(textKey(pod), pod)
	refs = slices.DeleteFunc(slices.Clone(refs), func(ref staticRef) bool {
		return ref == staticRef{pool: c.GetPool(), address: key}
	})
	if len(refs) == 0 {
		s.pods.del(o, textKey(pod), pod)
	} else {
		s.pods.put(o, textKey(pod), pod, refs)
	}
	s.staticCount--
}

// setGrant makes a grant, or changes it, unless all of a namespace would exceed its quota. It reports whether it did.
func (s *State) setGrant(g *skeinv1.Grant) bool {
	old := s.poolState(g.GetPool())
	if old == nil {
		return false
	}
	ns := g.GetNamespace()
	sum, _ := old.granted.get(textKey(ns), ns)
	have := s.Grant(g.GetPool(), ns, g.GetNodeId())
	sum += uint64(g.GetAddresses()) - uint64(have.GetAddresses())
	if quota, ok := old.pool.GetQuotas()[ns]; !ok || sum > uint64(quota) {
		return false
	}
	r, key := *old, grantKey(ns, g.GetNodeId())
	s.grantCount -= r.grants.n
	r.grants.put(s.own(), textKey(key), key, g)
	s.grantCount += r.grants.n
	if have != nil {
		s.sizes.drop(sectionGrants, have)
	}
	s.sizes.add(sectionGrants, g)
	r.granted.put(s.own(), textKey(ns), ns, sum)
	s.setPoolState(&r)
	return true
}

func (s *State) dropGrant(g *skeinv1.Grant) {
	have := s.Grant(g.GetPool(), g.GetNamespace(), g.GetNodeId())
	if have == nil {
		return
	}
	r, ns, key := *s.poolState(g.GetPool()), g.GetNamespace(), grantKey(g.GetNamespace(), g.GetNodeId())
	r.grants.del(s.own(), textKey(key), key)
	s.sizes.drop(sectionGrants, have)
	s.grantCount--
	if sum, _ := r.granted.get(textKey(ns), ns); sum > uint64(have.GetAddresses()) {
		r.granted.put(s.own(), textKey(ns), ns, sum-uint64(have.GetAddresses()))
	} else {
		r.granted.del(s.own(), textKey(ns), ns)
	}
	s.setPoolState(&r)
}
