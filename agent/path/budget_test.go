package path

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// A member that wants others to send to a victim can change its record, punch, and forge the victim's address on its
// pings as often as it likes.
func TestVictimInTheRecord(t *testing.T) {
	victim := ap("198.51.100.66:53")
	own := cand(srflx, "203.0.113.2:2000")
	listed, clean := node(natNone, own, Candidate{Type: srflx, Addr: victim}), node(natNone, own)
	for name, c := range map[string]struct {
		do       func(s *stepper, second int) []string
		atOnce   int // in the first four seconds
		at2m     int // in two minutes
		thenEach int // in every two minutes after the first ten
	}{
		"only listed": {func(s *stepper, _ int) []string { return nil }, 3, 8, 2},
		"comes and goes": {func(s *stepper, i int) []string {
			n := []Node{listed, clean}[i%2]
			return s.in(0, Input{Kind: InputPeer, Node: &n})
		}, 3, 10, 4},
		"punched": {func(s *stepper, _ int) []string {
			return s.in(0, Input{Kind: InputPunch, Addresses: []netip.AddrPort{victim}})
		}, 3, 12, 4},
		"forged": {func(s *stepper, _ int) []string { return s.in(0, Input{Kind: InputPing, Endpoint: victim}) }, 6, 14, 7},
		"own address changes": {func(s *stepper, i int) []string { // or so two others say, in turn
			n := node(natNone, cand(host, "203.0.113.1:51820"), cand(srflx, fmt.Sprintf("192.0.2.%d:51820", 1+i%2)))
			return append(s.in(0, Input{Kind: InputSelf, Node: &n}), s.in(0, Input{Kind: InputNetwork})...)
		}, 4, 31, 7},
		"everything": {func(s *stepper, i int) []string {
			n := []Node{listed, clean}[i%2]
			all := s.in(0, Input{Kind: InputPeer, Node: &n})
			all = append(all, s.in(0, Input{Kind: InputPunch, Addresses: []netip.AddrPort{victim}})...)
			return append(all, s.in(0, Input{Kind: InputPing, Endpoint: victim})...)
		}, 6, 16, 7},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStepper(t, node(natNone, cand(host, "203.0.113.1:51820")), clean)
			var sent []int // by second
			s.in(0, Input{Kind: InputPeer, Node: &listed})
			n := count(s, victim)
			for i := range 30 * 60 {
				for _, a := range c.do(s, i) {
					if a == "ping "+victim.String() {
						n++
					}
				}
				sent = append(sent, n+s.pings(victim, time.Second))
				n = 0
			}
			sum := func(from, to int) (n int) {
				for _, k := range sent[from:to] {
					n += k
				}
				return n
			}
			if n := sum(0, 4); n > c.atOnce {
				t.Errorf("%d pings in the first four seconds, want at most %d", n, c.atOnce)
			}
			if n := sum(0, 120); n > c.at2m {
				t.Errorf("%d pings in the first two minutes, want at most %d", n, c.at2m)
			}
			for from := 600; from+120 <= len(sent); from += 60 {
				if n := sum(from, from+120); n > c.thenEach {
					t.Errorf("%d pings in the two minutes after %d s, want at most %d", n, from, c.thenEach)
				}
			}
			t.Logf("%d, %d, then %d", sum(0, 4), sum(0, 120), sum(600, 720))
		})
	}
}

// count counts a ping if the last step sent one to the endpoint.
func count(s *stepper, e netip.AddrPort) int {
	for _, p := range s.m.Probes {
		if p.Endpoint == e {
			return int(p.Sent)
		}
	}
	return 0
}

// Listing the victim's other ports, or ever new addresses, does not help either.
func TestVictimsManyPorts(t *testing.T) {
	s := newStepper(t, node(natNone, cand(host, "203.0.113.1:51820")), node(natNone))
	toIP, all := 0, 0
	for i := range 10 * 60 {
		n := node(natNone)
		for k := range 8 {
			n.Candidates = append(n.Candidates,
				Candidate{Type: srflx, Addr: netip.AddrPortFrom(netip.MustParseAddr("198.51.100.66"), uint16(1+i*8+k))},
				Candidate{Type: srflx, Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i), byte(k)}), 53)})
		}
		for _, in := range []Input{{Kind: InputPeer, Node: &n}, {Kind: InputPunch}, {Kind: InputTick}} {
			for _, a := range s.in(300*time.Millisecond, in) {
				to, ok := strings.CutPrefix(a, "ping ")
				if !ok {
					continue
				}
				if all++; strings.HasPrefix(to, "198.51.100.66:") {
					toIP++
				}
			}
		}
	}
	minutes := 3 * 300 * 10 * 60 / 1000 / 60
	if toIP == 0 || toIP > unprovenPings*unprovenPerIP*(minutes/2+2) || all > unprovenPings*spentMax*(minutes/2+2) {
		t.Errorf("%d pings to one victim and %d in all, in %d minutes", toIP, all, minutes)
	}
	t.Logf("%d pings to one address, %d in all", toIP, all)
	if len(s.m.Spent) > spentMax || len(s.m.Probes) > 64 {
		t.Errorf("%d accounts and %d addresses remembered", len(s.m.Spent), len(s.m.Probes))
	}
}
