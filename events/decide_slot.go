package events

import (
	"cmp"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// slotAt is the slot that a command means. It is refused unless its epoch is the present one: who decided on an older
// state decided about another owner.
func (d *decision) slotAt(namespace, name string, number uint32, epoch uint64) (*outlet, *skeinv1.EgressSlot, error) {
	o, err := d.outlet(namespace, name)
	if err != nil {
		return nil, nil, err
	}
	ref := slotRef{egressRef{namespace, name}, number}
	if uint64(number) >= uint64(len(o.slots)) {
		return nil, nil, refuse(NotFound, "egress %s has no slot %d: it has %d, numbered from 0", ref.egressRef,
			number, len(o.slots))
	}
	v := o.slots[number]
	if v.GetEpoch() != epoch {
		return nil, nil, refuse(FailedPrecondition, "slot %s is fenced: it is at epoch %d with %s, and this command was "+
			"decided at epoch %d; decide again on the present state", ref, v.GetEpoch(), d.s.slotOwner(v), epoch)
	}
	return o, v, nil
}

// slotOwner names who has a slot.
func (s *State) slotOwner(v *skeinv1.EgressSlot) string {
	if v.GetNodeId() == "" {
		return "no owner"
	}
	return "node " + s.nameOf(v.GetNodeId())
}

// assignSlot gives a slot to a node, or moves it there.
func (d *decision) assignSlot(c *skeinv1.AssignSlot) error {
	if err := checkText("the reason", c.GetReason(), MaxText); err != nil {
		return err
	}
	o, old, err := d.slotAt(c.GetNamespace(), c.GetName(), c.GetNumber(), c.GetEpoch())
	if err != nil {
		return err
	}
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	if old.GetNodeId() == n.GetId() {
		d.answer.Slot = old
		return nil
	}
	if e := o.egress.get(); !Eligible(e, n) {
		why := "lacks a label that the egress requires of its gateways"
		if n.GetDraining() {
			why = "is being drained"
		}
		return refuse(FailedPrecondition, "node %s cannot have slot %d of egress %s: it %s; choose another node", n.GetName(),
			c.GetNumber(), refOf(e), why)
	}
	v := d.nextSlot(old, n.GetId(), c.GetReason())
	v.LeaseMillis = cmp.Or(o.egress.get().GetLeaseMillis(), DefaultEgressLease)
	if old.GetNodeId() == "" {
		d.emit(&skeinv1.Event{Body: &skeinv1.Event_SlotAssigned{SlotAssigned: &skeinv1.SlotAssigned{Slot: v}}})
	} else {
		v.FromNodeId, v.Planned = old.GetNodeId(), c.GetPlanned()
		d.emit(&skeinv1.Event{Body: &skeinv1.Event_SlotMoved{SlotMoved: &skeinv1.SlotMoved{Slot: v}}})
	}
	d.answer.Slot = v
	return nil
}

// nextSlot is the slot that the next event makes of old.
//
// The former lease is the longest of all before: the owner before the last may have been granted a longer one that
// still runs when the slot moves twice at once, and the state has no clock that could tell when it ended. It is what a
// leader waits that knows of no grants.
func (d *decision) nextSlot(old *skeinv1.EgressSlot, nodeID, reason string) *skeinv1.EgressSlot {
	return &skeinv1.EgressSlot{
		Namespace: old.GetNamespace(), Name: old.GetName(), Number: old.GetNumber(), NodeId: nodeID,
		Epoch: d.nextIndex(), Since: d.c.GetTime(), Reason: reason, FormerLeaseMillis: max(old.GetLeaseMillis(),
			old.GetFormerLeaseMillis()),
	}
}

// releaseSlot takes a slot from its owner. One that has none has what is wanted.
func (d *decision) releaseSlot(c *skeinv1.ReleaseSlot) error {
	if err := checkText("the reason", c.GetReason(), MaxText); err != nil {
		return err
	}
	_, old, err := d.slotAt(c.GetNamespace(), c.GetName(), c.GetNumber(), c.GetEpoch())
	if err != nil {
		return err
	}
	d.answer.Slot = d.emitSlotReleased(old, c.GetReason())
	return nil
}

// emitSlotReleased takes a slot from its owner, if it has one, and is the slot then.
func (d *decision) emitSlotReleased(old *skeinv1.EgressSlot, reason string) *skeinv1.EgressSlot {
	if old.GetNodeId() == "" {
		return old
	}
	v := d.nextSlot(old, "", reason)
	v.FromNodeId = old.GetNodeId()
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_SlotReleased{SlotReleased: &skeinv1.SlotReleased{Slot: v}}})
	return v
}

// drainNode makes a node no gateway of any egress, or lets it be one again. Its slots are moved away by the leader's
// slot controller.
func (d *decision) drainNode(c *skeinv1.DrainNode) error {
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	next := proto.CloneOf(n)
	next.Draining = c.GetDraining()
	d.answer.Node = n
	d.emitChange(next)
	return nil
}
