package egress

import (
	"context"
	"errors"
	"fmt"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/flows"
	"github.com/skeinmesh/skein/identity"
)

// match selects the connections of a slot. The caller holds mu.
func (g *Gateways) match(slot Slot) (path string, m flows.Match, err error) {
	r := g.served[slot.Ref]
	if r == nil || g.state == nil {
		return "", m, fmt.Errorf("this node is not a gateway of egress %s", slot.Ref)
	}
	for _, a := range sources(g.state.Egress(slot.Namespace, slot.Name), slot.Number) {
		if a.Is4() {
			m.Source4 = a
		} else {
			m.Source6 = a
		}
	}
	if !m.Source4.IsValid() && !m.Source6.IsValid() {
		return "", m, errors.New("its packets leave with the gateway node's own address, and so its connections cannot move")
	}
	return r.file, m, nil
}

// TakeOver loads connections of a slot that its former owner hands over to this node.
func (g *Gateways) TakeOver(from identity.ID, r *skeinv1.TakeOverRequest) *skeinv1.TakeOverResponse {
	slot, epoch := slotOf(r.GetSlot()), r.GetSlot().GetEpoch()
	fail := func(format string, a ...any) *skeinv1.TakeOverResponse {
		return &skeinv1.TakeOverResponse{Failed: uint32(len(r.GetConnections())), Reason: fmt.Sprintf(format, a...)}
	}
	g.mu.Lock()
	path, m, err := g.match(slot)
	var now *skeinv1.EgressSlot
	if g.state != nil {
		now = g.state.Slot(slot.Namespace, slot.Name, uint32(slot.Number))
	}
	g.mu.Unlock()
	switch {
	case err != nil:
		return fail("%v", err)
	case now.GetEpoch() != epoch || now.GetNodeId() != g.cfg.Self.String() || now.GetFromNodeId() != from.String():
		return fail("slot %s does not come here from that node in epoch %d", slot, epoch)
	case len(r.GetConnections()) > partConnections || r.GetPart() >= maxParts:
		return fail("the part has too many connections, or there are too many parts")
	}
	g.leaseClient.TakeOver(slot, epoch, false)
	loaded, failed, err := flows.Load(path, m, r.GetConnections())
	g.mu.Lock()
	t := g.taken[slot]
	if t.epoch != epoch {
		t = taken{epoch: epoch}
	}
	t.count += uint32(loaded)
	g.taken[slot] = t
	g.mu.Unlock()
	if r.GetLast() {
		g.leaseClient.TakeOver(slot, epoch, true)
		g.cfg.Journal(&skeinv1.SlotHeld{What: "taken-over", Namespace: slot.Namespace, Name: slot.Name,
			Number: uint32(slot.Number), Epoch: epoch, Connections: t.count})
	}
	out := &skeinv1.TakeOverResponse{Loaded: uint32(loaded), Failed: uint32(failed)}
	if err != nil {
		out.Reason = err.Error()
	}
	return out
}

// HandOver sends a slot's connections to its new owner.
func (k kernel) HandOver(ctx context.Context, slot Slot, epoch uint64, to identity.ID) error {
	k.g.hostWanted()
	k.g.mu.Lock()
	path, m, err := k.g.match(slot)
	k.g.mu.Unlock()
	var all [][]byte
	if err == nil {
		all, err = flows.Dump(path, m)
	}
	// Even after an error the new owner is sent the last part, so that it stops waiting.
	ref := slotRef(slot, epoch)
	for part := uint32(0); ; part++ {
		n := min(len(all), partConnections)
		r := &skeinv1.TakeOverRequest{Slot: ref, Part: part, Connections: all[:n], Last: n == len(all)}
		all = all[n:]
		answer, sendErr := k.g.cfg.TakeOver(ctx, to, r)
		if sendErr != nil {
			return errors.Join(err, sendErr)
		}
		if err == nil && answer.GetReason() != "" {
			err = errors.New(answer.GetReason())
		}
		if r.Last {
			break
		}
	}
	if err == nil {
		k.g.cfg.Journal(&skeinv1.SlotHeld{What: "handed-over", Namespace: slot.Namespace, Name: slot.Name,
			Number: uint32(slot.Number), Epoch: epoch})
	}
	return err
}
