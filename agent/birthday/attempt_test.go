package birthday

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/probe"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/nattest"
	"github.com/skeinmesh/skein/internal/testenv"
)

func TestPredictedPortsComeFirst(t *testing.T) {
	one, many := portRestrictedAndSymmetric(t, skeinv1.PairOutcome_PREDICTION, nattest.Sequential)
	many.sit.Step = 1
	m := meet(t, one, many, one)
	many.lead(m)
	o := heard(t, one, many, m)
	if o.Probes > predictSockets+predictSlack || m.Sockets > predictSockets {
		t.Errorf("%d probes, %d sockets, for ports that can be told beforehand", o.Probes, m.Sockets)
	}
	talks(t, one, many, o, m)
}

func TestBothAskAtOnce(t *testing.T) {
	one, many := portRestrictedAndSymmetric(t, skeinv1.PairOutcome_BIRTHDAY, nattest.Symmetric)
	m := meet(t, one, many, one, many)
	many.lead(m)
	talks(t, one, many, heard(t, one, many, m), m)
	if a, b := one.engine.Stats(), many.engine.Stats(); a.Attempts != b.Attempts || a.Attempts != b.Failed+b.Hits {
		t.Errorf("%+v and %+v, want joint attempts", a, b)
	}
}

func TestAPeerThatIsSilent(t *testing.T) {
	one, many := portRestrictedAndSymmetric(t, skeinv1.PairOutcome_BIRTHDAY, nattest.Symmetric)
	one.mute.Store(true)
	before := testenv.OpenFiles(t)
	one.engine.Start(bob)
	e := one.phase(Silent, 2*requestWait)
	if n := one.engine.Stats(); e.Probes != 0 || n.Mappings != 0 || many.engine.Stats().Running != 0 ||
		testenv.OpenFiles(t) > before {
		t.Errorf("%+v after a peer that did not answer: %+v", n, e)
	}
}

// A peer's record names a third party's address as its own. No relay has seen the peer there, so nothing is sent to
// it, whichever end begins and whichever role this end has; the peer is given the reason.
func TestAnAddressThatNobodyHasSeenGetsNothing(t *testing.T) {
	for _, c := range []struct {
		name  string
		liar  func(one, many *station) (liar, honest *station)
		begin func(liar, honest *station) *station
	}{
		{"many ports of it, when this end begins", func(o, m *station) (*station, *station) { return m, o },
			func(_, h *station) *station { return h }},
		{"many ports of it, when the peer begins", func(o, m *station) (*station, *station) { return m, o },
			func(l, _ *station) *station { return l }},
		{"one port from many sockets, when this end begins", func(o, m *station) (*station, *station) { return o, m },
			func(_, h *station) *station { return h }},
		{"one port from many sockets, when the peer begins", func(o, m *station) (*station, *station) { return o, m },
			func(l, _ *station) *station { return l }},
	} {
		t.Run(c.name, func(t *testing.T) {
			one, many := portRestrictedAndSymmetric(t, skeinv1.PairOutcome_BIRTHDAY, nattest.Symmetric)
			liar, honest := c.liar(one, many)
			victim := netip.MustParseAddr("198.51.100.200")
			honest.sit.Theirs = netip.AddrPortFrom(victim, honest.sit.Theirs.Port())
			honest.attest = func(at netip.Addr) error {
				if at != victim {
					return fmt.Errorf("asked about %s, want %s", at, victim)
				}
				return errors.New("no relay has seen it there")
			}
			before := testenv.OpenFiles(t)
			begins := c.begin(liar, honest)
			begins.engine.Start(begins.peer)
			if e := begins.phase(Refused, 5*time.Second); !strings.Contains(e.Text, "no relay has seen it there") ||
				e.Retry < busyRetry {
				t.Errorf("%+v", e)
			}
			within(t, "the end of both", 5*time.Second, func() bool {
				return honest.engine.Stats().Running == 0 && liar.engine.Stats().Running == 0
			})
			if n := honest.engine.Stats(); n.Probes != 0 || n.Sockets != 0 || n.Mappings != 0 || n.Attempts != 0 ||
				testenv.OpenFiles(t) > before {
				t.Errorf("something was sent to the victim: %+v", n)
			}
			// once relays have seen the peer there, ports are predicted as usual
			honest.attest, honest.sit.Theirs = nil, liar.sit.Mine
			meet(t, one, many, begins)
		})
	}
}

