package egress

import (
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// TestChooseDrained: draining slots end with their last flow, the highest first, or when their time is over; never
// before clients can have learned of the drain.
func TestChooseDrained(t *testing.T) {
	since := time.Unix(1000, 0)
	e := &skeinv1.Egress{Namespace: "x", Name: "a", Replicas: 4, Draining: 3, DrainingSince: since.UnixNano(),
		DrainMillis: 60_000, ChangedIndex: 7}
	ref := Ref{"x", "a"}
	owner, other := nodeID(1), nodeID(2)
	for name, c := range map[string]struct {
		after   time.Duration
		owners  []identity.ID // of slots 1 to 3
		idle    map[identity.ID][]uint32
		changed func(*skeinv1.Egress)
		want    uint32
	}{
		"all have flows": {10 * time.Second, []identity.ID{owner, owner, owner}, nil, nil, 0},
		"the highest has none": {10 * time.Second, []identity.ID{owner, owner, owner},
			map[identity.ID][]uint32{owner: {3}}, nil, 1},
		"a lower one has none": {10 * time.Second, []identity.ID{owner, owner, owner},
			map[identity.ID][]uint32{owner: {1, 2}}, nil, 0},
		"none has any": {10 * time.Second, []identity.ID{owner, other, owner},
			map[identity.ID][]uint32{owner: {1, 3}, other: {2}}, nil, 3},
		"another's word": {10 * time.Second, []identity.ID{owner, owner, owner},
			map[identity.ID][]uint32{other: {1, 2, 3}}, nil, 0},
		"nobody has the highest":    {10 * time.Second, []identity.ID{owner, owner, {}}, nil, nil, 1},
		"its owner is not a member": {10 * time.Second, []identity.ID{owner, owner, nodeID(9)}, nil, nil, 0},
		"too early": {DrainLeast - 1, []identity.ID{owner, owner, owner},
			map[identity.ID][]uint32{owner: {1, 2, 3}}, nil, 0},
		"just before the time": {time.Minute - 1, []identity.ID{owner, owner, owner}, nil, nil, 0},
		"time is over":         {time.Minute, []identity.ID{owner, owner, owner}, nil, nil, 3},
		"a slot for new flows alone": {time.Hour, []identity.ID{owner, owner, owner}, nil,
			func(e *skeinv1.Egress) { e.Draining = 0 }, 0},
	} {
		now := since.Add(c.after)
		one := &skeinv1.Egress{Namespace: e.Namespace, Name: e.Name, Replicas: e.Replicas, Draining: e.Draining,
			DrainingSince: e.DrainingSince, DrainMillis: e.DrainMillis, ChangedIndex: e.ChangedIndex}
		if c.changed != nil {
			c.changed(one)
		}
		slots := []PlaceSlot{{SlotState: SlotState{Node: owner}}}
		for _, o := range c.owners {
			slots = append(slots, PlaceSlot{SlotState: SlotState{Node: o}})
		}
		var nodes []PlaceNode
		for _, id := range []identity.ID{owner, other} {
			nodes = append(nodes, PlaceNode{ID: id, States: map[Ref]GatewayState{ref: {Idle: c.idle[id]}}})
		}
		d, ok := ChooseDrained(now, one, slots, nodes)
		if ok != (c.want > 0) || d.End != c.want || ok && (d.Ref != ref || d.Changed != 7) {
			t.Errorf("%s: %+v %v, want %d", name, d, ok, c.want)
		}
	}
}
