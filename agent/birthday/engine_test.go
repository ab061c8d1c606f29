package birthday

import (
	"context"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/probe"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nft"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/nattest"
	"github.com/skeinmesh/skein/internal/testenv"
)

const wgPort = 51820

var (
	alice = identity.ID{1}
	bob   = identity.ID{2}
)

// station is a host whose WireGuard port an ordinary socket holds, with prober, engine and data plane.
type station struct {
	t       *testing.T
	id      identity.ID
	peer    identity.ID
	host    *nattest.Host
	owner   *net.UDPConn
	prober  *probe.Prober
	engine  *Engine
	nft     *nft.Reconciler
	sit     Situation
	events  chan Event
	pongs   chan probe.Pong
	attest  func(at netip.Addr) error // nil: every address is attested
	newest  func(context.Context) (netip.AddrPort, error)
	signals chan *skeinv1.Signal_Birthday // to the peer; nil: they are lost
	mute    atomic.Bool                   // likewise
}

func newStation(t *testing.T, id, peer identity.ID, host *nattest.Host, sit Situation) *station {
	t.Helper()
	s := &station{t: t, id: id, peer: peer, host: host, sit: sit, events: make(chan Event, 64),
		pongs: make(chan probe.Pong, 4096)}
	var socket *probe.Socket
	host.Do(func() {
		var err error
		if s.owner, err = net.ListenUDP("udp4", &net.UDPAddr{Port: wgPort}); err != nil {
			t.Fatal(err)
		}
		if socket, err = probe.Open(probe.Config{Port: wgPort, Mark: dataplane.DefaultNumbers().MarkWG}); err != nil {
			t.Fatal(err)
		}
		if s.nft, err = nft.NewReconciler(dataplane.Numbers{}); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() { s.owner.Close() })
	t.Cleanup(func() { s.nft.Close() })
	s.prober = probe.NewProber(probe.ProberConfig{Self: id, Epoch: 1, Socket: socket,
		OnPing: func(p probe.Ping) { s.engine.PingReceived(p.Peer, p.From) },
		OnPong: func(p probe.Pong) { s.engine.PongReceived(p.Peer, p.From); offer(s.pongs, p) },
	})
	s.prober.SetPeer(peer, [32]byte{7})
	// A goroutine started inside a namespace may move to another thread; an attempt's sockets must be in the namespace.
	s.engine = New(Config{
		Prober: s.prober, Mark: dataplane.DefaultNumbers().MarkWG,
		Situation: func(identity.ID) (Situation, error) { return s.sit, nil },
		Report:    func(_ identity.ID, e Event) { s.events <- e },
		Signal: func(_ identity.ID, b *skeinv1.Signal) error {
			if s.signals != nil && !s.mute.Load() {
				s.signals <- b.GetBirthday()
			}
			return nil
		},
		Attest: func(_ context.Context, _ identity.ID, at netip.Addr) error {
			if s.attest != nil {
				return s.attest(at)
			}
			return nil
		},
		Newest: func(ctx context.Context) (netip.AddrPort, error) { return s.newest(ctx) },
	})
	s.engine.within = host.Do
	t.Cleanup(s.engine.Close)
	t.Cleanup(func() { socket.Close() })
	socket.Serve(s.prober.Handle)
	return s
}

func offer[T any](c chan T, v T) {
	select {
	case c <- v:
	default:
	}
}

// connect carries signals between two stations, as the relay does.
func connect(t *testing.T, a, b *station, delay time.Duration) {
	for _, p := range [][2]*station{{a, b}, {b, a}} {
		p[0].signals = make(chan *skeinv1.Signal_Birthday, 256)
		stop := make(chan struct{})
		t.Cleanup(func() { close(stop) })
		go func() {
			for {
				select {
				case s := <-p[0].signals:
					time.AfterFunc(delay, func() { p[1].engine.TakeSignal(p[0].id, s) })
				case <-stop:
					return
				}
			}
		}()
	}
}

// phase waits for an event of a phase.
func (s *station) phase(want Phase, within time.Duration) Event {
	s.t.Helper()
	limit := time.After(within)
	for {
		select {
		case e := <-s.events:
			if e.Phase == want {
				return e
			}
			if e.Phase != Began {
				s.t.Fatalf("node %s: %+v, want phase %d", s.id, e, want)
			}
		case <-limit:
			s.t.Fatalf("node %s: no event of phase %d within %s", s.id, want, within)
		}
	}
}

// meet starts attempts until one hits, and returns what many heard of it. One in some thousands misses by chance, and
// more on a machine too busy for their pace.
func meet(t *testing.T, one, many *station, begin ...*station) Event {
	t.Helper()
	for range 3 {
		one.drain()
		many.drain()
		for _, s := range begin {
			s.engine.Start(s.peer)
		}
		for e := (Event{Phase: Began}); e.Phase != Failed; {
			select {
			case e = <-many.events:
			case <-time.After(20 * time.Second):
				t.Fatalf("node %s: no outcome after %+v", many.id, e)
			}
			if e.Phase == Hit {
				return e
			}
			if e.Phase != Began && e.Phase != Failed {
				t.Fatalf("node %s: %+v", many.id, e)
			}
		}
		for _, s := range []*station{one, many} {
			within(t, "the end of an attempt", 5*time.Second, func() bool { return s.engine.Stats().Running == 0 })
			s.engine.mu.Lock()
			s.engine.memory = &Memory{} // else it would wait half a minute
			s.engine.mu.Unlock()
		}
	}
	t.Fatal("three attempts have missed")
	return Event{}
}

// heard pings from many through the socket that was hit, and returns what one learned from that ping. An earlier ping
// through a socket that is now closed may arrive first or late, so only the answer to this ping shows its origin.
func heard(t *testing.T, one, many *station, m Event) Event {
	t.Helper()
	many.engine.Settle(one.id)
	var at netip.AddrPort
	sent := map[probe.TxID]bool{}
	within(t, "an answer to a ping through the socket that was hit", 10*time.Second, func() bool {
		tx, err := many.prober.SendPing(one.id, m.Remote)
		if err != nil {
			t.Fatal(err)
		}
		sent[tx] = true
		for limit := time.After(200 * time.Millisecond); ; {
			select {
			case p := <-many.pongs:
				if sent[p.Tx] {
					at = p.Observed
					return true
				}
			case <-limit:
				return false
			}
		}
	})
	o := one.phase(Hit, 5*time.Second)
	o.Remote = at
	return o
}

// lead makes the data plane send WireGuard's packets through the port of the socket that was hit.
func (s *station) lead(e Event) {
	s.t.Helper()
	spec := dataplane.Spec{Complete: true, WireGuard: dataplane.WireGuard{Port: wgPort}}
	if e.Local != 0 {
		spec.PortRewrites = []dataplane.PortRewrite{{Local: e.Local, Remote: e.Remote}}
	}
	if _, notes, err := s.nft.Reconcile(spec); err != nil || len(notes) > 0 {
		s.t.Fatal(err, notes)
	}
}

// talks shows that pings from WireGuard's port, and what its owner sends, reach the peer and come back.
func talks(t *testing.T, a, b *station, atA, atB Event) {
	t.Helper()
	for _, p := range []struct {
		from, to *station
		at       netip.AddrPort
		sees     netip.AddrPort
	}{{a, b, atA.Remote, atB.Remote}, {b, a, atB.Remote, atA.Remote}} {
		tx, err := p.from.prober.SendPing(p.to.id, p.at)
		if err != nil {
			t.Fatal(err)
		}
		limit := time.After(5 * time.Second)
		for answered := false; !answered; {
			select {
			case pong := <-p.from.pongs:
				answered = pong.Tx == tx && pong.From == p.at
			case <-limit:
				t.Fatalf("node %s: no answer from %s", p.from.id, p.at)
			}
		}
		if _, err := p.from.owner.WriteToUDPAddrPort([]byte("as WireGuard from "+p.from.id.String()), p.at); err != nil {
			t.Fatal(err)
		}
		_ = p.to.owner.SetReadDeadline(time.Now().Add(5 * time.Second))
		for buf := make([]byte, 2048); ; {
			n, from, err := p.to.owner.ReadFromUDPAddrPort(buf)
			if err != nil {
				t.Fatalf("node %s did not get WireGuard's packet: %v", p.to.id, err)
			}
			if string(buf[:n]) == "as WireGuard from "+p.from.id.String() {
				if from != p.sees {
					t.Errorf("node %s sees it come from %s, and would answer to %s", p.to.id, from, p.sees)
				}
				break
			}
		}
	}
}

func within(t *testing.T, what string, limit time.Duration, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s", what, limit)
		}
	}
}

