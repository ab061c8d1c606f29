package events

import (
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// foldEgress folds what schema 3 brought.
func (s *State) foldEgress(e *skeinv1.Event) {
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_EgressDefined:
		if v := b.EgressDefined.GetEgress(); v.GetCreatedIndex() == e.GetIndex() && v.GetChangedIndex() == e.GetIndex() {
			s.makeEgress(v)
		}
	case *skeinv1.Event_EgressChanged:
		if v := b.EgressChanged.GetEgress(); v.GetChangedIndex() == e.GetIndex() {
			s.changeEgress(v)
		}
	case *skeinv1.Event_EgressRemoved:
		s.removeEgress(egressRef{b.EgressRemoved.GetNamespace(), b.EgressRemoved.GetName()})
	case *skeinv1.Event_SlotAssigned:
		v := b.SlotAssigned.GetSlot()
		if old := s.slotBefore(v, e); old != nil && old.GetNodeId() == "" && v.GetFromNodeId() == "" &&
			find(&s.nodes, v.GetNodeId()) != nil {
			s.setSlot(v)
		}
	case *skeinv1.Event_SlotMoved:
		v := b.SlotMoved.GetSlot()
		if old := s.slotBefore(v, e); old.GetNodeId() != "" && v.GetFromNodeId() == old.GetNodeId() &&
			v.GetNodeId() != old.GetNodeId() &&
			find(&s.nodes, v.GetNodeId()) != nil {
			s.setSlot(v)
		}
	case *skeinv1.Event_SlotReleased:
		v := b.SlotReleased.GetSlot()
		if old := s.slotBefore(v, e); old.GetNodeId() != "" && v.GetFromNodeId() == old.GetNodeId() && v.GetNodeId() == "" {
			s.setSlot(v)
		}
	}
}

// slotBefore is the slot that an event replaces, or nil if the event's own index is not its epoch.
func (s *State) slotBefore(v *skeinv1.EgressSlot, e *skeinv1.Event) *skeinv1.EgressSlot {
	if v.GetEpoch() != e.GetIndex() {
		return nil
	}
	return s.Slot(v.GetNamespace(), v.GetName(), v.GetNumber())
}

// newOutlet reads an egress, and refuses one that cannot be: its names are DNS labels, its gateways have a label, each
// slot has an endpoint in a reserved block of the egress's pool, source addresses are in reserved blocks, too, and no
// address is anybody else's. What an egress may ask for beyond that is Decide's alone.
func (s *State) newOutlet(e *skeinv1.Egress) (*outlet, []addressUse, bool) {
	n := len(e.GetEndpoints())
	if checkLabel("namespace", e.GetNamespace()) != nil || checkLabel("name", e.GetName()) != nil ||
		checkPoolName(e.GetPool()) != nil || len(e.GetGateways()) == 0 || n == 0 || uint64(n) != uint64(e.GetReplicas()) ||
		len(e.GetAddresses()) != 0 && len(e.GetAddresses()) != n {
		return nil, nil, false
	}
	o := &outlet{egress: &cell[*skeinv1.Egress]{value: e}}
	for _, text := range e.GetDestinations() {
		p, err := netip.ParsePrefix(text)
		if err != nil || p.Addr().Is4In6() || p != p.Masked() || p.String() != text {
			return nil, nil, false
		}
		o.destinations = append(o.destinations, p)
	}
	uses, ok := usesOf(e)
	if !ok {
		return nil, nil, false
	}
	for _, u := range uses {
		if other, taken := s.EgressAddressAt(u.addr); taken && other.ref() != refOf(e) {
			return nil, nil, false
		}
		r := s.poolAt(u.addr)
		if r == nil || !u.Source && r.pool.GetName() != e.GetPool() || r.static(u.addr) != nil {
			return nil, nil, false
		}
		number, _, _ := r.layout.find(u.addr)
		if b := r.block(number); b == nil || b.GetNodeId() != "" {
			return nil, nil, false
		}
	}
	for i := range n {
		o.slots = append(o.slots, newSlot(e, i))
	}
	return o, uses, true
}

// newSlot is a slot that never had an owner.
func newSlot(e *skeinv1.Egress, number int) *skeinv1.EgressSlot {
	return &skeinv1.EgressSlot{Namespace: e.GetNamespace(), Name: e.GetName(), Number: uint32(number)}
}

// makeEgress adds an egress whose slots have no owner, unless it is there or cannot be; it reports whether it did.
func (s *State) makeEgress(e *skeinv1.Egress) bool {
	ref := refOf(e)
	if s.outlet(ref) != nil {
		return false
	}
	o, uses, ok := s.newOutlet(e)
	if !ok {
		return false
	}
	i, _ := slices.BinarySearchFunc(s.egressNames, ref, egressRef.compare)
	s.egressNames = slices.Insert(slices.Clone(s.egressNames), i, ref)
	s.putOutlet(ref, o, uses)
	return true
}

