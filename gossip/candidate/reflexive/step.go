package reflexive

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
	"github.com/skeinmesh/skein/gossip/candidate/resolve"
	"github.com/skeinmesh/skein/gossip/candidate/stunmsg"
)

const (
	keepEvery  = 20 * time.Second // behind NAT; RFC 4787 asks NATs for two minutes, many keep 30 s
	lookEvery  = time.Minute      // without NAT
	fullEvery  = 10 * time.Minute
	retryFirst = 2 * time.Second // while no server answers
	retryLast  = time.Minute
)

// Socket sends from WireGuard's port; probe.Socket is one.
type Socket interface {
	Send(to netip.AddrPort, payload []byte) error
	IPv4() bool
	IPv6() bool
}

// Config makes a Step.
type Config struct {
	Socket  Socket
	Port    int      // WireGuard's UDP port
	Mark    uint32   // SO_MARK of the fresh sockets
	Servers []string // STUN servers, host:port; names are looked up at each run
	Off     bool     // STUN is switched off: Servers are none, and the advice says why
	// Alive says whether the node behind a STUN server's address is known to be up by another way, such as a relay session
	// of another host. It tells blocked UDP from servers that are away: a host cut off with its neighbours must not
	// declare itself unreachable to them. Without it, silence at the start counts as blocked, and silence later as servers
	// away.
	Alive func(server netip.AddrPort) bool
	// Ping asks the WireGuard port of a public peer where this host's packets come from, until ctx ends; nil: none is.
	Ping   func(ctx context.Context, at netip.AddrPort) (mapped netip.AddrPort, rtt time.Duration, err error)
	Lookup resolve.Lookup // nil: the host's own resolver
	Log    *slog.Logger
}

// Step looks at the NAT.
type Step struct {
	c     Config
	wg    *asker
	names *resolve.Names

	mu           sync.Mutex // guards what follows
	servers      []string
	off          bool             // nobody is to be asked
	spare        []netip.AddrPort // asked when no server answers
	wake         func()
	soon         func()
	revalidation revalidation
	mapped       []candidate.Observation // of the last run

	run state // owned by Look
}

// state is what one run leaves for the next.
type state struct {
	answered map[netip.AddrPort]bool
	attempt  int
	found    findings
	report   candidate.NATReport
	good     findings // the last in which somebody answered
	ran      bool
	fullAt   time.Time
	moved    bool // a server sees another mapping than before, or has not answered
}