// portRestricted and symmetric are two hosts that only port prediction can connect.
func portRestrictedAndSymmetric(t *testing.T, rule skeinv1.PairOutcome_Rule, kind nattest.Kind) (one, many *station) {
	internet := nattest.New(t)
	a, b := internet.Host(nattest.PortRestricted), internet.Host(kind)
	cone, symmetric := netip.AddrPortFrom(a.Outside, wgPort), netip.AddrPortFrom(b.Outside, 7)
	one = newStation(t, alice, bob, a, Situation{Role: One, Rule: rule, Mine: cone, Theirs: symmetric})
	many = newStation(t, bob, alice, b, Situation{Role: Many, Rule: rule, Mine: symmetric, Theirs: cone})
	one.counting(t, internet)
	many.counting(t, internet)
	connect(t, one, many, 10*time.Millisecond)
	return one, many
}

func TestPortRestrictedMeetsSymmetric(t *testing.T) {
	one, many := portRestrictedAndSymmetric(t, skeinv1.PairOutcome_BIRTHDAY, nattest.Symmetric)
	before := testenv.OpenFiles(t)
	for i, begins := range []*station{one, many, one} {
		m := meet(t, one, many, begins)
		many.lead(m)
		o := heard(t, one, many, m)
		if m.Local == 0 || m.Remote.Addr() != one.sit.Mine.Addr() || o.Local != 0 || o.Remote.Addr() != many.sit.Mine.Addr() {
			t.Fatalf("hits %+v and %+v", m, o)
		}
		if o.Probes > MaxProbes || m.Sockets > MaxSockets {
			t.Errorf("%d probes, %d sockets", o.Probes, m.Sockets)
		}
		t.Logf("run %d: %s / %s", i, m.Text, o.Text)
		talks(t, one, many, o, m)
		one.engine.Stop(bob)
		many.engine.Stop(alice)
		within(t, "all sockets closed", 5*time.Second, func() bool {
			return testenv.OpenFiles(t) <= before && one.engine.Stats().Running+many.engine.Stats().Running == 0
		})
		many.lead(Event{})
	}
	if n := many.engine.Stats(); n.Hits != 3 || n.Attempts < 3 || n.Mappings > int(n.Attempts)*MaxSockets {
		t.Errorf("%+v", n)
	}
}

