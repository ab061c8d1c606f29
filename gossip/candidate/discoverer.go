package candidate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

const (
	keepEvery    = 20 * time.Second // behind NAT; RFC 4787 asks NATs for two minutes, many keep 30 s
	lookEvery    = time.Minute      // without NAT
	fullEvery    = 10 * time.Minute
	retryFirst   = 2 * time.Second // while no server answers
	retryLast    = time.Minute
	settle       = 200 * time.Millisecond // changes of addresses come in flocks
	resubscribe  = time.Second
	watchBacklog = 1
)

// Socket sends from WireGuard's port; probe.Socket is one.
type Socket interface {
	Send(to netip.AddrPort, payload []byte) error
	IPv4() bool
	IPv6() bool
}

// Config makes a Discoverer.
type Config struct {
	Socket         Socket
	Port           int            // WireGuard's UDP port
	Mark           uint32         // SO_MARK of the fresh socket of the filtering tests
	Servers        []string       // STUN servers, host:port; names are looked up at each run
	ForcedEndpoint string         // host:port, names allowed; empty: none
	InternalIP     netip.Addr     // published as host candidate besides those of the interfaces
	SkipLinks      []string       // the overlay's own link
	SkipPrefixes   []netip.Prefix // the overlay's addresses
	// Alive says whether the node behind a STUN server's address is known to be up by another way, such as a relay session of
	// another host. It tells blocked UDP from servers that are away: a host cut off with its neighbours must not declare itself unreachable to them.
	// Without it, silence at the start counts as blocked, and silence later as servers away.
	Alive func(server netip.AddrPort) bool

	OnResult func(Result) // called from Run's goroutine when something changed; must not block
	Log      *slog.Logger

	lookup lookup // tests set these
	hosts  func() ([]link, []address, error)
	watch  func(done <-chan struct{}, changed func(), lost func(error)) error
}

// Discoverer keeps finding out how this host can be reached.
type Discoverer struct {
	c        Config
	wg       *asker
	changed  chan struct{}      // settings or host changed
	requests chan chan<- Result // somebody waits for a run
	stopped  chan struct{}      // closed when Run returns

	mu      sync.Mutex // guards what follows
	servers []string
	skip    []netip.Prefix
	last    Result
	urgent  bool // run even if the host's addresses are as before

	run state // owned by Run's goroutine
}

// state is what one run leaves for the next.
type state struct {
	resolver resolver
	answered map[netip.AddrPort]bool
	attempt  int
	found    findings
	good     findings // the last in which somebody answered
	ran      bool
	fullAt   time.Time
}

// ErrStopped is returned when a check is asked for after Run has ended.
var ErrStopped = errors.New("discovery of endpoints has stopped")

