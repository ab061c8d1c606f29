package reflexive

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/hostaddr"
	"github.com/skeinmesh/skein/gossip/candidate/stunmsg"
	"github.com/skeinmesh/skein/internal/simtime"
)

// world is a simulated NAT with STUN servers behind it, in virtual time, and the chain that discovers it. The servers
// have no alternate port, so that no test needs a real socket.
type world struct {
	*candidate.Discoverer
	step *Step
	t    *testing.T

	mu       sync.Mutex
	mapped   netip.AddrPort
	away     bool   // no server answers
	filtered uint16 // no server answers at this port
	addrs    []string
	overlay  []netip.Prefix
	asked    map[netip.AddrPort]int
	results  []candidate.Result
	changed  func()
	lost     chan error
	watches  int
	alive    bool // the servers are known to be up by another way
}

func (w *world) IPv4() bool { return true }
func (w *world) IPv6() bool { return false }

func (w *world) Send(to netip.AddrPort, b []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked[to]++
	if w.away || to.Port() == w.filtered || to.Port() == port { // WireGuard's port answers no STUN
		return nil
	}
	m, err := stunmsg.Decode(b)
	if err != nil {
		return err
	}
	answer, err := stunmsg.Success(m.TransactionID, w.mapped)
	if err != nil {
		return err
	}
	time.AfterFunc(10*time.Millisecond, func() {
		// Two copies in one datagram, as the kernel may join them.
		w.step.HandleSTUN(to, netip.Addr{}, slices.Concat(answer, answer), time.Now())
	})
	return nil
}

// Read is what the kernel would tell.
func (w *world) Read() (candidate.Host, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	keep := slices.DeleteFunc(addrs(w.addrs...), func(a netip.Addr) bool {
		return slices.ContainsFunc(w.overlay, func(p netip.Prefix) bool { return p.Contains(a) })
	})
	return candidate.Host{Addrs: keep, Overlay: w.overlay}, nil
}