func (s *station) drain() {
	for {
		select {
		case <-s.events:
		default:
			return
		}
	}
}

// counting adds to a station whose NAT counts its ports the function that measures these: a new socket that asks a
// STUN server, here a host that answers with the address it sees.
func (s *station) counting(t *testing.T, internet *nattest.Net) {
	t.Helper()
	server := internet.Host(nattest.Public)
	var c *net.UDPConn
	server.Do(func() {
		var err error
		if c, err = net.ListenUDP("udp4", &net.UDPAddr{Port: 3478}); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 16)
		for {
			_, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort([]byte(from.String()), from)
		}
	}()
	ask := func() (at netip.AddrPort, err error) {
		var fresh *net.UDPConn
		s.host.Do(func() {
			fresh, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(server.Addr, 3478)))
		})
		if err != nil {
			return at, err
		}
		defer fresh.Close()
		_ = fresh.SetDeadline(time.Now().Add(500 * time.Millisecond))
		b := make([]byte, 64)
		if _, err = fresh.Write([]byte("?")); err != nil {
			return at, err
		}
		n, err := fresh.Read(b)
		if err != nil {
			return at, err
		}
		return netip.ParseAddrPort(string(b[:n]))
	}
	s.newest = func(context.Context) (netip.AddrPort, error) { return ask() }
	within(t, "links that carry packets", 10*time.Second, func() bool { _, err := ask(); return err == nil })
}

