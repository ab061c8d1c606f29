package path

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

// cutAll drops every direct packet.
func cutAll(int, int, netip.AddrPort) bool { return true }

func wantPaths(t testing.TB, s *sim, when string, kind Kind, alive bool) {
	t.Helper()
	for _, n := range s.nodes {
		if p := n.m.Path; p.Kind != kind || p.Alive != alive {
			s.dump()
			t.Fatalf("%s: node %d has %s alive=%t (%s: %s), want %s alive=%t", when, n.id, p, p.Alive, p.Rule,
				p.Reason, kind, alive)
		}
	}
}

// An idle pair costs one ping per keepalive, and the next keepalive notices a death.
func TestIdlePair(t *testing.T) {
	s := newSim(t, 1, natPortRestricted, natPortRestricted)
	s.start(true)
	s.run(10 * time.Second)
	wantPaths(t, s, "after the start", Direct, true)
	before := s.nodes[0].pings
	s.run(10 * time.Minute)
	if n := s.nodes[0].pings - before; n > 40 {
		t.Errorf("%d pings in ten idle minutes, want one per keepalive and few others", n)
	}
	s.cut = cutAll
	s.run(26500 * time.Millisecond)
	wantPaths(t, s, "a keepalive after the cut", Relay, true)
}

// Traffic that resumes on a dead idle path moves to the relay within a second of the reading that shows it.
func TestTrafficResumesOnDeadPath(t *testing.T) {
	s := newSim(t, 1, natPortRestricted, natPortRestricted)
	s.start(true)
	s.run(10 * time.Second)
	s.cut = cutAll
	s.input(s.nodes[0], Input{Kind: InputTraffic})
	s.run(time.Second)
	wantPaths(t, s, "after a second", Relay, true)
}

// Without a relay a pair finds a path from the records alone. When the path dies it is reported as not alive, and
// recovers without help.
func TestNoRelay(t *testing.T) {
	s := newSim(t, 1, natPortRestricted, natPortRestricted)
	s.start(false)
	s.run(2 * time.Second)
	wantPaths(t, s, "without a relay", Direct, true)
	s.cut = cutAll
	s.traffic(40 * time.Second)
	s.run(20 * time.Second)
	wantPaths(t, s, "cut", Direct, false)
	if r := s.nodes[0].m.Path.Reason; !strings.Contains(r, "share no relay") {
		t.Errorf("reason %q", r)
	}
	s.cut = nil
	s.run(13 * time.Second)
	wantPaths(t, s, "healed", Direct, true)
	s.cut = cutAll
	s.run(2 * time.Second)
	for _, n := range s.nodes {
		s.input(n, Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID, RTT: 0}})
	}
	wantPaths(t, s, "a relay appears", Relay, true)
}

func TestRelayFollowsItsUpdates(t *testing.T) {
	s := newSim(t, 1, natSymmetric, natSymmetric)
	s.start(true)
	s.run(time.Second)
	n := s.nodes[0]
	other := RelayChoice{ID: [8]byte{7}, RTT: time.Millisecond}
	s.input(n, Input{Kind: InputRelay, Relay: other})
	if n.m.Path.Relay != other.ID || !n.m.Path.Alive || n.m.Path.RTT != other.RTT {
		t.Errorf("after the change %+v", n.m.Path)
	}
	since := n.m.Path.Since
	s.run(time.Second)
	s.input(n, Input{Kind: InputRelay, Relay: RelayChoice{ID: other.ID, RTT: 2 * time.Millisecond}})
	if n.m.Path.RTT != 2*time.Millisecond || n.m.Path.Since != since {
		t.Errorf("a new RTT is no new path: %+v", n.m.Path)
	}
	s.input(n, Input{Kind: InputRelay})
	if p := n.m.Path; p.Kind != None || p.Alive || p.Rule != "symmetric-symmetric" {
		t.Errorf("without a relay %+v", p)
	}
}