// Watch is a subscription that the test can cut off.
func (w *world) Watch(ctx context.Context, changed func()) error {
	w.mu.Lock()
	w.changed = changed
	w.watches++
	w.mu.Unlock()
	select {
	case err := <-w.lost:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ping is what a peer's WireGuard port answers to a member.
func (w *world) ping(ctx context.Context, at netip.AddrPort) (netip.AddrPort, time.Duration, error) {
	w.mu.Lock()
	w.asked[at]++
	silent, mapped := w.away || at.Port() == w.filtered, w.mapped
	w.mu.Unlock()
	if silent {
		<-ctx.Done()
		return netip.AddrPort{}, 0, ctx.Err()
	}
	time.Sleep(10 * time.Millisecond)
	return mapped, 10 * time.Millisecond, nil
}

func newWorld(t *testing.T, adjust func(*Config, *world), servers ...string) *world {
	w := &world{t: t, mapped: ap("198.51.100.9:7"), addrs: []string{"192.168.1.2"}, asked: map[netip.AddrPort]int{},
		lost: make(chan error)}
	c := Config{Socket: w, Port: port, Servers: servers}
	if adjust != nil {
		adjust(&c, w)
	}
	var err error
	if w.step, err = New(c); err != nil {
		t.Fatal(err)
	}
	steps := []candidate.Step{w.step, &hostaddr.Step{Port: port}}
	w.Discoverer = candidate.New(candidate.Config{
		Steps: steps, First: steps, Network: w,
		OnResult: func(r candidate.Result) {
			w.mu.Lock()
			w.results = append(w.results, r)
			w.mu.Unlock()
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if _, err := w.Check(context.Background()); !errors.Is(err, candidate.ErrStopped) {
			t.Errorf("a check after the end: %v", err)
		}
	})
	return w
}

func (w *world) set(f func()) {
	w.mu.Lock()
	f()
	w.mu.Unlock()
}

// after lets virtual time pass and returns what was told since the last call.
func (w *world) after(d time.Duration) []candidate.Result {
	time.Sleep(d)
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.results
	w.results = nil
	return out
}

func (w *world) requests() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, k := range w.asked {
		n += k
	}
	clear(w.asked)
	return n
}

func (w *world) one(rs []candidate.Result) candidate.Result {
	w.t.Helper()
	if len(rs) != 1 {
		w.t.Fatalf("%d results were told, want 1: %+v", len(rs), rs)
	}
	return rs[0]
}

const settle = 200 * time.Millisecond // of the chain

const two = "203.0.113.1:3478,203.0.113.2"

func bubble(t *testing.T, servers string, f func(t *testing.T, w *world)) {
	bubbleWith(t, servers, nil, f)
}

func withAlive(c *Config, w *world) {
	c.Ping = w.ping
	c.Alive = func(netip.AddrPort) bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.alive
	}
}

func bubbleWith(t *testing.T, servers string, adjust func(*Config, *world), f func(t *testing.T, w *world)) {
	simtime.Test(t, func(t *testing.T) {
		var list []string
		if servers != "" {
			list = strings.Split(servers, ",")
		}
		f(t, newWorld(t, adjust, list...))
	})
}

func TestMappingIsKeptAliveAndWatched(t *testing.T) {
	bubble(t, two, func(t *testing.T, w *world) {
		// Nothing can be tested here, so the early result and the sure one are one.
		if first := w.one(w.after(2 * time.Second)); first.NAT != skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE {
			t.Fatalf("told %+v", first)
		}
		w.requests()
		if rs := w.after(5 * time.Minute); len(rs) != 0 {
			t.Errorf("told %d times though nothing changed", len(rs))
		}
		if n := w.requests(); n < 2*13 || n > 2*17 {
			t.Errorf("%d requests in 5 minutes, want about two every %s", n, keepEvery)
		}
		w.set(func() { w.mapped = ap("198.51.100.9:8") })
		if r := w.one(w.after(keepEvery + 5*time.Second)); r.Candidates[0].Address != "198.51.100.9:8" {
			t.Errorf("after the mapping changed: %v", r.Candidates)
		}
	})
}

// A path that has died, or a peer that sees the host elsewhere, brings a look at once. What it costs is bounded: in
// vain it is done ever more rarely, and a host without NAT does not look at all.
func TestRevalidateLooksAtOnce(t *testing.T) {
	bubble(t, two, func(t *testing.T, w *world) {
		first := w.one(w.after(2 * time.Second))
		w.requests()
		w.set(func() { w.mapped = ap("198.51.100.9:8") })
		w.step.Revalidate()
		if r := w.one(w.after(300 * time.Millisecond)); r.Candidates[0].Address != "198.51.100.9:8" || r.NAT != first.NAT {
			t.Errorf("after Revalidate: %v, NAT %s", r.Candidates, r.NAT)
		}
		w.after(3 * time.Minute)
		w.requests()
		for range 600 {
			w.step.Revalidate()
			w.after(100 * time.Millisecond)
		}
		// 1+2+4+8+16 s, then as often as without.
		if n := w.requests(); n < 2*6 || n > 2*(2*3+6) {
			t.Errorf("%d requests in a minute of looks in vain, want about %d", n, 2*(6+2))
		}
		w.set(func() { w.mapped = ap("198.51.100.9:9") })
		if r := w.one(w.after(keepEvery + 5*time.Second)); r.Candidates[0].Address != "198.51.100.9:9" {
			t.Errorf("after the last one: %v", r.Candidates)
		}
	})
	bubbleWith(t, two, func(_ *Config, w *world) {
		w.addrs, w.mapped = []string{"198.51.100.9"}, netip.AddrPortFrom(ap("198.51.100.9:1").Addr(), port)
	}, func(t *testing.T, w *world) {
		w.after(2 * time.Second)
		w.requests()
		w.step.Revalidate()
		w.after(5 * time.Second)
		if n := w.requests(); n > 0 {
			t.Errorf("%d requests though no NAT could have changed its mapping", n)
		}
	})
}

// Servers that are silent when Revalidate is called are not believed gone, nor UDP blocked, before the regular look
// says so.
func TestRevalidateInAShortOutageIsNoNews(t *testing.T) {
	bubbleWith(t, two, withAlive, func(t *testing.T, w *world) {
		w.set(func() { w.alive = true })
		w.one(w.after(2 * time.Second))
		w.set(func() { w.away = true })
		w.step.Revalidate()
		w.after(2 * time.Second)
		w.set(func() { w.away = false })
		if rs := w.after(time.Minute); len(rs) > 0 {
			t.Errorf("told %+v", rs)
		}
		w.set(func() { w.away = true })
		w.step.Revalidate()
		if r := w.one(w.after(10 * time.Second)); r.NAT != skeinv1.NatType_NAT_TYPE_BLOCKED {
			t.Errorf("of an outage that stays, this was told in 10 s: %+v", r)
		}
	})
}

// A site that is cut off from all servers must go on telling its neighbours how to reach it.
func TestServersGoAndComeBack(t *testing.T) {
	for name, adjust := range map[string]func(*Config, *world){"without another way to know": nil,
		"known to be down": withAlive} {
		t.Run(name, func(t *testing.T) {
			bubbleWith(t, two, adjust, func(t *testing.T, w *world) {
				before := w.one(w.after(2 * time.Second))
				w.set(func() { w.away = true })
				r := w.one(w.after(time.Minute))
				if r.NAT != before.NAT || r.UDP || !r.SameCandidates(before) || !strings.Contains(strings.Join(r.Advice, " "),
					"stays in use") {
					t.Errorf("without servers: %+v", r)
				}
				w.set(func() { w.away = false })
				if r := w.one(w.after(retryLast + 10*time.Second)); !r.Equal(before) {
					t.Errorf("with servers again: %+v", r)
				}
				// In another network the old knowledge is worth nothing.
				w.set(func() { w.away, w.addrs = true, []string{"192.168.77.2"} })
				w.changed()
				if r := w.one(w.after(30 * time.Second)); len(r.Candidates) != 1 || r.NAT == before.NAT {
					t.Errorf("elsewhere without servers: %+v", r)
				}
			})
		})
	}
}

func TestSilenceOfServersThatAreUpMeansBlocked(t *testing.T) {
	bubbleWith(t, two, withAlive, func(t *testing.T, w *world) {
		w.set(func() { w.away = true })
		if r := w.one(w.after(mappingTime + time.Second)); r.NAT != skeinv1.NatType_NAT_TYPE_UNKNOWN {
			t.Errorf("before anything is known of the servers: %+v", r)
		}
		w.set(func() { w.alive = true })
		if r := w.one(w.after(30 * time.Second)); r.NAT != skeinv1.NatType_NAT_TYPE_BLOCKED || r.UDP {
			t.Errorf("when they are known to be up: %+v", r)
		}
		w.set(func() { w.away = false })
		if r := w.one(w.after(retryLast + 10*time.Second)); r.NAT != skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE {
			t.Errorf("when UDP passes: %+v", r)
		}
		w.set(func() { w.away = true })
		if r := w.one(w.after(time.Minute)); r.NAT != skeinv1.NatType_NAT_TYPE_BLOCKED || len(r.Mapped) != 0 {
			t.Errorf("when UDP passes no more: %+v", r)
		}
	})
}

// A firewall that drops STUN's port alone does not make a host blocked: the WireGuard ports of public peers are asked
// instead.
func TestFilteredSTUNPortIsNotBlockedUDP(t *testing.T) {
	bubbleWith(t, two, withAlive, func(t *testing.T, w *world) {
		w.set(func() { w.filtered, w.alive = 3478, true })
		if r := w.one(w.after(2*mappingTime + time.Second)); r.NAT != skeinv1.NatType_NAT_TYPE_BLOCKED {
			t.Errorf("without peers to ask: %v", r.NAT)
		}
		w.step.SetSpare([]netip.AddrPort{ap("203.0.113.1:51820"), ap("203.0.113.2:51820"), ap("192.168.1.2:51820")})
		rs := w.after(time.Minute)
		r := rs[len(rs)-1]
		if r.NAT != skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE || !r.UDP || len(r.Mapped) != 2 ||
			!strings.Contains(strings.Join(r.Advice, " "), "drops the STUN port") {
			t.Errorf("with peers to ask: %+v", r)
		}
		w.requests()
		if rs := w.after(5 * time.Minute); len(rs) != 0 {
			t.Errorf("told %+v though nothing changed", rs)
		}
		w.set(func() { w.filtered = 0 })
		w.step.wake()
		if rs := w.after(10 * time.Second); len(rs) != 1 || strings.Contains(strings.Join(rs[0].Advice, " "),
			"drops the STUN port") {
			t.Errorf("when the port is open: %+v", rs)
		}
	})
}

func TestShortOutageIsNoNews(t *testing.T) {
	bubble(t, two, func(t *testing.T, w *world) {
		w.after(2 * time.Second)
		for range 20 {
			w.set(func() { w.away = true })
			w.step.wake()
			w.after(settle + mappingTime + 100*time.Millisecond) // one whole run fails
			w.set(func() { w.away = false })
			if rs := w.after(5 * time.Second); len(rs) != 0 {
				t.Fatalf("told %+v", rs)
			}
		}
	})
}

func TestNewAddressesAreFollowed(t *testing.T) {
	bubble(t, two, func(t *testing.T, w *world) {
		w.after(2 * time.Second)
		w.requests()
		w.changed() // something else about a link
		if rs := w.after(2 * settle); len(rs) != 0 || w.requests() != 0 {
			t.Error("the same addresses made a run")
		}
		w.set(func() { w.addrs = append(w.addrs, "10.9.8.7") })
		w.changed()
		if r := w.one(w.after(time.Second)); len(r.Candidates) != 3 {
			t.Errorf("candidates %v", r.Candidates)
		}
		w.set(func() { w.overlay = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")} })
		w.changed()
		if r := w.one(w.after(time.Second)); len(r.Candidates) != 2 {
			t.Errorf("candidates %v", r.Candidates)
		}
		// Cut off from the kernel's notifications, it subscribes again and looks.
		w.set(func() { w.addrs = append(w.addrs, "10.5.5.5") })
		w.lost <- errors.New("no buffer space")
		if r := w.one(w.after(3 * time.Second)); len(r.Candidates) != 3 {
			t.Errorf("candidates %v", r.Candidates)
		}
		w.set(func() {
			if w.watches != 2 {
				t.Errorf("subscribed %d times, want 2", w.watches)
			}
		})
	})
}

func TestServersCanBeChanged(t *testing.T) {
	bubble(t, "", func(t *testing.T, w *world) {
		if r := w.one(w.after(time.Second)); r.NAT != skeinv1.NatType_NAT_TYPE_UNKNOWN || len(r.Candidates) != 1 || !r.IPv4 {
			t.Errorf("without servers: %+v", r)
		}
		list := append(strings.Split(two, ","), "192.168.1.2:3478", "no port:", "[2001:db8::1]:3478")
		w.step.SetServers(list, false)
		if r := w.one(w.after(2 * time.Second)); !r.UDP || len(r.Mapped) != 2 {
			t.Errorf("with servers: %+v", r)
		}
		w.requests()
		w.step.SetServers(list, false)
		if w.after(time.Second); w.requests() != 0 {
			t.Error("the same servers made a run")
		}
	})
}

func TestCheckRunsAtOnce(t *testing.T) {
	bubble(t, two, func(t *testing.T, w *world) {
		w.after(2 * time.Second)
		w.set(func() { w.mapped = ap("198.51.100.9:8") })
		r, err := w.Check(t.Context())
		if err != nil || r.Mapped[0].Mapped != ap("198.51.100.9:8") || w.Result().Mapped[0].Mapped != r.Mapped[0].Mapped {
			t.Errorf("%+v, %v", r, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		w.set(func() { w.away = true })
		if _, err := w.Check(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("a cancelled check: %v", err)
		}
	})
}
