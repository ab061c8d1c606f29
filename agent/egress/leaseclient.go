package egress

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

const (
	urgentEvery = 20 * time.Millisecond // between two requests while a slot waits to be granted
	requestFor  = time.Second           // after that an answer is of no use
	maxRequests = 64                    // running at a time
	// running at a time while they are sent every urgentEvery: a slow leader is not asked more often
	maxUrgent   = 4
	dropAgain   = 50 * time.Millisecond   // after a failed drop
	adoptAgain  = time.Second             // after a drop before the namespace was open; Retry shortens the wait
	handOverFor = 1500 * time.Millisecond // limit for moving a slot's connections to its new owner; less than HoldMost
)

// Kernel is the leases' interface to the gateways' network namespaces; dataplane/egressns implements it per egress.
type Kernel interface {
	// Begin starts a ticket for an epoch: when it returns, the kernel's countdown of lease runs, but packets pass only
	// once the ticket is granted. It fails until the kernel has the slot as agreed for that epoch.
	Begin(slot Slot, epoch uint64, lease time.Duration) (Ticket, error)
	Grant(slot Slot, t Ticket) error
	// Drop ends all tickets, also those of an earlier run. After success no packet passes until the next Grant. The
	// error is errNotReady while it is unknown what an earlier run left.
	Drop(slot Slot) error
	// Hold queues packets of the slot; off releases them in order.
	Hold(slot Slot, on bool) error
}

// Leader answers requests for leases. An implementation should ask all servers at once and use the first answer that
// is not an error: only a leader answers, so a change of leader then costs no search.
type Leader interface {
	RenewLeases(ctx context.Context, r *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error)
}

// Peers moves the connections of a slot that was just dropped here to its new owner: it dumps them and calls TakeOver
// by RPC.
type Peers interface {
	HandOver(ctx context.Context, slot Slot, epoch uint64, to identity.ID) error
}

// Clocks reads the clocks of other machines and of this one, as far as they answer soon.
type Clocks interface {
	Read(ctx context.Context) Readings
}

// LeaseClientConfig is what a LeaseClient needs. Defaults are in brackets.
type LeaseClientConfig struct {
	Self   identity.ID
	Kernel Kernel
	Leader Leader
	Peers  Peers
	Clocks Clocks // for leases longer than MaxTicket when no leader answers [none: those end with their tickets then]
	// Gateways is this node's state as a gateway of each egress that it could serve. While it is empty and no slot is
	// this node's, nothing is sent to the leader. It must be safe for concurrent use and must not block.
	Gateways func() []*skeinv1.GatewayState
	Announce func(slot Slot, on bool)     // the slot's address is here, or no longer [nothing]
	Tell     func(slot Slot, text string) // writes to the journal [nothing]
	Now      func() time.Time             // monotonic [time.Now]
	Log      *slog.Logger
}

// LeaseClient runs the lease holders of one node: it renews leases with the leader, and executes their orders, one
// after the other.
//
// Usage: call Run in a goroutine while the node is up; Agree whenever the agreed slots change; TakeOver from the
// RPC's handler, after the connections of that part were loaded; Live and Report from anywhere. When Run ends,
// nothing is dropped: tickets end by themselves, and an agent that restarts before then continues.
type LeaseClient struct {
	cfg LeaseClientConfig

	mu    sync.Mutex // guards the fields shared with callers
	queue []func()
	news  chan struct{}
	shown map[Slot]LeaseReport

	// For Run's goroutine only:
	holders  map[Slot]*LeaseHolder
	round    uint64
	lastSent time.Time
	lastRead time.Time
	reading  int // rounds of readings that are running
	flying   []flight
	releases map[slotEpoch]time.Time // releases to repeat until they are answered, and since when
	undone   map[Slot]*undone        // failed drops
}

// slotEpoch is a slot in one epoch.
type slotEpoch struct {
	Slot
	Epoch uint64
}

type flight struct {
	round  uint64
	cancel context.CancelFunc
}

// undone is a failed drop, and the orders that must wait for it.
type undone struct {
	again time.Time
	then  []Order
}

// NewLeaseClient makes a lease client without slots.
func NewLeaseClient(cfg LeaseClientConfig) *LeaseClient {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Announce == nil {
		cfg.Announce = func(Slot, bool) {}
	}
	if cfg.Tell == nil {
		cfg.Tell = func(Slot, string) {}
	}
	return &LeaseClient{cfg: cfg, news: make(chan struct{}, 1), shown: make(map[Slot]LeaseReport),
		holders:  make(map[Slot]*LeaseHolder),
		releases: make(map[slotEpoch]time.Time), undone: make(map[Slot]*undone)}
}

func (r *LeaseClient) post(f func()) {
	r.mu.Lock()
	r.queue = append(r.queue, f)
	r.mu.Unlock()
	select {
	case r.news <- struct{}{}:
	default:
	}
}

