package path

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

var (
	portAt  = netip.MustParseAddrPort("198.18.1.11:24001")
	portNew = netip.MustParseAddrPort("198.18.1.11:24077")
)

// futilePair is a machine of two symmetric NATs, with traffic, that asks for a port.
func futilePair(t *testing.T) *stepper {
	t.Helper()
	s := newStepper(t, node(natSymmetric, cand(srflx, "203.0.113.1:1000")),
		node(natSymmetric, cand(srflx, "203.0.113.2:2000")))
	if got := s.pings(portAt, 30*time.Second); got != 0 {
		t.Fatalf("%d pings to a port that nobody gave", got)
	}
	s.want(s.in(0, Input{Kind: InputTraffic}), "reserve at relay "+relayID.String())
	return s
}

func (s *stepper) reserved(e netip.AddrPort, ready bool) []string {
	return s.in(0, Input{Kind: InputReserved, Relay: RelayChoice{ID: relayID}, Endpoint: e, Reply: ready})
}

func (s *stepper) pong(e netip.AddrPort) []string {
	s.t.Helper()
	i := (&step{Machine: s.m}).find(e)
	if i < 0 {
		s.t.Fatalf("%s is not known", e)
	}
	sent := s.m.Probes[i].LastSent
	return s.in(5*time.Millisecond, Input{Kind: InputPong, Endpoint: e,
		RTT: s.now.Add(5 * time.Millisecond).Sub(sent), Sent: sent})
}

func onPort(t *testing.T) *stepper {
	t.Helper()
	s := futilePair(t)
	s.want(s.reserved(portAt, false), "ping "+portAt.String())
	s.in(40*time.Millisecond, Input{Kind: InputTick})
	s.want(s.reserved(portAt, true), "ping "+portAt.String())
	if got := s.pong(portAt); !strings.HasPrefix(strings.Join(got, " "), "use relay:"+relayID.String()+","+portAt.String()+
		" alive=true (relay-udp)") {
		t.Fatalf("after the answer: %q", got)
	}
	return s
}

func TestAPortIsAskedForWithTrafficOnly(t *testing.T) {
	s := futilePair(t) // no traffic, no wish
	for _, a := range s.in(0, Input{Kind: InputTraffic}) {
		if strings.HasPrefix(a, "reserve") {
			t.Error("asked again at once")
		}
	}
	n := 0
	for range 60 { // a minute of traffic without an answer
		for _, a := range s.in(time.Second, Input{Kind: InputTraffic}) {
			if strings.HasPrefix(a, "reserve") {
				n++
			}
		}
	}
	if n < 2 || n > 4 {
		t.Errorf("asked %d times in a minute, want 5, 10, 20 … s apart", n)
	}
}

func TestAPortWaitsForADirectPath(t *testing.T) {
	s := newStepper(t, node(natPortRestricted, cand(srflx, "203.0.113.1:1000")),
		node(natRestricted, cand(srflx, "203.0.113.2:2000")))
	for _, a := range s.in(0, Input{Kind: InputTraffic}) {
		if strings.HasPrefix(a, "reserve") {
			t.Error("asked for a port while direct paths are being probed")
		}
	}
	s.pong(netip.MustParseAddrPort("203.0.113.2:2000"))
	for range 20 {
		for _, a := range s.in(time.Second,
			Input{Kind: InputTraffic, Endpoint: netip.MustParseAddrPort("203.0.113.2:2000")}) {
			if strings.HasPrefix(a, "reserve") {
				t.Error("asked for a port beside a direct path")
			}
		}
		s.pong(netip.MustParseAddrPort("203.0.113.2:2000"))
	}
	if s.m.Path.Kind != Direct {
		t.Errorf("path %s", s.m.Path)
	}
}

