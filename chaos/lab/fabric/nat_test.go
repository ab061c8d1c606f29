package fabric

import (
	"net"
	"net/netip"
	"testing"
)

// behaviour is what RFC 5780 finds out about a NAT, here with sockets that lie in nobody's way: two
// servers of two ports each.
type behaviour struct{ Mapping, Filtering string }

const (
	independent = "endpoint-independent"
	byAddress   = "address-dependent"
	byPort      = "address-and-port-dependent"
	open_       = "no translation"
	nothing     = "nothing passes"
)

// want says what each kind must look like.
var want = map[NAT]behaviour{
	None:               {open_, independent},
	OneToOne:           {independent, independent},
	FullCone:           {independent, independent},
	RestrictedCone:     {independent, byAddress},
	PortRestrictedCone: {independent, byPort},
	Symmetric:          {byPort, byPort},
	UDPBlocked:         {nothing, nothing},
}

type servers struct{ a1, a2, b1 *net.UDPConn } // address a with two ports, address b

// mappings tells as whom a socket is seen by the three servers.
func (s servers) mappings(t *testing.T, c *net.UDPConn) (seen [3]netip.AddrPort, ok bool) {
	t.Helper()
	for i, server := range []*net.UDPConn{s.a1, s.a2, s.b1} {
		if seen[i], ok = passes(t, c, local(server), server); !ok {
			return seen, false
		}
	}
	return seen, true
}

func (s servers) mapping(t *testing.T, c *net.UDPConn) string {
	t.Helper()
	seen, ok := s.mappings(t, c)
	switch {
	case !ok:
		return nothing
	case seen[0] == local(c) && seen[1] == seen[0] && seen[2] == seen[0]:
		return open_
	case seen[0] == seen[1] && seen[0] == seen[2]:
		return independent
	case seen[0] == seen[1]:
		return byAddress
	}
	return byPort
}

// filtering uses a fresh socket that has spoken to a1 only, and lets the others call it.
func (s servers) filtering(t *testing.T, fresh *net.UDPConn) string {
	t.Helper()
	mapped, ok := passes(t, fresh, local(s.a1), s.a1)
	if !ok {
		return nothing
	}
	if _, ok := passes(t, s.a1, mapped, fresh); !ok {
		return "not even answers pass"
	}
	if _, ok := passes(t, s.b1, mapped, fresh); ok {
		return independent
	}
	if _, ok := passes(t, s.a2, mapped, fresh); ok {
		return byAddress
	}
	return byPort
}

// Each kind behaves as its name says, for two hosts behind one NAT that use the same ports.
func TestNATKinds(t *testing.T) {
	for _, kind := range NATs() {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			p := raise(t, []SiteSpec{{Name: "x", NAT: None}, {Name: "y", NAT: None}, {Name: "site", NAT: kind}},
				HostSpec{"x1", "x"}, HostSpec{"y1", "y"}, HostSpec{"h1", "site"}, HostSpec{"h2", "site"})
			s := servers{a1: p.socket(t, "x1", false, 3478), a2: p.socket(t, "x1", false, 3479), b1: p.socket(t, "y1", false, 3478)}
			for _, host := range []string{"h1", "h2"} {
				wg := p.socket(t, host, false, 51820)
				got := behaviour{s.mapping(t, wg), s.filtering(t, p.socket(t, host, false, 40000))}
				if got != want[kind] {
					t.Errorf("%s: %+v, want %+v", host, got, want[kind])
				}
			}
			if kind == None || kind == UDPBlocked {
				return
			}
			if !p.tcpReaches(t, "h1", "x1") {
				t.Error("TCP does not pass outwards")
			}
			h1, _ := s.mappings(t, p.socket(t, "h1", false, 51821))
			h2, _ := s.mappings(t, p.socket(t, "h2", false, 51821))
			for i := range h1 {
				if h1[i] == h2[i] {
					t.Errorf("both hosts are seen as %s", h1[i])
				}
				if addr := p.host(t, "h1").Public; h1[i].Addr() != addr {
					t.Errorf("h1 is seen as %s, want its public address %s", h1[i], addr)
				}
			}
		})
	}
}

// An unasked packet must not spoil the mapping that the host is about to make towards its sender:
// else two hosts that punch at the same moment would miss each other.
func TestEarlyPunchSpoilsNothing(t *testing.T) {
	p := raise(t, []SiteSpec{{Name: "x", NAT: None}, {Name: "a", NAT: PortRestrictedCone}, {Name: "b", NAT: PortRestrictedCone}},
		HostSpec{"x1", "x"}, HostSpec{"a1", "a"}, HostSpec{"b1", "b"})
	x, a, b := p.socket(t, "x1", false, 3478), p.socket(t, "a1", false, 51820), p.socket(t, "b1", false, 51820)
	aSeen, _ := passes(t, a, local(x), x)
	bSeen, _ := passes(t, b, local(x), x)
	if _, ok := passes(t, a, bSeen, b); ok {
		t.Fatal("a port-restricted cone let a stranger in")
	}
	if as, ok := passes(t, b, aSeen, a); !ok || as != bSeen {
		t.Errorf("b punched back: arrived %v as %s, want %s", ok, as, bSeen)
	}
	if as, ok := passes(t, a, bSeen, b); !ok || as != aSeen {
		t.Errorf("a again: arrived %v as %s, want %s", ok, as, aSeen)
	}
}

func TestIPv6BehindNATIsAFirewall(t *testing.T) {
	for kind, wantIn := range map[NAT]bool{FullCone: true, PortRestrictedCone: false, Symmetric: false} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			p := raise(t, []SiteSpec{{Name: "x", NAT: None, IPv6: true}, {Name: "h", NAT: kind, IPv6: true}}, HostSpec{"x1", "x"}, HostSpec{"h1", "h"})
			x, h := p.socket(t, "x1", true, 1000), p.socket(t, "h1", true, 1000)
			if _, ok := passes(t, x, local(h), h); ok != wantIn {
				t.Errorf("a stranger comes in: %v, want %v", ok, wantIn)
			}
			if as, ok := passes(t, h, local(x), x); !ok || as != local(h) {
				t.Errorf("outwards: arrived %v as %s", ok, as)
			}
			if _, ok := passes(t, x, local(h), h); !ok {
				t.Error("the answer does not come in")
			}
		})
	}
	t.Run("udp-blocked", func(t *testing.T) {
		p := raise(t, []SiteSpec{{Name: "x", NAT: None, IPv6: true}, {Name: "h", NAT: UDPBlocked, IPv6: true}}, HostSpec{"x1", "x"}, HostSpec{"h1", "h"})
		x, h := p.socket(t, "x1", true, 1000), p.socket(t, "h1", true, 1000)
		if _, ok := passes(t, h, local(x), x); ok {
			t.Error("UDP passes over IPv6")
		}
	})
}