// Agree passes on all slots of the egresses that this node may serve. A slot that is missing is dropped.
func (r *LeaseClient) Agree(slots []SlotState) {
	slots = slices.Clone(slots)
	r.post(func() {
		now, named := r.cfg.Now(), make(map[Slot]bool, len(slots))
		for _, s := range slots {
			named[s.Slot] = true
			h := r.holders[s.Slot]
			if h == nil {
				h = NewLeaseHolder(r.cfg.Self, s.Slot)
				r.holders[s.Slot] = h
			}
			r.do(h.Agree(s, now))
		}
		for _, s := range sorted(r.holders) {
			if !named[s] {
				r.do(r.holders[s].Gone())
				delete(r.holders, s)
			}
		}
	})
}

// Retry reports that the namespace of an egress was made, adopted or removed: drops that waited for it run now.
func (r *LeaseClient) Retry(ref Ref) {
	r.post(func() {
		for s, u := range r.undone {
			if s.Ref == ref {
				u.again = r.cfg.Now()
			}
		}
	})
}

// TakeOver reports that connections of a slot arrived from its former owner and were loaded; last: all of them.
func (r *LeaseClient) TakeOver(slot Slot, epoch uint64, last bool) {
	r.post(func() {
		if h := r.holders[slot]; h != nil {
			r.do(h.TakeOver(epoch, last, r.cfg.Now()))
		}
	})
}

// Live reports whether a granted ticket of the slot runs. Only then may this node answer for the slot's address.
func (r *LeaseClient) Live(slot Slot) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	h, ok := r.shown[slot]
	return ok && h.Until.After(r.cfg.Now())
}

// Report returns the state of every slot, by slot.
func (r *LeaseClient) Report() []LeaseReport {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := slices.Collect(maps.Values(r.shown))
	slices.SortFunc(out, func(a, b LeaseReport) int { return Slot.Compare(a.Slot, b.Slot) })
	return out
}

// Run works until the context ends.
func (r *LeaseClient) Run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	defer func() {
		for _, f := range r.flying {
			f.cancel()
		}
	}()
	for {
		r.mu.Lock()
		queue := r.queue
		r.queue = nil
		r.mu.Unlock()
		for _, f := range queue {
			f()
		}
		now := r.cfg.Now()
		for _, s := range sorted(r.holders) {
			r.do(r.holders[s].Tick(now))
		}
		r.dropUndone(now)
		due := r.due(now)
		if !due.After(now) {
			r.send(ctx)
			due = r.due(r.cfg.Now())
		}
		if at := r.readAt(now); !at.IsZero() {
			if !at.After(now) {
				r.read(ctx)
				at = r.readAt(r.cfg.Now())
			}
			if at.Before(due) {
				due = at
			}
		}
		r.show()
		timer.Reset(max(0, due.Sub(r.cfg.Now())))
		select {
		case <-r.news:
		case <-timer.C:
		case <-ctx.Done():
			r.leave()
			return
		}
	}
}

// due is when the next request must be sent, or another task is due before.
func (r *LeaseClient) due(now time.Time) time.Time {
	if len(r.holders)+len(r.releases)+len(r.undone)+len(r.cfg.Gateways()) == 0 {
		return now.Add(time.Hour) // Agree wakes Run
	}
	every := RenewEvery
	for _, h := range r.holders {
		if h.Urgent() {
			every = urgentEvery
		}
	}
	for _, since := range r.releases {
		if now.Sub(since) < HoldMost { // the new owner is holding packets
			every = urgentEvery
		}
	}
	if len(r.flying) >= maxUrgent {
		every = RenewEvery
	}
	at := r.lastSent.Add(every)
	if r.lastSent.IsZero() || at.After(now.Add(every)) {
		at = now
	}
	for _, h := range r.holders {
		if d := h.Due(); !d.IsZero() && d.Before(at) && d.After(now) {
			at = d
		}
	}
	for _, u := range r.undone {
		if u.again.Before(at) && u.again.After(now) {
			at = u.again
		}
	}
	return at
}

func (r *LeaseClient) show() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.shown)
	for s, h := range r.holders {
		r.shown[s] = h.Report()
	}
}

