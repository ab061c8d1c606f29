package agent

import (
	"slices"
	"testing"

	"github.com/skeinmesh/skein/agent/config"
)

// The number outside goes with the forwarding host alone.
func TestWithRelayPort(t *testing.T) {
	hosts := []string{"edge.example.com", "203.0.113.7", "192.168.1.2", "2001:db8::7"}
	for outside, want := range map[uint16][]string{
		0:    {"edge.example.com:7443", "203.0.113.7:7443", "192.168.1.2:7443", "[2001:db8::7]:7443"},
		7444: {"edge.example.com:7444", "203.0.113.7:7443", "192.168.1.2:7443", "[2001:db8::7]:7443"},
	} {
		have := withRelayPort(hosts, "edge.example.com", config.Ports{Relay: 7443, RelayOutside: outside})
		if !slices.Equal(have, want) {
			t.Errorf("outside %d: %s, want %s", outside, have, want)
		}
	}
	have := withRelayPort(hosts[1:2], "", config.Ports{Relay: 7443, RelayOutside: 7444})
	if have[0] != "203.0.113.7:7443" {
		t.Errorf("nothing is forwarded, and others are told %s", have)
	}
}
