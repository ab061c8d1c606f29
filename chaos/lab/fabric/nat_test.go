package fabric

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
)

// behaviour is what RFC 5780 finds out about a NAT, here with sockets that lie in nobody's way: two
// servers of two ports each.
type behaviour struct {
	Mapping, Filtering string
	Hairpin            bool
	Ports              string // how ports are given out to one socket's destinations, one after the other
}

const (
	independent = "endpoint-independent"
	byAddress   = "address-dependent"
	byPort      = "address-and-port-dependent"
	open_       = "no translation"
	nothing     = "nothing passes"

	kept   = "kept"   // the socket's own
	fixed  = "fixed"  // another, the same for all
	steps  = "steps"  // the next one for each
	random = "random" // no two have the distance of the two before
)

// want says what each kind must look like to its first host; the second's ports are fixed where the
// first's are kept.
var want = map[NAT]behaviour{
	None:                {open_, independent, true, kept},
	OneToOne:            {independent, independent, false, kept},
	FullCone:            {independent, independent, false, kept},
	RestrictedCone:      {independent, byAddress, false, kept},
	PortRestrictedCone:  {independent, byPort, false, kept},
	Symmetric:           {byPort, byPort, false, random},
	SymmetricSequential: {byPort, byPort, false, steps},
	Double:              {independent, byPort, false, fixed},
	UDPBlocked:          {nothing, nothing, false, nothing},
}

func second(_ netip.AddrPort, ok bool) bool { return ok }

type servers struct {
	p              Plan
	a1, a2, b1, b2 *net.UDPConn // addresses a and b, two ports each
}

func (p Plan) servers(t *testing.T) servers {
	return servers{p, p.socket(t, "x1", false, 3478), p.socket(t, "x1", false, 3479), p.socket(t, "y1", false, 3478),
		p.socket(t, "y1", false, 3479)}
}

// mappings tells as whom a socket is seen by the four servers.
func (s servers) mappings(t *testing.T, c *net.UDPConn) (seen [4]netip.AddrPort) {
	t.Helper()
	for i, server := range []*net.UDPConn{s.a1, s.a2, s.b1, s.b2} {
		seen[i] = arrives(t, c, local(server), server)
	}
	return seen
}

func mapping(c *net.UDPConn, seen [4]netip.AddrPort) string {
	switch {
	case seen[0] == local(c) && seen[1] == seen[0] && seen[2] == seen[0]:
		return open_
	case seen[0] == seen[1] && seen[0] == seen[2]:
		return independent
	case seen[0] == seen[1]:
		return byAddress
	}
	return byPort
}

func ports(c *net.UDPConn, seen [4]netip.AddrPort) string {
	var step [3]int
	for i := range step {
		step[i] = int(seen[i+1].Port()) - int(seen[i].Port())
	}
	switch {
	case step == [3]int{} && seen[0].Port() == local(c).Port():
		return kept
	case step == [3]int{}:
		return fixed
	case step == [3]int{1, 1, 1}:
		return steps
	case step[0] != step[1] && step[1] != step[2]:
		return random
	}
	return fmt.Sprint(step)
}

// filtering uses a fresh socket that has spoken to a1 only, and lets the others call it.
func (s servers) filtering(t *testing.T, fresh *net.UDPConn) string {
	t.Helper()
	mapped := arrives(t, fresh, local(s.a1), s.a1)
	arrives(t, s.a1, mapped, fresh)
	switch {
	case second(getsIn(t, s.b1, mapped, fresh, s.a1)):
		return independent
	case second(getsIn(t, s.a2, mapped, fresh, s.a1)):
		return byAddress
	}
	return byPort
}

// hairpin tells whether a socket behind the NAT reaches another by that one's outside address, when both
// have sent to where the other is seen; and that it is then seen from outside too (RFC 4787, REQ-9).
func (s servers) hairpin(t *testing.T, from, to *net.UDPConn) bool {
	t.Helper()
	mine, theirs := arrives(t, from, local(s.a1), s.a1), arrives(t, to, local(s.a1), s.a1)
	send(t, to, mine)
	send(t, from, theirs)
	as, ok := getsIn(t, from, theirs, to, s.a1)
	if ok && as != mine {
		t.Errorf("turned round as %s, want the outside address %s", as, mine)
	}
	return ok
}

