package egress

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

var (
	t0   = time.Now()
	refA = Ref{"x", "a"}
)

// place is a cluster of healthy gateways, an hour after the term began, and one egress whose slots they own.
func place(nodes int, owners ...int) Placement {
	p := Placement{Now: t0.Add(time.Hour), Since: t0, Egresses: []PlaceEgress{{Ref: refA,
		Gateways: map[string]string{"gw": "yes"}}}}
	for i := range nodes {
		p.Nodes = append(p.Nodes, PlaceNode{ID: nodeID(i), Name: fmt.Sprintf("g%d", i), Heard: p.Now,
			Labels: map[string]string{"gw": "yes"},
			States: map[Ref]GatewayState{refA: {Ready: true, Health: skeinv1.GatewayState_HEALTH_GOOD}}})
	}
	for n, o := range owners {
		s := PlaceSlot{SlotState: SlotState{Slot: Slot{refA, n}, Epoch: 7, Lease: 1200 * time.Millisecond}, Seen: t0}
		if o >= 0 {
			s.Node, s.Granted, s.FreeAt = nodeID(o), p.Now, p.Now.Add(1300*time.Millisecond)
		}
		p.Egresses[0].Slots = append(p.Egresses[0].Slots, s)
	}
	return p
}

// dead makes a node silent long enough for its leases to end.
func dead(p *Placement, n int) {
	p.Nodes[n].Heard = p.Now.Add(-2 * time.Second)
	for i := range p.Egresses[0].Slots {
		if s := &p.Egresses[0].Slots[i]; s.Node == nodeID(n) {
			s.FreeAt = p.Now
		}
	}
}

func health(p *Placement, n int, h skeinv1.GatewayState_Health, ready bool) {
	p.Nodes[n].States = map[Ref]GatewayState{refA: {Ready: ready, Health: h, Reason: "no answer"}}
}

const bad, unknown, good = skeinv1.GatewayState_HEALTH_BAD, skeinv1.GatewayState_HEALTH_UNKNOWN,
	skeinv1.GatewayState_HEALTH_GOOD