func TestAPortIsUsedAndLeftLikeADirectPath(t *testing.T) {
	s := onPort(t)
	if p := s.m.Path; p.Kind != Relay || p.Relay != relayID || !p.UDP() || !strings.Contains(p.Reason, "symmetric") {
		t.Errorf("path %s: %s", p, p.Reason)
	}
	// Silence under traffic: back to the session within 700 ms and the time of two checks.
	died := s.now
	for s.m.Path.UDP() && s.now.Sub(died) < 2*time.Second {
		s.in(25*time.Millisecond, Input{Kind: InputTick})
		s.in(0, Input{Kind: InputTraffic})
	}
	if d := s.now.Sub(died); d > 900*time.Millisecond {
		t.Errorf("left after %s", d)
	}
	if p := s.m.Path; p.Kind != Relay || p.Relay != relayID || !p.Alive || p.Rule != RuleRelayDead ||
		!p.FollowsDead() || !strings.Contains(p.Reason, "symmetric") || !strings.Contains(p.Reason, "died") {
		t.Errorf("path %s (%s): %s", p, p.Rule, p.Reason)
	}
	// Tried again and again, ever less often; three answers in a row bring it back.
	if n := s.pings(portAt, 20*time.Second); n < 7 || n > 30 {
		t.Errorf("%d pings in 20 s of silence", n)
	}
	for range 200 {
		if s.m.Path.UDP() {
			break
		}
		s.in(max(s.m.Woken.Sub(s.now), time.Millisecond), Input{Kind: InputTick})
		if p := s.m.Probes[(&step{Machine: s.m}).find(portAt)]; p.LastSent.Equal(s.now) {
			for range 3 {
				s.pong(portAt)
			}
		}
	}
	if p := s.m.Path; !p.UDP() || p.FollowsDead() || strings.Contains(p.Reason, "died") {
		t.Errorf("path %s after answers: %s", p, p.Reason)
	}
}

func TestADirectPathComesBeforeAPort(t *testing.T) {
	s := onPort(t)
	if s.m.NextRetry.IsZero() && s.m.Plan.Probe {
		t.Error("no direct path is looked for")
	}
	direct := netip.MustParseAddrPort("203.0.113.2:4711")
	if got := s.in(100*time.Millisecond, Input{Kind: InputPing, Endpoint: direct}); !strings.Contains(strings.Join(got,
		", "), "ping "+direct.String()) {
		t.Fatalf("the address of a ping is not pinged back: %q", got)
	}
	s.in(100*time.Millisecond, Input{Kind: InputTick})
	s.pong(direct) // far slower than the port
	if p := s.m.Path; p.Kind != Direct || p.Endpoint != direct {
		t.Fatalf("path %s", p)
	}
	// The port answers faster, but the direct endpoint is still preferred.
	s.reserved(portAt, true)
	for range 10 {
		s.in(100*time.Millisecond, Input{Kind: InputTick})
		s.pong(direct)
		s.pong(portAt)
		s.in(0, Input{Kind: InputEndpointSeen, Endpoint: portAt})
	}
	if p := s.m.Path; p.Kind != Direct || p.Endpoint != direct {
		t.Errorf("path %s", p)
	}
}

func TestAPortThatCarriesNothingIsTold(t *testing.T) {
	s := futilePair(t)
	s.reserved(portAt, true)
	told := 0
	for range 400 {
		for _, a := range s.in(50*time.Millisecond, Input{Kind: InputTick}) {
			if strings.HasPrefix(a, "nothing comes through") {
				told++
			}
		}
	}
	if told != 1 {
		t.Errorf("told %d times", told)
	}
	if got := s.reserved(portAt, true); len(got) == 0 || got[0] != "ping "+portAt.String() {
		t.Errorf("after the relay says that it is ready once more: %q", got)
	}
}

func TestAPortEnds(t *testing.T) {
	s := onPort(t)
	s.in(time.Second, Input{Kind: InputReserved, Relay: RelayChoice{ID: relayID}, Error: "the relay ended it"})
	if p := s.m.Path; p.UDP() || p.Kind != Relay || !p.Alive || p.FollowsDead() { // the peer is as well as before
		t.Errorf("path %s (%s)", p, p.Rule)
	}
	// Given back after ten minutes without traffic.
	s = onPort(t)
	for s.m.Path.UDP() && s.now.Sub(simStart) < time.Hour {
		for _, a := range s.in(max(s.m.Woken.Sub(s.now), time.Millisecond), Input{Kind: InputTick}) {
			if a == "ping "+portAt.String() {
				s.pong(portAt)
			}
			if strings.HasPrefix(a, "give back") && s.now.Sub(s.m.TrafficAt) < portIdle {
				t.Error("given back in use")
			}
		}
	}
	if p := s.m.Path; p.UDP() || p.Kind != Relay {
		t.Errorf("path %s after an hour without traffic", p)
	}
}