func TestTwoCountingNATsMeet(t *testing.T) {
	internet := nattest.New(t)
	a, b := internet.Host(nattest.Sequential), internet.Host(nattest.Sequential)
	outA, outB := netip.AddrPortFrom(a.Outside, 7), netip.AddrPortFrom(b.Outside, 7)
	sit := Situation{Role: Twin, Rule: skeinv1.PairOutcome_PREDICTION, Step: 1, Mine: outA, Theirs: outB, Decides: true}
	one := newStation(t, alice, bob, a, sit)
	sit.Mine, sit.Theirs, sit.Decides = outB, outA, false
	two := newStation(t, bob, alice, b, sit)
	one.counting(t, internet)
	two.counting(t, internet)
	connect(t, one, two, 10*time.Millisecond)
	before := testenv.OpenFiles(t)
	for i := range 2 {
		one.engine.Start(bob)
		o, w := one.phase(Hit, 10*time.Second), two.phase(Hit, 10*time.Second)
		one.lead(o)
		two.lead(w)
		t.Logf("run %d: %s / %s", i, o.Text, w.Text)
		talks(t, one, two, o, w)
		one.engine.Stop(bob)
		two.engine.Stop(alice)
		within(t, "all sockets closed", 5*time.Second, func() bool {
			return testenv.OpenFiles(t) <= before && one.engine.Stats().Running+two.engine.Stats().Running == 0
		})
		one.lead(Event{})
		two.lead(Event{})
		one.drain()
		two.drain()
	}
}

// Two symmetric NATs that do not count meet by chance if both map to few ports, whichever end begins.
func TestTwoSymmetricNATsOfFewPortsMeet(t *testing.T) {
	internet := nattest.New(t)
	a, b := internet.Host(nattest.Narrow), internet.Host(nattest.Narrow)
	outA, outB := netip.AddrPortFrom(a.Outside, 7), netip.AddrPortFrom(b.Outside, 7)
	sit := Situation{Role: Twin, Rule: skeinv1.PairOutcome_BIRTHDAY_BOTH, Mine: outA, Theirs: outB, Decides: true}
	one := newStation(t, alice, bob, a, sit)
	sit.Mine, sit.Theirs, sit.Decides = outB, outA, false
	two := newStation(t, bob, alice, b, sit)
	connect(t, one, two, 10*time.Millisecond)
	for _, s := range []*station{one, two} {
		s.engine.c.Ports = Range{nattest.NarrowFirst, nattest.NarrowPorts}
	}
	before := testenv.OpenFiles(t)
	for _, begins := range []*station{one, two} {
		begins.engine.Start(begins.peer)
		o, w := one.phase(Hit, 10*time.Second), two.phase(Hit, 10*time.Second)
		one.lead(o)
		two.lead(w)
		t.Logf("%s begins: %s / %s", begins.id, o.Text, w.Text)
		talks(t, one, two, o, w)
		one.engine.Stop(bob)
		two.engine.Stop(alice)
		within(t, "all sockets closed", 5*time.Second, func() bool {
			return testenv.OpenFiles(t) <= before && one.engine.Stats().Running+two.engine.Stats().Running == 0
		})
		for _, s := range []*station{one, two} {
			s.lead(Event{})
			s.drain()
		}
	}
}

func newSocket(t *testing.T, h *nattest.Host) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	h.Do(func() {
		var err error
		if c, err = net.ListenUDP("udp4", nil); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() { c.Close() })
	return c
}