// Behind one NAT the LAN is used. Two private networks behind one address are not confused.
func TestSamePublicAddress(t *testing.T) {
	s := newSim(t, 1, natPortRestricted, natPortRestricted)
	s.sameLAN()
	s.start(true)
	s.run(2 * time.Second)
	for i, n := range s.nodes {
		if want := s.nodes[1-i].inner; n.m.Path.Endpoint != want || n.m.Plan.Rule != "same-public-ip" {
			t.Errorf("node %d: %s by %s, want the LAN address %s", i, n.m.Path, n.m.Plan.Rule, want)
		}
	}
	s = newSim(t, 1, natPortRestricted, natPortRestricted)
	s.sameLAN()
	s.nodes[1].lan = 1
	s.hairpin = false
	s.start(true)
	s.run(10 * time.Second)
	wantPaths(t, s, "two networks behind one address", Relay, true)
}

// A symmetric pair in one site uses the LAN.
func TestSameSite(t *testing.T) {
	s := newSim(t, 1, natSymmetric, natSymmetric)
	s.sameLAN()
	s.start(true)
	s.run(2 * time.Second)
	wantPaths(t, s, "one site", Direct, true)
}

// A peer unreachable at first becomes direct by the regular retry, and at once when the network changes.
func TestDirectLater(t *testing.T) {
	for name, heal := range map[string]struct {
		do     func(*sim)
		within time.Duration
	}{
		"retry":   {func(*sim) {}, directRetry + burstFor},
		"network": {func(s *sim) { s.input(s.nodes[0], Input{Kind: InputNetwork}) }, time.Second},
		"punch":   {func(s *sim) { s.input(s.nodes[1], Input{Kind: InputPunch}) }, time.Second},
		"record": {func(s *sim) {
			r := s.record(s.nodes[1])
			r.Candidates = append(r.Candidates, Candidate{Type: host, Addr: ap("10.1.1.1:51820")})
			s.input(s.nodes[0], Input{Kind: InputPeer, Node: &r})
		}, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, 1, natPortRestricted, natPortRestricted)
			s.cut = cutAll
			s.start(true)
			s.run(20 * time.Minute)
			wantPaths(t, s, "cut", Relay, true)
			if r := s.nodes[0].m.Path.Rule; r != "no-answer" {
				t.Errorf("rule %q", r)
			}
			for _, n := range s.nodes {
				for e, k := range n.pingsTo {
					if k > 12*2*len(pacing)+30 {
						t.Errorf("node %d sent %d pings to silent %s in twenty minutes", n.id, k, e)
					}
				}
			}
			s.cut = nil
			heal.do(s)
			s.run(heal.within)
			wantPaths(t, s, "healed", Direct, true)
		})
	}
}

// A host whose address changes is direct again soon after its record is updated.
func TestRoaming(t *testing.T) {
	s := newSim(t, 1, natNone, natPortRestricted)
	s.start(true)
	s.run(2 * time.Second)
	s.traffic(20 * time.Second)
	s.run(3 * time.Second)
	a, b := s.nodes[0], s.nodes[1]
	a.inner, a.outer = ap("203.0.113.99:51820"), netip.MustParseAddr("203.0.113.99")
	r := s.record(a)
	s.input(a, Input{Kind: InputSelf, Node: &r})
	s.after(300*time.Millisecond, func() { s.input(b, Input{Kind: InputPeer, Node: &r}) })
	s.run(2 * time.Second)
	wantPaths(t, s, "roamed", Direct, true)
	if b.m.Path.Endpoint != a.inner {
		t.Errorf("%s, want %s", b.m.Path, a.inner)
	}
}

// A path that dies repeatedly returns after ever longer holds.
func TestDamping(t *testing.T) {
	s := newSim(t, 1, natNone, natNone)
	s.cut = func(int, int, netip.AddrPort) bool { return s.now.Sub(simStart)%(6*time.Second) > 3*time.Second }
	s.start(true)
	s.traffic(10 * time.Minute)
	s.run(10 * time.Minute)
	if n := s.nodes[0].switches; n > 40 {
		s.dump()
		t.Errorf("%d switches in a hundred cuts, want damping", n)
	}
	s.cut = nil
	s.run(5 * time.Minute)
	wantPaths(t, s, "calm", Direct, true)
}