func TestARestartedRelaysPortReplacesTheOld(t *testing.T) {
	s := onPort(t)
	s.in(time.Millisecond, Input{Kind: InputTick})
	s.want(s.reserved(portNew, true), "ping "+portNew.String())
	if p := s.m.Path; p.Endpoint != portAt {
		t.Errorf("path %s before the new port has answered", p)
	}
	s.pong(portAt)
	if p := s.m.Path; p.Endpoint != portAt {
		t.Errorf("path %s before the new port has answered", p)
	}
	s.pong(portNew) // the old one lives, but not for long
	if p := s.m.Path; p.Endpoint != portNew {
		t.Errorf("path %s", p)
	}
	// The peer is not there yet: packets from the old port show no direct endpoint.
	for range 5 {
		s.in(100*time.Millisecond, Input{Kind: InputPing, Endpoint: portAt})
		s.pong(portAt)
		s.in(0, Input{Kind: InputTick})
		s.pong(portNew)
	}
	if p := s.m.Path; p.Endpoint != portNew || !p.UDP() {
		t.Errorf("path %s", p)
	}
}

func TestAnAdoptedEndpointTurnsOutToBeAPort(t *testing.T) {
	s := newStepper(t, node(natSymmetric, cand(srflx, "203.0.113.1:1000")),
		node(natSymmetric, cand(srflx, "203.0.113.2:2000")))
	s.in(0, Input{Kind: InputAdopted, Endpoint: portAt})
	if p := s.m.Path; p.Kind != Direct || p.Endpoint != portAt {
		t.Fatalf("path %s", p)
	}
	got := s.reserved(portAt, true)
	if p := s.m.Path; !p.UDP() || p.Relay != relayID || len(got) == 0 {
		t.Errorf("path %s, %q", p, got)
	}
	s.in(10*time.Millisecond, Input{Kind: InputTick})
	s.pong(portAt)
	if p := s.m.Path; !p.UDP() || p.Silent {
		t.Errorf("path %s", p)
	}
}

func TestPortsOfOneRelayOnlyAreRemembered(t *testing.T) {
	s := futilePair(t)
	for i := range 10 {
		s.in(0, Input{Kind: InputReserved, Relay: RelayChoice{ID: identity.ID{byte(20 + i)}},
			Endpoint: netip.AddrPortFrom(portAt.Addr(), uint16(25000+i))})
	}
	if n := (&step{Machine: s.m}).ports(); n > portsMax {
		t.Errorf("%d ports", n)
	}
	peer := node(natSymmetric, cand(srflx, "203.0.113.2:2001"))
	s.in(0, Input{Kind: InputPeer, Node: &peer})
	if n := (&step{Machine: s.m}).ports(); n != portsMax {
		t.Errorf("%d ports after a new record", n)
	}
}

func TestADecisionForAPortIsReplayed(t *testing.T) {
	s := futilePair(t)
	trace := Trace{Machine: s.m}
	told := func(in Input) []string {
		trace.Inputs = append(trace.Inputs, Timed{s.now, in})
		return s.in(0, in)
	}
	told(Input{Kind: InputReserved, Relay: RelayChoice{ID: relayID}, Endpoint: portAt, Reply: true})
	sent := s.now
	s.now = s.now.Add(3 * time.Millisecond)
	got := told(Input{Kind: InputPong, Endpoint: portAt, RTT: 3 * time.Millisecond, Sent: sent})
	if !s.m.Path.UDP() {
		t.Fatalf("path %s, %q", s.m.Path, got)
	}
	b, err := json.Marshal(trace)
	if err != nil {
		t.Fatal(err)
	}
	var again Trace
	if err := json.Unmarshal(b, &again); err != nil {
		t.Fatal(err)
	}
	d := again.fold()
	if d.GetTo() != s.m.Path.String() || d.GetRule() != "relay-udp" || d.GetReason() != s.m.Path.Reason {
		t.Errorf("replayed: %v", d)
	}
}
