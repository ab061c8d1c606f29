package egress

import (
	"log/slog"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// The slot controller records once when an owner's labels cease to fit, however often the state changes afterwards.
func TestSlotControllerNotesWhenLabelsFitNoMore(t *testing.T) {
	labels := map[bool]map[string]string{true: {"gw": "yes"}}
	now, view := t0, View{Index: 1, Egresses: []*skeinv1.Egress{{Namespace: refA.Namespace, Name: refA.Name, Replicas: 1,
		Gateways: labels[true]}}}
	k := NewSlotController(SlotControllerConfig{Since: t0, View: func() View { return view },
		Now: func() time.Time { return now }, Log: slog.New(slog.DiscardHandler)})
	at := func(seconds int) time.Time { return t0.Add(time.Duration(seconds) * time.Second) }
	for i, c := range []struct {
		owner int
		fits  [2]bool
		want  time.Time
	}{
		{0, [2]bool{true, false}, time.Time{}},
		{0, [2]bool{false, false}, at(1)},
		{0, [2]bool{false, true}, at(1)},
		{0, [2]bool{true, true}, time.Time{}},
		{0, [2]bool{false, true}, at(4)},
		{1, [2]bool{false, true}, time.Time{}},
		{0, [2]bool{false, true}, at(6)},
	} {
		now, view.Nodes = at(i), nil
		for n, fits := range c.fits {
			view.Nodes = append(view.Nodes, &skeinv1.Node{Id: nodeID(n).String(), Labels: labels[fits]})
		}
		view.Index++
		view.Slots = []*skeinv1.EgressSlot{{Namespace: refA.Namespace, Name: refA.Name, NodeId: nodeID(c.owner).String(),
			Epoch: uint64(1 + i/5 + i/6)}}
		p := k.placement(now)
		if got := p.Egresses[0].Slots[0].Unfit; !got.Equal(c.want) {
			t.Errorf("step %d: noted at %v, want %v", i, got.Sub(t0), c.want.Sub(t0))
		}
		if !c.want.IsZero() && Wake(p).After(c.want.Add(GetReady)) {
			t.Errorf("step %d: looks again only at %v", i, Wake(p).Sub(t0))
		}
	}
}
