package candidate

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/simtime"
)

// script is a step that does as the test says.
type script struct {
	source   string
	look     func(ctx context.Context, r Request) Found
	mu       sync.Mutex
	asked    []Request
	released bool
}

func (s *script) Source() string { return s.source }

func (s *script) Look(ctx context.Context, r Request) Found {
	s.mu.Lock()
	s.asked = append(s.asked, r)
	s.mu.Unlock()
	return s.look(ctx, r)
}

func (s *script) Release(context.Context) { s.released = true }

func (s *script) requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.asked
	s.asked = nil
	return out
}

// wire is a network that the test changes.
type wire struct {
	mu      sync.Mutex
	host    Host
	err     error
	changed func()
}

func (w *wire) Read() (Host, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.host, w.err
}

func (w *wire) Watch(ctx context.Context, changed func()) error {
	w.mu.Lock()
	w.changed = changed
	w.mu.Unlock()
	<-ctx.Done()
	return ctx.Err()
}

func (w *wire) move(addr string) {
	w.mu.Lock()
	w.host = Host{Addrs: []netip.Addr{netip.MustParseAddr(addr)}}
	w.mu.Unlock()
	w.changed()
}

func host(addr, source string) *skeinv1.Candidate {
	return Make(skeinv1.CandidateType_CANDIDATE_TYPE_HOST, netip.MustParseAddrPort(addr), PriorityHost, source)
}

// chain runs steps until the test ends. Those called stun and interface have to speak before anything is told.
func chain(t *testing.T, w *wire, steps ...Step) (*Discoverer, func() []Result) {
	var mu sync.Mutex
	var told []Result
	var first []Step
	for _, s := range steps {
		if s.Source() == "stun" || s.Source() == "interface" {
			first = append(first, s)
		}
	}
	d := New(Config{Steps: steps, First: first, Network: w, OnResult: func(r Result) {
		mu.Lock()
		told = append(told, r)
		mu.Unlock()
	}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		for _, s := range steps {
			if !s.(*script).released {
				t.Errorf("step %s was not released", s.Source())
			}
		}
		if _, err := d.Check(context.Background()); !errors.Is(err, ErrStopped) {
			t.Errorf("a check after the end: %v", err)
		}
	})
	return d, func() []Result {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		out := told
		told = nil
		return out
	}
}

func sources(r Result) string {
	var out []string
	for _, c := range r.Candidates {
		out = append(out, c.Address+" "+c.Source)
	}
	return strings.Join(out, ", ")
}

func TestNothingIsToldBeforeTheNATIsKnown(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		nat := &script{source: "stun", look: func(ctx context.Context, r Request) Found {
			pause.For(ctx, time.Second)
			r.Early(Found{NAT: &NATReport{At: time.Now()}, Candidates: []*skeinv1.Candidate{host("198.51.100.9:1", "stun")}})
			pause.For(ctx, time.Second)
			return Found{NAT: &NATReport{At: time.Now(), Hairpin: true},
				Candidates: []*skeinv1.Candidate{host("198.51.100.9:1", "stun")}}
		}}
		links := &script{source: "interface", look: func(_ context.Context, r Request) Found {
			return Found{Candidates: []*skeinv1.Candidate{host("198.51.100.9:1", "interface"), host("10.0.0.1:1", "interface")},
				Problem: "broken", Help: "repair it"}
		}}
		w := &wire{host: Host{Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}}
		d, told := chain(t, w, nat, links)
		time.Sleep(900 * time.Millisecond)
		if rs := told(); len(rs) != 0 {
			t.Errorf("told %+v before the NAT was known", rs)
		}
		time.Sleep(200 * time.Millisecond)
		rs := told()
		if len(rs) != 1 || sources(rs[0]) != "198.51.100.9:1 stun, 10.0.0.1:1 interface" {
			t.Fatalf("early: %+v", rs)
		}
		if p := rs[0].Problems; len(p) != 1 || p[0] != (Problem{"interface", "broken", "repair it"}) {
			t.Errorf("problems %v", p)
		}
		time.Sleep(time.Second)
		if rs := told(); len(rs) != 1 || !rs[0].Hairpin || !d.Result().Equal(rs[0]) {
			t.Errorf("sure: %+v", rs)
		}
	})
}

// TestNothingIsToldWithoutTheHostsAddresses has the interfaces speak after the NAT: a host told others that it had no
// address, and `skein token create` that no member offered a port, until they had.
func TestNothingIsToldWithoutTheHostsAddresses(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		nat := &script{source: "stun", look: func(context.Context, Request) Found {
			return Found{NAT: &NATReport{At: time.Now()}}
		}}
		links := &script{source: "interface", look: func(ctx context.Context, r Request) Found {
			pause.For(ctx, time.Second)
			return Found{Candidates: []*skeinv1.Candidate{host(r.Host.Addrs[0].String()+":1", "interface")}}
		}}
		w := &wire{host: Host{Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}}
		_, told := chain(t, w, nat, links)
		for _, addr := range []string{"10.0.0.1", "10.0.0.2"} {
			time.Sleep(900 * time.Millisecond)
			if rs := told(); len(rs) != 0 {
				t.Errorf("told %+v before the addresses were known", rs)
			}
			time.Sleep(2 * settle)
			if rs := told(); len(rs) != 1 || sources(rs[0]) != addr+":1 interface" {
				t.Fatalf("told %+v, want %s", rs, addr)
			}
			w.move("10.0.0.2")
		}
	})
}

