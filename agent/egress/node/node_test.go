package node

import (
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/api/apitest"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Packets for a slot in a planned move go to its former owner for a while, and no longer. That does not apply to a
// slot whose owner is gone, nor to one that moved before this agent started.
func TestSlotsThatMoveByPlanHaveAGracePeriod(t *testing.T) {
	st, ids := apitest.State(t)
	do := func(c *skeinv1.Command) {
		t.Helper()
		st = st.Clone()
		apitest.Decide(t, st, c)
	}
	for _, id := range ids {
		do(&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: id,
			Labels: map[string]string{"gateway": "yes"}, SetLabels: true}}})
	}
	do(&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{
		Name: "default", Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.100.0.0/24"}}, BlockSizeBits: 3}}}})
	do(&skeinv1.Command{Body: &skeinv1.Command_DefineEgress{DefineEgress: &skeinv1.DefineEgress{
		Egress: &skeinv1.Egress{Namespace: "out", Name: "any", Destinations: []string{"192.0.2.0/24"}, Replicas: 1,
			Gateways: map[string]string{"gateway": "yes"}}}}})
	give := func(id string, planned bool) uint64 { // it returns the slot's epoch then
		t.Helper()
		do(&skeinv1.Command{Body: &skeinv1.Command_AssignSlot{AssignSlot: &skeinv1.AssignSlot{Namespace: "out",
			Name: "any", NodeId: id, Epoch: st.Slot("out", "any", 0).GetEpoch(), Reason: "chosen", Planned: planned}}})
		return st.Slot("out", "any", 0).GetEpoch()
	}
	a, b := ids[0], ids[1]
	give(a, false)
	give(b, true)
	woken := make(chan struct{}, 8)
	e := &Node{c: Config{Wake: func() { woken <- struct{}{} }}, moved: map[uint64]time.Time{}}
	e.noteMoves(st, time.Now())
	if got := e.InGrace(); len(got) > 0 {
		t.Errorf("a move from before has a grace period: %v", got)
	}
	give(a, false)
	e.noteMoves(st, time.Now())
	if got := e.InGrace(); len(got) > 0 {
		t.Errorf("a move from a dead owner has a grace period: %v", got)
	}
	epoch := give(b, true)
	e.noteMoves(st, time.Now())
	if got := e.InGrace(); !got[epoch] || len(got) != 1 {
		t.Errorf("in their grace period are %v, want epoch %d", got, epoch)
	}
	select {
	case <-woken: // the routes change then
	case <-time.After(10 * time.Second):
		t.Error("the agent's loop does not learn of its end")
	}
	if got := e.InGrace(); len(got) > 0 {
		t.Errorf("after the end: %v", got)
	}
	e.noteMoves(st, time.Now())
	if len(e.moved) > 0 {
		t.Errorf("remembered: %v", e.moved)
	}
	if (*Node)(nil).InGrace() != nil {
		t.Error("an agent that only relays has slots")
	}
}
