package hostaddr

import (
	"context"
	"net/netip"
	"sync"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

// Step publishes this host's own addresses. SetInternal may be called by any goroutine.
type Step struct {
	Port uint16 // WireGuard's

	mu       sync.Mutex
	internal netip.Addr // one that was asked for; the zero Addr: none
	wake     func()     // asks for a look; nil before the first one
}

// SetInternal changes the address that is published first; the zero Addr: none.
func (s *Step) SetInternal(a netip.Addr) {
	s.mu.Lock()
	changed := a != s.internal
	s.internal = a
	wake := s.wake
	s.mu.Unlock()
	if changed && wake != nil {
		wake()
	}
}

// Source names the step.
func (*Step) Source() string { return "interface" }

// Look publishes what the request tells.
func (s *Step) Look(_ context.Context, r candidate.Request) (f candidate.Found) {
	s.mu.Lock()
	internal := s.internal
	s.wake = r.Wake
	s.mu.Unlock()
	add := func(a netip.Addr, source string) {
		f.Candidates = append(f.Candidates, candidate.Make(skeinv1.CandidateType_CANDIDATE_TYPE_HOST, netip.AddrPortFrom(a, s.Port), candidate.PriorityHost, source))
	}
	if internal.IsValid() {
		add(internal, "config")
	}
	for _, a := range r.Host.Addrs {
		add(a, "interface")
	}
	return f
}
