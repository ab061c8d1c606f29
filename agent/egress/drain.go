package egress

import (
	"context"
	"errors"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
)

// DrainLeast is the shortest drain of a slot: before that, clients may not have learned of it and may still begin
// flows.
const DrainLeast = 3 * time.Second

// Drained names draining slots of an egress that should end.
type Drained struct {
	Ref
	Changed uint64 // index of the egress when this was decided
	End     uint32 // number of slots to end, the highest first
}

// ChooseDrained returns how many of an egress's draining slots end now, by the log's clock: all when the drain's time
// is over; otherwise the highest ones that have no owner or whose owners report no flow. Slot numbers have no gaps,
// so a slot with flows keeps those below it.
func ChooseDrained(now time.Time, e *skeinv1.Egress, slots []PlaceSlot, nodes []PlaceNode) (d Drained, ok bool) {
	ref := RefOf(e)
	d = Drained{Ref: ref, Changed: e.GetChangedIndex()}
	until, draining := events.DrainedAt(e)
	if !draining {
		return d, false
	}
	if !now.Before(until) {
		d.End = e.GetDraining()
		return d, true
	}
	if now.Sub(time.Unix(0, e.GetDrainingSince())) < DrainLeast {
		return d, false
	}
	for n := len(slots) - 1; n >= int(events.Replicas(e)); n-- {
		owner := slices.IndexFunc(nodes, func(one PlaceNode) bool { return one.ID == slots[n].Node })
		if !slots[n].Node.IsZero() && (owner < 0 || !slices.Contains(nodes[owner].States[ref].Idle, uint32(n))) {
			break
		}
		d.End++
	}
	return d, d.End > 0
}

// drained lists the slots to end, with at most one proposal per egress. The caller holds mu.
func (k *SlotController) drained(p Placement) (out []Drained) {
	now := k.cfg.Wall()
	for _, e := range k.agreed().view.Egresses {
		i := slices.IndexFunc(p.Egresses, func(one PlaceEgress) bool { return one.Ref == RefOf(e) })
		if e.GetDraining() == 0 || i < 0 || len(p.Egresses[i].Slots) != int(e.GetReplicas()) {
			continue // nothing drains, or the state is newer than p: the next round handles it
		}
		d, ok := ChooseDrained(now, e, p.Egresses[i].Slots, p.Nodes)
		if ok && !k.ending[d.Ref] {
			k.ending[d.Ref] = true
			out = append(out, d)
		}
	}
	return out
}

// untilDrained is the time until slots may end without further reports. The caller holds mu.
func (k *SlotController) untilDrained() (left time.Duration, any bool) {
	now := k.cfg.Wall()
	for _, e := range k.agreed().view.Egresses {
		until, draining := events.DrainedAt(e)
		if !draining {
			continue
		}
		for _, at := range []time.Time{until, time.Unix(0, e.GetDrainingSince()).Add(DrainLeast)} {
			if wait := at.Sub(now); wait > 0 && (!any || wait < left) {
				left, any = wait, true
			}
		}
	}
	return left, any
}

// end repeats the proposal until its outcome is known.
func (k *SlotController) end(ctx context.Context, d Drained) {
	c := &skeinv1.Command{RequestId: consensus.NewRequestID(), Issuer: k.cfg.Self.String(),
		Body: &skeinv1.Command_ChangeEgress{
			ChangeEgress: &skeinv1.ChangeEgress{Namespace: d.Namespace, Name: d.Name, EndDraining: d.End,
				AtChangedIndex: d.Changed}}}
	done := func() {
		k.mu.Lock()
		delete(k.ending, d.Ref)
		k.mu.Unlock()
		k.wake()
	}
	for ctx.Err() == nil {
		try, cancel := context.WithTimeout(ctx, proposeFor)
		answer, err := k.cfg.Lead.Propose(try, c)
		cancel()
		switch {
		case err == nil:
			k.log.Info("slots have drained", "egress", d.Ref.String(), "slots", d.End)
			for at := k.index(); at < answer.GetIndex(); at = k.index() {
				if k.cfg.Wait(ctx, at) != nil {
					return
				}
			}
			done()
			return
		case events.CodeOf(err) != "":
			k.log.Warn("the end of slots that drain was refused", "egress", d.Ref.String(), "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(refusedFor):
				done()
			}
			return
		case errors.Is(err, consensus.ErrNotLeader):
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(uncertainFor):
		}
	}
}

func (k *SlotController) index() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.agreed().view.Index
}
