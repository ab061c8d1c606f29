package agent

import (
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// withSlot defines egress out/any with one slot, which the first host has, and whose gateways are all hosts.
func (w *world) withSlot(hosts ...host) {
	w.t.Helper()
	for _, h := range hosts {
		w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: h.key.ID().String(),
			Labels: map[string]string{"gateway": "yes"}, SetLabels: true}}})
	}
	w.must(&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{
		Name: "default", Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.100.0.0/24"}}, BlockSizeBits: 3}}}})
	w.must(&skeinv1.Command{Body: &skeinv1.Command_DefineEgress{DefineEgress: &skeinv1.DefineEgress{
		Egress: &skeinv1.Egress{
			Namespace: "out", Name: "any", Destinations: []string{"192.0.2.0/24"}, Replicas: 1,
			Gateways: map[string]string{"gateway": "yes"}}}}})
	w.give(hosts[0], false)
}

// give assigns the slot of out/any, and is its epoch then.
func (w *world) give(h host, planned bool) uint64 {
	w.t.Helper()
	w.must(&skeinv1.Command{Body: &skeinv1.Command_AssignSlot{AssignSlot: &skeinv1.AssignSlot{Namespace: "out",
		Name:   "any",
		NodeId: h.key.ID().String(), Epoch: w.state.Slot("out", "any", 0).GetEpoch(), Reason: "chosen", Planned: planned}}})
	return w.state.Slot("out", "any", 0).GetEpoch()
}

// A slot that moves by plan is led to its former owner for a while, and no longer; one that moves because its owner is
// gone is not, nor is one that moved before this agent looked.
func TestSlotsThatMoveByPlanLinger(t *testing.T) {
	a, b := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, a, b)
	w.withSlot(a, b)
	w.give(b, true)
	agent := newTestAgent(a, w.state)
	e := &ownEgresses{a: agent, moved: map[uint64]time.Time{}}
	e.noteMoves(w.state, time.Now())
	if got := e.lingering(); len(got) > 0 {
		t.Errorf("a move from before lingers: %v", got)
	}
	w.give(a, false)
	e.noteMoves(w.state, time.Now())
	if got := e.lingering(); len(got) > 0 {
		t.Errorf("a move from a dead owner lingers: %v", got)
	}
	epoch := w.give(b, true)
	e.noteMoves(w.state, time.Now())
	if got := e.lingering(); !got[epoch] || len(got) != 1 {
		t.Errorf("lingering are %v, want epoch %d", got, epoch)
	}
	select {
	case <-agent.wake: // the ways are led anew then
	case <-time.After(10 * time.Second):
		t.Error("the agent's loop does not learn of its end")
	}
	if got := e.lingering(); len(got) > 0 {
		t.Errorf("after the end: %v", got)
	}
	e.noteMoves(w.state, time.Now())
	if len(e.moved) > 0 {
		t.Errorf("remembered: %v", e.moved)
	}
	if (*ownEgresses)(nil).lingering() != nil {
		t.Error("an agent that only relays has slots")
	}
}
