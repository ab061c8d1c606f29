package portmap

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/ask"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/natpmp"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/pcp"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/upnp"
	"github.com/skeinmesh/skein/internal/addr"
)

// Config makes a Step.
type Config struct {
	Port      uint16   // WireGuard's
	Mark      uint32   // SO_MARK of all sockets
	Protocols []string // that may be used, of Protocols
	Secret    []byte   // known to this host alone and the same after a restart; names its mappings towards PCP
	// Prove has somebody outside send a packet to what was granted, and tells whether it arrived; nil: nobody can be
	// asked.
	Prove func(ctx context.Context, outer netip.AddrPort) Proof
	Log   *slog.Logger
}

// Proof is whether a granted endpoint lets packets in.
type Proof uint8

// What a proof can say. Disproven is believed when it is said twice in a row.
const (
	Unproven Proof = iota
	Proven
	Disproven
)

// Step keeps a mapping at the router.
type Step struct {
	c Config

	mu   sync.Mutex
	want []string // the protocols that may be used; guarded by mu
	wake func()   // guarded by mu; nil before the first Look

	protocols []string // as of the last Look

	// Owned by Look, and after the last one by Release.
	lease *lease
	notes []candidate.Note
	heard *announcements
}

// New makes a Step; nothing is sent before Look.
func New(c Config) (*Step, error) {
	for _, p := range c.Protocols {
		if !slices.Contains(Protocols, p) {
			return nil, fmt.Errorf("port mapping: there is no protocol %q; want some of %v", p, Protocols)
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Step{c: c, want: c.Protocols, protocols: c.Protocols}, nil
}

// SetProtocols changes which protocols may be used, some of Protocols. A mapping by one that may not be used any more
// is given back.
func (s *Step) SetProtocols(protocols []string) {
	s.mu.Lock()
	changed := !slices.Equal(protocols, s.want)
	s.want = protocols
	wake := s.wake
	s.mu.Unlock()
	if changed && wake != nil {
		wake()
	}
}

// follow takes in which protocols may be used now.
func (s *Step) follow(ctx context.Context, wake func()) {
	s.mu.Lock()
	protocols := s.want
	s.wake = wake
	s.mu.Unlock()
	if slices.Equal(protocols, s.protocols) {
		return
	}
	s.protocols, s.notes = protocols, nil
	if s.lease != nil && !slices.Contains(protocols, s.lease.protocol) {
		s.release(ctx)
		s.lease = nil
	}
	if len(protocols) == 0 && s.heard != nil {
		s.heard.close()
		s.heard = nil
	}
}

// Source names the step; each candidate has the name of its protocol.
func (*Step) Source() string { return "portmap" }

// Look gets a mapping, or sees to it that the one there is holds.
func (s *Step) Look(ctx context.Context, r candidate.Request) candidate.Found {
	if s.follow(ctx, r.Wake); len(s.protocols) == 0 {
		return candidate.Found{}
	}
	g, why := choose(r.Host)
	if why != "" {
		s.lease = nil
		return candidate.Found{Notes: []candidate.Note{{Source: s.Source(), Text: why}}}
	}
	if s.heard == nil {
		s.heard = listen(s.c.Log)
	}
	s.heard.follow(g.Addr, r.Wake)
	before := s.lease
	if s.lease != nil && s.lease.gateway != g {
		s.lease = nil // that router cannot be reached from here any more
	}
	if s.lease != nil {
		s.keep(ctx, r.Full)
	}
	if s.lease == nil && ctx.Err() == nil {
		s.get(ctx, g)
	}
	if s.lease != nil && before != nil && s.lease.outer == before.outer {
		s.lease.proof, s.lease.provenAt = before.proof, before.provenAt
	}
	if s.lease != nil && s.c.Prove != nil && r.Early != nil {
		r.Early(s.found())
	}
	s.prove(ctx)
	return s.found()
}

// prove sees whether the router does what it says. What nobody could prove is believed, since it is true nearly always;
// what was disproven is not published any more, and tried again at each check.
func (s *Step) prove(ctx context.Context) {
	if s.lease == nil || s.c.Prove == nil || s.lease.proof == Proven && time.Since(s.lease.provenAt) < proveEvery {
		return
	}
	p := s.c.Prove(ctx, s.lease.outer)
	if p == Disproven && s.lease.proof != Disproven && ctx.Err() == nil {
		p = s.c.Prove(ctx, s.lease.outer)
	}
	if p == Unproven && s.lease.proof != Unproven || ctx.Err() != nil {
		return // nobody is there to say anything else
	}
	if p == Disproven && s.lease.proof != Disproven {
		s.c.Log.Warn("the router granted a port mapping, but what is sent there does not arrive", "outer", s.lease.outer,
			"protocol", s.lease.protocol)
	}
	s.lease.proof, s.lease.provenAt = p, time.Now()
}

// choose picks the router to ask, or says why there is none.
func choose(h candidate.Host) (candidate.Gateway, string) {
	for _, g := range h.Gateways {
		if !g.Addr.Is4() || !g.Local.Is4() {
			continue
		}
		if addr.Public(g.Local) {
			return g, fmt.Sprintf("not needed: this host's own address %s is public", g.Local)
		}
		return g, ""
	}
	return candidate.Gateway{}, "this host has no IPv4 gateway to ask"
}

// keep renews a lease when half of its time is over, and checks it otherwise. A lease that has run out or is refused is
// dropped; a router that is silent keeps it until then.
func (s *Step) keep(ctx context.Context, renew bool) {
	l := s.lease
	if now := time.Now(); !renew && now.Before(l.renewAt()) {
		err := s.check(ctx, l)
		forgotten := errors.Is(err, errForgotten)
		if err == nil || !forgotten && l.protocol != UPnP { // UPnP may have moved to another port
			return
		}
		if forgotten {
			s.c.Log.Info("the router has lost its port mappings; asking again", "gateway", l.gateway.Addr,
				"protocol", l.protocol)
		}
	}
	next, err := s.requestMapping(ctx, l.protocol, l.gateway, l.outer, l.device)
	if err != nil && l.protocol == UPnP && !final(err) {
		var device *upnp.Device
		if device, err = upnp.Discover(ctx, s.peer(l.gateway)); err == nil {
			next, err = s.requestMapping(ctx, UPnP, l.gateway, l.outer, device)
		}
	}
	if err == nil {
		err = useless(next.outer)
	}
	switch {
	case ctx.Err() != nil:
	case err == nil:
		if next.outer != l.outer {
			s.c.Log.Info("the router has mapped another port", "before", l.outer, "now", next.outer)
		}
		s.lease = next
	case final(err), time.Now().After(l.expiresAt()):
		s.c.Log.Warn("the router's port mapping was not renewed", "gateway", l.gateway.Addr, "protocol",
			l.protocol, "error", err)
		s.lease = nil
	}
}

// final tells a router's word from its silence.
func final(err error) bool {
	var byPCP *pcp.RefusedError
	var byNATPMP natpmp.RefusedError
	var byUPnP *upnp.RefusedError
	return errors.As(err, &byPCP) || errors.As(err, &byNATPMP) || errors.As(err, &byUPnP) || errors.Is(err, errUseless) ||
		errors.Is(err, pcp.ErrVersion) || errors.Is(err, upnp.ErrLost)
}

// get tries the protocols: it asks at once who speaks what, and takes the best that gives something of use.
func (s *Step) get(ctx context.Context, g candidate.Gateway) {
	s.notes = nil
	offers := s.offers(ctx, g)
	wish := netip.AddrPortFrom(netip.Addr{}, s.c.Port)
	for _, protocol := range Protocols {
		o, asked := offers[protocol]
		switch {
		case !asked:
			continue
		case s.lease != nil:
			if o.err == nil {
				s.note(protocol, false, "the router offers it too; not needed")
			}
			continue
		case o.err != nil:
			s.note(protocol, false, plain(o.err))
			continue
		}
		l, err := o.lease, error(nil)
		if l == nil {
			l, err = s.requestMapping(ctx, protocol, g, wish, o.device)
		}
		if err == nil {
			if err = useless(l.outer); err != nil {
				_ = s.giveBack(ctx, l)
			}
		}
		if err != nil {
			s.note(protocol, false, plain(err))
			continue
		}
		s.lease = l
		s.c.Log.Info("the router maps WireGuard's port", "outer", l.outer, "gateway", g.Addr, "protocol", protocol,
			"lifetime", l.lifetime)
	}
}

// offer is what came of asking whether a router speaks a protocol.
type offer struct {
	err    error
	lease  *lease       // PCP's first question is the request itself
	device *upnp.Device // of UPnP
}

// offers asks by all protocols at the same time.
func (s *Step) offers(ctx context.Context, g candidate.Gateway) map[string]offer {
	var mu sync.Mutex
	out := map[string]offer{}
	var running sync.WaitGroup
	for _, protocol := range s.protocols {
		running.Go(func() {
			var o offer
			switch protocol {
			case PCP:
				o.lease, o.err = s.requestMapping(ctx, PCP, g, netip.AddrPortFrom(netip.Addr{}, s.c.Port), nil)
			case NATPMP:
				_, _, o.err = natpmp.Address(ctx, s.peer(g))
			case UPnP:
				o.device, o.err = upnp.Discover(ctx, s.peer(g))
			}
			mu.Lock()
			defer mu.Unlock()
			out[protocol] = o
		})
	}
	running.Wait()
	return out
}

// useless says why a granted endpoint is not worth telling.
func useless(outer netip.AddrPort) error {
	switch a := outer.Addr(); {
	case outer.Port() == 0:
		return fmt.Errorf("%w: the router granted port 0", errUseless)
	case !a.IsGlobalUnicast():
		return fmt.Errorf("%w: the router reports %s as its external address, so it has none", errUseless, a)
	case !addr.Public(a):
		return fmt.Errorf(
			"%w: the router's external address %s is private: there is another NAT in front of it (double NAT)", errUseless,
			a)
	}
	return nil
}

// plain is an error without what changes from one time to the next.
func plain(err error) string {
	if errors.Is(err, ask.ErrNoAnswer) {
		return "the router does not answer"
	}
	return err.Error()
}

func (s *Step) note(protocol string, ok bool, text string) {
	s.notes = append(s.notes, candidate.Note{Source: protocol, OK: ok, Text: text})
}

func (s *Step) found() candidate.Found {
	l := s.lease
	if l == nil {
		return candidate.Found{Notes: s.notes, Again: lookEvery}
	}
	now := time.Now()
	again := min(checkEvery, l.renewAt().Sub(now))
	if !now.Before(l.renewAt()) { // it was not renewed in time: RFC 6886 section 3.3 halves what is left
		again = max(l.expiresAt().Sub(now)/2, retryLeast)
	}
	text := fmt.Sprintf("UDP port %d is mapped to %s", s.c.Port, l.outer)
	if l.forever {
		text += ", until it is deleted"
	}
	f := candidate.Found{Again: max(again, retryLeast)}
	if l.proof == Disproven {
		text += ", says the router, but packets from outside do not arrive there: a firewall or another NAT is in front of " +
			"it, or it does not do what it says; not published"
	} else {
		f.Candidates = []*skeinv1.Candidate{candidate.Make(skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, l.outer,
			candidate.PriorityReflexive, l.protocol)}
	}
	others := slices.DeleteFunc(slices.Clone(s.notes), func(n candidate.Note) bool { return n.Source == l.protocol })
	f.Notes = append([]candidate.Note{{Source: l.protocol, OK: l.proof != Disproven, Text: text}}, others...)
	return f
}

// Release gives the mapping back.
func (s *Step) Release(ctx context.Context) {
	if s.heard != nil {
		s.heard.close()
	}
	s.release(ctx)
}

func (s *Step) release(ctx context.Context) {
	if s.lease == nil {
		return
	}
	if err := s.giveBack(ctx, s.lease); err != nil {
		s.c.Log.Warn("the router keeps a port mapping that is not needed any more; it ends by itself", "error", err)
		return
	}
	s.c.Log.Info("the port mapping was given back to the router", "outer", s.lease.outer)
	s.lease = nil
}
