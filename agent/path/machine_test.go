package path

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// stepper drives one machine by hand.
type stepper struct {
	t   *testing.T
	m   Machine
	now time.Time
}

func newStepper(t *testing.T, self, peer Node) *stepper {
	s := &stepper{t: t, now: simStart, m: NewMachine(nodeIDs[0], nodeIDs[1], simStart)}
	s.in(0, Input{Kind: InputSelf, Node: &self})
	s.in(0, Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID, RTT: time.Millisecond}})
	s.in(0, Input{Kind: InputPeer, Node: &peer})
	return s
}

// in advances the clock, folds an input and returns the actions except wake-ups.
func (s *stepper) in(after time.Duration, in Input) []string {
	s.now = s.now.Add(after)
	var out []string
	next, actions := Step(s.m, s.now, in)
	s.m = next
	for _, a := range actions {
		if a.Kind != ActionWake {
			out = append(out, a.String())
		}
	}
	return out
}

// pings counts pings to an endpoint while time passes without answers.
func (s *stepper) pings(e netip.AddrPort, d time.Duration) int {
	n := 0
	for end := s.now.Add(d); ; {
		at := s.m.Woken
		if at.IsZero() || at.After(end) {
			s.now = end
			return n
		}
		for _, a := range s.in(at.Sub(s.now), Input{Kind: InputTick}) {
			if a == "ping "+e.String() {
				n++
			}
		}
	}
}

func (s *stepper) want(got []string, want ...string) {
	s.t.Helper()
	if len(got) != len(want) {
		s.t.Fatalf("actions %q, want %q", got, want)
	}
	for i := range got {
		if got[i] != want[i] {
			s.t.Fatalf("actions %q, want %q", got, want)
		}
	}
}

func TestFirstSteps(t *testing.T) {
	peer := node(natRestricted, cand(srflx, "203.0.113.2:2000"))
	m := NewMachine(nodeIDs[0], nodeIDs[1], simStart)
	s := &stepper{t: t, m: m, now: simStart}
	s.want(s.in(0, Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID, RTT: time.Millisecond}}),
		"use relay:0900000000000000 alive=true (no-record)")
	s.want(s.in(0, Input{Kind: InputPeer, Node: &peer}), "punch reply=false", "ping 203.0.113.2:2000")
	if s.m.Path.Rule != "relay-first" {
		t.Errorf("rule %s", s.m.Path.Rule)
	}
	s.want(s.in(0, Input{Kind: InputPeer, Node: &peer})) // the same record again
	s.want(s.in(200*time.Millisecond, Input{Kind: InputTick}), "ping 203.0.113.2:2000")
	s.want(s.in(0, Input{Kind: InputPong, Endpoint: ap("203.0.113.2:2000"), RTT: 20 * time.Millisecond, Sent: simStart}),
		"use direct:203.0.113.2:2000 alive=true (direct-proven)")
	s.want(s.in(heartbeat, Input{Kind: InputTick}), "ping 203.0.113.2:2000") // a new path is watched
	if got := m.Path; got.Kind != None {
		t.Errorf("the first machine changed: %s", got)
	}
}

// An authenticated ping from an unknown address is answered with at most three pings until that address is proven;
// the same holds for addresses in a punch.
func TestThreeProbesToUnprovenAddresses(t *testing.T) {
	for name, kind := range map[string]InputKind{"ping": InputPing, "punch": InputPunch, "seen": InputEndpointSeen} {
		t.Run(name, func(t *testing.T) {
			s := newStepper(t, node(natNone), node(natNone, cand(srflx, "203.0.113.2:2000")))
			s.pings(netip.AddrPort{}, 10*time.Second)
			victim := ap("198.51.100.66:53")
			n := 0
			for range 100 {
				for _, a := range s.in(time.Second, Input{Kind: kind, Endpoint: victim, Addresses: []netip.AddrPort{victim}}) {
					if a == "ping "+victim.String() {
						n++
					}
				}
				n += s.pings(victim, 100*time.Millisecond)
			}
			if n == 0 || n > unprovenPings {
				t.Errorf("%d pings to an unproven address", n)
			}
			many := 0
			for i := range 1000 {
				e := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)}), 53)
				for range s.in(time.Millisecond, Input{Kind: kind, Endpoint: e, Addresses: []netip.AddrPort{e}}) {
					many++
				}
			}
			if len(s.m.Probes) > 1+learnedMax || many > learnedMax*unprovenPings+20 {
				t.Errorf("%d addresses remembered, %d actions for a thousand made-up ones", len(s.m.Probes), many)
			}
		})
	}
}

