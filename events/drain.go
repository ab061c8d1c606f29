package events

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// DefaultDrain is how long slots of an egress drain at most that says nothing else, in milliseconds.
const DefaultDrain = 600_000

// drainSchema is the event schema that brought slots that drain, and egresses that spread flows.
const drainSchema = 9

// What an egress spreads over its slots.
const (
	SpreadClient = "client" // each client's flows go by one slot
	SpreadFlow   = "flow"   // each flow goes by a slot of its own
)

// schemaOfEgress is the schema of an event that has an egress.
func schemaOfEgress(e *skeinv1.Egress) uint32 {
	if e.GetDraining() > 0 || e.GetDrainMillis() > 0 || e.GetSpread() != "" {
		return drainSchema
	}
	return 3
}

// Replicas are the slots of an egress that take new flows; the slots from that number on drain.
func Replicas(e *skeinv1.Egress) uint32 {
	return e.GetReplicas() - min(e.GetDraining(), e.GetReplicas())
}

// DrainedAt is when the slots of an egress that drain end at the latest; ok is false when none does.
func DrainedAt(e *skeinv1.Egress) (at time.Time, ok bool) {
	millis := int64(e.GetDrainMillis())
	if millis == 0 {
		millis = DefaultDrain
	}
	return time.Unix(0, e.GetDrainingSince()).Add(time.Duration(millis) * time.Millisecond), e.GetDraining() > 0
}

// Lasting is a copy of an egress without the slots that drain: what its user asks for. The endpoints are left as they
// are.
func Lasting(e *skeinv1.Egress) *skeinv1.Egress {
	n := Replicas(e)
	e = proto.CloneOf(e)
	e.Addresses = e.Addresses[:min(len(e.Addresses), int(n))]
	e.Replicas, e.Draining, e.DrainingSince = n, 0, 0
	return e
}

// drainSlots has the slots of an egress drain that the next one lacks, but for the given number of those that drain
// already, which end. Those whose source address another slot gets, or that cannot keep theirs, end at once, and so
// they all do while a member does not know of draining.
func (d *decision) drainSlots(old, next *skeinv1.Egress, end uint32) {
	total := old.GetReplicas() - end
	if next.GetReplicas() >= total || !d.allFold(drainSchema) ||
		(len(old.GetAddresses()) > 0) != (len(next.GetAddresses()) > 0) {
		return
	}
	if len(old.GetAddresses()) > 0 {
		rest := old.GetAddresses()[next.GetReplicas():total]
		if slices.ContainsFunc(rest, func(a *skeinv1.EgressAddress) bool { return overlaps(a, next.GetAddresses()) }) {
			return
		}
		next.Addresses = append(slices.Clone(next.GetAddresses()), rest...)
	}
	next.Draining, next.Replicas = total-next.GetReplicas(), total
	next.DrainingSince = d.c.GetTime()
	if next.GetDraining() <= old.GetDraining() { // none is new among them
		next.DrainingSince = old.GetDrainingSince()
	}
}

// overlaps reports whether one of several pairs of addresses has an address of a pair.
func overlaps(a *skeinv1.EgressAddress, all []*skeinv1.EgressAddress) bool {
	return slices.ContainsFunc(all, func(b *skeinv1.EgressAddress) bool {
		return a.GetIpv4() != "" && a.GetIpv4() == b.GetIpv4() || a.GetIpv6() != "" && a.GetIpv6() == b.GetIpv6()
	})
}
