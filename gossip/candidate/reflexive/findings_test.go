package reflexive

import (
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

func TestReport(t *testing.T) {
	f := findings{
		port: port, local: addrs("192.168.1.2", "2001:db8::2"),
		v4: Evidence{Port: port, Local: addrs("192.168.1.2"), Servers: 2, Observations: sights("203.0.113.1:3478",
			"198.51.100.9:7", "203.0.113.2:3478", "198.51.100.9:8")},
		v6: Evidence{Port: port, Local: addrs("2001:db8::2"), Servers: 1, Observations: sights("[2001:db8::9]:3478",
			"[2001:db8::2]:51820")},
	}
	r := f.report()
	if r.NAT != skeinv1.NatType_NAT_TYPE_SYMMETRIC || !r.IPv4 || !r.IPv6 || !r.UDP {
		t.Errorf("%+v", r)
	}
	c := f.candidates()
	if len(c) != 1 || c[0].Address != "198.51.100.9:7" || c[0].Source != "stun" ||
		c[0].Priority != candidate.PrioritySymmetric {
		t.Errorf("candidates %v", c)
	}
	// IPv4 is silent, IPv6 speaks.
	f.v4 = Evidence{Port: port, Servers: 2}
	if r := f.report(); r.NAT != skeinv1.NatType_NAT_TYPE_NONE || r.IPv4 || !r.IPv6 {
		t.Errorf("with IPv6 alone: %+v", r)
	}
}