// An answer to a ping that was never sent proves nothing.
func TestUnaskedAnswers(t *testing.T) {
	e := ap("203.0.113.2:2000")
	s := newStepper(t, node(natSymmetric), node(natSymmetric, Candidate{Type: srflx, Addr: e}))
	for _, in := range []Input{
		{Kind: InputPong, Endpoint: e, RTT: time.Millisecond, Sent: s.now},
		{Kind: InputPong, Endpoint: ap("1.2.3.4:5"), RTT: time.Millisecond, Sent: s.now},
		{Kind: InputPong, Endpoint: e, RTT: -1, Sent: s.now},
		{Kind: InputPong, RTT: time.Hour},
	} {
		s.want(s.in(time.Millisecond, in))
	}
	s = newStepper(t, node(natNone), node(natNone, Candidate{Type: srflx, Addr: e}))
	s.want(s.in(time.Millisecond, Input{Kind: InputPong, Endpoint: e, RTT: time.Millisecond, Sent: s.now.Add(time.Hour)}))
}

// checker holds the invariants that no input may break.
type checker struct {
	proven  map[netip.AddrPort]bool
	pinged  map[netip.AddrPort][]time.Time // all pings
	foreign map[netip.AddrPort][]time.Time // those while the address was not in the record
}

func (c *checker) step(t *testing.T, m Machine, now time.Time, in Input) Machine {
	t.Helper()
	record := map[netip.AddrPort]bool{}
	if e := unmap(in.Endpoint); e.Addr() == vouchedHost {
		c.proven[e] = true
	}
	if in.Kind == InputSendFailed {
		in.Endpoint = c.unsent(in.Endpoint)
	}
	next, actions := Step(m, now, in)
	for _, k := range next.Remote.Candidates {
		record[k.Addr] = true
		delete(c.foreign, k.Addr)
	}
	if in.Kind == InputPong && len(c.pinged[unmap(in.Endpoint)]) > 0 {
		c.proven[unmap(in.Endpoint)] = true
	}
	for _, a := range actions {
		switch a.Kind {
		case ActionUse:
			if told := (Past{Path: a.Path.String(), Rule: a.Path.Rule}).Alive(); told != a.Path.Alive {
				t.Fatalf("the journal would tell of %s by rule %s that alive is %t; it is not so", a.Path, a.Path.Rule, told)
			}
			if a.Path.Kind == Direct && !c.proven[a.Path.Endpoint] {
				t.Fatalf("direct over %s, which never answered", a.Path.Endpoint)
			}
			if a.Path.Kind == Relay && a.Path.Relay != next.Relay.ID && !a.Path.UDP() {
				t.Fatalf("uses relay %s, offered is %s", a.Path.Relay, next.Relay.ID)
			}
		case ActionPing:
			e := a.Endpoint
			c.pinged[e] = append(c.pinged[e], next.Now)
			if c.proven[e] {
				continue
			}
			if !record[e] {
				c.foreign[e] = append(c.foreign[e], next.Now)
			}
			if n := within(c.pinged[e], next.Now, windowFor); n > 4*unprovenPings { // first, heard, and this host's own changes
				t.Fatalf("%d pings in %s to %s, which never answered", n, windowFor, e)
			}
			if n := within(c.foreign[e], next.Now, learnedFor); n > unprovenPings {
				t.Fatalf("%d pings in %s to %s, which is not in the record and never answered", n, learnedFor, e)
			}
		case ActionWake:
			if !a.At.IsZero() && !a.At.After(next.Now) {
				t.Fatalf("wake at %s, which is not after now", a.At)
			}
		}
	}
	if next.Lost != m.Lost && next.Lost != "" && !strings.Contains(next.Lost, m.Path.Endpoint.String()) &&
		!strings.Contains(next.Lost, next.LastDirect.String()) {
		t.Fatalf("a path to %s, then %s, was lost: %q", m.Path.Endpoint, next.LastDirect, next.Lost)
	}
	if next.Path.Rule == "" || next.Path.Reason == "" {
		t.Fatalf("path %s without a reason", next.Path)
	}
	if len(next.Probes) > 64+learnedMax+1 || len(next.Pending) > pendingMax {
		t.Fatalf("%d probes, %d pending", len(next.Probes), len(next.Pending))
	}
	return next
}

// unsent removes the last ping to an endpoint, which was not sent; without effect if there was none.
func (c *checker) unsent(e netip.AddrPort) netip.AddrPort {
	e = unmap(e)
	all := c.pinged[e]
	if len(all) == 0 {
		return netip.AddrPort{}
	}
	last := all[len(all)-1]
	for _, m := range []map[netip.AddrPort][]time.Time{c.pinged, c.foreign} {
		if n := len(m[e]); n > 0 && m[e][n-1].Equal(last) {
			m[e] = m[e][:n-1]
		}
	}
	return e
}

func within(times []time.Time, now time.Time, d time.Duration) (n int) {
	for _, at := range times {
		if now.Sub(at) < d {
			n++
		}
	}
	return n
}

// vouchedHost is the host of endpoints that others vouch for: a relay's port, WireGuard's endpoint, and a hit of port
// prediction. The limits for unproven addresses do not apply there.
var vouchedHost = netip.AddrFrom4([4]byte{198, 51, 100, 9})

// inputKinds are all of them.
const inputKinds = len(inputNames)

// randomMTU is the tunnel's in most of the random settings.
const randomMTU = 1420

