package egress

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/kerneltest"
)

// outside is the clock of another machine as seen in a guest: its RTC, which the host advances while the guest is
// frozen.
type outside struct {
	t  *testing.T
	id identity.ID
	mu *sync.Mutex // held while the RTC is open, which one can have at a time: gateways and the test both read it
}

func (o outside) now() time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	f, err := os.Open("/dev/rtc0")
	if err != nil {
		o.t.Error(err)
		return 0
	}
	defer f.Close()
	r, err := unix.IoctlGetRTCTime(int(f.Fd()))
	if err != nil {
		o.t.Error(err)
		return 0
	}
	at := time.Date(int(r.Year)+1900, time.Month(r.Mon)+1, int(r.Mday), int(r.Hour), int(r.Min), int(r.Sec), 0,
		time.UTC)
	return time.Duration(at.Unix()) * time.Second
}

func (o outside) Read(context.Context) Readings { return Readings{o.id: {"outside", o.now()}} }

// A complete machine, including its kernel, is frozen for longer than the lease and resumed. Before that another
// machine's clock prolongs the lease, which no leader renews. Afterwards the kernel forwards only for the rest of one
// ticket.
func TestAFrozenGuest(t *testing.T) {
	if os.Getenv(kerneltest.Frozen) == "" {
		t.Skip("a machine of its own is needed: the guest of the kernel tier")
	}
	if !alone(t) {
		return
	}
	const lease, frozen = 15 * time.Second, 20 * time.Second
	g := newGate(t, uint32(lease/time.Millisecond))
	rtc := outside{t, g.other, new(sync.Mutex)}
	g.clocks = rtc
	until := func(what string, within time.Duration, ok func() bool) (took time.Duration) {
		t.Helper()
		for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
			if took = time.Since(began); ok() {
				return took
			}
			if took > within {
				t.Fatalf("not within %s: %s", within, what)
			}
		}
	}
	g.live(func(gs *Gateways, l *generous) {
		gs.Follow(g.state, 1420, dataplane.FoUPorts{})
		select { // an emulated guest on a busy machine takes a minute to make the namespace
		case <-l.gave:
		case <-time.After(2 * time.Minute):
			t.Fatalf("no lease is granted within two minutes: %v", gs.Problems())
		}
		until("the kernel forwards", time.Minute, func() bool { return g.lives() > 0 })
		began, at := time.Now(), rtc.now()
		until("other machines' clocks are known", time.Minute, func() bool { return time.Since(began) > 2*readEvery })
		l.mu.Lock()
		l.mute = true
		l.mu.Unlock()
		alone := time.Now()
		for time.Since(alone) < MaxTicket+2*time.Second {
			if left := g.lives(); left == 0 || left > MaxTicket {
				t.Fatalf("%s after the leader fell silent the kernel forwards for another %s", time.Since(alone), left)
			}
			time.Sleep(50 * time.Millisecond)
		}
		if err := kerneltest.AskFreeze(frozen); err != nil {
			t.Fatal(err)
		}
		until("the machine was frozen", time.Minute, func() bool { return rtc.now()-at-time.Since(began) > lease })
		thawed, left := time.Now(), g.lives()
		t.Logf("frozen for %s without a clock that shows it; continued, the kernel forwards for another %s",
			rtc.now()-at-time.Since(began), left)
		if left > MaxTicket {
			t.Errorf("the kernel goes on for %s, at most a ticket of %s is due", left, MaxTicket)
		}
		until("it stops", MaxTicket+time.Second, func() bool { return g.lives() == 0 })
		t.Logf("it stopped %s after it was seen that it was continued", time.Since(thawed))
		for time.Since(thawed) < 2*MaxTicket {
			if left := g.lives(); left > 0 && time.Since(thawed) > MaxTicket+time.Second {
				t.Fatalf("it forwards again, for %s", left)
			}
			time.Sleep(50 * time.Millisecond)
		}
	})
}
