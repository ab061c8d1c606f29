package egress

import (
	"cmp"
	"fmt"
	"net/netip"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Slot names one slot of an egress.
type Slot struct {
	Ref
	Number int
}

// String is namespace/name#number.
func (s Slot) String() string { return fmt.Sprintf("%s#%d", s.Ref, s.Number) }

// Compare orders slots by egress, then by number.
func (s Slot) Compare(o Slot) int { return cmp.Or(s.Ref.Compare(o.Ref), s.Number-o.Number) }

// slotOf is the slot that a message names.
func slotOf(m interface {
	GetNamespace() string
	GetName() string
	GetNumber() uint32
}) Slot {
	return Slot{RefOf(m), int(m.GetNumber())}
}

func slotRef(s Slot, epoch uint64) *skeinv1.SlotRef {
	return &skeinv1.SlotRef{Namespace: s.Namespace, Name: s.Name, Number: uint32(s.Number), Epoch: epoch}
}

// SlotState is one slot in the agreed state.
type SlotState struct {
	Slot
	Node    identity.ID   // zero: no owner
	Epoch   uint64        // of its owner and source addresses; 0: it never had an owner
	From    identity.ID   // previous owner; zero: none
	Planned bool          // From was able to hand the slot over when it moved
	Lease   time.Duration // the longest in this epoch
	Former  time.Duration // longest lease that may run from an earlier epoch
	Reason  string
	// IPv4 and IPv6 are the endpoint of the slot's tunnels; one of the two may be invalid.
	IPv4, IPv6 netip.Addr
	Sources    []netip.Addr // source addresses of its packets; none: the gateway's own
}

// StateOf combines a slot of the agreed state with its egress, which may be nil. An owner that is not a valid node ID
// counts as none.
func StateOf(e *skeinv1.Egress, s *skeinv1.EgressSlot) SlotState {
	node, _ := identity.ParseID(s.GetNodeId())
	from, _ := identity.ParseID(s.GetFromNodeId())
	out := SlotState{Node: node, From: from, Planned: s.GetPlanned(), Reason: s.GetReason(),
		Slot: slotOf(s), Epoch: s.GetEpoch(),
		Lease:  time.Duration(s.GetLeaseMillis()) * time.Millisecond,
		Former: time.Duration(s.GetFormerLeaseMillis()) * time.Millisecond}
	if out.Lease == 0 {
		out.Lease = events.DefaultEgressLease * time.Millisecond
	}
	if at := e.GetEndpoints(); out.Number < len(at) {
		out.IPv4, out.IPv6 = address(at[out.Number].GetIpv4()), address(at[out.Number].GetIpv6())
	}
	out.Sources = sources(e, out.Number)
	return out
}

// longest is the longest lease of the slot that any node may have.
func (s SlotState) longest() time.Duration { return max(s.Lease, s.Former) }

// counted is how long a leader assumes that such a lease runs.
func (s SlotState) counted() time.Duration { return s.longest() + GuardFor(s.longest()) }

// sources are the source addresses of a slot's packets; none: the gateway's own.
func sources(e *skeinv1.Egress, number int) (out []netip.Addr) {
	if number >= len(e.GetAddresses()) {
		return nil
	}
	for _, text := range []string{e.GetAddresses()[number].GetIpv4(), e.GetAddresses()[number].GetIpv6()} {
		if a := address(text); a.IsValid() {
			out = append(out, a)
		}
	}
	return out
}
