package birthday

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/agent/probe"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Prober pings from WireGuard's port and from other sockets, and authenticates packets that arrive at those.
type Prober interface {
	SendPing(peer identity.ID, to netip.AddrPort) (probe.TxID, error)
	PingBy(s probe.Sender, peer identity.ID, to netip.AddrPort) (probe.TxID, error)
	Authenticate(b []byte, at time.Time) (probe.Message, bool)
}

// Role is what this end of an attempt does.
type Role = skeinv1.Signal_Birthday_Role

// The roles.
const (
	One  = skeinv1.Signal_Birthday_ONE  // WireGuard's port tries many ports
	Many = skeinv1.Signal_Birthday_MANY // many sockets try the peer's one port
	Twin = skeinv1.Signal_Birthday_TWIN // many sockets at both ends
)

// Situation is what an attempt needs to know of a pair of nodes.
type Situation struct {
	Role         Role
	Rule         skeinv1.PairOutcome_Rule
	Mine, Theirs netip.AddrPort // WireGuard's mapped addresses; of a symmetric NAT only the IP is used
	Step         int            // port increment of this end's NAT, if it counts
	Decides      bool           // of two ends with many sockets: this end chooses the pair
}

// many reports whether this end opens sockets.
func (s Situation) many() bool { return s.Role != One }

// probesReserved is how many mappings an attempt from WireGuard's port reserves at a time; most need only one such
// part.
const probesReserved = 512

// cost is how many mappings the attempt reserves at first in this end's NAT.
func (s Situation) cost() int {
	switch {
	case s.Role == One:
		return probesReserved
	case s.Role == Many:
		return MaxSockets
	case s.Rule == skeinv1.PairOutcome_PREDICTION:
		return waves * waveSize
	}
	return twinProbes
}

// fits reports whether the peer's role and prediction match this end's.
func (s Situation) fits(b *skeinv1.Signal_Birthday) bool {
	theirs := b.GetRole()
	if s.Role == Twin && s.Rule == skeinv1.PairOutcome_PREDICTION && (b.GetBase() == 0 || b.GetBase() > 65535) {
		return false
	}
	return s.Role == One && theirs == Many || s.Role == Many && theirs == One || s.Role == Twin && theirs == Twin
}

// Phase is the progress or outcome of an attempt.
type Phase uint8

// The phases.
const (
	Began   Phase = iota
	Hit           // Remote, and Local if a socket was hit
	Failed        // all ports were tried, or time is up
	Refused       // not before Retry
	Silent        // the peer did not answer the request
)

// Event is a report on the attempt with a peer.
type Event struct {
	Phase   Phase
	Text    string
	Retry   time.Duration
	Local   uint16 // port of the socket that was hit; 0: WireGuard's own
	Remote  netip.AddrPort
	Probes  int // packets sent from WireGuard's port
	Sockets int // opened
	Took    time.Duration
}

// Config makes an Engine. Its functions are called from several goroutines.
type Config struct {
	Prober    Prober
	Signal    func(peer identity.ID, s *skeinv1.Signal) error // may block shortly
	Situation func(peer identity.ID) (Situation, error)       // an error: ports are not predicted with this peer
	// Attest returns nil when witnesses other than the peer confirm that its packets come from an address. It may take
	// two seconds. nil: no witnesses, so nothing is sent to any address.
	Attest func(ctx context.Context, peer identity.ID, at netip.Addr) error
	// mappings in use by other nodes behind the same public address; nil: none
	Shared func() int
	Told   func(Situation) []Outcome                     // outcomes for the pair of NATs from others' records; nil: none
	Newest func(context.Context) (netip.AddrPort, error) // the newest mapping of a NAT that counts its ports
	Report func(peer identity.ID, e Event)               // must not block
	Memory *Memory
	Mark   uint32 // SO_MARK of the sockets
	Log    *slog.Logger
	Seed   func() *rand.Rand // nil: random
	Ports  Range             // that NATs map to; zero: all from firstPort on
}

// Stats are counters since the start.
type Stats struct {
	Attempts, Hits, Failed, Refused, Silent uint64
	Probes, Sockets                         uint64
	Running, Mappings                       int
}

