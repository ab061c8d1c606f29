package events

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// allSlots are the slots of all egresses, by namespace, name and number.
func (s *State) allSlots() []*skeinv1.EgressSlot {
	out := make([]*skeinv1.EgressSlot, 0, s.slotCount)
	for _, r := range s.egressNames {
		out = append(out, s.outlet(r).slots...)
	}
	return out
}

// loadEgresses takes egresses and their slots from a snapshot.
func (s *State) loadEgresses(p *skeinv1.State) error {
	for _, e := range p.GetEgresses() {
		if !s.past(e.GetCreatedIndex(), p) || !s.past(e.GetChangedIndex(), p) || e.GetChangedIndex() < e.GetCreatedIndex() ||
			!s.makeEgress(e) {
			return fmt.Errorf("egress %q/%q: it is malformed or listed twice, or one of its addresses belongs to another "+
				"or lies in no reserved block", e.GetNamespace(), e.GetName())
		}
	}
	seen, epochs := map[slotRef]bool{}, map[uint64]bool{} // of events that gave a slot or took it back: each did one thing
	for _, v := range p.GetSlots() {
		ref := slotRef{egressRef{v.GetNamespace(), v.GetName()}, v.GetNumber()}
		if seen[ref] || epochs[v.GetEpoch()] || !s.loadSlot(v, p) {
			return fmt.Errorf("slot %d of egress %q/%q: it is listed twice or not of the egress, its epoch %d is impossible, "+
				"or its node %q never was a member",
				v.GetNumber(), v.GetNamespace(), v.GetName(), v.GetEpoch(), v.GetNodeId())
		}
		seen[ref], epochs[v.GetEpoch()] = true, v.GetEpoch() != 0
	}
	if len(seen) != s.slotCount {
		return fmt.Errorf("it holds %d slots, and its egresses have %d", len(seen), s.slotCount)
	}
	return nil
}

// loadSlot takes a slot in and reports whether events can have made it.
func (s *State) loadSlot(v *skeinv1.EgressSlot, p *skeinv1.State) bool {
	have := s.Slot(v.GetNamespace(), v.GetName(), v.GetNumber())
	if have == nil {
		return false
	}
	if v.GetEpoch() == 0 {
		return proto.Equal(v, have)
	}
	if !s.past(v.GetEpoch(), p) || v.GetEpoch() <= s.Egress(v.GetNamespace(), v.GetName()).GetCreatedIndex() ||
		v.GetNodeId() == v.GetFromNodeId() || !s.everNode(v.GetNodeId()) || !s.everNode(v.GetFromNodeId()) {
		return false
	}
	s.setSlot(v)
	return true
}
