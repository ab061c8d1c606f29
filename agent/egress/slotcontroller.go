package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	maxWishes    = 4096                   // in one request
	maxProposals = 64                     // pending at a time
	proposeFor   = 2 * time.Second        // one attempt at a proposal
	refusedFor   = time.Second            // pause after a refused proposal
	lookEvery    = 10 * time.Second       // longest pause between two rounds
	uncertainFor = 100 * time.Millisecond // between attempts to learn a proposal's outcome
)

// View is the part of the agreed state that a SlotController uses. Its messages must never be modified.
type View struct {
	Index    uint64
	Egresses []*skeinv1.Egress
	Slots    []*skeinv1.EgressSlot
	Nodes    []*skeinv1.Node
}

// SlotControllerLead is one term of leadership; consensus.Lead is one.
type SlotControllerLead interface {
	// Verify proves that the term lasted at a moment after the call began.
	Verify(ctx context.Context) error
	Propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error)
}

var _ SlotControllerLead = consensus.Lead{}

// SlotControllerConfig is what a SlotController needs. Defaults are in brackets.
type SlotControllerConfig struct {
	Self  identity.ID
	Lead  SlotControllerLead
	Since time.Time // consensus.Lead.Since: the term began before it
	// View returns the newest agreed state, which includes everything that earlier terms agreed on.
	View func() View
	// Wait returns when there is a newer state than index, or with the context's error.
	Wait func(ctx context.Context, index uint64) error
	Site func(*skeinv1.Node) string // a node's site; slots are spread over sites [one site for all]
	Now  func() time.Time           // monotonic [time.Now]
	Wall func() time.Time           // the clock of the log's times [time.Now]
	Log  *slog.Logger
}

// SlotController manages the slots of all egresses during one term of this server's leadership: it grants leases, and
// moves slots whose owner is gone or unfit. Make one in consensus.ServerConfig.OnLead, call Run with that context,
// and let it answer RenewLeases meanwhile; NotLeading is the answer at other times. Its methods are safe for
// concurrent use.
type SlotController struct {
	cfg    SlotControllerConfig
	log    *slog.Logger
	news   chan struct{}
	decide func(now time.Time, from identity.ID, epoch uint64, held bool, slot SlotState) Verdict // leases.Renew

	mu      sync.Mutex
	leases  *Leases
	heard   map[identity.ID]heard
	seen    map[Slot]seen
	busy    map[Slot]bool
	refused map[Slot]time.Time
	ending  map[Ref]bool // pending proposals to end draining slots
	cache   *agreed
}

type heard struct {
	at     time.Time
	states map[Ref]GatewayState
}

type seen struct {
	epoch uint64
	at    time.Time
	unfit time.Time // see PlaceSlot.Unfit
}

// agreed is a View with indexes.
type agreed struct {
	view  View
	slots map[Slot]SlotState
	refs  map[Ref]bool
}

// NewSlotController makes the slot controller of a term.
func NewSlotController(cfg SlotControllerConfig) *SlotController {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Wall == nil {
		cfg.Wall = time.Now
	}
	if cfg.Site == nil {
		cfg.Site = func(*skeinv1.Node) string { return "" }
	}
	k := &SlotController{cfg: cfg, log: cfg.Log.With("component", "egress"), news: make(chan struct{}, 1),
		leases: NewLeases(cfg.Since), heard: make(map[identity.ID]heard),
		seen: make(map[Slot]seen), busy: make(map[Slot]bool), refused: make(map[Slot]time.Time), ending: make(map[Ref]bool)}
	k.decide = k.leases.Renew
	return k
}

// NotLeading is the answer of a server that does not lead: unavailable, with the leader's name if known.
func NotLeading(leader string) error {
	if leader == "" {
		return connect.NewError(connect.CodeUnavailable, errors.New("this server does not lead and knows no leader: ask "+
			"another"))
	}
	return connect.NewError(connect.CodeUnavailable, fmt.Errorf("this server does not lead: ask %s", leader))
}

// RenewLeases answers a gateway. Errors are connect's: unavailable if this server may no longer lead, permission
// denied if the caller is not a member, invalid argument if it asks for too much.
func (k *SlotController) RenewLeases(ctx context.Context, from identity.ID,
	r *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	if n := len(r.GetWishes()) + len(r.GetReleased()) + len(r.GetGateways()); n > maxWishes {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("the request names %d slots and egresses, at "+
			"most %d are allowed", n, maxWishes))
	}
	if err := k.cfg.Lead.Verify(ctx); err != nil {
		return nil, k.unavailable(err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	now, state := k.cfg.Now(), k.agreed()
	if !slices.ContainsFunc(state.view.Nodes, func(n *skeinv1.Node) bool { return n.GetId() == from.String() }) {
		return nil, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("node %s is not a member", from))
	}
	a := &skeinv1.RenewLeasesResponse{Index: state.view.Index}
	for _, s := range r.GetReleased() { // before the wishes, so that a slot that returns is granted at once
		if slot, ok := state.slots[slotOf(s)]; !ok || k.leases.Released(from, s.GetEpoch(), slot) {
			a.Released = append(a.Released, s)
		}
	}
	for _, w := range r.GetWishes() {
		if v := k.wish(now, from, w, state); v.Granted {
			a.Granted = append(a.Granted, w.GetSlot())
		} else {
			a.Denied = append(a.Denied, &skeinv1.RenewLeasesResponse_LeaseDenied{Slot: w.GetSlot(), Reason: v.Reason,
				RetryNanos: int64(v.Retry)})
		}
	}
	k.hear(now, from, r.GetGateways(), state)
	return a, nil
}

