package egress

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// slowLeader answers after a delay, grants nothing, and counts requests.
type slowLeader struct {
	takes time.Duration
	asked atomic.Int64
}

func (l *slowLeader) RenewLeases(ctx context.Context,
	_ *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	l.asked.Add(1)
	select {
	case <-time.After(l.takes):
		return &skeinv1.RenewLeasesResponse{}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// tickets is a kernel whose operations always succeed.
type tickets struct{ n Ticket }

func (k *tickets) Begin(Slot, uint64, time.Duration) (Ticket, error) { k.n++; return k.n, nil }
func (*tickets) Grant(Slot, Ticket) error                            { return nil }
func (*tickets) Drop(Slot) error                                     { return nil }
func (*tickets) Hold(Slot, bool) error                               { return nil }

// A gateway that waits for its slot asks often, so that it is granted soon; a slow leader is not asked more often for
// that.
func TestWaitingForASlowLeader(t *testing.T) {
	for _, tt := range []struct {
		takes       time.Duration
		least, most int64 // requests in two seconds
	}{
		{time.Millisecond, 90, 110},
		{900 * time.Millisecond, 10, 20},
	} {
		synctest.Test(t, func(t *testing.T) {
			self, leader := identity.ID{1}, &slowLeader{takes: tt.takes}
			r := NewLeaseClient(LeaseClientConfig{Self: self, Kernel: &tickets{}, Leader: leader,
				Gateways: func() []*skeinv1.GatewayState {
					return nil
				}, Log: slog.New(slog.DiscardHandler)})
			r.Agree([]SlotState{{Slot: Slot{Ref: Ref{Namespace: "out", Name: "a"}}, Node: self, Epoch: 7, Lease: time.Second,
				Former: time.Second}})
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { defer close(done); r.Run(ctx) }()
			time.Sleep(2 * time.Second)
			if asked := leader.asked.Load(); asked < tt.least || asked > tt.most {
				t.Errorf("answers after %s: asked %d times in two seconds, want %d to %d", tt.takes, asked, tt.least, tt.most)
			}
			stop()
			<-done
			synctest.Wait()
		})
	}
}

// grants is a kernel and a leader that grant everything, and another machine whose clock advances while this one is
// frozen.
type grants struct {
	mu      sync.Mutex
	mute    bool
	ahead   time.Duration
	amid    time.Duration // this machine stands still for that while the rest of a lease is begun
	lives   map[Ticket]time.Duration
	granted time.Duration // of the last granted ticket
}

func (g *grants) RenewLeases(_ context.Context, q *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	a := &skeinv1.RenewLeasesResponse{}
	for _, w := range q.GetWishes() {
		if !g.mute {
			a.Granted = append(a.Granted, w.GetSlot())
		}
	}
	return a, nil
}

func (g *grants) Begin(_ Slot, _ uint64, life time.Duration) (Ticket, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	t := Ticket(len(g.lives) + 1)
	g.lives[t] = life
	if life > MaxTicket {
		g.ahead += g.amid
	}
	return t, nil
}

func (g *grants) Grant(_ Slot, t Ticket) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.granted = g.lives[t]
	return nil
}

func (*grants) Drop(Slot) error       { return nil }
func (*grants) Hold(Slot, bool) error { return nil }

func (g *grants) Read(context.Context) Readings {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Readings{nodeID(7): {"boot", time.Since(t0) + g.ahead}}
}

// An agent that ends leaves the rest of a long lease to its kernel, unless the machine was frozen and the lease may
// be over: before the agent was asked to end, or while it ended.
func TestAnAgentThatEndsLeavesTheRestOfItsLease(t *testing.T) {
	const lease = time.Minute
	for name, c := range map[string]struct {
		before, amid time.Duration
		want         bool
	}{
		"it runs all the time":                         {0, 0, true},
		"it stood still for half of the lease":         {lease / 2, 0, true},
		"it was continued after the lease":             {2 * lease, 0, false},
		"it stands still when the rest is to be begun": {0, 2 * lease, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := &grants{amid: c.amid, lives: map[Ticket]time.Duration{}}
				r := NewLeaseClient(LeaseClientConfig{Self: self, Kernel: g, Leader: g, Clocks: g,
					Gateways: func() []*skeinv1.GatewayState { return nil }, Log: slog.New(slog.DiscardHandler)})
				r.Agree([]SlotState{{Slot: slotA, Node: self, Epoch: 7, Lease: lease}})
				ctx, stop := context.WithCancel(t.Context())
				done := make(chan struct{})
				go func() { defer close(done); r.Run(ctx) }()
				time.Sleep(5 * time.Second)
				g.mu.Lock()
				if g.granted != MaxTicket {
					t.Errorf("it forwards by tickets of %s", g.granted)
				}
				g.mute, g.ahead = true, c.before
				g.mu.Unlock()
				stop()
				<-done
				synctest.Wait()
				if left := lease - c.before; c.want && (g.granted > left || g.granted < left-5*time.Second) {
					t.Errorf("it leaves a ticket of %s, want up to %s", g.granted, left)
				}
				if !c.want && g.granted > MaxTicket {
					t.Errorf("it leaves a ticket of %s, though its lease may be over", g.granted)
				}
			})
		})
	}
}

// A node without gateways and slots has nothing due; a gateway asks the leader at its interval.
func TestANodeWithoutEgressesRests(t *testing.T) {
	var gateways []*skeinv1.GatewayState
	r := NewLeaseClient(LeaseClientConfig{Gateways: func() []*skeinv1.GatewayState { return gateways }})
	now := time.Now()
	r.lastSent = now
	if due := r.due(now); due.Before(now.Add(time.Minute)) {
		t.Errorf("without an egress it wakes after %s", due.Sub(now))
	}
	gateways = []*skeinv1.GatewayState{{Namespace: "out", Name: "nat"}}
	if due := r.due(now); due.After(now.Add(RenewEvery)) {
		t.Errorf("as a gateway it wakes after %s, want %s", due.Sub(now), RenewEvery)
	}
	gateways, r.releases[slotEpoch{Epoch: 1}] = nil, now
	if due := r.due(now); due.After(now.Add(RenewEvery)) {
		t.Errorf("with a release to say it wakes after %s, want %s at most", due.Sub(now), RenewEvery)
	}
}
