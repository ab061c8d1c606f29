package reflexive

import (
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func TestLyingServersAreOutvoted(t *testing.T) {
	const a, a2, b, b2, c, d = "203.0.113.1:3478", "203.0.113.1:3479", "203.0.113.2:3478", "203.0.113.2:3479",
		"203.0.113.3:3478", "203.0.113.4:3478"
	const x, y, z, w, victim, private = "198.51.100.9:1", "198.51.100.9:2", "198.51.100.9:3", "198.51.100.9:4",
		"192.0.2.66:53", "10.66.66.66:1"
	const own, ownOther = "198.51.100.7:51820", "198.51.100.7:9"
	const cone, symmetric, none = skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, skeinv1.NatType_NAT_TYPE_SYMMETRIC,
		skeinv1.NatType_NAT_TYPE_NONE
	tests := []struct {
		name   string
		local  string
		seen   []string
		nat    skeinv1.NatType
		mapped string
		lies   int
	}{
		{"all agree", "192.168.1.2", []string{a, x, b, x, c, x}, cone, x, 0},
		{"one of three names somebody else", "192.168.1.2", []string{a, victim, b, x, c, x}, cone, x, 1},
		{"the same with both its ports", "192.168.1.2", []string{a, victim, a2, victim, b, x, b2, x, c, x}, cone, x, 2},
		{"one of three names another port", "192.168.1.2", []string{a, y, b, x, c, x}, cone, x, 1},
		// of an inner NAT, as far as anybody can tell
		{"one names a private address", "192.168.1.2", []string{a, private, b, x, c, x}, cone, x, 0},
		{"one of three, on a symmetric NAT", "192.168.1.2", []string{a, victim, b, x, c, y}, symmetric, x, 1},
		{"a symmetric NAT", "192.168.1.2", []string{a, x, b, y, c, z}, symmetric, x, 0},
		{"a NAT with a port for each address", "192.168.1.2", []string{a, x, a2, x, b, y, b2, y, c, z}, symmetric, x, 0},
		{"one that is unsure of itself", "192.168.1.2", []string{a, x, a2, y, b, x, c, x}, cone, x, 2},
		// no majority: nothing can be told
		{"two of four lie each in its way", "192.168.1.2", []string{a, victim, b, x, c, x, d, "192.0.2.77:7"},
			symmetric, victim, 0},
		{"half lie together", "192.168.1.2", []string{a, victim, b, victim, c, x, d, x}, symmetric, victim, 0},
		{"two disagree", "192.168.1.2", []string{a, x, b, victim}, symmetric, x, 0},
		{"two disagree, and one names our own address", "198.51.100.7", []string{a, victim, b, own}, none, own, 1},
		{"a public host and one liar", "198.51.100.7", []string{a, own, b, own, c, victim}, none, own, 1},
		{"our own address at another port", "198.51.100.7", []string{a, victim, b, ownOther}, symmetric, victim, 0},
		{"ports of one server differ", "192.168.1.2", []string{a, x, a2, y, b, z, b2, w}, symmetric, x, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := Evidence{Port: port, Local: addrs(tt.local), Servers: 4, Observations: sights(tt.seen...)}
			got := Assess(e)
			if got.NAT != tt.nat || got.Mapped != ap(tt.mapped) {
				t.Errorf("%v at %s, want %v at %s", got.NAT, got.Mapped, tt.nat, tt.mapped)
			}
			if _, lies := e.believed(); len(lies) != tt.lies {
				t.Errorf("not believed: %v", lies)
			}
			if named := strings.Contains(strings.Join(got.Advice, "\n"), "is not believed"); named != (tt.lies > 0) {
				t.Errorf("advice %q", got.Advice)
			}
		})
	}
}