func (s servers) behaviour(t *testing.T, kind NAT, host string, c *net.UDPConn) behaviour {
	t.Helper()
	if kind == UDPBlocked {
		for _, server := range []*net.UDPConn{s.a1, s.a2, s.b1, s.b2} {
			if as, ok := passes(t, c, local(server), server); ok {
				t.Errorf("UDP came through as %s", as)
			}
		}
		return want[UDPBlocked]
	}
	seen := s.mappings(t, c)
	neighbour := map[string]string{"h1": "h2", "h2": "h1"}[host]
	other := s.p.socket(t, neighbour, false, 41000)
	return behaviour{mapping(c, seen), s.filtering(t, s.p.socket(t, host, false, 40000)),
		s.hairpin(t, s.p.socket(t, host, false, 42000), other), ports(c, seen)}
}

// Each kind behaves as its name says, for two hosts behind one NAT that use the same ports.
func TestNATKinds(t *testing.T) {
	for _, kind := range NATs() {
		for _, hairpin := range []bool{false, true} {
			if hairpin && !kind.CanHairpin() {
				continue
			}
			t.Run(fmt.Sprintf("%s hairpin %v", kind, hairpin), func(t *testing.T) {
				t.Parallel()
				testNATKind(t, kind, hairpin)
			})
		}
	}
}

func testNATKind(t *testing.T, kind NAT, hairpin bool) {
	p := raise(t, []SiteSpec{{Name: "x", NAT: None}, {Name: "y", NAT: None}, {Name: "site", NAT: kind, Hairpin: hairpin}},
		HostSpec{"x1", "x"}, HostSpec{"y1", "y"}, HostSpec{"h1", "site"}, HostSpec{"h2", "site"})
	s := p.servers(t)
	for _, host := range []string{"h1", "h2"} {
		got, want := s.behaviour(t, kind, host, p.socket(t, host, false, 51820)), want[kind]
		want.Hairpin = want.Hairpin || hairpin
		if host == "h2" && kind.cone() {
			want.Ports = fixed
		}
		if got != want {
			t.Errorf("%s: %+v, want %+v", host, got, want)
		}
	}
	if !p.tcpReaches(t, "h1", "x1") {
		t.Error("TCP does not pass outwards")
	}
	if kind == None || kind == UDPBlocked {
		return
	}
	h1, h2 := s.mappings(t, p.socket(t, "h1", false, 51821)), s.mappings(t, p.socket(t, "h2", false, 51821))
	for i := range h1 {
		if h1[i] == h2[i] {
			t.Errorf("both hosts are seen as %s", h1[i])
		}
		if addr := p.host(t, "h1").Public; h1[i].Addr() != addr {
			t.Errorf("h1 is seen as %s, want its public address %s", h1[i], addr)
		}
	}
}

func TestPortKeys(t *testing.T) {
	seen := map[uint16]string{}
	for outer := range 32 {
		for inner := range 32 {
			k, who := portKey(outer, true)^portKey(inner, false), fmt.Sprintf("client %d of router %d", inner, outer)
			if other, ok := seen[k]; ok {
				t.Errorf("%s and %s get the same ports", who, other)
			}
			seen[k] = who
		}
	}
}

