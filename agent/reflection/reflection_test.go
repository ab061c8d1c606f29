package reflection

import (
	"net/netip"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

func TestReflection(t *testing.T) {
	start := time.Unix(1000, 0)
	at := netip.MustParseAddrPort
	const own, other = "203.0.113.7:40001", "203.0.113.7:40002"
	type seen struct {
		observed, by string
		every        time.Duration
		pongs        int
	}
	known := []*skeinv1.Candidate{{Address: "203.0.113.7:51820"}}
	for name, c := range map[string]struct {
		seen  []seen
		after time.Duration
		want  string
	}{
		"by two peers": {[]seen{{own, "198.51.100.1:1", 5 * time.Second, 3},
			{own, "198.51.100.2:1", 5 * time.Second, 3}}, 11 * time.Second, own},
		"by one peer at two ports": {[]seen{{own, "198.51.100.1:1", 5 * time.Second, 9},
			{own, "198.51.100.1:2", 5 * time.Second, 9}}, time.Minute, ""},
		"a port per peer": {[]seen{{own, "198.51.100.1:1", 5 * time.Second, 9},
			{other, "198.51.100.2:1", 5 * time.Second, 9}}, time.Minute, ""},
		"not for long": {[]seen{{own, "198.51.100.1:1", time.Second, 5}, {own, "198.51.100.2:1", time.Second,
			5}}, 6 * time.Second, ""},
		"once only": {[]seen{{own, "198.51.100.1:1", 5 * time.Second, 9},
			{own, "198.51.100.2:1", 5 * time.Second, 1}}, time.Minute, ""},
		"long ago": {[]seen{{own, "198.51.100.1:1", 5 * time.Second, 3},
			{own, "198.51.100.2:1", 5 * time.Second, 3}}, 5 * time.Minute, ""},
		"known by STUN": {[]seen{{"203.0.113.7:51820", "198.51.100.1:1", 5 * time.Second, 3},
			{"203.0.113.7:51820", "198.51.100.2:1", 5 * time.Second, 3}}, 11 * time.Second, ""},
		"inside a LAN": {[]seen{{"192.168.1.2:51820", "198.51.100.1:1", 5 * time.Second, 3},
			{"192.168.1.2:51820", "198.51.100.2:1", 5 * time.Second, 3}}, 11 * time.Second, ""},
		"by a peer in the LAN, and one": {[]seen{{own, "192.168.1.9:1", 5 * time.Second, 3},
			{own, "198.51.100.2:1", 5 * time.Second, 3}}, 11 * time.Second, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var r Reflection
			for _, s := range c.seen {
				for i := range s.pongs {
					r.Saw(at(s.observed), at(s.by).Addr(), start.Add(time.Duration(i)*s.every))
				}
			}
			got := ""
			for _, k := range r.Stable(known, false, start.Add(c.after)) {
				got += k.GetAddress()
			}
			if got != c.want {
				t.Errorf("tells %q, want %q", got, c.want)
			}
		})
	}
}

// In a mesh of two one peer confirms what it sees, with the lowest priority, and no more once there is a third member.
func TestReflectionOfTwo(t *testing.T) {
	start, at := time.Unix(1000, 0), netip.MustParseAddrPort
	var r Reflection
	r.Saw(at("203.0.113.7:40001"), netip.MustParseAddr("198.51.100.1"), start)
	r.Saw(at("203.0.113.7:40001"), netip.MustParseAddr("198.51.100.1"), start.Add(5*time.Second))
	if got := r.Stable(nil, true, start.Add(5*time.Second)); len(got) > 0 {
		t.Errorf("told too early: %v", got)
	}
	r.Saw(at("203.0.113.7:40001"), netip.MustParseAddr("198.51.100.1"), start.Add(11*time.Second))
	got := r.Stable(nil, true, start.Add(11*time.Second))
	if len(got) != 1 || got[0].GetAddress() != "203.0.113.7:40001" || got[0].GetPriority() != candidate.PrioritySymmetric {
		t.Errorf("by the one peer: %v", got)
	}
	if got := r.Stable(nil, false, start.Add(11*time.Second)); len(got) > 0 {
		t.Errorf("with a third member one peer's word is told: %v", got)
	}
}

func TestReflectionIsBounded(t *testing.T) {
	var r Reflection
	now := time.Unix(1000, 0)
	for i := range 1000 {
		for _, by := range []string{"198.51.100.1", "198.51.100.2"} {
			for k := range reflectPongs {
				r.Saw(netip.AddrPortFrom(netip.MustParseAddr("203.0.113.7"), uint16(1024+i)), netip.MustParseAddr(by),
					now.Add(time.Duration(k)*reflectFor))
			}
		}
	}
	if n := len(r.Stable(nil, false, now.Add(time.Minute))); len(r.seen) > reflectTracked || n > reflectMax {
		t.Errorf("%d sightings, %d addresses", len(r.seen), n)
	}
}

func TestStrangePong(t *testing.T) {
	at := netip.MustParseAddrPort
	cone := &candidate.Result{
		NATReport:  candidate.NATReport{Mapping: candidate.EndpointIndependent},
		Candidates: []*skeinv1.Candidate{{Address: "203.0.113.7:51820"}, {Address: "192.168.1.2:51820"}},
	}
	symmetric := &candidate.Result{NATReport: candidate.NATReport{Mapping: candidate.AddressAndPortDependent},
		Candidates: cone.Candidates}
	for name, c := range map[string]struct {
		observed, from string
		result         *candidate.Result
		want           bool
	}{
		"another port":                {"203.0.113.7:40001", "198.51.100.1:51820", cone, true},
		"another address":             {"203.0.113.8:51820", "198.51.100.1:51820", cone, true},
		"what is known":               {"203.0.113.7:51820", "198.51.100.1:51820", cone, false},
		"as an IPv4-mapped address":   {"[::ffff:203.0.113.7]:51820", "198.51.100.1:51820", cone, false},
		"before discovery":            {"203.0.113.7:40001", "198.51.100.1:51820", nil, false},
		"a NAT that maps by peer":     {"203.0.113.7:40001", "198.51.100.1:51820", symmetric, false},
		"by a relay's port":           {"198.51.100.9:24001", "198.51.100.9:24000", cone, false},
		"inside a carrier's network":  {"100.64.1.2:40001", "198.51.100.1:51820", cone, false},
		"by a peer in the LAN":        {"203.0.113.7:40001", "192.168.1.9:51820", cone, false},
		"IPv6, which nobody rewrites": {"[2001:db8::7]:40001", "[2001:db8::1]:51820", cone, false},
	} {
		if got := Strange(at(c.observed), at(c.from), c.result); got != c.want {
			t.Errorf("%s: %t, want %t", name, got, c.want)
		}
	}
}