func (k *SlotController) unavailable(err error) error {
	var no *consensus.NotLeaderError
	if errors.As(err, &no) {
		if no.Leader.IsZero() {
			return NotLeading("")
		}
		return NotLeading("node " + no.Leader.String())
	}
	return connect.NewError(connect.CodeUnavailable, err)
}

func (k *SlotController) wish(now time.Time, from identity.ID, w *skeinv1.RenewLeasesRequest_LeaseWish,
	state *agreed) Verdict {
	slot, ok := state.slots[slotOf(w.GetSlot())]
	switch {
	case !ok:
		return Verdict{Reason: "there is no such slot"}
	case k.busy[slot.Slot]:
		return Verdict{Reason: "the slot is being moved"}
	}
	return k.decide(now, from, w.GetSlot().GetEpoch(), w.GetHeld(), slot)
}

// hear records a gateway's states, except those of unknown egresses.
func (k *SlotController) hear(now time.Time, from identity.ID, gateways []*skeinv1.GatewayState, state *agreed) {
	was, h := k.heard[from], heard{at: now, states: make(map[Ref]GatewayState, len(gateways))}
	changed := was.at.IsZero() || now.Sub(was.at) > AliveFor
	for _, g := range gateways {
		ref := RefOf(g)
		if !state.refs[ref] {
			continue
		}
		s := GatewayState{Ready: g.GetReady(), Health: g.GetHealth(), Reason: clip(g.GetReason()),
			Idle: g.GetIdle()[:min(len(g.GetIdle()), events.MaxReplicas)]}
		h.states[ref] = s
		old, had := was.states[ref]
		changed = changed || !had || old.Ready != s.Ready || old.Health != s.Health || !slices.Equal(old.Idle, s.Idle)
	}
	k.heard[from] = h
	if changed {
		k.wake()
	}
}

// clip limits the length of another node's text.
func clip(s string) string {
	if len(s) > 200 {
		return strings.ToValidUTF8(s[:200], "")
	}
	return s
}

// States are the nodes' states as gateways reported in this term, and when each node reported last.
func (k *SlotController) States() []PlaceNode {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.placement(k.cfg.Now()).Nodes
}

func (k *SlotController) wake() {
	select {
	case k.news <- struct{}{}:
	default:
	}
}

// agreed is the newest state with its indexes. The caller holds mu.
func (k *SlotController) agreed() *agreed {
	view := k.cfg.View()
	if k.cache != nil && k.cache.view.Index >= view.Index {
		return k.cache
	}
	a := &agreed{view: view, slots: make(map[Slot]SlotState, len(view.Slots)),
		refs: make(map[Ref]bool, len(view.Egresses))}
	egresses := make(map[Ref]*skeinv1.Egress, len(view.Egresses))
	for _, e := range view.Egresses {
		ref := RefOf(e)
		a.refs[ref], egresses[ref] = true, e
	}
	members := make(map[string]*skeinv1.Node, len(view.Nodes))
	for _, n := range view.Nodes {
		members[n.GetId()] = n
	}
	now := k.cfg.Now()
	for _, s := range view.Slots {
		slot := StateOf(egresses[slotOf(s).Ref], s)
		a.slots[slot.Slot] = slot
		have, ok := k.seen[slot.Slot]
		if !ok || have.epoch != slot.Epoch {
			have = seen{epoch: slot.Epoch, at: now}
		}
		switch fits := Eligible(members[slot.Node.String()].GetLabels(), egresses[slot.Ref].GetGateways()); {
		case fits:
			have.unfit = time.Time{}
		case have.unfit.IsZero():
			have.unfit = now
		}
		k.seen[slot.Slot] = have
	}
	k.cache = a
	exists := func(s Slot) bool { _, ok := a.slots[s]; return ok }
	for s := range k.seen {
		if !exists(s) {
			delete(k.seen, s)
			delete(k.refused, s)
		}
	}
	for id := range k.heard {
		if members[id.String()] == nil {
			delete(k.heard, id)
		}
	}
	return a
}

