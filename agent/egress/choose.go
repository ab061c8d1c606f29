package egress

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Bounds of Choose.
const (
	AliveFor    = 700 * time.Millisecond // a gateway silent for longer is not chosen; more than three renewals
	Settle      = 700 * time.Millisecond // since the term began: by then every live gateway has reported
	HoldDown    = 10 * time.Second       // a slot stays at least so long with an owner before it moves for health
	Rebalance   = 30 * time.Second       // all slots of an egress stay so long before one moves for balance
	PlannedMost = 8                      // planned moves under way at a time
	HandingOver = 3 * time.Second        // how long a planned move counts as under way
	GetReady    = 3 * time.Second        // how long an owner whose labels no longer fit waits for another
)

// Placement is all input for placing slots.
type Placement struct {
	Now      time.Time // monotonic
	Since    time.Time // when the term began
	Egresses []PlaceEgress
	Nodes    []PlaceNode
}

// PlaceEgress is an egress with its slots, by number.
type PlaceEgress struct {
	Ref
	Gateways map[string]string // labels required of a gateway
	Slots    []PlaceSlot
}

// PlaceSlot is a slot with the leader's knowledge of it.
type PlaceSlot struct {
	SlotState
	Seen    time.Time // when the slot controller first saw this epoch; not before the term began
	Unfit   time.Time // when it first saw that the owner's labels no longer fit; zero: they fit
	Granted time.Time // last grant in this epoch; zero: none in this term
	FreeAt  time.Time // see Leases.FreeAt
	Busy    bool      // a proposal for it is pending
}

// PlaceNode is a member.
type PlaceNode struct {
	ID       identity.ID
	Name     string // for reasons
	Labels   map[string]string
	Draining bool
	Site     string
	Heard    time.Time // its last request in this term; zero: none
	States   map[Ref]GatewayState
}

// GatewayState is a node's state as a possible gateway of one egress.
type GatewayState struct {
	Ready  bool
	Health skeinv1.GatewayState_Health
	Reason string
	Idle   []uint32 // draining slots without flows there
}

func (g GatewayState) bad() bool { return g.Health == skeinv1.GatewayState_HEALTH_BAD }

// Move assigns a slot to another node, or to none.
type Move struct {
	Slot
	Epoch   uint64      // the slot's present epoch
	From    identity.ID // zero: no owner
	To      identity.ID // zero: it is released
	Planned bool        // From hands it over
	Reason  string
}