// New checks the configuration. Nothing is sent before Run.
func New(c Config) (*Discoverer, error) {
	if c.Port < 1 || c.Port > 65535 {
		return nil, fmt.Errorf("discover endpoints: WireGuard's port is %d, want 1 to 65535", c.Port)
	}
	if c.ForcedEndpoint != "" {
		if _, _, err := splitEndpoint(c.ForcedEndpoint, ""); err != nil {
			return nil, fmt.Errorf("discover endpoints: forceEndpoint: %w", err)
		}
	}
	for _, s := range c.Servers {
		if _, _, err := splitEndpoint(s, defaultPort); err != nil {
			return nil, fmt.Errorf("discover endpoints: stunServers: %w", err)
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.OnResult == nil {
		c.OnResult = func(Result) {}
	}
	if c.lookup == nil {
		c.lookup = systemLookup
	}
	if c.hosts == nil {
		c.hosts, c.watch = readHost, watchHost
	}
	return &Discoverer{
		c: c, wg: newAsker(c.Socket.Send),
		changed: make(chan struct{}, watchBacklog), requests: make(chan chan<- Result), stopped: make(chan struct{}),
		servers: slices.Clone(c.Servers), skip: slices.Clone(c.SkipPrefixes),
		run: state{resolver: resolver{lookup: c.lookup, known: map[string][]netip.Addr{}}, answered: map[netip.AddrPort]bool{}},
	}, nil
}

// HandleSTUN takes what the socket received; it has probe.Handler's form.
func (d *Discoverer) HandleSTUN(from netip.AddrPort, _ netip.Addr, payload []byte, _ time.Time) {
	for n := messageLen(payload); n > 0; n = messageLen(payload) {
		d.wg.deliver(from, payload[:n])
		payload = payload[n:]
	}
}

// Result is the newest one; its At is zero before the first.
func (d *Discoverer) Result() Result {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.last
}

// SetServers changes the STUN servers (host:port; what cannot be parsed is left out) and runs again if they differ.
func (d *Discoverer) SetServers(servers []string) {
	servers = slices.DeleteFunc(slices.Clone(servers), func(s string) bool {
		_, _, err := splitEndpoint(s, defaultPort)
		return err != nil
	})
	d.mu.Lock()
	same := slices.Equal(servers, d.servers)
	d.servers = servers
	d.mu.Unlock()
	if !same {
		d.Refresh()
	}
}

// SetSkipPrefixes changes the overlay's addresses, which are never candidates.
func (d *Discoverer) SetSkipPrefixes(skip []netip.Prefix) {
	d.mu.Lock()
	same := slices.Equal(skip, d.skip)
	d.skip = slices.Clone(skip)
	d.mu.Unlock()
	if !same {
		d.Refresh()
	}
}

// Refresh asks for a full run soon; it does not wait.
func (d *Discoverer) Refresh() {
	d.mu.Lock()
	d.urgent = true
	d.mu.Unlock()
	d.notify()
}

func (d *Discoverer) notify() {
	select {
	case d.changed <- struct{}{}:
	default: // one is waiting already
	}
}

// Check makes a full run and returns what it found.
func (d *Discoverer) Check(ctx context.Context) (Result, error) {
	answer := make(chan Result, 1)
	for request := d.requests; ; {
		select {
		case request <- answer:
			request = nil
		case r := <-answer:
			return r, nil
		case <-d.stopped:
			return Result{}, ErrStopped
		case <-ctx.Done():
			return Result{}, fmt.Errorf("check the network: %w", ctx.Err())
		}
	}
}

// NewestMapping asks a server that answered lately from a fresh socket, and returns the address that the NAT gave this socket: behind
// a symmetric NAT with a PortStep, the next mapping follows from it. It does not touch WireGuard's port.
func (d *Discoverer) NewestMapping(ctx context.Context) (netip.AddrPort, error) {
	err := errors.New("no STUN server has answered yet")
	for _, o := range d.Result().Mapped {
		var m netip.AddrPort
		if m, err = mapFresh(ctx, d.c.Mark, o.Server); err == nil {
			return m, nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("learn the NAT's newest mapping: %w", err)
}

// Run discovers until ctx ends. It is called once.
func (d *Discoverer) Run(ctx context.Context) error {
	var watching sync.WaitGroup
	defer watching.Wait()
	defer close(d.stopped)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	watching.Go(func() { d.watch(ctx) })

	d.full(ctx)
	for {
		timer := time.NewTimer(d.pause())
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case answer := <-d.requests:
			answer <- d.full(ctx)
		case <-d.changed:
			d.settled(ctx)
		case <-timer.C:
			if d.due() || !d.unchanged(ctx) {
				d.full(ctx)
			}
		}
		timer.Stop()
	}
}

// pause is the time until the next look, a tenth more or less so that a mesh started at once does not ask at once.
func (d *Discoverer) pause() time.Duration {
	p := lookEvery
	switch {
	case !d.Result().UDP && d.run.attempt > 0:
		p = min(retryFirst<<min(d.run.attempt-1, 5), retryLast)
	case d.run.found.translated():
		p = keepEvery
	}
	return p*9/10 + rand.N(p/5)
}

func (d *Discoverer) due() bool {
	return !d.Result().UDP || time.Since(d.run.fullAt) >= fullEvery
}

// settled runs again when somebody asked for it, or when the host's addresses are others than before.
func (d *Discoverer) settled(ctx context.Context) {
	select {
	case <-time.After(settle):
	case <-ctx.Done():
		return
	}
	d.mu.Lock()
	urgent := d.urgent
	d.urgent = false
	d.mu.Unlock()
	if !urgent {
		if local, err := d.hosts(); err == nil && slices.Equal(local, d.run.found.local) {
			return
		}
	}
	d.full(ctx)
}

// unchanged asks two servers what they see, which also keeps the NAT's mapping alive.
func (d *Discoverer) unchanged(ctx context.Context) bool {
	before := map[netip.AddrPort]netip.AddrPort{}
	var servers []netip.AddrPort
	for _, o := range d.Result().Mapped {
		before[o.Server] = o.Mapped
		if d.run.answered[o.Server] && len(servers) < 2 {
			servers = append(servers, o.Server)
		}
	}
	if len(servers) == 0 {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, mappingTime)
	defer cancel()
	same := make(chan bool, len(servers))
	for _, s := range servers {
		go func() {
			r, _, err := d.wg.ask(ctx, s, wantHere)
			same <- err == nil && r.mapped == before[s]
		}()
	}
	all := true
	for range servers {
		all = <-same && all
	}
	return all
}

// full makes one whole discovery and tells of it if it is news.
func (d *Discoverer) full(ctx context.Context) Result {
	f, r := d.discover(ctx)
	if before := d.Result(); ctx.Err() == nil && d.run.ran && doubtful(before, r, slices.Equal(f.local, d.run.found.local)) {
		f, r = d.discover(ctx) // a lost packet must not change what the whole mesh does
	}
	if ctx.Err() != nil {
		return d.Result()
	}
	d.run.found, d.run.ran, d.run.fullAt = f, true, r.At
	if r.UDP {
		d.run.good = f
	}
	if answered := answering(d.run.answered); answered > 1 || answered == len(d.run.answered) && r.UDP {
		d.run.attempt = 0
	} else {
		d.run.attempt++
	}
	d.publish(r)
	return r
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

// doubtful says whether a change rests on something that did not come, and nothing else.
func doubtful(before, now Result, sameHost bool) bool {
	return sameHost && before.UDP && (!now.UDP || now.sameCandidates(before) && now.NAT != before.NAT)
}

func (d *Discoverer) publish(r Result) {
	d.mu.Lock()
	news := d.last.At.IsZero() || !r.Equal(d.last)
	d.last = r
	d.mu.Unlock()
	if news {
		d.c.OnResult(r)
	}
}

func (d *Discoverer) hosts() ([]netip.Addr, error) {
	d.mu.Lock()
	skip := d.skip
	d.mu.Unlock()
	links, addrs, err := d.c.hosts()
	if err != nil {
		return nil, err
	}
	return hostAddresses(links, addrs, d.c.SkipLinks, skip), nil
}

func (d *Discoverer) discover(ctx context.Context) (findings, Result) {
	f := findings{port: uint16(d.c.Port), internal: d.c.InternalIP, at: time.Now()}
	var err error
	if f.local, err = d.hosts(); err != nil {
		d.c.Log.Warn("interface addresses could not be read; those of the last run are used", "error", err)
		f.local = d.run.found.local
	}
	if d.c.ForcedEndpoint != "" {
		if f.forced, err = d.run.resolver.endpoint(ctx, d.c.ForcedEndpoint, ""); err != nil {
			d.c.Log.Warn("the forced endpoint could not be looked up", "endpoint", d.c.ForcedEndpoint, "error", err)
		}
	}
	servers := d.chosen(ctx, f.local)
	results := observe(ctx, d.wg, servers)
	f.v4, f.v6 = d.evidence(f.local, results, true), d.evidence(f.local, results, false)
	for _, s := range results {
		d.run.answered[s.server] = len(s.observations) > 0
	}
	d.weighSilence(&f, servers)
	d.early(f)
	d.testFamily(ctx, &f, results)
	return f, f.result()
}

// weighSilence decides what it means that nobody answered.
func (d *Discoverer) weighSilence(f *findings, servers []netip.AddrPort) {
	if len(servers) == 0 || len(f.v4.Observations)+len(f.v6.Observations) > 0 {
		return
	}
	known := len(d.run.good.v4.Observations)+len(d.run.good.v6.Observations) > 0 && slices.Equal(f.local, d.run.good.local)
	switch {
	case d.c.Alive != nil && slices.ContainsFunc(servers, d.c.Alive):
		// They are up and UDP does not reach them.
	case known:
		f.v4, f.v6, f.hairpin, f.kept = d.run.good.v4, d.run.good.v6, d.run.good.hairpin, true
	case d.c.Alive != nil:
		f.v4.Doubtful, f.v6.Doubtful = true, true
	}
}

// chosen looks the servers up and leaves out those that cannot be asked, are we ourselves, or lie in the overlay.
func (d *Discoverer) chosen(ctx context.Context, local []netip.Addr) []netip.AddrPort {
	d.mu.Lock()
	names, skip := d.servers, d.skip
	d.mu.Unlock()
	has4 := d.c.Socket.IPv4() && slices.ContainsFunc(local, netip.Addr.Is4)
	has6 := d.c.Socket.IPv6() && slices.ContainsFunc(local, netip.Addr.Is6)
	var all []netip.AddrPort
	for _, found := range d.lookUp(ctx, names) {
		for _, s := range found {
			inside := slices.ContainsFunc(skip, func(p netip.Prefix) bool { return p.Contains(s.Addr()) })
			if !inside && !slices.Contains(local, s.Addr()) && (s.Addr().Is4() && has4 || s.Addr().Is6() && has6) {
				all = append(all, s)
			}
		}
	}
	known := map[netip.AddrPort]bool{}
	for _, s := range all {
		known[s] = d.run.answered[s]
	}
	d.run.answered = known // forgets servers that are gone
	return chooseServers(all, known, d.run.attempt)
}

// lookUp resolves the servers' names at once, since a name service that is away takes its time for each.
func (d *Discoverer) lookUp(ctx context.Context, names []string) [][]netip.AddrPort {
	out := make([][]netip.AddrPort, len(names))
	var running sync.WaitGroup
	for i, name := range names {
		running.Go(func() {
			var err error
			if out[i], err = d.run.resolver.endpoint(ctx, name, defaultPort); err != nil {
				d.c.Log.Warn("a STUN server could not be looked up", "server", name, "error", err)
			}
		})
	}
	running.Wait()
	return out
}

func (d *Discoverer) evidence(local []netip.Addr, results []seen, v4 bool) Evidence {
	e := Evidence{Port: uint16(d.c.Port), Local: local}
	for _, s := range results {
		if s.server.Addr().Is4() == v4 {
			e.Servers++
			e.Observations = append(e.Observations, s.observations...)
		}
	}
	return e
}

// early tells the candidates before the filtering tests, which may take a second, so that peers on the same network and cones
// can begin. Only the first run does so; later ones change nothing before they are sure.
func (d *Discoverer) early(f findings) {
	if d.run.ran || !d.Result().At.IsZero() {
		return
	}
	r := f.result()
	if f.translated() && r.NAT == skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE {
		r.NAT = skeinv1.NatType_NAT_TYPE_UNKNOWN // a cone of a kind not yet known
		r.Advice = nil
	}
	d.publish(r)
}

// testFamily tests the filtering in IPv4, or in IPv6 where IPv4 does not answer. Where the first server knows no other node to
// answer, a second one may.
func (d *Discoverer) testFamily(ctx context.Context, f *findings, results []seen) {
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
		e.Sequences = followSequence(ctx, d.c.Mark, e.destinations())
	}
	tries := 0
	for _, s := range results {
		if s.other.Port() == 0 || s.server.Addr().Is4() != (e == &f.v4) || tries == 2 {
			continue
		}
		tries++
		t := testFiltering(ctx, d.wg, d.c.Mark, s.server, mapped)
		e.WireGuardPort, e.OtherPort, e.OtherAddress = t.wireGuardPort, t.otherPort, t.otherAddress
		f.hairpin = f.hairpin || t.hairpin
		if t.otherPort == Silent || t.otherAddress != NotTested {
			return
		}
	}
}

// watch follows the kernel's notifications, and subscribes again when they were cut off.
func (d *Discoverer) watch(ctx context.Context) {
	for ctx.Err() == nil {
		done, lost := make(chan struct{}), make(chan error, 1)
		err := d.c.watch(done, d.notify, func(err error) {
			select {
			case lost <- err:
			default:
			}
		})
		if err == nil {
			select {
			case <-ctx.Done():
			case err = <-lost:
			}
		}
		close(done)
		if err != nil {
			d.c.Log.Warn("address changes are not being followed; trying again", "error", err)
			d.notify()
			select {
			case <-ctx.Done():
			case <-time.After(resubscribe):
			}
		}
	}
}