func TestWithoutAWitnessNothingIsPredicted(t *testing.T) {
	e := New(Config{Situation: func(identity.ID) (Situation, error) {
		return Situation{Role: One, Theirs: netip.MustParseAddrPort("198.51.100.1:1")}, nil
	}, Signal: func(identity.ID, *skeinv1.Signal) error { t.Error("it said something"); return nil }})
	defer e.Close()
	events := make(chan Event, 1)
	e.c.Report = func(_ identity.ID, ev Event) { events <- ev }
	e.Start(bob)
	if ev := <-events; ev.Phase != Refused || !strings.Contains(ev.Text, "no relay can confirm where the peer's packets") {
		t.Errorf("%+v", ev)
	}
}

func TestAPeerThatRefuses(t *testing.T) {
	one, many := portRestrictedAndSymmetric(t, skeinv1.PairOutcome_BIRTHDAY, nattest.Symmetric)
	for _, c := range []struct {
		name  string
		sit   Situation
		says  string
		retry time.Duration
	}{
		{"it has failed lately", many.sit, "has failed lately", pauseFirst},
		{"it takes the same part", Situation{Role: One, Rule: skeinv1.PairOutcome_BIRTHDAY, Mine: many.sit.Mine,
			Theirs: many.sit.Theirs}, "do not agree", busyRetry},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.retry == pauseFirst {
				many.engine.mu.Lock()
				many.engine.memory.Note(many.sit.Mine.Addr(), many.sit.Theirs.Addr(), many.sit.Rule, false, time.Now())
				many.engine.mu.Unlock()
			}
			many.sit = c.sit
			one.engine.Start(bob)
			e := one.phase(Refused, 5*time.Second)
			if !strings.Contains(e.Text, c.says) || e.Retry > c.retry || e.Retry < c.retry-3*time.Second || e.Probes != 0 {
				t.Errorf("%+v, want one that says %q and to come again in %s", e, c.says, c.retry)
			}
			within(t, "the end", 3*time.Second, func() bool { return one.engine.Stats().Running == 0 })
		})
	}
	if n := many.engine.Stats(); n.Sockets != 0 || n.Mappings != 0 {
		t.Errorf("who refuses has spent %+v", n)
	}
}

func TestUnfitPairsAreNotStarted(t *testing.T) {
	one, _ := portRestrictedAndSymmetric(t, skeinv1.PairOutcome_BIRTHDAY, nattest.Symmetric)
	e := New(Config{Prober: one.prober, Report: func(_ identity.ID, e Event) {
		one.events <- e
	}, Situation: func(identity.ID) (Situation, error) {
		return Situation{}, errors.New("it is disabled")
	}, Signal: func(identity.ID, *skeinv1.Signal) error { t.Error("a signal was sent"); return nil }})
	defer e.Close()
	e.Start(bob)
	if ev := one.phase(Refused, 3*time.Second); ev.Retry != refusedRetry || !strings.Contains(ev.Text, "it is disabled") {
		t.Errorf("%+v", ev)
	}
}

// An attempt that is no longer needed closes its sockets and informs the peer, which ends, too.
func TestCancelledInTheMiddle(t *testing.T) {
	one, many := portRestrictedAndSymmetric(t, skeinv1.PairOutcome_BIRTHDAY, nattest.Symmetric)
	one.sit.Theirs = netip.MustParseAddrPort("203.0.113.250:7") // nobody is there, so nothing is hit
	before := testenv.OpenFiles(t)
	many.engine.Start(alice)
	many.phase(Began, 5*time.Second)
	within(t, "many sockets", 5*time.Second, func() bool { return testenv.OpenFiles(t) > before+100 })
	many.engine.Stop(alice)
	within(t, "sockets closed and both ends done", 5*time.Second, func() bool {
		return testenv.OpenFiles(t) <= before && one.engine.Stats().Running+many.engine.Stats().Running == 0
	})
	if e := one.phase(Failed, time.Second); !strings.Contains(e.Text, errCancelled.Error()) {
		t.Errorf("the other end is told %q", e.Text)
	}
	one.engine.Close()
	many.engine.Close()
	many.engine.Start(alice) // after the end nothing starts
	if n := many.engine.Stats(); n.Running != 0 || testenv.OpenFiles(t) > before {
		t.Errorf("after Close %+v", n)
	}
}