// Eligible reports whether a node with these labels may be a gateway of an egress that requires the given ones. An
// egress that requires none has no gateways, so that an incomplete definition does not select every node.
func Eligible(labels, gateways map[string]string) bool {
	if len(gateways) == 0 {
		return false
	}
	for k, v := range gateways {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// Choose says which slots to move now, in the order of egresses and slots. It is a function of its argument alone.
//
//	owner                                 another is ready         nobody is
//	none                                  assigned                 -
//	lease ran out, not heard              moved                    stays: it may come back
//	lease ran out, heard, not renewed     moved after a lease      stays
//	labels fit no more                    handed over              released, after GetReady where others' labels fit
//	is not a member                          moved                    released
//	draining                              handed over              stays
//	unhealthy or not ready                handed over, HoldDown    stays
//	has two, another none                 handed over, Rebalance   -
func Choose(in Placement) []Move {
	c := chooser{in: in, nodes: make(map[identity.ID]*PlaceNode), total: make(map[identity.ID]int)}
	for i := range in.Nodes {
		c.nodes[in.Nodes[i].ID] = &in.Nodes[i]
	}
	for _, e := range in.Egresses {
		for _, s := range e.Slots {
			if !s.Node.IsZero() {
				c.total[s.Node]++
			}
			if s.Planned && s.Granted.IsZero() && in.Now.Sub(s.Seen) < HandingOver || s.Busy {
				c.handing++
			}
		}
	}
	for _, e := range in.Egresses {
		c.egress(e)
	}
	return c.moves
}

// chooser is one run of Choose.
type chooser struct {
	in      Placement
	nodes   map[identity.ID]*PlaceNode
	total   map[identity.ID]int // slots of all egresses
	handing int                 // planned moves under way
	moves   []Move
}

// spread counts one egress's slots.
type spread struct {
	nodes map[identity.ID]int
	sites map[string]int
}

func (c *chooser) egress(e PlaceEgress) {
	at := spread{make(map[identity.ID]int), make(map[string]int)}
	for _, s := range e.Slots {
		c.count(at, s.Node, 1)
	}
	moved := false
	for _, s := range e.Slots {
		if s.Busy {
			continue
		}
		if m, ok := c.slot(e, s, at); ok {
			c.record(m, at)
			moved = true
		}
	}
	if !moved {
		c.rebalance(e, at)
	}
}

func (c *chooser) count(at spread, id identity.ID, by int) {
	if n := c.nodes[id]; n != nil {
		at.sites[n.Site] += by
	}
	at.nodes[id] += by
}

func (c *chooser) record(m Move, at spread) {
	c.count(at, m.From, -1)
	c.count(at, m.To, 1)
	c.total[m.From]--
	c.total[m.To]++
	if m.Planned {
		c.handing++
	}
	c.moves = append(c.moves, m)
}

func (c *chooser) alive(n *PlaceNode) bool {
	return n != nil && !n.Heard.IsZero() && c.in.Now.Sub(n.Heard) <= AliveFor
}

func (c *chooser) slot(e PlaceEgress, s PlaceSlot, at spread) (Move, bool) {
	m := Move{Slot: s.Slot, Epoch: s.Epoch, From: s.Node}
	settled := c.in.Now.Sub(c.in.Since) >= Settle
	owner := c.nodes[s.Node]
	free := !s.FreeAt.After(c.in.Now)
	switch {
	case s.Node.IsZero():
		m.To, m.Reason = c.best(e, s, at, true), "it had no owner"
		return m, settled && !m.To.IsZero()
	case owner == nil || !Eligible(owner.Labels, e.Gateways):
		m.To, m.Reason = c.best(e, s, at, true), "its owner is no longer a gateway of this egress"
		if m.To.IsZero() && c.serving(owner, s) && c.in.Now.Sub(s.Unfit) < GetReady && c.coming(e, s) {
			return m, false
		}
		return m, settled && c.planned(&m, owner, s)
	case free && c.lapsed(owner, s):
		m.To, m.Reason = c.best(e, s, at, true), fmt.Sprintf("the lease of %s ran out", owner.Name)
		return m, settled && !m.To.IsZero()
	case owner.Draining:
		m.To, m.Reason = c.best(e, s, at, false), owner.Name+" is draining"
	case !c.alive(owner):
		return m, false // its lease decides
	case c.in.Now.Sub(s.Seen) < HoldDown:
		return m, false
	case owner.States[e.Ref].bad():
		m.To, m.Reason = c.best(e, s, at, false), fmt.Sprintf("%s is unhealthy: %s", owner.Name, owner.States[e.Ref].Reason)
	case !owner.States[e.Ref].Ready:
		m.To, m.Reason = c.best(e, s, at, false), fmt.Sprintf("%s is not ready: %s", owner.Name, owner.States[e.Ref].Reason)
	default:
		return m, false
	}
	return m, !m.To.IsZero() && c.planned(&m, owner, s)
}

// lapsed reports whether an owner whose lease has ended loses the slot: at once when it is silent; otherwise one
// lease after it could have renewed, since it may be about to.
func (c *chooser) lapsed(owner *PlaceNode, s PlaceSlot) bool {
	if !c.alive(owner) {
		return c.in.Now.Sub(s.Seen) >= s.counted()
	}
	from := s.Seen
	if s.FreeAt.After(from) {
		from = s.FreeAt
	}
	return c.in.Now.Sub(from) >= s.counted()
}

// serving reports whether the owner is alive and may forward.
func (c *chooser) serving(owner *PlaceNode, s PlaceSlot) bool {
	return c.alive(owner) && !s.Granted.IsZero() && s.FreeAt.After(c.in.Now)
}

// coming reports whether another node's labels fit. It may have got them just now, and be ready soon.
func (c *chooser) coming(e PlaceEgress, s PlaceSlot) bool {
	return slices.ContainsFunc(c.in.Nodes, func(n PlaceNode) bool {
		return n.ID != s.Node && !n.Draining && Eligible(n.Labels, e.Gateways)
	})
}

// planned makes the move a planned one if the owner can hand over, and reports whether the move may be made now.
func (c *chooser) planned(m *Move, owner *PlaceNode, s PlaceSlot) bool {
	if !c.serving(owner, s) {
		return true // the owner has nothing to hand over; the new owner waits for the lease's end
	}
	m.Planned = !m.To.IsZero()
	return !m.Planned || c.handing < PlannedMost
}

// best is the best new owner for a slot; zero: none. Unhealthy nodes are considered only as a last resort.
func (c *chooser) best(e PlaceEgress, s PlaceSlot, at spread, resort bool) (id identity.ID) {
	var nodes []*PlaceNode
	for i := range c.in.Nodes {
		n := &c.in.Nodes[i]
		g := n.States[e.Ref]
		if n.ID != s.Node && !n.Draining && Eligible(n.Labels, e.Gateways) && c.alive(n) && g.Ready && (resort || !g.bad()) {
			nodes = append(nodes, n)
		}
	}
	if len(nodes) == 0 {
		return id
	}
	leaving := c.nodes[s.Node]
	sites := func(n *PlaceNode) int {
		if leaving != nil && leaving.Site == n.Site {
			return at.sites[n.Site] - 1
		}
		return at.sites[n.Site]
	}
	return slices.MinFunc(nodes, func(a, b *PlaceNode) int {
		return cmp.Or(
			cmp.Compare(number(a.States[e.Ref].bad()), number(b.States[e.Ref].bad())),
			cmp.Compare(sites(a), sites(b)),
			cmp.Compare(at.nodes[a.ID], at.nodes[b.ID]),
			cmp.Compare(c.total[a.ID], c.total[b.ID]),
			cmp.Compare(weight(s.Slot, b.ID), weight(s.Slot, a.ID)),
			a.ID.Compare(b.ID))
	}).ID
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

// weight is the rendezvous weight of a node for a slot.
func weight(s Slot, id identity.ID) uint64 {
	h := sha256.New()
	fmt.Fprintf(h, "skein slot v1\x00%s\x00%s\x00%d\x00", s.Namespace, s.Name, s.Number)
	h.Write(id[:])
	return binary.BigEndian.Uint64(h.Sum(nil))
}

// rebalance moves one slot from a node with several to a node with none, once no slot has moved for a while.
func (c *chooser) rebalance(e PlaceEgress, at spread) {
	most := 0
	for _, n := range slices.SortedFunc(maps.Keys(at.nodes), identity.ID.Compare) {
		most = max(most, number(!n.IsZero())*at.nodes[n])
	}
	if most < 2 || c.handing >= PlannedMost {
		return
	}
	for _, s := range e.Slots {
		if s.Busy || s.Granted.IsZero() || c.in.Now.Sub(s.Seen) < Rebalance {
			return
		}
	}
	for _, s := range e.Slots {
		if at.nodes[s.Node] != most || !c.alive(c.nodes[s.Node]) {
			continue
		}
		to := c.emptiest(e, s, at)
		if to.IsZero() {
			continue
		}
		m := Move{Slot: s.Slot, Epoch: s.Epoch, From: s.Node, To: to,
			Reason: fmt.Sprintf("%s has %d slots of this egress, %s none", c.nodes[s.Node].Name, most, c.nodes[to].Name)}
		if c.planned(&m, c.nodes[s.Node], s) && m.Planned {
			c.record(m, at)
			return
		}
	}
}

// emptiest is the best node without a slot of the egress.
func (c *chooser) emptiest(e PlaceEgress, s PlaceSlot, at spread) identity.ID {
	free := *c
	free.in.Nodes = nil
	for _, n := range c.in.Nodes {
		if at.nodes[n.ID] == 0 {
			free.in.Nodes = append(free.in.Nodes, n)
		}
	}
	return free.best(e, s, at, false)
}

// Wake is when Choose may decide differently without other changes; the zero time: never.
func Wake(in Placement) (at time.Time) {
	next := func(t time.Time) {
		if t.After(in.Now) && (at.IsZero() || t.Before(at)) {
			at = t
		}
	}
	next(in.Since.Add(Settle))
	for _, e := range in.Egresses {
		for _, s := range e.Slots {
			if s.Node.IsZero() {
				continue
			}
			next(s.FreeAt)
			next(s.FreeAt.Add(s.counted()))
			next(s.Seen.Add(s.counted()))
			next(s.Seen.Add(HoldDown))
			next(s.Seen.Add(Rebalance))
			next(s.Seen.Add(HandingOver))
			if !s.Unfit.IsZero() {
				next(s.Unfit.Add(GetReady))
			}
		}
	}
	for _, n := range in.Nodes {
		if !n.Heard.IsZero() {
			next(n.Heard.Add(AliveFor + time.Nanosecond))
		}
	}
	return at
}
