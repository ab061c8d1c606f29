package candidate

import (
	"net/netip"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
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
func sights(pairs ...string) (out []Observation) {
	for i := 0; i < len(pairs); i += 2 {
		out = append(out, Observation{Server: ap(pairs[i]), Mapped: ap(pairs[i+1])})
	}
	return out
}

func TestMapping(t *testing.T) {
	const a1, a2, b1, b2 = "203.0.113.1:3478", "203.0.113.1:3479", "203.0.113.2:3478", "203.0.113.2:3479"
	const x, y, z, w = "198.51.100.9:1", "198.51.100.9:2", "198.51.100.9:3", "198.51.100.9:4"
	tests := []struct {
		name string
		seen []Observation
		want Behaviour
	}{
		{"nothing seen", nil, Unknown},
		{"one server, one port", sights(a1, x), Unknown},
		{"one server asked twice", sights(a1, x, a1, x), Unknown},
		{"two ports of one server agree", sights(a1, x, a2, x), EndpointIndependent},
		{"two ports of one server differ", sights(a1, x, a2, y), AddressAndPortDependent},
		{"two servers agree", sights(a1, x, b1, x), EndpointIndependent},
		{"all four agree", sights(a1, x, a2, x, b1, x, b2, x), EndpointIndependent},
		{"all four differ", sights(a1, x, a2, y, b1, z, b2, w), AddressAndPortDependent},
		{"by address only", sights(a1, x, a2, x, b1, y, b2, y), AddressDependent},
		{"two servers differ, ports not known", sights(a1, x, b1, y), AddressAndPortDependent},
		{"another outside address", sights(a1, x, b1, "198.51.100.10:1"), AddressAndPortDependent},
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
		want              Behaviour
	}{
		{NotTested, NotTested, NotTested, Unknown},
		{NotTested, Received, Received, EndpointIndependent},
		{NotTested, NotTested, Received, EndpointIndependent}, // the port test was cut short
		{NotTested, Received, Silent, AddressDependent},
		{NotTested, Received, NotTested, AddressDependent}, // no second node: the careful reading
		{NotTested, Silent, Silent, AddressAndPortDependent},
		{Received, Received, Received, EndpointIndependent},
		{Received, Received, Silent, AddressDependent},
		{Received, Silent, Silent, EndpointIndependent}, // this one port is forwarded
		{Received, NotTested, NotTested, AddressDependent},
		{Silent, Received, Received, AddressAndPortDependent}, // a firewall on this one port
		{Silent, NotTested, NotTested, AddressAndPortDependent},
	}
	for _, tt := range tests {
		if got := filtering(Evidence{WireGuardPort: tt.wg, OtherPort: tt.port, OtherAddress: tt.address}); got != tt.want {
			t.Errorf("WireGuard's port %d, other port %d, other address %d: %s, want %s", tt.wg, tt.port, tt.address, got, tt.want)
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
	e := Evidence{Port: port, Local: addrs("192.168.1.2"), Servers: 2, Observations: sights("203.0.113.1:3478", "198.51.100.9:1", "203.0.113.2:3478", "198.51.100.9:1"), Sequences: [][]uint16{{1, 2, 3}}}
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
		{"no servers, carrier's address", Evidence{Local: addrs("100.64.3.4")}, skeinv1.NatType_NAT_TYPE_UNKNOWN, "set stunServers"},
		{"no answers", Evidence{Local: inside, Servers: 3}, skeinv1.NatType_NAT_TYPE_BLOCKED, "none of 3 STUN servers"},
		{"no answers on a public address", Evidence{Local: outside, Servers: 3}, skeinv1.NatType_NAT_TYPE_BLOCKED, "UDP seems blocked"},
		{"no answers from servers that may be away", Evidence{Local: inside, Servers: 3, Doubtful: true}, skeinv1.NatType_NAT_TYPE_UNKNOWN, "asking again"},
		{"the same on a public address", Evidence{Local: outside, Servers: 3, Doubtful: true}, skeinv1.NatType_NAT_TYPE_NONE, "asking again"},
		{"one answer", Evidence{Local: inside, Servers: 2, Observations: sights(a, out)}, skeinv1.NatType_NAT_TYPE_UNKNOWN, "name a second one"},
		{"symmetric", Evidence{Local: inside, Servers: 2, Observations: sights(a, out, b, out2)}, skeinv1.NatType_NAT_TYPE_SYMMETRIC, "forward UDP port 51820"},
		{"public", Evidence{Local: outside, Servers: 2, Observations: sights(a, "198.51.100.7:51820", b, "198.51.100.7:51820"), WireGuardPort: Received}, skeinv1.NatType_NAT_TYPE_NONE, ""},
		{"public, seen by one", Evidence{Local: outside, Servers: 1, Observations: sights(a, "198.51.100.7:51820")}, skeinv1.NatType_NAT_TYPE_NONE, ""},
		{"public, other ports closed", Evidence{Local: outside, Servers: 2, Observations: sights(a, "198.51.100.7:51820", b, "198.51.100.7:51820"), WireGuardPort: Received, OtherPort: Silent, OtherAddress: Silent}, skeinv1.NatType_NAT_TYPE_NONE, ""},
		{"public behind a firewall", Evidence{Local: outside, Servers: 2, Observations: sights(a, "198.51.100.7:51820", b, "198.51.100.7:51820"), WireGuardPort: Silent}, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, "firewall"},
		{"own address, another port", Evidence{Local: outside, Servers: 2, Observations: sights(a, "198.51.100.7:9", b, "198.51.100.7:9"), OtherPort: Silent}, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, ""},
		{"full cone", Evidence{Local: inside, Servers: 2, Observations: sights(a, out, b, out), OtherPort: Received, OtherAddress: Received}, skeinv1.NatType_NAT_TYPE_FULL_CONE, ""},
		{"restricted cone", Evidence{Local: inside, Servers: 2, Observations: sights(a, out, b, out), OtherPort: Received, OtherAddress: Silent}, skeinv1.NatType_NAT_TYPE_RESTRICTED_CONE, ""},
		{"port-restricted cone", Evidence{Local: inside, Servers: 2, Observations: sights(a, out, b, out), OtherPort: Silent, OtherAddress: Silent}, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, ""},
		{"cone, filtering untested", Evidence{Local: inside, Servers: 2, Observations: sights(a, out, b, out)}, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, "assumed port-restricted"},
		{"a server on our side of the NAT", Evidence{Local: inside, Servers: 3, Observations: sights("192.168.1.9:3478", "192.168.1.2:51820", a, out, b, out), OtherPort: Silent}, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, ""},
		{"a server between two NATs", Evidence{Local: inside, Servers: 3, Observations: sights("10.0.0.9:3478", "10.0.0.7:5", a, out, b, out), OtherPort: Silent}, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, ""},
		{"a private internet", Evidence{Local: inside, Servers: 2, Observations: sights("10.0.0.9:3478", "10.0.0.7:5", "10.0.0.8:3478", "10.0.0.7:5"), OtherPort: Silent}, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.e.Port = port
			got := Assess(tt.e)
			if got.NAT != tt.want {
				t.Errorf("%v, want %v: %+v", got.NAT, tt.want, got)
			}
			if advice := strings.Join(got.Advice, "\n"); !strings.Contains(advice, tt.advice) || tt.advice == "" && advice != "" {
				t.Errorf("advice %q, want %q in it", advice, tt.advice)
			}
		})
	}
}

func TestHostAddresses(t *testing.T) {
	links := []link{
		{index: 1, name: "lo", up: true, loopback: true},
		{index: 2, name: "eth0", kind: "device", up: true},
		{index: 3, name: "skein0", kind: "wireguard", up: true},
		{index: 4, name: "docker0", kind: "bridge", up: true},
		{index: 5, name: "br0", kind: "bridge", up: true},
		{index: 6, name: "eth1", kind: "device"},
		{index: 7, name: "tailscale0", kind: "tuntap", up: true},
		{index: 8, name: "mesh", kind: "device", up: true},
		{index: 9, name: "veth1", kind: "veth", up: true},
	}
	on := func(link int, list ...string) (out []address) {
		for _, a := range addrs(list...) {
			out = append(out, address{link: link, addr: a})
		}
		return out
	}
	var all []address
	all = append(all, on(1, "127.0.0.1", "::1", "203.0.113.50")...)
	all = append(all, on(2, "2001:db8::2", "fe80::1", "192.168.1.2", "169.254.1.1", "10.4.0.9", "198.51.100.7", "fd00::2", "192.168.1.2")...)
	all = append(all, address{link: 2, addr: netip.MustParseAddr("2001:db8::bad"), unusable: true})
	all = append(all, on(3, "10.4.0.1")...)
	all = append(all, on(4, "172.17.0.1")...)
	all = append(all, on(5, "10.0.0.5")...)
	all = append(all, on(6, "10.1.1.1")...)
	all = append(all, on(7, "100.100.1.1")...)
	all = append(all, on(8, "10.7.7.7")...)
	all = append(all, on(9, "10.8.8.8")...)
	all = append(all, on(99, "10.9.9.9")...)
	got := hostAddresses(links, all, []string{"mesh"}, []netip.Prefix{netip.MustParsePrefix("10.4.0.0/16")})
	want := addrs("198.51.100.7", "2001:db8::2", "192.168.1.2", "10.0.0.5", "10.8.8.8", "fd00::2")
	if len(got) != len(want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("got %v, want %v", got, want)
			break
		}
	}
	var many []address
	for i := range 200 {
		many = append(many, address{link: 2, addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})})
	}
	if got := hostAddresses(links, many, nil, nil); len(got) != maxHosts {
		t.Errorf("%d host candidates, want at most %d", len(got), maxHosts)
	}
}