// Engine carries attempts out.
type Engine struct {
	c      Config
	ctx    context.Context
	cancel context.CancelFunc
	done   sync.WaitGroup
	within func(func()) // overridden in tests, to open sockets in a namespace

	saving sync.Mutex // of the memory's file

	mu       sync.Mutex // guards what follows
	sessions map[identity.ID]*session
	budget   *Budget
	memory   *Memory
	ids      uint64
	asked    map[identity.ID]time.Time // when each peer's last request was considered
	closed   bool

	stats struct{ attempts, hits, failed, refused, silent, probes, sockets atomic.Uint64 }
}

// New makes an Engine; Close ends it.
func New(c Config) *Engine {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Memory == nil {
		c.Memory = &Memory{}
	}
	if c.Seed == nil {
		c.Seed = func() *rand.Rand { return rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())) }
	}
	if c.Ports.Count == 0 {
		c.Ports = allPorts
	}
	e := &Engine{c: c, within: func(f func()) { f() }, sessions: map[identity.ID]*session{},
		asked: map[identity.ID]time.Time{}, budget: NewBudget(), memory: c.Memory}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e
}

// Close ends all attempts and waits until their sockets are closed.
func (e *Engine) Close() {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.cancel()
	e.done.Wait()
}

// Start begins an attempt with a peer, unless one is running. The outcome is reported.
func (e *Engine) Start(peer identity.ID) { e.start(peer, nil) }

// Stop ends the attempt with a peer, if there is one, since the path has become direct. If this end tries ports, the
// path has noticed a hit before the attempt has, and Hit is reported; otherwise nothing is reported.
func (e *Engine) Stop(peer identity.ID) {
	if s := e.session(peer); s != nil {
		s.direct.Store(true)
		s.cancel()
	}
}

// Settle reports that WireGuard's packets now leave through the port of the socket that was hit.
func (e *Engine) Settle(peer identity.ID) {
	if s := e.session(peer); s != nil {
		s.deliver(event{settled: true})
	}
}

// TakeSignal handles a peer's signal about an attempt. The control net has authenticated the peer.
func (e *Engine) TakeSignal(peer identity.ID, b *skeinv1.Signal_Birthday) {
	if s := e.session(peer); s != nil {
		s.deliver(event{signal: b})
		return
	}
	if b.GetPhase() == skeinv1.Signal_Birthday_START && e.mayAsk(peer, time.Now()) {
		e.start(peer, b)
	}
}

// mayAsk limits the rate of one peer's requests, since each makes this end ask relays about the peer.
func (e *Engine) mayAsk(peer identity.ID, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if now.Sub(e.asked[peer]) < askGap {
		return false
	}
	if len(e.asked) >= targetsKept {
		maps.DeleteFunc(e.asked, func(_ identity.ID, at time.Time) bool { return now.Sub(at) >= askGap })
	}
	if len(e.asked) >= targetsKept {
		return false
	}
	e.asked[peer] = now
	return true
}

// PingReceived reports an authenticated ping of a peer at WireGuard's port.
func (e *Engine) PingReceived(peer identity.ID, from netip.AddrPort) {
	if s := e.session(peer); s != nil && s.sit.Role == One {
		s.deliver(event{ping: true, from: from})
	}
}

// PongReceived reports that a ping from WireGuard's port was answered from the address it was sent to.
func (e *Engine) PongReceived(peer identity.ID, from netip.AddrPort) {
	if s := e.session(peer); s != nil && s.sit.Role == One && s.sit.Theirs.Addr() == from.Addr() {
		s.deliver(event{ping: true, from: from})
	}
}

// Brief returns the outcomes behind a public address for the node's record.
func (e *Engine) Brief(mine netip.Addr) []*skeinv1.PairOutcome {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.memory.Brief(mine)
}

// Mappings is how many of the NAT's mappings count as used by this node at present.
func (e *Engine) Mappings() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.budget.Used(time.Now())
}