// A process that sleeps occasionally does not lose its path each time, and soon returns to it. One that sleeps for
// seconds, as on an overloaded machine, learns to wait that long, since each path change would cause more work.
func TestStarvedMachine(t *testing.T) {
	for _, tt := range []struct {
		longest, every time.Duration
		switches       int
		relayed        time.Duration
	}{
		{800 * time.Millisecond, 5 * time.Second, 60, 5 * time.Second},
		{2500 * time.Millisecond, 8 * time.Second, 60, 20 * time.Second},
	} {
		for seed := range uint64(5) {
			s := newSim(t, seed, natNone, natPortRestricted)
			s.delay = time.Millisecond
			s.stall = func(node int) time.Duration { // one of both sleeps, in turns
				period := s.now.Sub(simStart) / tt.every
				if int(period)%2 != node {
					return 0
				}
				length := 100*time.Millisecond +
					time.Duration((uint64(period)*2654435761+seed*1_000_003_979)%uint64(tt.longest-100*time.Millisecond))
				return max(length-s.now.Sub(simStart)%tt.every, 0)
			}
			s.start(true)
			s.run(5 * time.Second)
			s.traffic(10 * time.Minute)
			relayed := time.Duration(0)
			for range 6000 {
				s.run(100 * time.Millisecond)
				if s.nodes[0].m.Path.Kind != Direct || s.nodes[1].m.Path.Kind != Direct {
					relayed += 100 * time.Millisecond
				}
			}
			switches := s.nodes[0].switches + s.nodes[1].switches
			t.Logf("up to %s, seed %d: %d switches in %d stalls, on the relay %s of 10m", tt.longest, seed, switches,
				10*time.Minute/tt.every, relayed)
			if switches > tt.switches || relayed > tt.relayed {
				s.dump()
				t.Fatal("too many")
			}
		}
	}
}

// Both ends finally use the same endpoint pair when WireGuard shows where the other end sends from.
func TestBothEndsAgree(t *testing.T) {
	s := newSim(t, 1, natNone, natNone)
	s.start(true)
	s.run(10 * time.Second)
	b := s.nodes[1]
	second := ap("203.0.113.200:51820")
	r := s.record(s.nodes[0])
	r.Candidates = append(r.Candidates, Candidate{Type: srflx, Addr: second, Source: "stun"})
	s.input(b, Input{Kind: InputPeer, Node: &r})
	s.run(5 * time.Second)
	s.input(b, Input{Kind: InputEndpointSeen, Endpoint: second})
	s.input(b, Input{Kind: InputPong, Endpoint: second, RTT: time.Millisecond, Sent: s.now})
	if p := b.m.Path; p.Endpoint != second || p.Rule != "direct-follows" {
		t.Errorf("the higher ID uses %s (%s), want to follow", p, p.Rule)
	}
	a := s.nodes[0]
	was := a.m.Path
	s.input(a, Input{Kind: InputEndpointSeen, Endpoint: ap("203.0.113.201:51820")})
	if a.m.Path.Endpoint != was.Endpoint {
		t.Errorf("the lower ID followed to %s", a.m.Path)
	}
}

// A better path replaces a working one without interruption; similar ones do not alternate.
func TestBetterEndpoint(t *testing.T) {
	s := newSim(t, 1, natNone, natNone)
	s.start(true)
	s.run(5 * time.Second)
	n := s.nodes[0]
	first := n.m.Path.Endpoint
	peer := s.record(s.nodes[1])
	near, far := ap("203.0.113.77:51820"), ap("203.0.113.78:51820")
	peer.Candidates = append(peer.Candidates, Candidate{Type: host, Addr: near}, Candidate{Type: host, Addr: far})
	s.input(n, Input{Kind: InputPeer, Node: &peer})
	pong := func(e netip.AddrPort, rtt time.Duration) {
		for range 3 {
			s.input(n, Input{Kind: InputPong, Endpoint: e, RTT: rtt, Sent: n.m.Probes[(&step{Machine: n.m}).find(e)].LastSent})
			s.run(50 * time.Millisecond)
		}
	}
	s.run(40 * time.Millisecond)
	pong(far, 18*time.Millisecond)
	if n.m.Path.Endpoint != first {
		t.Errorf("a near-equal took over: %s", n.m.Path)
	}
	pong(near, 2*time.Millisecond)
	if n.m.Path.Endpoint != near || n.m.Path.Rule != "direct-better" || !n.m.Path.Alive {
		t.Errorf("the better one did not: %s (%s)", n.m.Path, n.m.Path.Rule)
	}
}
