package events

import (
	"cmp"
	"fmt"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// allFreed are the freed blocks of all pools, those that are free for the longest first.
func (s *State) allFreed() []*skeinv1.FreedBlock {
	out := []*skeinv1.FreedBlock{}
	for _, name := range s.poolNames {
		out = append(out, s.Freed(name)...)
	}
	slices.SortFunc(out, func(x, y *skeinv1.FreedBlock) int { return cmp.Compare(x.GetIndex(), y.GetIndex()) })
	return out
}

// loadPools takes pools and what is in them from a snapshot.
func (s *State) loadPools(p *skeinv1.State) error {
	for _, v := range p.GetPools() {
		if v.GetCreatedIndex() > p.GetIndex() || !s.makePool(v) {
			return fmt.Errorf("pool %q: its subnets are malformed, or its name, an address or a namespace is there twice",
				v.GetName())
		}
	}
	indexes := map[uint64]bool{} // of events that gave a block or took it back: each did one thing
	for _, b := range p.GetBlocks() {
		if s.Block(b.GetPool(), b.GetNumber()) != nil || indexes[b.GetIndex()] || !s.past(b.GetIndex(), p) ||
			!s.everNode(b.GetNodeId()) || !s.allocateBlock(b) {
			return fmt.Errorf("block %d of pool %q: it is there twice or not of the pool, or its node %q never was a member",
				b.GetNumber(), b.GetPool(), b.GetNodeId())
		}
		indexes[b.GetIndex()] = true
	}
	if err := s.loadFreed(p, indexes); err != nil {
		return err
	}
	for _, v := range p.GetStatics() {
		if !s.past(v.GetIndex(), p) || !s.everNode(v.GetNodeId()) || !s.addStatic(v) {
			return fmt.Errorf("static address %s of pool %q: it is there twice or not in a reserved block, or its node %q "+
				"never was a member",
				cmp.Or(v.GetIpv4(), v.GetIpv6()), v.GetPool(), v.GetNodeId())
		}
	}
	for _, g := range p.GetGrants() {
		if g.GetAddresses() == 0 || g.GetNodeId() == "" || !s.everNode(g.GetNodeId()) ||
			s.Grant(g.GetPool(), g.GetNamespace(), g.GetNodeId()) != nil || !s.setGrant(g) {
			return fmt.Errorf("grant of pool %q to namespace %q on node %q: it is there twice, exceeds the quota, or its node "+
				"never was a member",
				g.GetPool(), g.GetNamespace(), g.GetNodeId())
		}
	}
	return nil
}

func (s *State) loadFreed(p *skeinv1.State, indexes map[uint64]bool) error {
	var last uint64
	for _, f := range p.GetFreed() {
		old := s.poolState(f.GetPool())
		if old == nil || f.GetNumber() >= old.layout.blocks || old.given(f.GetNumber()) || f.GetIndex() <= last ||
			!s.past(f.GetIndex(), p) || indexes[f.GetIndex()] {
			return fmt.Errorf("freed block %d of pool %q: it is there twice or not of the pool, or its index %d is out of order",
				f.GetNumber(), f.GetPool(), f.GetIndex())
		}
		last = f.GetIndex()
		r := *old
		s.rest(&r, f)
		r.advance()
		s.numbers++
		s.setPoolState(&r)
	}
	return nil
}

// past reports whether an event of that index can be in the state.
func (s *State) past(index uint64, p *skeinv1.State) bool { return index > 0 && index <= p.GetIndex() }

// everNode reports whether the node is or was a member; no node is fine.
func (s *State) everNode(id string) bool {
	return id == "" || find(&s.nodes, id) != nil || find(&s.revoked, id) != nil
}