// send begins a round: tickets first, then the request.
func (r *LeaseClient) send(ctx context.Context) {
	r.lastSent = r.cfg.Now()
	r.round++
	round := r.round
	q := &skeinv1.RenewLeasesRequest{Gateways: r.cfg.Gateways()}
	for _, s := range sorted(r.holders) {
		h := r.holders[s]
		began := r.cfg.Now()
		epoch, lease, held, ok := h.Wish(began)
		if !ok {
			continue
		}
		t, err := r.cfg.Kernel.Begin(s, epoch, lease)
		if err != nil {
			if !errors.Is(err, errNotReady) {
				r.cfg.Log.Warn("no ticket for the slot could be begun; trying again", "slot", s.String(), "error", err)
			}
			continue
		}
		h.Begun(round, epoch, t, began, lease)
		q.Wishes = append(q.Wishes, &skeinv1.RenewLeasesRequest_LeaseWish{Slot: slotRef(s, epoch), Held: held})
	}
	for s := range r.releases {
		q.Released = append(q.Released, slotRef(s.Slot, s.Epoch))
	}
	if len(q.Wishes)+len(q.Released)+len(q.Gateways) == 0 {
		return
	}
	if len(r.flying) >= maxRequests { // the oldest is the least useful
		r.flying[0].cancel()
		r.flying = r.flying[1:]
	}
	asking, cancel := context.WithTimeout(ctx, requestFor)
	r.flying = append(r.flying, flight{round, cancel})
	go func() {
		defer cancel()
		a, err := r.cfg.Leader.RenewLeases(asking, q)
		r.post(func() { r.answered(round, a, err) })
	}()
}

// answered handles the answer to a round.
func (r *LeaseClient) answered(round uint64, a *skeinv1.RenewLeasesResponse, err error) {
	r.flying = slices.DeleteFunc(r.flying, func(f flight) bool { return f.round == round })
	if err != nil {
		r.cfg.Log.Debug("the leases were not renewed", "round", round, "error", err)
		return
	}
	for _, g := range a.GetGranted() {
		if h := r.holders[slotOf(g)]; h != nil {
			r.do(h.Granted(round, g.GetEpoch(), r.cfg.Now()))
		}
	}
	for _, d := range a.GetDenied() {
		if h := r.holders[slotOf(d.GetSlot())]; h != nil {
			h.Denied(round, d.GetReason())
		}
	}
	for _, s := range a.GetReleased() {
		delete(r.releases, slotEpoch{slotOf(s), s.GetEpoch()})
	}
}

// do executes orders.
func (r *LeaseClient) do(orders []Order) {
	for i, o := range orders {
		var err error
		switch o.Kind {
		case DoGrant:
			delete(r.undone, o.Slot) // the slot is this node's again, so nothing remains to be dropped
			err = r.cfg.Kernel.Grant(o.Slot, o.Ticket)
		case DoDrop:
			if err = r.cfg.Kernel.Drop(o.Slot); err != nil {
				again := adoptAgain
				if !errors.Is(err, errNotReady) {
					again = dropAgain
					r.cfg.Log.Warn("the slot could not be dropped; trying again", "slot", o.Slot.String(), "error", err)
				}
				r.undone[o.Slot] = &undone{again: r.cfg.Now().Add(again), then: orders[i+1:]}
				return
			}
			delete(r.undone, o.Slot)
		case DoHold:
			err = r.cfg.Kernel.Hold(o.Slot, true)
		case DoOpen:
			err = r.cfg.Kernel.Hold(o.Slot, false)
		case DoAnnounce, DoSilence:
			r.show() // so that Live is current during the call
			r.cfg.Announce(o.Slot, o.Kind == DoAnnounce)
		case DoHandOver:
			r.handOver(o)
		case DoRelease:
			r.release(o)
		case DoRecord:
			r.cfg.Tell(o.Slot, o.Text)
		}
		if err != nil {
			r.cfg.Log.Warn("an order for the slot failed", "slot", o.Slot.String(), "order", string(o.Kind), "error", err)
		}
	}
}

// release repeats a release to the leader until it is answered, but not before a failed drop of the slot has
// succeeded.
func (r *LeaseClient) release(o Order) {
	if u := r.undone[o.Slot]; u != nil {
		u.then = append(slices.Clone(u.then), o)
		return
	}
	r.releases[slotEpoch{o.Slot, o.Epoch}] = r.cfg.Now()
	r.lastSent = time.Time{} // at once
}

// handOver moves the connections in a goroutine of its own. Only Run's goroutine may call it.
func (r *LeaseClient) handOver(o Order) {
	h := r.holders[o.Slot]
	if h == nil || o.To.IsZero() {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), handOverFor)
		defer cancel()
		err := r.cfg.Peers.HandOver(ctx, o.Slot, o.Epoch, o.To)
		r.post(func() {
			if err != nil {
				r.cfg.Tell(o.Slot, o.Slot.String()+": its connections could not be moved to node "+o.To.String()+": "+
					err.Error())
			}
			if r.holders[o.Slot] == h {
				r.do(h.HandedOver())
			}
		})
	}()
}

func (r *LeaseClient) dropUndone(now time.Time) {
	for s, u := range r.undone {
		if !u.again.After(now) {
			r.do(append([]Order{{Kind: DoDrop, Slot: s}}, u.then...))
		}
	}
}

func sorted[V any](m map[Slot]V) []Slot { return slices.SortedFunc(maps.Keys(m), Slot.Compare) }
