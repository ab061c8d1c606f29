package path

import (
	"net/netip"
	"testing"
	"time"
)

var (
	lanAt   = ap("192.168.1.3:51820")
	outside = ap("203.0.113.7:40001")
)

// neighbours is a machine whose peer is in the same LAN, behind a NAT that hairpins.
func neighbours(t *testing.T) *stepper {
	self := node(natPortRestricted, cand(host, "192.168.1.2:51820"), cand(srflx, "203.0.113.7:40000"))
	s := newStepper(t, self, node(natPortRestricted, cand(host, lanAt.String()), cand(srflx, outside.String())))
	if s.m.Plan.Rule != "same-public-ip" {
		t.Fatalf("plan %s", s.m.Plan.Rule)
	}
	return s
}

// answered advances the time while pings are answered after the RTT; 0: not answered.
func (s *stepper) answered(d time.Duration, rtt func(e netip.AddrPort, nth uint32) time.Duration) {
	type pong struct {
		at time.Time
		in Input
	}
	var due []pong
	for end := s.now.Add(d); ; {
		in, at := Input{Kind: InputTick}, s.m.Woken
		next := -1
		for i, p := range due {
			if at.IsZero() || p.at.Before(at) {
				in, at, next = p.in, p.at, i
			}
		}
		if at.IsZero() || at.After(end) {
			s.now = end
			return
		}
		if next >= 0 {
			due = append(due[:next], due[next+1:]...)
		}
		before := map[netip.AddrPort]uint32{}
		for _, p := range s.m.Probes {
			before[p.Endpoint] = p.Sent
		}
		s.in(at.Sub(s.now), in)
		for _, p := range s.m.Probes {
			if p.Sent == before[p.Endpoint] {
				continue
			}
			if r := rtt(p.Endpoint, p.Sent); r > 0 {
				due = append(due, pong{s.now.Add(r), Input{Kind: InputPong, Endpoint: p.Endpoint, RTT: r, Sent: s.now}})
			}
		}
	}
}

// One late answer from the LAN, on a busy machine, does not keep a pair on the path through its router for minutes.
func TestLateAnswerFromTheLAN(t *testing.T) {
	s := neighbours(t)
	s.answered(burstFor, func(e netip.AddrPort, nth uint32) time.Duration {
		switch {
		case e == lanAt && nth == 1:
			return 0 // lost
		case e == lanAt && nth == 2:
			return 400 * time.Millisecond
		}
		return 3 * time.Millisecond
	})
	if p := s.m.Path; p.Endpoint != lanAt {
		t.Errorf("%s (%s), want the LAN", p, p.Rule)
	}
}

// If two ends use different paths, the end that is not on the LAN changes, whatever their IDs.
func TestTheLANIsFollowed(t *testing.T) {
	on := func(e netip.AddrPort) *stepper {
		s := neighbours(t)
		s.answered(2*streakGap, func(at netip.AddrPort, _ uint32) time.Duration {
			if at != e {
				return 0
			}
			return time.Millisecond
		})
		if s.m.Path.Endpoint != e {
			t.Fatalf("%s, want %s", s.m.Path, e)
		}
		return s
	}
	for _, higher := range []bool{false, true} {
		swap := func(s *stepper) *stepper {
			if higher {
				s.m.SelfID, s.m.Peer = s.m.Peer, s.m.SelfID
			}
			return s
		}
		s := swap(on(outside))
		s.in(time.Second, Input{Kind: InputEndpointSeen, Endpoint: lanAt})
		s.in(time.Millisecond, Input{Kind: InputPong, Endpoint: lanAt, RTT: time.Millisecond, Sent: s.now})
		if p := s.m.Path; p.Endpoint != lanAt || p.Rule != "direct-follows" {
			t.Errorf("higher ID %t: %s (%s), want to follow to the LAN", higher, p, p.Rule)
		}
		s = swap(on(lanAt))
		s.in(time.Second, Input{Kind: InputEndpointSeen, Endpoint: outside})
		s.in(time.Millisecond, Input{Kind: InputPong, Endpoint: outside, RTT: 100 * time.Microsecond, Sent: s.now})
		if p := s.m.Path; p.Endpoint != lanAt {
			t.Errorf("higher ID %t: left the LAN for %s (%s)", higher, p, p.Rule)
		}
	}
}