func TestStepsLookWhenTheirTimeComes(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		var wake func()
		nat := &script{source: "stun", look: func(_ context.Context, r Request) Found {
			wake = r.Wake
			return Found{NAT: &NATReport{At: time.Now()}, Again: 10 * time.Second}
		}}
		links := &script{source: "interface", look: func(context.Context, Request) Found { return Found{} }}
		w := &wire{}
		_, told := chain(t, w, nat, links)
		time.Sleep(time.Minute)
		told()
		rs := nat.requests()
		if len(rs) < 6 || len(rs) > 8 || !rs[0].Full || !rs[0].Fresh || rs[1].Full || rs[1].Fresh {
			t.Errorf("asked %d times in a minute: %+v", len(rs), rs)
		}
		if n := len(links.requests()); n != 1 {
			t.Errorf("a step that wants nothing was asked %d times", n)
		}
		wake()
		synctest.Wait()
		if rs := nat.requests(); len(rs) != 1 || !rs[0].Full || rs[0].Fresh {
			t.Errorf("woken: %+v", rs)
		}
		w.changed() // of something that does not matter
		time.Sleep(2 * settle)
		if n := len(links.requests()); n != 0 {
			t.Errorf("asked %d times on the same network", n)
		}
	})
}

func TestNewNetworkCutsALookShort(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		nat := &script{source: "stun", look: func(_ context.Context, r Request) Found {
			return Found{NAT: &NATReport{At: time.Now()}}
		}}
		slow := &script{source: "upnp", look: func(ctx context.Context, r Request) Found {
			if r.Host.Addrs[0].String() == "10.0.0.1" && !pause.For(ctx, time.Hour) {
				return Found{Candidates: []*skeinv1.Candidate{host("192.0.2.1:1", "upnp")}} // nobody may hear of it
			}
			return Found{Candidates: []*skeinv1.Candidate{host(fmt.Sprintf("%s:1", r.Host.Addrs[0]), "upnp")}}
		}}
		w := &wire{host: Host{Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}}
		_, told := chain(t, w, nat, slow)
		time.Sleep(time.Second)
		w.move("10.0.0.2")
		time.Sleep(time.Second)
		rs := told()
		if len(rs) == 0 || sources(rs[len(rs)-1]) != "10.0.0.2:1 upnp" ||
			slices.ContainsFunc(rs, func(r Result) bool { return strings.Contains(sources(r), "192.0.2.1") }) {
			t.Errorf("told %+v", rs)
		}
		if rs := slow.requests(); len(rs) != 2 || !rs[1].Fresh {
			t.Errorf("asked %+v", rs)
		}
	})
}

func TestCheckWaitsForEveryStep(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		n := 0
		nat := &script{source: "stun", look: func(context.Context, Request) Found {
			return Found{NAT: &NATReport{At: time.Now()}}
		}}
		slow := &script{source: "pcp", look: func(ctx context.Context, _ Request) Found {
			pause.For(ctx, 3*time.Second)
			n++
			return Found{Candidates: []*skeinv1.Candidate{host(fmt.Sprintf("192.0.2.1:%d", n), "pcp")}}
		}}
		d, _ := chain(t, &wire{}, nat, slow)
		time.Sleep(time.Second) // the first look is under way; a check wants one that begins now
		r, err := d.Check(t.Context())
		if err != nil || sources(r) != "192.0.2.1:2 pcp" {
			t.Errorf("%s, %v", sources(r), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := d.Check(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a check that takes too long: %v", err)
		}
	})
}

func TestUnreadableHostKeepsTheLast(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		nat := &script{source: "stun", look: func(_ context.Context, r Request) Found {
			return Found{NAT: &NATReport{At: time.Now()}}
		}}
		w := &wire{host: Host{Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}}
		d, _ := chain(t, w, nat)
		time.Sleep(time.Second)
		w.mu.Lock()
		w.err, w.host = errors.New("netlink says no"), Host{}
		w.mu.Unlock()
		w.changed()
		time.Sleep(time.Second)
		if r, err := d.Check(t.Context()); err != nil || len(r.Host.Addrs) != 1 {
			t.Errorf("%+v, %v", r.Host, err)
		}
	})
}

func TestResultsAreComparedByWhatMatters(t *testing.T) {
	seen := Observation{Server: netip.MustParseAddrPort("203.0.113.1:3478"),
		Mapped: netip.MustParseAddrPort("198.51.100.9:7")}
	make := func(change func(*Result)) Result {
		r := Result{NATReport: NATReport{Mapped: []Observation{seen}},
			Candidates: []*skeinv1.Candidate{host("10.0.0.1:1", "interface")}, Notes: []Note{{Source: "pcp"}}}
		change(&r)
		return r
	}
	same := make(func(*Result) {})
	for name, change := range map[string]func(*Result){
		"time":       func(r *Result) { r.At = r.At.Add(1) },
		"round trip": func(r *Result) { r.Mapped[0].RTT = 5 },
	} {
		if !same.Equal(make(change)) {
			t.Errorf("another %s makes results differ", name)
		}
	}
	for name, change := range map[string]func(*Result){
		"mapped address": func(r *Result) { r.Mapped[0].Mapped = netip.MustParseAddrPort("198.51.100.9:9") },
		"candidate":      func(r *Result) { r.Candidates[0].Source = "imds" },
		"port step":      func(r *Result) { r.PortStep = 1 },
		"problem":        func(r *Result) { r.Problems = []Problem{{}} },
		"note":           func(r *Result) { r.Notes[0].OK = true },
	} {
		if same.Equal(make(change)) {
			t.Errorf("another %s is no news", name)
		}
	}
}