// Two symmetric NATs that do not count hardly ever meet. The attempt keeps its bounds and says so.
func TestTwoSymmetricNATsKeepTheBounds(t *testing.T) {
	internet := nattest.New(t)
	a, b := internet.Host(nattest.Symmetric), internet.Host(nattest.Symmetric)
	outA, outB := netip.AddrPortFrom(a.Outside, 7), netip.AddrPortFrom(b.Outside, 7)
	nobody := netip.MustParseAddrPort("203.0.113.250:7") // else one attempt in some thousands would succeed
	sit := Situation{Role: Twin, Rule: skeinv1.PairOutcome_BIRTHDAY_BOTH, Mine: outA, Theirs: nobody, Decides: true}
	one := newStation(t, alice, bob, a, sit)
	sit.Mine, sit.Decides = outB, false
	two := newStation(t, bob, alice, b, sit)
	connect(t, one, two, 10*time.Millisecond)
	before := testenv.OpenFiles(t)
	two.engine.Start(alice)
	for _, s := range []*station{one, two} {
		e := s.phase(Failed, 10*time.Second)
		if e.Probes > twinProbes || e.Sockets != MaxSockets || e.Text == "" {
			t.Errorf("%+v", e)
		}
	}
	within(t, "sockets closed", 5*time.Second, func() bool { return testenv.OpenFiles(t) <= before })
}

// A packet that does not prove the pair's key, is a repetition, or is another member's is not a hit.
func TestForgedAndReplayedPacketsAreNoHits(t *testing.T) {
	internet := nattest.New(t)
	host := internet.Host(nattest.Public)
	at := netip.AddrPortFrom(host.Addr, wgPort)
	s := newStation(t, bob, alice, host, Situation{Role: Many, Rule: skeinv1.PairOutcome_BIRTHDAY, Mine: at,
		Theirs: netip.MustParseAddrPort("203.0.113.250:51820")})
	s.prober.SetPeer(identity.ID{9}, [32]byte{8})
	mallory := internet.Host(nattest.Public)
	in := make(chan *skeinv1.Signal_Birthday, 16)
	s.signals = in
	s.engine.TakeSignal(alice, &skeinv1.Signal_Birthday{Phase: skeinv1.Signal_Birthday_START, Role: One, Session: 1})
	s.phase(Began, 3*time.Second)
	var fan *fan
	within(t, "sockets", 5*time.Second, func() bool {
		ss := s.engine.session(alice)
		fan = ss.fan
		return fan.size() == MaxSockets
	})
	good := probe.NewCodec([32]byte{7})
	seen := good.EncodePing(nil, probe.Message{Sender: alice, Tx: probe.NewTxID(), Epoch: 1, Counter: 5})
	if _, ok := s.prober.Authenticate(seen, time.Now()); !ok {
		t.Fatal("a genuine ping is refused")
	}
	forged := probe.NewCodec([32]byte{1}).EncodePing(nil, probe.Message{Sender: alice, Tx: probe.NewTxID(),
		Epoch: 1, Counter: 6})
	other := probe.NewCodec([32]byte{8}).EncodePing(nil, probe.Message{Sender: identity.ID{9}, Tx: probe.NewTxID(),
		Epoch: 1, Counter: 1})
	pong := good.EncodePong(nil, probe.Message{Sender: alice, Tx: probe.NewTxID(), Epoch: 1})
	sender := newSocket(t, mallory)
	for i := range 20 {
		for _, b := range [][]byte{seen, forged, other, pong, {1, 2, 3}, nil} {
			if _, err := sender.WriteToUDPAddrPort(b, netip.AddrPortFrom(host.Addr, fan.port(i))); err != nil {
				t.Fatal(err)
			}
		}
	}
	read := func() probe.ProberStats {
		n := s.prober.Stats()
		return probe.ProberStats{BadMAC: n.BadMAC, Replayed: n.Replayed, Unsolicited: n.Unsolicited, PongsSent: n.PongsSent}
	}
	want := probe.ProberStats{BadMAC: 20, Replayed: 39, Unsolicited: 20} // nothing that comes to these sockets is answered
	within(t, fmt.Sprintf("all of them are read, as %+v", want), 10*time.Second, func() bool { return read() == want })
	genuine := good.EncodePing(nil, probe.Message{Sender: alice, Tx: probe.NewTxID(), Epoch: 1, Counter: 7})
	if _, err := sender.WriteToUDPAddrPort(genuine, netip.AddrPortFrom(host.Addr, fan.port(200))); err != nil {
		t.Fatal(err)
	}
	if e := s.phase(Hit, 5*time.Second); e.Local != fan.port(200) {
		t.Errorf("the hit is at port %d, want %d, where the only genuine packet went", e.Local, fan.port(200))
	}
	if n := read(); n != want {
		t.Errorf("%+v, want %+v", n, want)
	}
}