// putOutlet takes an egress in, with what is derived from it but the owners of its slots.
func (s *State) putOutlet(ref egressRef, o *outlet, uses []addressUse) {
	s.outlets.put(s.own(), textKey(ref.key()), ref.key(), o)
	s.slotCount += len(o.slots)
	s.sizes.add(sectionEgresses, o.egress.get())
	for _, v := range o.slots {
		s.sizes.add(sectionEgresses, v)
	}
	s.destinationCount += len(o.destinations)
	for _, u := range uses {
		text := u.addr.String()
		s.egressAddrs.put(s.own(), textKey(text), text, u.EgressUse)
		s.countEgress(u.addr, 1)
	}
}

// dropOutlet is the reverse of putOutlet; the egress itself stays until it is replaced or removed.
func (s *State) dropOutlet(o *outlet) {
	s.slotCount -= len(o.slots)
	s.sizes.drop(sectionEgresses, o.egress.get())
	for _, v := range o.slots {
		s.sizes.drop(sectionEgresses, v)
	}
	s.destinationCount -= len(o.destinations)
	uses, _ := usesOf(o.egress.get())
	for _, u := range uses {
		text := u.addr.String()
		s.egressAddrs.del(s.own(), textKey(text), text)
		s.countEgress(u.addr, -1)
	}
}

// countEgress counts an address in or out of its block.
func (s *State) countEgress(a netip.Addr, by int) {
	r := s.poolAt(a)
	number, _, _ := r.layout.find(a)
	key := egressBlock(r.pool.GetName(), number)
	have, _ := s.egressIn.get(textKey(key), key)
	if n := int(have) + by; n > 0 {
		s.egressIn.put(s.own(), textKey(key), key, uint32(n))
	} else {
		s.egressIn.del(s.own(), textKey(key), key)
	}
}

// changeEgress replaces an egress. The endpoints of slots that stay are theirs for life, and the slots keep their
// owners.
func (s *State) changeEgress(e *skeinv1.Egress) {
	ref := refOf(e)
	old := s.outlet(ref)
	if old == nil {
		return
	}
	was := old.egress.get()
	if e.GetPool() != was.GetPool() || e.GetCreatedAt() != was.GetCreatedAt() ||
		e.GetCreatedIndex() != was.GetCreatedIndex() {
		return
	}
	kept := min(len(old.slots), len(e.GetEndpoints()))
	for i := range kept {
		if !proto.Equal(e.GetEndpoints()[i], was.GetEndpoints()[i]) {
			return
		}
	}
	o, uses, ok := s.newOutlet(e)
	if !ok {
		return
	}
	copy(o.slots, old.slots[:kept])
	s.dropOutlet(old)
	for _, v := range old.slots[kept:] {
		s.disown(v)
	}
	s.putOutlet(ref, o, uses)
}

// removeEgress takes an egress out, with its slots.
func (s *State) removeEgress(ref egressRef) {
	o := s.outlet(ref)
	if o == nil {
		return
	}
	s.dropOutlet(o)
	for _, v := range o.slots {
		s.disown(v)
	}
	s.outlets.del(s.own(), textKey(ref.key()), ref.key())
	s.egressNames = slices.DeleteFunc(slices.Clone(s.egressNames), func(r egressRef) bool { return r == ref })
}

// setSlot replaces a slot that is there.
func (s *State) setSlot(v *skeinv1.EgressSlot) {
	ref := slotRef{egressRef{v.GetNamespace(), v.GetName()}, v.GetNumber()}
	o := *s.outlet(ref.egressRef)
	s.disown(o.slots[ref.number])
	s.sizes.drop(sectionEgresses, o.slots[ref.number])
	s.sizes.add(sectionEgresses, v)
	o.slots = slices.Clone(o.slots)
	o.slots[ref.number] = v
	s.outlets.put(s.own(), textKey(ref.egressRef.key()), ref.egressRef.key(), &o)
	if h, ok := hexKey(v.GetNodeId()); ok {
		held, _ := s.slotOwners.get(h, v.GetNodeId())
		held.put(s.own(), textKey(ref.key()), ref.key(), ref)
		s.slotOwners.put(s.own(), h, v.GetNodeId(), held)
	}
}

// disown takes a slot out of the index of its owner.
func (s *State) disown(v *skeinv1.EgressSlot) {
	h, ok := hexKey(v.GetNodeId())
	if !ok {
		return
	}
	ref := slotRef{egressRef{v.GetNamespace(), v.GetName()}, v.GetNumber()}
	held, _ := s.slotOwners.get(h, v.GetNodeId())
	held.del(s.own(), textKey(ref.key()), ref.key())
	if held.n == 0 {
		s.slotOwners.del(s.own(), h, v.GetNodeId())
	} else {
		s.slotOwners.put(s.own(), h, v.GetNodeId(), held)
	}
}
