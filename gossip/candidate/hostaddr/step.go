package hostaddr

import (
	"context"
	"net/netip"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

// Step publishes this host's own addresses.
type Step struct {
	Port     uint16     // WireGuard's
	Internal netip.Addr // from the configuration; the zero Addr: none
}

// Source names the step.
func (Step) Source() string { return "interface" }

// Look publishes what the request tells.
func (s Step) Look(_ context.Context, r candidate.Request) (f candidate.Found) {
	add := func(a netip.Addr, source string) {
		f.Candidates = append(f.Candidates, candidate.Make(skeinv1.CandidateType_CANDIDATE_TYPE_HOST, netip.AddrPortFrom(a, s.Port), candidate.PriorityHost, source))
	}
	if s.Internal.IsValid() {
		add(s.Internal, "config")
	}
	for _, a := range r.Host.Addrs {
		add(a, "interface")
	}
	return f
}
