package agent

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/gossip/candidate"
)

// A cloud's address counts as this host's own where nobody outside sees another one.
func TestElastic(t *testing.T) {
	addrs := func(texts ...string) (out []netip.Addr) {
		for _, s := range texts {
			out = append(out, netip.MustParseAddr(s))
		}
		return out
	}
	seen := func(texts ...string) (out []candidate.Observation) {
		for _, s := range texts {
			out = append(out, candidate.Observation{Mapped: netip.MustParseAddrPort(s)})
		}
		return out
	}
	for name, c := range map[string]struct {
		told []netip.Addr
		seen []candidate.Observation
		want string
	}{
		"seen so from outside":       {addrs("203.0.113.7"), seen("203.0.113.7:51820"), "[203.0.113.7]"},
		"seen by nobody":             {addrs("203.0.113.7"), nil, "[203.0.113.7]"},
		"it leaves by a NAT gateway": {addrs("203.0.113.7"), seen("198.51.100.9:4711"), "[]"},
		"one of two": {addrs("203.0.113.7", "203.0.113.8"), seen("203.0.113.8:51820"),
			"[203.0.113.7 203.0.113.8]"},
		"IPv6 says nothing of IPv4": {addrs("203.0.113.7"), seen("[2001:db8::7]:51820"), "[203.0.113.7]"},
		"a private one":             {addrs("10.0.0.7"), nil, "[]"},
		"none is told":              {nil, seen("203.0.113.7:51820"), "[]"},
	} {
		if have := fmt.Sprint(elastic(&candidate.Result{NATReport: candidate.NATReport{Mapped: c.seen},
			Elastic: c.told})); have != c.want {
			t.Errorf("%s: %s, want %s", name, have, c.want)
		}
	}
	if elastic(nil) != nil {
		t.Error("an address before anything was found")
	}
}