// randomInput draws from few values, so that collisions occur.
func randomInput(r func(int) int) Input {
	endpoint := func() netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(r(24))}), uint16(r(2)))
	}
	nd := func() *Node {
		n := node(nats[r(len(nats))])
		for range r(6) {
			n.Candidates = append(n.Candidates, Candidate{Type: skeinv1.CandidateType(r(6)), Addr: endpoint()})
		}
		return &n
	}
	in := Input{Kind: InputKind(r(inputKinds)), Endpoint: endpoint(), RTT: time.Duration(r(2000)-10) * time.Millisecond,
		Reply: r(2) == 0}
	switch in.Kind {
	case InputSelf, InputPeer:
		in.Node = nd()
	case InputRelay:
		in.Relay = RelayChoice{ID: identity.ID{byte(r(3))}, RTT: time.Duration(r(100))}
		in.Relay.Absent = in.Relay.ID.IsZero() && r(2) == 0
	case InputSettings:
		in.Settings = &Settings{DirectRetry: time.Duration(r(200)) * time.Second,
			Keepalive: time.Duration(r(60)) * time.Second, BirthdayBoth: r(2) == 0}
		if r(8) > 0 {
			in.Settings.MTU = randomMTU
		}
	case InputPunch:
		for range r(20) {
			in.Addresses = append(in.Addresses, endpoint())
		}
	case InputSendFailed:
		in.Error = "network is unreachable"
	case InputReserved, InputAdopted, InputPrediction:
		in.Endpoint = netip.AddrPortFrom(vouchedHost, uint16(r(6)))
		in.Relay.ID = identity.ID{byte(1 + r(2))}
		if in.Kind == InputPrediction {
			in.Prediction = &PredictionEvent{Phase: PredictionPhase(r(5)), Retry: time.Duration(r(100)) * time.Second}
		} else if in.Kind == InputReserved && r(6) == 0 {
			in.Endpoint, in.Error = netip.AddrPort{}, "no port is free"
		}
	}
	return in
}

// randomTime advances the clock: to the next wake-up, by some time, a little back, or far past every deadline, as on
// a machine that was short of CPU or suspended.
func randomTime(r func(int) int, m Machine, now time.Time, in Input) (time.Time, Input) {
	switch turn := r(16); {
	case turn < 4:
		now = now.Add(time.Duration(r(3000)) * time.Millisecond)
	case turn < 8:
		if m.Woken.After(now) {
			now, in = m.Woken, Input{Kind: InputTick}
		}
	case turn < 12:
		now = now.Add(time.Duration(r(10)-3) * time.Millisecond)
	case turn == 12: // whatever comes first after the sleep
		now = later(now, m.Woken).Add(time.Duration(r(300)) * time.Second)
	case turn == 13:
		if m.Woken.After(now) {
			now, in = m.Woken.Add(time.Duration(r(300))*time.Second), Input{Kind: InputTick}
		}
	}
	return now, in
}

// answer changes a pong into the answer to a ping that the machine has sent, if any: mostly on the path in use, and
// sometimes to a padded ping.
func answer(r func(int) int, m Machine, now time.Time, in Input) Input {
	in.Sent = now.Add(-in.RTT)
	if len(m.Probes) == 0 {
		return in
	}
	p := m.Probes[r(len(m.Probes))]
	used := func(p Probe) bool { return p.Endpoint == m.Path.Endpoint }
	if i := slices.IndexFunc(m.Probes, used); i >= 0 && r(2) == 0 {
		p = m.Probes[i]
	}
	in.Endpoint, in.Sent = p.Endpoint, p.LastSent
	if r(3) == 0 {
		in.Sent = p.MTUProbe.Sent
		in.Size = []int{randomMTU, mtuLeast, 1344}[r(3)]
	}
	in.RTT = now.Sub(in.Sent)
	return in
}

func runRandom(t *testing.T, r func(int) int, steps int) {
	c := &checker{map[netip.AddrPort]bool{}, map[netip.AddrPort][]time.Time{}, map[netip.AddrPort][]time.Time{}}
	now := simStart
	m := NewMachine(nodeIDs[0], nodeIDs[1], now)
	for range steps {
		in := randomInput(r)
		now, in = randomTime(r, m, now, in)
		if in.Kind == InputPong {
			in = answer(r, m, now, in)
		}
		m = c.step(t, m, now, in)
	}
}

func TestRandomInputs(t *testing.T) {
	for seed := range uint64(100) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		runRandom(t, rnd.IntN, 500)
	}
}

// FuzzStep derives a run from a seed, and changes its first draws by the bytes. So each input is a long run, of which
// small variations can be tried.
func FuzzStep(f *testing.F) {
	f.Add(uint64(0), []byte("a machine seen in the field"))
	f.Fuzz(func(t *testing.T, seed uint64, shifts []byte) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		runRandom(t, func(n int) int {
			v := rnd.IntN(n)
			if len(shifts) > 0 {
				v, shifts = (v+int(shifts[0]))%n, shifts[1:]
			}
			return v
		}, 500)
	})
}