// Stats reads the counters.
func (e *Engine) Stats() Stats {
	s := &e.stats
	e.mu.Lock()
	running := len(e.sessions)
	e.mu.Unlock()
	return Stats{
		Attempts: s.attempts.Load(), Hits: s.hits.Load(), Failed: s.failed.Load(), Refused: s.refused.Load(),
		Silent: s.silent.Load(),
		Probes: s.probes.Load(), Sockets: s.sockets.Load(), Running: running, Mappings: e.Mappings(),
	}
}

func (e *Engine) session(peer identity.ID) *session {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sessions[peer]
}

// start makes a session; asked is the peer's request, or nil.
func (e *Engine) start(peer identity.ID, asked *skeinv1.Signal_Birthday) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, running := e.sessions[peer]; running || e.closed {
		return
	}
	e.ids++
	s := &session{e: e, peer: peer, budgetID: e.ids, id: rand.Uint64(), theirs: asked, in: make(chan event, 1024)}
	if asked != nil {
		s.id = asked.GetSession()
	}
	s.ctx, s.cancel = context.WithCancel(e.ctx)
	sit, err := e.c.Situation(peer)
	s.sit = sit
	e.sessions[peer] = s
	e.done.Go(func() {
		s.run(err)
		s.cancel()
		e.mu.Lock()
		delete(e.sessions, peer)
		e.mu.Unlock()
	})
}

// attest verifies that the peer's packets come from the address that it claims, since an attempt sends thousands of
// packets there.
func (e *Engine) attest(s *session) error {
	err := errors.New("no relay can confirm where the peer's packets come from")
	if e.c.Attest != nil {
		err = e.c.Attest(s.ctx, s.peer, s.sit.Theirs.Addr())
	}
	if err != nil {
		return &Refusal{err.Error(), busyRetry}
	}
	return nil
}

// permit checks the memory and reserves the budget.
func (e *Engine) permit(s *session) (Advice, error) {
	now := time.Now()
	var told []Outcome
	if e.c.Told != nil {
		told = e.c.Told(s.sit)
	}
	others := e.others()
	e.mu.Lock()
	defer e.mu.Unlock()
	a := e.memory.Advise(s.sit.Mine.Addr(), s.sit.Theirs.Addr(), s.sit.Rule, told)
	if a.NotBefore.After(now) {
		return a, &Refusal{fmt.Sprintf("port prediction between %s and %s has failed lately", s.sit.Mine.Addr(),
			s.sit.Theirs.Addr()), a.NotBefore.Sub(now)}
	}
	return a, e.budget.Begin(s.ask(others), now)
}

// ask is the session's request to the budget.
func (s *session) ask(others int) Ask {
	return Ask{
		ID: s.budgetID, Many: s.sit.many(), Alone: s.sit.Role == Twin && s.sit.Rule == skeinv1.PairOutcome_PREDICTION,
		Cost: s.sit.cost(), Others: others, Target: s.sit.Theirs.Addr(),
	}
}

func (e *Engine) others() int {
	if e.c.Shared == nil {
		return 0
	}
	return e.c.Shared()
}

// more reserves another probesReserved mappings for an attempt from WireGuard's port.
func (e *Engine) more(s *session) bool {
	others := e.others()
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.budget.More(s.budgetID, time.Now(), probesReserved, others)
}

// finish records an attempt's cost and outcome.
func (e *Engine) finish(s *session, ev Event, cost int) {
	now := time.Now()
	noted := ev.Phase == Hit || ev.Phase == Failed
	e.saving.Lock() // before mu, so that snapshots are written in their order
	defer e.saving.Unlock()
	e.mu.Lock()
	e.budget.End(s.ask(0), now, cost, ev.Phase == Hit || s.ctx.Err() != nil)
	if noted {
		e.memory.Note(s.sit.Mine.Addr(), s.sit.Theirs.Addr(), s.sit.Rule, ev.Phase == Hit, now)
	}
	all := e.memory.Snapshot()
	e.mu.Unlock()
	if !noted {
		return
	}
	if err := e.memory.Save(all); err != nil {
		e.c.Log.Warn("the outcome of port prediction cannot be saved", "error", err)
	}
}

// errCancelled ends an attempt that is no longer needed.
var errCancelled = errors.New("not needed any more")
