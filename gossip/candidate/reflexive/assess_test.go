package reflexive

import (
	"net/netip"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

const port = 51820

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func addrs(list ...string) (out []netip.Addr) {
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// sights reads "server mapped" pairs.
func sights(pairs ...string) (out []candidate.Observation) {
	for i := 0; i < len(pairs); i += 2 {
		out = append(out, candidate.Observation{Server: ap(pairs[i]), Mapped: ap(pairs[i+1])})
	}
	return out
}

func TestMapping(t *testing.T) {
	const a1, a2, b1, b2 = "203.0.113.1:3478", "203.0.113.1:3479", "203.0.113.2:3478", "203.0.113.2:3479"
	const x, y, z, w = "198.51.100.9:1", "198.51.100.9:2", "198.51.100.9:3", "198.51.100.9:4"
	tests := []struct {
		name string
		seen []candidate.Observation
		want candidate.Behaviour
	}{
		{"nothing seen", nil, candidate.Unknown},
		{"one server, one port", sights(a1, x), candidate.Unknown},
		{"one server asked twice", sights(a1, x, a1, x), candidate.Unknown},
		{"two ports of one server agree", sights(a1, x, a2, x), candidate.EndpointIndependent},
		{"two ports of one server differ", sights(a1, x, a2, y), candidate.AddressAndPortDependent},
		{"two servers agree", sights(a1, x, b1, x), candidate.EndpointIndependent},
		{"all four agree", sights(a1, x, a2, x, b1, x, b2, x), candidate.EndpointIndependent},
		{"all four differ", sights(a1, x, a2, y, b1, z, b2, w), candidate.AddressAndPortDependent},
		{"by address only", sights(a1, x, a2, x, b1, y, b2, y), candidate.AddressDependent},
		{"two servers differ, ports not known", sights(a1, x, b1, y), candidate.AddressAndPortDependent},
		{"another outside address", sights(a1, x, b1, "198.51.100.10:1"), candidate.AddressAndPortDependent},
	}
	for _, tt := range tests {
		if got := mapping(tt.seen); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

func TestFiltering(t *testing.T) {
	tests := []struct {
		wg, port, address Answer
		want              candidate.Behaviour
	}{
		{NotTested, NotTested, NotTested, candidate.Unknown},
		{NotTested, Received, Received, candidate.EndpointIndependent},
		{NotTested, NotTested, Received, candidate.EndpointIndependent}, // the port test was cut short
		{NotTested, Received, Silent, candidate.AddressDependent},
		{NotTested, Received, NotTested, candidate.AddressDependent}, // no second node: the careful reading
		{NotTested, Silent, Silent, candidate.AddressAndPortDependent},
		{Received, Received, Received, candidate.EndpointIndependent},
		{Received, Received, Silent, candidate.AddressDependent},
		{Received, Silent, Silent, candidate.EndpointIndependent}, // this one port is forwarded
		{Received, NotTested, NotTested, candidate.AddressDependent},
		{Silent, Received, Received, candidate.AddressAndPortDependent}, // a firewall on this one port
		{Silent, NotTested, NotTested, candidate.AddressAndPortDependent},
	}
	for _, tt := range tests {
		if got := filtering(Evidence{Tests: Tests{WireGuardPort: tt.wg, OtherPort: tt.port,
			OtherAddress: tt.address}}); got != tt.want {
			t.Errorf("WireGuard's port %d, other port %d, other address %d: %s, want %s", tt.wg, tt.port,
				tt.address, got, tt.want)
		}
	}
}

func TestPortStep(t *testing.T) {
	tests := []struct {
		name string
		seen [][]uint16
		want int
	}{
		{"nothing", nil, 0},
		{"one step alone may be chance", [][]uint16{{5000, 5001}}, 0},
		{"one by one", [][]uint16{{5000, 5001, 5002, 5003}}, 1},
		{"two sockets at one server with two ports", [][]uint16{{5000, 5002}, {5004, 5006}}, 2},
		{"a counter for each socket", [][]uint16{{5000, 5001}, {60000, 60001}}, 1},
		{"downwards", [][]uint16{{5003, 5002, 5001}}, -1},
		{"others in between", [][]uint16{{5000, 5001, 5004, 5005}, {5009, 5010}}, 1},
		{"wrapping round", [][]uint16{{29998, 29999, 20000, 20001}}, 1},
		{"the highest port and the lowest", [][]uint16{{65534, 65535, 1024, 1025}}, 1},
		{"random", [][]uint16{{31111, 60222, 1077, 44044}, {9, 50000, 222, 7}}, 0},
		{"random, with neighbours by chance", [][]uint16{{31111, 31112, 1077, 44044}, {9, 50000, 222, 223}}, 0},
		{"back and forth", [][]uint16{{5000, 5001, 5000, 5001, 5000}}, 0},
		{"the same port for all", [][]uint16{{5000, 5000, 5000}}, 0},
	}
	for _, tt := range tests {
		if got := portStep(tt.seen); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
	}
	// A cone has no next mapping to predict.
	e := Evidence{Port: port, Local: addrs("192.168.1.2"), Servers: 2, Observations: sights("203.0.113.1:3478",
		"198.51.100.9:1", "203.0.113.2:3478", "198.51.100.9:1"), Tests: Tests{Sequences: [][]uint16{{1, 2, 3}}}}
	if a := Assess(e); a.PortStep != 0 || a.Preserving {
		t.Errorf("cone: %+v", a)
	}
	e.Observations = sights("203.0.113.1:3478", "198.51.100.9:51820", "203.0.113.2:3478", "198.51.100.9:51820")
	if a := Assess(e); !a.Preserving {
		t.Errorf("cone that keeps the port: %+v", a)
	}
}

func TestAssess(t *testing.T) {
	const a, b = "203.0.113.1:3478", "203.0.113.2:3478"
	const out, out2 = "198.51.100.9:1024", "198.51.100.9:1025"
	inside, outside := addrs("192.168.1.2"), addrs("198.51.100.7")
	tests := []struct {
		name   string
		e      Evidence
		want   skeinv1.NatType
		advice string
	}{
		{"no servers, private address", Evidence{Local: inside}, skeinv1.NatType_NAT_TYPE_UNKNOWN, "set stunServers"},
		{"no servers, public address", Evidence{Local: outside}, skeinv1.NatType_NAT_TYPE_NONE, "counts as public"},
		{"no servers, carrier's address", Evidence{Local: addrs("100.64.3.4")}, skeinv1.NatType_NAT_TYPE_UNKNOWN,
			"set stunServers"},
		{"no answers", Evidence{Local: inside, Servers: 3}, skeinv1.NatType_NAT_TYPE_BLOCKED, "none of 3 STUN servers"},
		{"no answers on a public address", Evidence{Local: outside, Servers: 3}, skeinv1.NatType_NAT_TYPE_BLOCKED,
			"UDP seems blocked"},
		{"no answers from servers that may be away", Evidence{Local: inside, Servers: 3, Inconclusive: true},
			skeinv1.NatType_NAT_TYPE_UNKNOWN, "asking again"},
		{"the same on a public address", Evidence{Local: outside, Servers: 3, Inconclusive: true},
			skeinv1.NatType_NAT_TYPE_NONE,
			"asking again"},
		{"one answer", Evidence{Local: inside, Servers: 2, Observations: sights(a, out)}, skeinv1.NatType_NAT_TYPE_UNKNOWN,
			"name a second one"},
		{"symmetric", Evidence{Local: inside, Servers: 2, Observations: sights(a, out, b, out2)},
			skeinv1.NatType_NAT_TYPE_SYMMETRIC, "every destination another port"},
		{"public", Evidence{Local: outside, Servers: 2, Observations: sights(a, "198.51.100.7:51820", b,
			"198.51.100.7:51820"), Tests: Tests{WireGuardPort: Received}}, skeinv1.NatType_NAT_TYPE_NONE, ""},
		{"public, seen by one", Evidence{Local: outside, Servers: 1, Observations: sights(a, "198.51.100.7:51820")},
			skeinv1.NatType_NAT_TYPE_NONE, ""},
		{"public, other ports closed", Evidence{Local: outside, Servers: 2, Observations: sights(a, "198.51.100.7:51820", b,
			"198.51.100.7:51820"), Tests: Tests{WireGuardPort: Received, OtherPort: Silent, OtherAddress: Silent}},
			skeinv1.NatType_NAT_TYPE_NONE, ""},
		{"public behind a firewall", Evidence{Local: outside, Servers: 2, Observations: sights(a, "198.51.100.7:51820", b,
			"198.51.100.7:51820"), Tests: Tests{WireGuardPort: Silent}},
			skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, "firewall"},
		{"own address, another port", Evidence{Local: outside, Servers: 2, Observations: sights(a, "198.51.100.7:9", b,
			"198.51.100.7:9"), Tests: Tests{OtherPort: Silent}}, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, ""},
		{"full cone", Evidence{Local: inside, Servers: 2, Observations: sights(a, out, b, out),
			Tests: Tests{OtherPort: Received, OtherAddress: Received}}, skeinv1.NatType_NAT_TYPE_FULL_CONE, ""},
		{"restricted cone", Evidence{Local: inside, Servers: 2, Observations: sights(a, out, b, out),
			Tests: Tests{OtherPort: Received, OtherAddress: Silent}}, skeinv1.NatType_NAT_TYPE_RESTRICTED_CONE, ""},
		{"port-restricted cone", Evidence{Local: inside, Servers: 2, Observations: sights(a, out, b, out),
			Tests: Tests{OtherPort: Silent, OtherAddress: Silent}}, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, ""},
		{"cone, filtering untested", Evidence{Local: inside, Servers: 2, Observations: sights(a, out, b, out)},
			skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, "assumed port-restricted"},
		{"a server on our side of the NAT", Evidence{Local: inside, Servers: 3, Observations: sights("192.168.1.9:3478",
			"192.168.1.2:51820", a, out, b, out), Tests: Tests{OtherPort: Silent}},
			skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, ""},
		{"a server between two NATs", Evidence{Local: inside, Servers: 3, Observations: sights("10.0.0.9:3478", "10.0.0.7:5",
			a, out, b, out), Tests: Tests{OtherPort: Silent}}, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, ""},
		{"a private internet", Evidence{Local: inside, Servers: 2, Observations: sights("10.0.0.9:3478", "10.0.0.7:5",
			"10.0.0.8:3478", "10.0.0.7:5"), Tests: Tests{OtherPort: Silent}}, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.e.Port = port
			got := Assess(tt.e)
			if got.NAT != tt.want {
				t.Errorf("%v, want %v: %+v", got.NAT, tt.want, got)
			}
			if advice := strings.Join(got.Advice, "\n"); !strings.Contains(advice, tt.advice) ||
				tt.advice == "" && advice != "" {
				t.Errorf("advice %q, want %q in it", advice, tt.advice)
			}
		})
	}
}
