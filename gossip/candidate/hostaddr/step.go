package hostaddr

import (
	"context"
	"net/netip"
	"sync"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/addr"
)

// Step publishes this host's own addresses. SetInternal may be called by any goroutine.
type Step struct {
	Port uint16 // WireGuard's

	mu       sync.Mutex
	internal netip.Addr // the one inside of the site, if it was named; the zero Addr: it was not
	wake     func()     // asks for a look; nil before the first one
}

// SetInternal names the host's address inside of its site, instead of all that it has; the zero Addr: all of them.
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
		f.Candidates = append(f.Candidates, candidate.Make(skeinv1.CandidateType_CANDIDATE_TYPE_HOST,
			netip.AddrPortFrom(a, s.Port), candidate.PriorityHost, source))
	}
	if internal.IsValid() {
		add(internal, "config")
	}
	for _, a := range Offered(r.Host.Addrs, internal) {
		if a != internal {
			add(a, "interface")
		}
	}
	return f
}

// Offered are the addresses of the interfaces that others are told, where internal is the one inside of the site:
// besides it the public ones alone, by which the host is reached from outside. The zero Addr: all.
func Offered(addrs []netip.Addr, internal netip.Addr) []netip.Addr {
	if !internal.IsValid() {
		return addrs
	}
	out := []netip.Addr{internal}
	for _, a := range addrs {
		if a != internal && addr.Public(a) {
			out = append(out, a)
		}
	}
	return out
}
