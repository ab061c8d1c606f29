package egress

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// slowLeader answers after a time, grants nothing, and counts who asks.
type slowLeader struct {
	takes time.Duration
	asked atomic.Int64
}

func (l *slowLeader) RenewLeases(ctx context.Context, _ *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	l.asked.Add(1)
	select {
	case <-time.After(l.takes):
		return &skeinv1.RenewLeasesResponse{}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// tickets is a kernel that does what it is told.
type tickets struct{ n Ticket }

func (k *tickets) Begin(Slot, uint64, time.Duration) (Ticket, error) { k.n++; return k.n, nil }
func (*tickets) Grant(Slot, Ticket) error                            { return nil }
func (*tickets) Drop(Slot) error                                     { return nil }
func (*tickets) Hold(Slot, bool) error                               { return nil }

// A gateway that waits for its slot asks often, so that it is granted soon; a leader that is slow to answer is not asked more often for that.
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
			r := NewRenewer(RenewerConfig{Self: self, Kernel: &tickets{}, Leader: leader, Gateways: func() []*skeinv1.GatewayState { return nil }, Log: slog.New(slog.DiscardHandler)})
			r.Agree([]Agreed{{Slot: Slot{Ref: Ref{Namespace: "out", Name: "a"}}, Node: self, Epoch: 7, Lease: time.Second, Former: time.Second}})
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