// placement is the input for Choose. The caller holds mu.
func (k *SlotController) placement(now time.Time) Placement {
	state := k.agreed()
	k.leases.Prune(now, func(s Slot) bool { _, ok := state.slots[s]; return ok })
	p := Placement{Now: now, Since: k.cfg.Since}
	slots := make(map[Ref][]PlaceSlot, len(state.refs))
	for _, s := range state.view.Slots {
		a := state.slots[slotOf(s)]
		slots[a.Ref] = append(slots[a.Ref], PlaceSlot{SlotState: a, Seen: k.seen[a.Slot].at, Unfit: k.seen[a.Slot].unfit,
			Granted: k.leases.Granted(a), FreeAt: k.leases.FreeAt(a),
			Busy: k.busy[a.Slot] || k.refused[a.Slot].After(now)})
	}
	for _, e := range state.view.Egresses {
		ref := RefOf(e)
		p.Egresses = append(p.Egresses, PlaceEgress{Ref: ref, Gateways: e.GetGateways(), Slots: slots[ref]})
	}
	for _, n := range state.view.Nodes {
		id, err := identity.ParseID(n.GetId())
		if err != nil {
			continue
		}
		h := k.heard[id]
		p.Nodes = append(p.Nodes, PlaceNode{ID: id, Name: n.GetName(), Labels: n.GetLabels(), Draining: n.GetDraining(),
			Site: k.cfg.Site(n), Heard: h.at, States: h.states})
	}
	return p
}

// Run moves slots until the term ends.
func (k *SlotController) Run(ctx context.Context) {
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() { k.watch(ctx) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		k.mu.Lock()
		now := k.cfg.Now()
		p := k.placement(now)
		for _, m := range Choose(p) {
			if len(k.busy) >= maxProposals {
				break
			}
			k.busy[m.Slot] = true
			all.Go(func() { k.move(ctx, m) })
		}
		wait := lookEvery
		for _, d := range k.drained(p) {
			all.Go(func() { k.end(ctx, d) })
		}
		if left, any := k.untilDrained(); any {
			wait = min(wait, left)
		}
		if at := Wake(p); !at.IsZero() {
			wait = min(wait, at.Sub(now))
		}
		for _, at := range k.refused {
			if at.After(now) {
				wait = min(wait, at.Sub(now))
			}
		}
		k.mu.Unlock()
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-k.news:
		case <-ctx.Done():
		}
	}
}

// watch wakes Run when the agreed state changes.
func (k *SlotController) watch(ctx context.Context) {
	for {
		k.mu.Lock()
		index := k.agreed().view.Index
		k.mu.Unlock()
		if k.cfg.Wait(ctx, index) != nil {
			return
		}
		k.wake()
	}
}

// move repeats the proposal until its outcome is known. Until then the slot is granted to no node.
func (k *SlotController) move(ctx context.Context, m Move) {
	c := &skeinv1.Command{RequestId: consensus.NewRequestID(), Issuer: k.cfg.Self.String()}
	if m.To.IsZero() {
		c.Body = &skeinv1.Command_ReleaseSlot{ReleaseSlot: &skeinv1.ReleaseSlot{Namespace: m.Namespace, Name: m.Name,
			Number: uint32(m.Number), Epoch: m.Epoch, Reason: m.Reason}}
	} else {
		c.Body = &skeinv1.Command_AssignSlot{AssignSlot: &skeinv1.AssignSlot{Namespace: m.Namespace, Name: m.Name,
			Number: uint32(m.Number), NodeId: m.To.String(),
			Epoch: m.Epoch, Reason: m.Reason, Planned: m.Planned}}
	}
	for ctx.Err() == nil {
		try, cancel := context.WithTimeout(ctx, proposeFor)
		answer, err := k.cfg.Lead.Propose(try, c)
		cancel()
		switch {
		case err == nil:
			k.awaitMove(ctx, m, answer.GetIndex())
			return
		case events.CodeOf(err) != "":
			k.log.Warn("a slot's move was refused", "slot", m.Slot.String(), "to", m.To.String(), "error", err)
			k.mu.Lock()
			delete(k.busy, m.Slot)
			k.refused[m.Slot] = k.cfg.Now().Add(refusedFor)
			k.mu.Unlock()
			k.wake()
			return
		case errors.Is(err, consensus.ErrNotLeader):
			return // the term is over, so this slot controller grants nothing more
		}
		select {
		case <-ctx.Done():
		case <-time.After(uncertainFor):
		}
	}
}

// awaitMove waits until the state includes the move.
func (k *SlotController) awaitMove(ctx context.Context, m Move, index uint64) {
	for {
		k.mu.Lock()
		at := k.agreed().view.Index
		if at >= index {
			delete(k.busy, m.Slot)
			k.mu.Unlock()
			k.wake()
			k.log.Info("slot moved", "slot", m.Slot.String(), "from", m.From.String(), "to", m.To.String(), "planned", m.Planned,
				"reason", m.Reason)
			return
		}
		k.mu.Unlock()
		if k.cfg.Wait(ctx, at) != nil {
			return
		}
	}
}
