package forced

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/resolve"
)

// The resolver does not tell how long an answer holds (its TTL), so names are looked up at a fixed pace.
const (
	lookEvery  = time.Minute
	retryEvery = 10 * time.Second // while the name cannot be looked up
	patience   = 3 * time.Second
	keepFailed = 24 * time.Hour // an outage of the name service says nothing of the address
	keepGone   = time.Hour      // a name that is gone may be a slip that is repaired soon
	maxAddrs   = 8              // of one name
)

// Step publishes the forced endpoint. Set may be called by any goroutine.
type Step struct {
	lookup resolve.Lookup
	log    *slog.Logger

	mu   sync.Mutex
	want target // as Set had it last
	wake func() // asks for a look; nil before the first one

	// Owned by Look.
	target
	addrs []netip.Addr // that the name last had
	at    time.Time    // when
	lost  time.Time    // when it could not be looked up for the first time since; zero: it could
}

// target is an endpoint taken apart; empty: none.
type target struct {
	endpoint string // host:port
	host     string
	port     uint16
}

// New checks the endpoint, host:port, as Set does. A nil lookup asks the host's own resolver.
func New(endpoint string, lookup resolve.Lookup, log *slog.Logger) (*Step, error) {
	if lookup == nil {
		lookup = resolve.System
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Step{lookup: lookup, log: log}
	if err := s.Set(endpoint); err != nil {
		return nil, fmt.Errorf("discover endpoints: forceEndpoint: %w", err)
	}
	return s, nil
}

// Set changes the endpoint: host:port, where the host may be a name; empty: none any more. An error leaves the former
// one.
func (s *Step) Set(endpoint string) error {
	t := target{endpoint: endpoint}
	if endpoint != "" {
		var err error
		if t.host, t.port, err = resolve.Split(endpoint, ""); err != nil {
			return err
		}
	}
	s.mu.Lock()
	changed := t != s.want
	s.want = t
	wake := s.wake
	s.mu.Unlock()
	if changed && wake != nil {
		wake()
	}
	return nil
}

// Source names the step.
func (*Step) Source() string { return "config" }

// Look looks the name up.
func (s *Step) Look(ctx context.Context, r candidate.Request) candidate.Found {
	s.mu.Lock()
	if s.target != s.want {
		s.target, s.addrs, s.at, s.lost = s.want, nil, time.Time{}, time.Time{}
	}
	s.wake = r.Wake
	s.mu.Unlock()
	if s.endpoint == "" {
		return candidate.Found{}
	}
	if a, err := netip.ParseAddr(s.host); err == nil {
		return s.found([]netip.Addr{a}, 0)
	}
	inner, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	addrs, err := s.lookup(inner, s.host)
	if err == nil && len(addrs) == 0 {
		err = &net.DNSError{Err: "no address", Name: s.host, IsNotFound: true}
	}
	if ctx.Err() != nil {
		return candidate.Found{}
	}
	return s.learn(addrs, err, time.Now())
}

// learn weighs one answer of the name service.
func (s *Step) learn(addrs []netip.Addr, err error, now time.Time) candidate.Found {
	if err == nil {
		for i, a := range addrs {
			addrs[i] = a.Unmap()
		}
		slices.SortFunc(addrs, netip.Addr.Compare) // a name service that turns its answer round says nothing new
		addrs = slices.Compact(addrs)
		addrs = addrs[:min(len(addrs), maxAddrs)]
		if !s.lost.IsZero() || !slices.Equal(addrs, s.addrs) {
			s.log.Info("the forced endpoint has been looked up", "endpoint", s.endpoint, "addresses", addrs)
		}
		s.addrs, s.at, s.lost = addrs, now, time.Time{}
		return s.found(addrs, lookEvery)
	}
	if s.lost.IsZero() {
		s.lost = now
		s.log.Warn("the forced endpoint cannot be looked up", "endpoint", s.endpoint, "error", err)
	}
	keep, gone := keepFailed, false
	var dns *net.DNSError
	if errors.As(err, &dns) && dns.IsNotFound {
		keep, gone = keepGone, true
	}
	if now.Sub(s.lost) >= keep {
		s.addrs = nil
	}
	f := s.found(s.addrs, retryEvery)
	f.Problem = fmt.Sprintf("forceEndpoint %s cannot be looked up: the name service does not answer", s.endpoint)
	f.Help = "repair this host's name service, or put an address into forceEndpoint"
	if gone {
		f.Problem = fmt.Sprintf("forceEndpoint %s: the name has no address", s.endpoint)
		f.Help = "bring the name back, or change forceEndpoint"
	}
	if len(s.addrs) > 0 {
		f.Problem += fmt.Sprintf("; its last address stays published until %s",
			s.lost.Add(keep).UTC().Format("2006-01-02 15:04 MST"))
	} else {
		f.Problem += "; it is not published"
	}
	return f
}

func (s *Step) found(addrs []netip.Addr, again time.Duration) candidate.Found {
	f := candidate.Found{Again: again}
	for _, four := range []bool{true, false} {
		for _, a := range addrs {
			if a.Is4() == four && a.IsGlobalUnicast() {
				f.Candidates = append(f.Candidates, candidate.Make(skeinv1.CandidateType_CANDIDATE_TYPE_FORCED,
					netip.AddrPortFrom(a, s.port), candidate.PriorityForced, "config"))
			}
		}
	}
	return f
}