func TestChoose(t *testing.T) {
	for name, c := range map[string]struct {
		p    Placement
		do   func(p *Placement)
		want []string // slot: from→to planned
	}{
		"all is well":                    {place(3, 0, 1, 2), nil, nil},
		"nobody's":                       {place(1, -1), nil, []string{"0: -→g0"}},
		"gateways need no label: nobody": {place(2, -1), func(p *Placement) { p.Egresses[0].Gateways = nil }, nil},
		"nobody's, just begun":           {place(1, -1), func(p *Placement) { p.Since = p.Now }, nil},
		"no gateway is ready":            {place(1, -1), func(p *Placement) { health(p, 0, good, false) }, nil},
		"an unhealthy one is a resort":   {place(1, -1), func(p *Placement) { health(p, 0, bad, true) }, []string{"0: -→g0"}},
		"more slots than gateways":       {place(1, -1, -1), nil, []string{"0: -→g0", "1: -→g0"}},
		"the owner is dead":              {place(2, 0), func(p *Placement) { dead(p, 0) }, []string{"0: g0→g1"}},
		"dead, and nobody else":          {place(1, 0), func(p *Placement) { dead(p, 0) }, nil},
		"silent, but the lease may run": {place(2, 0), func(p *Placement) {
			p.Nodes[0].Heard = p.Now.Add(-time.Second)
		}, nil},
		"just assigned, not granted yet": {place(2, 0), func(p *Placement) {
			s := &p.Egresses[0].Slots[0]
			s.FreeAt, s.Seen,
				s.Granted = t0, p.Now, time.Time{}
		}, nil},
		"alive but does not renew": {place(2, 0), func(p *Placement) {
			p.Egresses[0].Slots[0].FreeAt = p.Now.Add(-2 * time.Second)
		}, []string{"0: g0→g1"}},
		"draining": {place(2, 0), func(p *Placement) { p.Nodes[0].Draining = true },
			[]string{"0: g0→g1 planned"}},
		"draining, and nobody else": {place(1, 0), func(p *Placement) { p.Nodes[0].Draining = true }, nil},
		"draining and dead": {place(2, 0), func(p *Placement) { p.Nodes[0].Draining = true; dead(p, 0) },
			[]string{"0: g0→g1"}},
		"labels fit no more": {place(2, 0), func(p *Placement) {
			p.Egresses[0].Gateways = map[string]string{"gw": "yes"}
			p.Nodes[0].Labels = nil
		},
			[]string{"0: g0→g1 planned"}},
		"labels fit another, not ready yet": {place(2, 0), func(p *Placement) {
			p.Nodes[0].Labels, p.Egresses[0].Slots[0].Unfit = nil, p.Now
			health(p, 1, good, false)
		}, nil},
		"labels fit another, not heard yet": {place(2, 0), func(p *Placement) {
			p.Nodes[0].Labels, p.Egresses[0].Slots[0].Unfit = nil, p.Now.Add(time.Millisecond-GetReady)
			p.Nodes[1].Heard = time.Time{}
		}, nil},
		"labels fit another, not ready for long": {place(2, 0), func(p *Placement) {
			p.Nodes[0].Labels, p.Egresses[0].Slots[0].Unfit = nil, p.Now.Add(-GetReady)
			health(p, 1, good, false)
		}, []string{"0: g0→-"}},
		"labels fit another, who is draining": {place(2, 0), func(p *Placement) {
			p.Nodes[0].Labels, p.Egresses[0].Slots[0].Unfit, p.Nodes[1].Draining = nil, p.Now, true
		}, []string{"0: g0→-"}},
		"labels fit another, the owner is dead": {place(2, 0), func(p *Placement) {
			p.Nodes[0].Labels, p.Egresses[0].Slots[0].Unfit = nil, p.Now
			dead(p, 0)
			health(p, 1, good, false)
		}, []string{"0: g0→-"}},
		"labels fit nobody": {place(1, 0), func(p *Placement) {
			p.Egresses[0].Gateways = map[string]string{"gw": "no"}
		}, []string{"0: g0→-"}},
		"revoked": {place(2, 0), func(p *Placement) { p.Nodes = p.Nodes[1:] }, []string{"0: gone→g1"}},
		"unhealthy": {place(2, 0), func(p *Placement) { health(p, 0, bad, true) },
			[]string{"0: g0→g1 planned"}},
		"unhealthy, the other unsure": {place(2, 0), func(p *Placement) {
			health(p, 0, bad, true)
			health(p, 1, unknown, true)
		}, []string{"0: g0→g1 planned"}},
		"both unhealthy": {place(2, 0), func(p *Placement) { health(p, 0, bad, true); health(p, 1, bad, true) }, nil},
		"unhealthy, just come": {place(2, 0), func(p *Placement) {
			health(p, 0, bad, true)
			p.Egresses[0].Slots[0].Seen = p.Now.Add(-time.Second)
		}, nil},
		"not ready":  {place(2, 0), func(p *Placement) { health(p, 0, good, false) }, []string{"0: g0→g1 planned"}},
		"two on one": {place(2, 0, 0), nil, []string{"0: g0→g1 planned"}},
		"two on one, not long": {place(2, 0, 0), func(p *Placement) {
			p.Egresses[0].Slots[1].Seen = p.Now.Add(-20 * time.Second)
		}, nil},
		"two on each":    {place(2, 0, 0, 1, 1), nil, nil},
		"a gateway more": {place(3, 0, 1), nil, nil},
		"busy": {place(2, 0), func(p *Placement) {
			p.Nodes[0].Draining = true
			p.Egresses[0].Slots[0].Busy = true
		}, nil},
		"another site first": {place(4, 0, -1), func(p *Placement) {
			for i := range p.Nodes {
				p.Nodes[i].Site = []string{"n", "n", "n", "s"}[i]
			}
		}, []string{"1: -→g3"}},
	} {
		if c.do != nil {
			c.do(&c.p)
		}
		var got []string
		for _, m := range Choose(c.p) {
			who := func(id identity.ID) string {
				for _, n := range c.p.Nodes {
					if n.ID == id {
						return n.Name
					}
				}
				if id.IsZero() {
					return "-"
				}
				return "gone"
			}
			text := fmt.Sprintf("%d: %s→%s", m.Number, who(m.From), who(m.To))
			if m.Planned {
				text += " planned"
			}
			if m.Reason == "" || m.Epoch != 7 {
				t.Errorf("%s: %+v", name, m)
			}
			got = append(got, text)
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// From any state: no ineligible node gets a slot, and after all moves nothing more needs to move.
func TestChooseProperties(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 1))
		owners := make([]int, 1+r.IntN(6))
		nodes := 1 + r.IntN(6)
		for i := range owners {
			owners[i] = r.IntN(nodes+1) - 1
		}
		p := place(nodes, owners...)
		for i := range p.Nodes {
			p.Nodes[i].Site = fmt.Sprint(r.IntN(3))
			p.Nodes[i].Draining = r.IntN(5) == 0
			health(&p, i, skeinv1.GatewayState_Health(1+r.IntN(3)), r.IntN(5) > 0)
			if r.IntN(5) == 0 {
				dead(&p, i)
			}
		}
		for round := 0; ; round++ {
			moves := Choose(p)
			if len(moves) == 0 {
				break
			}
			if round > 40 {
				t.Fatalf("seed %d: slots move for ever: %+v", seed, moves)
			}
			for _, m := range moves {
				s := &p.Egresses[0].Slots[m.Number]
				for _, n := range p.Nodes {
					if n.ID == m.To && (n.Draining || !n.States[refA].Ready || p.Now.Sub(n.Heard) > AliveFor) {
						t.Fatalf("seed %d: %+v goes to %+v", seed, m, n)
					}
				}
				if m.To == m.From || m.From != s.Node {
					t.Fatalf("seed %d: %+v of %+v", seed, m, s)
				}
				s.Node, s.From, s.Planned, s.Granted, s.FreeAt = m.To, m.From, m.Planned, p.Now, p.Now.Add(1300*time.Millisecond)
			}
		}
	}
}