func TestResult(t *testing.T) {
	f := findings{
		port: port, local: addrs("192.168.1.2", "2001:db8::2"), internal: netip.MustParseAddr("10.0.0.1"), forced: []netip.AddrPort{ap("198.51.100.1:4444")},
		v4: Evidence{Port: port, Local: addrs("192.168.1.2"), Servers: 2, Observations: sights("203.0.113.1:3478", "198.51.100.9:7", "203.0.113.2:3478", "198.51.100.9:8")},
		v6: Evidence{Port: port, Local: addrs("2001:db8::2"), Servers: 1, Observations: sights("[2001:db8::9]:3478", "[2001:db8::2]:51820")},
	}
	r := f.result()
	var got []string
	for _, c := range r.Candidates {
		got = append(got, c.Address+" "+c.Source)
	}
	want := "198.51.100.1:4444 config,198.51.100.9:7 stun,10.0.0.1:51820 config,192.168.1.2:51820 interface,[2001:db8::2]:51820 interface"
	if strings.Join(got, ",") != want {
		t.Errorf("candidates %v\nwant %v", got, want)
	}
	if r.NAT != skeinv1.NatType_NAT_TYPE_SYMMETRIC || !r.IPv4 || !r.IPv6 || !r.UDP || r.Candidates[1].Priority != PrioritySymmetric {
		t.Errorf("%+v", r)
	}
	other := f.result()
	other.At = other.At.Add(1)
	other.Mapped[0].RTT = 5
	if !r.Equal(other) {
		t.Error("another time or round trip makes results differ")
	}
	f.v4.Observations[0].Mapped = ap("198.51.100.9:9")
	if r.Equal(f.result()) {
		t.Error("another mapped address is no news")
	}
	// IPv4 is silent, IPv6 speaks.
	f.v4 = Evidence{Port: port, Servers: 2}
	if r := f.result(); r.NAT != skeinv1.NatType_NAT_TYPE_NONE || r.IPv4 || !r.IPv6 {
		t.Errorf("with IPv6 alone: %+v", r)
	}
}