// Invalid signals change nothing.
func TestSignalsWithoutSense(t *testing.T) {
	one, many := portRestrictedAndSymmetric(t, skeinv1.PairOutcome_BIRTHDAY, nattest.Symmetric)
	for _, b := range []*skeinv1.Signal_Birthday{nil, {}, {Phase: 99}, {Phase: skeinv1.Signal_Birthday_END, Hit: true,
		Tx: []byte("short")}, {Phase: skeinv1.Signal_Birthday_ACCEPT}, {Phase: skeinv1.Signal_Birthday_REFUSE,
		RetryNanos: -1}} {
		many.engine.TakeSignal(alice, b)
	}
	if n := many.engine.Stats(); n.Running != 0 {
		t.Fatalf("an attempt began by %+v", n)
	}
	many.sit.Role = Twin
	many.sit.Rule = skeinv1.PairOutcome_PREDICTION
	for i, base := range []uint32{0, 65536, 1 << 31} {
		within(t, "the end", 3*time.Second, func() bool { // requests are paced, so it asks as often as it takes
			many.engine.TakeSignal(alice, &skeinv1.Signal_Birthday{Phase: skeinv1.Signal_Birthday_START, Role: Twin, Session: 1,
				Base: base, Step: 1 << 30})
			n := many.engine.Stats()
			return n.Running == 0 && n.Refused == uint64(i+1)
		})
	}
	if n := many.engine.Stats(); n.Attempts != 0 || n.Refused != 3 {
		t.Errorf("bases that are not ports led to %+v", n)
	}
	_ = one
}

// Each request of a peer makes this end ask relays about it, so requests of a flooding peer are considered only now
// and then.
func TestRequestsOfOnePeerArePaced(t *testing.T) {
	e := New(Config{})
	defer e.Close()
	now := time.Unix(1000, 0)
	count := func(peer identity.ID, from, to time.Duration) (n int) {
		for d := from; d < to; d += 10 * time.Millisecond {
			if e.mayAsk(peer, now.Add(d)) {
				n++
			}
		}
		return n
	}
	if n := count(alice, 0, 8*time.Second); n != 10 {
		t.Errorf("%d requests in 8 s are taken, want one every %s", n, askGap)
	}
	if n := count(bob, 0, time.Millisecond); n != 1 {
		t.Error("another peer's request waits for it")
	}
	for i := range 2 * targetsKept {
		e.mayAsk(identity.ID{9, byte(i >> 8), byte(i)}, now)
	}
	if len(e.asked) > targetsKept {
		t.Errorf("%d peers are remembered", len(e.asked))
	}
	if !e.mayAsk(identity.ID{8}, now.Add(time.Minute)) || len(e.asked) > 2 {
		t.Errorf("%d are remembered a minute later", len(e.asked))
	}
}