// Two households behind one carrier have the same private network and the same public address. They are
// kept apart.
func TestHouseholdsBehindOneAddress(t *testing.T) {
	lan := netip.MustParsePrefix("192.168.1.0/24")
	p := raise(t, []SiteSpec{{Name: "x", NAT: None}, {Name: "isp", NAT: FullCone, Hairpin: true},
		{Name: "a", NAT: PortRestrictedCone, Behind: "isp", LAN: lan}, {Name: "b", NAT: PortRestrictedCone,
			Behind: "isp", LAN: lan}},
		HostSpec{"x1", "x"}, HostSpec{"a1", "a"}, HostSpec{"b1", "b"}, HostSpec{"b2", "b"})
	x, a1, b1, b2 := p.socket(t, "x1", false, 3478), p.socket(t, "a1", false, 51820), p.socket(t, "b1", false, 51820),
		p.socket(t, "b2", false, 51820)
	if local(a1) != local(b1) || local(a1) == local(b2) {
		t.Fatalf("the private addresses are %s, %s and %s", local(a1), local(b1), local(b2))
	}
	aSeen, bSeen := arrives(t, a1, local(x), x), arrives(t, b2, local(x), x)
	if want := p.host(t, "a1").Public; aSeen.Addr() != want || bSeen.Addr() != want || aSeen == bSeen {
		t.Errorf("seen as %s and %s, want two ports of %s", aSeen, bSeen, want)
	}
	send(t, a1, local(b2)) // ends in a's own network
	send(t, a1, bSeen)
	if as := arrives(t, b2, aSeen, a1); as != bSeen {
		t.Errorf("through the carrier's hairpin as %s, want %s", as, bSeen)
	}
	if as := arrives(t, a1, bSeen, b2); as != aSeen {
		t.Errorf("through the carrier's hairpin as %s, want %s", as, aSeen)
	}
}

// An unasked packet must not spoil the mapping that the host is about to make towards its sender:
// else two hosts that punch at the same moment would miss each other.
func TestEarlyPunchSpoilsNothing(t *testing.T) {
	p := raise(t, []SiteSpec{{Name: "x", NAT: None}, {Name: "a", NAT: PortRestrictedCone},
		{Name: "b", NAT: PortRestrictedCone}},
		HostSpec{"x1", "x"}, HostSpec{"a1", "a"}, HostSpec{"b1", "b"})
	x, a, b := p.socket(t, "x1", false, 3478), p.socket(t, "a1", false, 51820), p.socket(t, "b1", false, 51820)
	aSeen, bSeen := arrives(t, a, local(x), x), arrives(t, b, local(x), x)
	if second(getsIn(t, a, bSeen, b, x)) {
		t.Fatal("a port-restricted cone let a stranger in")
	}
	if as := arrives(t, b, aSeen, a); as != bSeen {
		t.Errorf("b punched back: arrived as %s, want %s", as, bSeen)
	}
	if as := arrives(t, a, bSeen, b); as != aSeen {
		t.Errorf("a again: arrived as %s, want %s", as, aSeen)
	}
}

func TestIPv6BehindNATIsAFirewall(t *testing.T) {
	for kind, wantIn := range map[NAT]bool{FullCone: true, PortRestrictedCone: false, Symmetric: false} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			p := raise(t, []SiteSpec{{Name: "x", NAT: None, IPv6: true}, {Name: "h", NAT: kind, IPv6: true}},
				HostSpec{"x1", "x"}, HostSpec{"h1", "h"})
			x, h := p.socket(t, "x1", true, 1000), p.socket(t, "h1", true, 1000)
			y := p.socket(t, "x1", true, 1001)
			if as := arrives(t, h, local(x), x); as != local(h) {
				t.Errorf("outwards: arrived as %s", as)
			}
			arrives(t, x, local(h), h) // the answer
			if in := second(getsIn(t, y, local(h), h, x)); in != wantIn {
				t.Errorf("a stranger comes in: %v, want %v", in, wantIn)
			}
		})
	}
	t.Run("udp-blocked", func(t *testing.T) {
		p := raise(t, []SiteSpec{{Name: "x", NAT: None, IPv6: true}, {Name: "h", NAT: UDPBlocked, IPv6: true}},
			HostSpec{"x1", "x"}, HostSpec{"h1", "h"})
		x, h := p.socket(t, "x1", true, 1000), p.socket(t, "h1", true, 1000)
		if _, ok := passes(t, h, local(x), x); ok {
			t.Error("UDP passes over IPv6")
		}
	})
}