// New checks the configuration. Nothing is sent before Look.
func New(c Config) (*Step, error) {
	if c.Port < 1 || c.Port > 65535 {
		return nil, fmt.Errorf("discover endpoints: WireGuard's port is %d, want 1 to 65535", c.Port)
	}
	for _, s := range c.Servers {
		if _, _, err := resolve.Split(s, defaultPort); err != nil {
			return nil, fmt.Errorf("discover endpoints: stunServers: %w", err)
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Step{
		c: c, wg: newAsker(c.Socket.Send), names: resolve.New(c.Lookup), servers: slices.Clone(c.Servers), off: c.Off,
		run: state{answered: map[netip.AddrPort]bool{}},
	}, nil
}

// Source names the step.
func (*Step) Source() string { return "stun" }

// HandleSTUN takes what the socket received; it has probe.Handler's form.
func (s *Step) HandleSTUN(from netip.AddrPort, _ netip.Addr, payload []byte, _ time.Time) {
	for n := stunmsg.Len(payload); n > 0; n = stunmsg.Len(payload) {
		s.wg.deliver(from, payload[:n])
		payload = payload[n:]
	}
}

// SetServers changes the STUN servers (host:port; what cannot be parsed is left out) and looks again if they differ;
// off: nobody is to be asked, and the advice says so. Any goroutine may call it.
func (s *Step) SetServers(servers []string, off bool) {
	servers = slices.DeleteFunc(slices.Clone(servers), func(name string) bool {
		_, _, err := resolve.Split(name, defaultPort)
		return err != nil
	})
	s.mu.Lock()
	same := slices.Equal(servers, s.servers) && off == s.off
	s.servers, s.off = servers, off
	wake := s.wake
	s.mu.Unlock()
	if !same && wake != nil {
		wake()
	}
}

// SetSpare names the WireGuard ports of public peers: they are asked, by Config.Ping, when none of the servers
// answers, since a firewall may drop STUN's own port and let the rest of UDP through. Any goroutine may call it.
func (s *Step) SetSpare(spare []netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spare = slices.Clone(spare)
}

// NewestMapping asks a server that answered lately from a fresh socket, and returns the address that the NAT gave this
// socket: behind a symmetric NAT with a PortStep, the next mapping follows from it. It does not touch WireGuard's port.
// Any goroutine may call it.
func (s *Step) NewestMapping(ctx context.Context) (netip.AddrPort, error) {
	s.mu.Lock()
	mapped := s.mapped
	s.mu.Unlock()
	err := errors.New("no STUN server has answered yet")
	for _, o := range mapped {
		var m netip.AddrPort
		if m, err = mapFresh(ctx, s.c.Mark, o.Server); err == nil {
			return m, nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("learn the NAT's newest mapping: %w", err)
}

// Await waits for a STUN answer at WireGuard's port that somebody else is asked to send; the channel is closed when it
// comes. The ID is the proof: it must be random, and told to nobody but those who shall answer. Any goroutine may call
// it.
func (s *Step) Await(tx stunmsg.TxID) (heard <-chan struct{}, stop func()) { return s.wg.await(tx) }

// Look makes a whole run when it was asked for one or the last is old, else it asks two servers whether all is as
// before, which also keeps the NAT's mapping alive.
func (s *Step) Look(ctx context.Context, r candidate.Request) candidate.Found {
	s.mu.Lock()
	s.wake, s.soon = r.Wake, r.Soon
	s.revalidation.begin(time.Now())
	s.mu.Unlock()
	before, silent := s.run.found, false
	whole := r.Full || s.due()
	if s.run.moved = false; !whole {
		s.run.moved, silent = s.compare(ctx)
	}
	s.mu.Lock()
	revalidated := s.revalidation.due
	s.mu.Unlock()
	if whole || s.run.moved || silent && !revalidated {
		s.full(ctx, r)
	}
	s.mu.Lock()
	s.revalidation.end(s.run.found.translated(), candidate.SameCandidates(before.candidates(), s.run.found.candidates()))
	s.mu.Unlock()
	f := s.foundOf(s.run.found, s.run.report)
	if silent && revalidated { // what asked for this look may have silenced the servers too; the regular look decides
		f.Again = min(f.Again, retryFirst)
	}
	return f
}

// foundOf makes a Found of what was found.
func (s *Step) foundOf(f findings, report candidate.NATReport) candidate.Found {
	return candidate.Found{Candidates: f.candidates(), NAT: &report, Again: s.pause()}
}

// pause is the time until the next look.
func (s *Step) pause() time.Duration {
	switch {
	case s.run.found.off:
		return lookEvery // SetServers wakes it
	case !s.run.report.UDP && s.run.attempt > 0:
		return min(retryFirst<<min(s.run.attempt-1, 5), retryLast)
	case s.run.found.translated():
		return keepEvery
	}
	return lookEvery
}

func (s *Step) due() bool {
	return !s.run.report.UDP || time.Since(s.run.fullAt) >= fullEvery
}

// compare asks two servers whether they see what they saw before, or say nothing.
func (s *Step) compare(ctx context.Context) (moved, silent bool) {
	before := map[netip.AddrPort]netip.AddrPort{}
	var servers []netip.AddrPort
	for _, o := range s.run.report.Mapped {
		before[o.Server] = o.Mapped
		if s.run.answered[o.Server] && len(servers) < 2 {
			servers = append(servers, o.Server)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, mappingTime)
	defer cancel()
	type answer struct{ moved, silent bool }
	answers := make(chan answer, len(servers))
	for _, server := range servers {
		go func() {
			r, _, err := s.wg.ask(ctx, server, stunmsg.Here)
			answers <- answer{err == nil && r.Mapped != before[server], err != nil}
		}()
	}
	for range servers {
		a := <-answers
		if moved, silent = moved || a.moved, silent || a.silent; moved {
			break // this is enough
		}
	}
	return moved, silent
}

// full makes one whole run.
func (s *Step) full(ctx context.Context, r candidate.Request) {
	f, report := s.discover(ctx, r)
	if ctx.Err() == nil && s.run.ran && inconclusive(s.run.report, report, f, s.run.found) {
		f, report = s.discover(ctx, r) // a lost packet must not change what the whole mesh does
	}
	if ctx.Err() != nil {
		return
	}
	s.run.found, s.run.report, s.run.ran, s.run.fullAt = f, report, true, report.At
	if report.UDP {
		s.run.good = f
	}
	if answered := answering(s.run.answered); answered > 1 || answered == len(s.run.answered) && report.UDP {
		s.run.attempt = 0
	} else {
		s.run.attempt++
	}
	s.mu.Lock()
	s.mapped = f.trusted()
	s.mu.Unlock()
}

// answering counts the servers that answered last time they were asked.
func answering(servers map[netip.AddrPort]bool) (n int) {
	for _, yes := range servers {
		if yes {
			n++
		}
	}
	return n
}

// inconclusive says whether a change rests on something that did not come, and nothing else.
func inconclusive(before, now candidate.NATReport, f, last findings) bool {
	return slices.Equal(f.local, last.local) && before.UDP &&
		(!now.UDP || now.NAT != before.NAT && candidate.SameCandidates(f.candidates(), last.candidates()))
}

func (s *Step) discover(ctx context.Context, r candidate.Request) (findings, candidate.NATReport) {
	s.mu.Lock()
	off := s.off
	s.mu.Unlock()
	f := findings{port: uint16(s.c.Port), local: r.Host.Addrs, at: time.Now(), off: off}
	servers := s.chosen(ctx, r.Host)
	ask := func(ctx context.Context, server netip.AddrPort) seen { return askServer(ctx, s.wg, server) }
	answered := func(x seen) bool { return len(x.observations) > 0 }
	results := observe(ctx, servers, ask)
	if len(servers) > 0 && s.c.Ping != nil && !slices.ContainsFunc(results, answered) {
		if spare := observe(ctx, s.chosenSpare(r.Host), s.pingPeer); slices.ContainsFunc(spare, answered) {
			results, f.spare = spare, true
		}
	}
	f.v4, f.v6 = s.evidence(f.local, results, true), s.evidence(f.local, results, false)
	if ctx.Err() != nil {
		return f, f.report()
	}
	for _, seen := range results {
		s.run.answered[seen.server] = len(seen.observations) > 0
	}
	s.weighSilence(&f, servers)
	// others should hear of a new mapping before its filtering is tested
	again := s.run.moved && f.translated() && sameNAT(f, s.run.found)
	if (r.Fresh || again) && r.Early != nil {
		r.Early(s.early(f))
	}
	s.testFamily(ctx, &f, results)
	return f, f.report()
}

// weighSilence decides what it means that nobody answered.
func (s *Step) weighSilence(f *findings, servers []netip.AddrPort) {
	if len(servers) == 0 || len(f.v4.Observations)+len(f.v6.Observations) > 0 {
		return
	}
	good := s.run.good
	known := len(good.v4.Observations)+len(good.v6.Observations) > 0 && slices.Equal(f.local, good.local)
	switch {
	case s.c.Alive != nil && slices.ContainsFunc(servers, s.c.Alive):
		// They are up and UDP does not reach them.
	case known:
		f.v4, f.v6, f.hairpin, f.kept = good.v4, good.v6, good.hairpin, true
	case s.c.Alive != nil:
		f.v4.Inconclusive, f.v6.Inconclusive = true, true
	}
}

// chosen looks the servers up and leaves out those that cannot be asked, are we ourselves, or lie in the overlay.
func (s *Step) chosen(ctx context.Context, host candidate.Host) []netip.AddrPort {
	s.mu.Lock()
	names := s.servers
	s.mu.Unlock()
	all := s.askable(slices.Concat(s.lookUp(ctx, names)...), host)
	known := map[netip.AddrPort]bool{}
	for _, a := range all {
		known[a] = s.run.answered[a]
	}
	s.run.answered = known // forgets servers that are gone
	return chooseServers(all, known, s.run.attempt)
}

// chosenSpare picks some of the other ports.
func (s *Step) chosenSpare(host candidate.Host) []netip.AddrPort {
	s.mu.Lock()
	spare := s.spare
	s.mu.Unlock()
	return chooseServers(s.askable(spare, host), nil, s.run.attempt)
}

// askable leaves out what cannot be asked, is we ourselves, or lies in the overlay.
func (s *Step) askable(servers []netip.AddrPort, host candidate.Host) (out []netip.AddrPort) {
	has4 := s.c.Socket.IPv4() && slices.ContainsFunc(host.Addrs, netip.Addr.Is4)
	has6 := s.c.Socket.IPv6() && slices.ContainsFunc(host.Addrs, netip.Addr.Is6)
	for _, a := range servers {
		inside := slices.ContainsFunc(host.Overlay, func(p netip.Prefix) bool { return p.Contains(a.Addr()) })
		if !inside && !slices.Contains(host.Addrs, a.Addr()) && (a.Addr().Is4() && has4 || a.Addr().Is6() && has6) {
			out = append(out, a)
		}
	}
	return out
}

// lookUp resolves the servers' names at once, since a name service that is away takes its time for each.
func (s *Step) lookUp(ctx context.Context, names []string) [][]netip.AddrPort {
	out := make([][]netip.AddrPort, len(names))
	var running sync.WaitGroup
	for i, name := range names {
		running.Go(func() {
			var err error
			if out[i], err = s.names.Endpoint(ctx, name, defaultPort); err != nil && ctx.Err() == nil {
				s.c.Log.Warn("a STUN server could not be looked up", "server", name, "error", err)
			}
		})
	}
	running.Wait()
	return out
}

func (s *Step) evidence(local []netip.Addr, results []seen, v4 bool) Evidence {
	e := Evidence{Port: uint16(s.c.Port), Local: local}
	for _, r := range results {
		if r.server.Addr().Is4() == v4 {
			e.Servers++
			e.Observations = append(e.Observations, r.observations...)
		}
	}
	return e
}

// early tells the candidates before the filtering tests, which may take a second, so that peers on the same network and
// cones can begin. It is told on a new network, and when the same NAT has given out another mapping; other runs change
// nothing before they are sure.
func (s *Step) early(f findings) candidate.Found {
	if last := s.run.found; s.run.ran && f.translated() && sameNAT(f, last) {
		f.v4.Tests, f.v6.Tests, f.hairpin = last.v4.Tests, last.v6.Tests, last.hairpin // the same NAT, in all likelihood
		return s.foundOf(f, f.report())
	}
	r := f.report()
	if f.translated() && r.NAT == skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE {
		r.NAT = skeinv1.NatType_NAT_TYPE_UNKNOWN // a cone of a kind not yet known
		r.Advice = nil
	}
	return s.foundOf(f, r)
}

// sameNAT tells whether the same NAT shows, though it may have given out new mappings.
func sameNAT(f, last findings) bool {
	if !slices.Equal(f.local, last.local) {
		return false
	}
	a, b := f.candidates(), last.candidates()
	return slices.EqualFunc(a, b, func(x, y *skeinv1.Candidate) bool {
		m, err1 := netip.ParseAddrPort(x.GetAddress())
		n, err2 := netip.ParseAddrPort(y.GetAddress())
		return err1 == nil && err2 == nil && m.Addr() == n.Addr() && x.GetPriority() == y.GetPriority()
	})
}

// testFamily tests the filtering in IPv4, or in IPv6 where IPv4 does not answer. Where the first server knows no other
// node to answer, a second one may.
func (s *Step) testFamily(ctx context.Context, f *findings, results []seen) {
	e := &f.v4
	if len(f.v4.Observations) == 0 {
		e = &f.v6
	}
	mapped := netip.AddrPort{}
	a := Assess(*e)
	if a.Translated {
		mapped = a.Mapped
	}
	if a.dependent() {
		e.Sequences = followSequence(ctx, s.c.Mark, e.destinations())
	}
	tries := 0
	for _, r := range results {
		if r.other.Port() == 0 || r.server.Addr().Is4() != (e == &f.v4) || tries == 2 {
			continue
		}
		tries++
		t := testFiltering(ctx, s.wg, s.c.Mark, r.server, mapped)
		t.Sequences = e.Sequences
		e.Tests = t.Tests
		f.hairpin = f.hairpin || t.hairpin
		if t.OtherPort == Silent || t.OtherAddress != NotTested {
			return
		}
	}
}
