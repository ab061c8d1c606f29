package ipam

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// AddFailed is the reason of a Release when no pod ever had the address, since its link could not be made. Such an
// address need not rest, so that repeated failures of ADD do not exhaust the pool.
const AddFailed = "the link could not be made"

// Config is what a Manager needs.
type Config struct {
	Self identity.ID
	File string // ipam.db in the state directory
	// Propose commits a command and returns once the replica has its effect. A refusal is an *events.Error; after any
	// other error the command may still be committed. Propose must keep a request ID that is set.
	Propose func(context.Context, *skeinv1.Command) (*skeinv1.Answer, error)
	Now     func() time.Time     // nil: time.Now
	Uptime  func() time.Duration // of the kernel; nil: CLOCK_BOOTTIME, or unknown if Now is set
	BootID  string               // of the kernel; if it differs from the file's, all earlier pods are gone
	IdleFor time.Duration        // how long an empty block beyond the spare is kept; 0: five minutes
	Log     *slog.Logger         // nil: none
	// Leaderless is for how long no leader has been known; nil: not known. An election takes a second, so shorter times
	// refuse no request.
	Leaderless func() time.Duration
	OnEvent    func(*skeinv1.PodAddress) // for the journal; must not block
	OnChange   func()                    // addresses in use have changed; must not block
}

// Manager assigns addresses to this host's pods.
type Manager struct {
	cfg  Config
	self string
	log  *slog.Logger

	ctx    context.Context // context of proposals
	cancel context.CancelFunc
	wg     sync.WaitGroup
	kick   chan struct{}

	mu       sync.Mutex
	core     *core
	state    *events.State // nil before the first Follow
	sources  sources
	file     *file
	fileErr  error // of the last write
	adopted  bool  // the first scan of the kernel is done
	pending  map[podnet.Key]*pendingAssign
	waiting  map[taskKey]int
	flights  map[taskKey]*flight
	backoffs map[taskKey]backoff
	refusals map[taskKey]refusal
	failed   time.Time // when the last proposal ended undecided; zero: it was decided
	failure  error
	moved    chan struct{} // closed at the next Follow
	events   []*skeinv1.PodAddress
	changed  bool
}

// pendingAssign is a request that waits for the log.
type pendingAssign struct{ cancel context.CancelFunc }

// Open reads the file. The notes report irregularities to the user. Assign fails until Follow and Adopt were called.
func Open(cfg Config) (*Manager, []string, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
		if cfg.Uptime == nil {
			cfg.Uptime = bootTime
		}
	}
	if cfg.Uptime == nil {
		cfg.Uptime = func() time.Duration { return 0 }
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	m := &Manager{
		cfg: cfg, self: cfg.Self.String(), log: cfg.Log.With("component", "ipam"), kick: make(chan struct{}, 1),
		core: newCore(cfg.Self.String()),
		file: newFile(cfg.File), pending: map[podnet.Key]*pendingAssign{}, waiting: map[taskKey]int{},
		flights:  map[taskKey]*flight{},
		backoffs: map[taskKey]backoff{}, refusals: map[taskKey]refusal{}, moved: make(chan struct{}),
	}
	m.core.idleFor = cmp.Or(cfg.IdleFor, idleFor)
	notes, err := restore(m.core, m.file, cfg.BootID, m.now())
	if err != nil {
		return nil, nil, err
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	return m, notes, nil
}

// bootTime is the time since the kernel's start, including suspend.
func bootTime() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

func (m *Manager) now() moment { return moment{at: m.cfg.Now(), up: m.cfg.Uptime()} }

// unlock unlocks, and then reports the changes made under the lock.
func (m *Manager) unlock() {
	list, changed := m.events, m.changed
	m.events, m.changed = nil, false
	m.mu.Unlock()
	for _, e := range list {
		if m.cfg.OnEvent != nil {
			m.cfg.OnEvent(e)
		}
	}
	if changed && m.cfg.OnChange != nil {
		m.cfg.OnChange()
	}
}

func (m *Manager) event(what string, l Lease, reason string) {
	e := &skeinv1.PodAddress{
		What: what, Pool: l.Pool, Namespace: l.Namespace, Pod: l.Pod, ContainerId: l.Key.ContainerID,
		Interface: l.Key.Interface, Reason: reason,
	}
	if l.IPv4.IsValid() {
		e.Ipv4 = l.IPv4.String()
	}
	if l.IPv6.IsValid() {
		e.Ipv6 = l.IPv6.String()
	}
	m.events = append(m.events, e)
}

func (m *Manager) wake() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// write appends a record to the file, then applies it.
func (m *Manager) write(r record, now moment) error {
	r = now.stamp(r)
	err := m.file.append(r)
	m.fileErr = err
	if err != nil {
		return err
	}
	m.core.apply(r, now.at)
	return nil
}

// Follow applies the newest agreed state.
func (m *Manager) Follow(s *events.State) {
	m.mu.Lock()
	defer m.unlock()
	if m.state != nil && s.Index() <= m.state.Index() {
		return
	}
	sources := readSources(s, m.self)
	if same := m.state != nil && sources.equal(m.sources); same {
		m.core.view.Index = s.Index()
	} else {
		m.core.follow(sources.view(s.Index()), m.cfg.Now())
		m.changed = true
		m.wake()
	}
	m.state, m.sources = s, sources
	close(m.moved)
	m.moved = make(chan struct{})
}

// SetIdleFor changes how long an empty block beyond the spare is kept; 0: five minutes.
func (m *Manager) SetIdleFor(d time.Duration) {
	m.mu.Lock()
	defer m.unlock()
	if d = cmp.Or(d, idleFor); d != m.core.idleFor {
		m.core.idleFor = d
		m.wake()
	}
}

// Adopt applies a scan of the kernel's addresses. It is called at the start, and at each audit.
func (m *Manager) Adopt(found []podnet.Found) {
	m.mu.Lock()
	defer m.unlock()
	m.adopt(found)
}

func (m *Manager) adopt(found []podnet.Found) {
	now := m.now()
	records, changed := m.core.adopt(found, now.at)
	for _, r := range records {
		if err := m.write(r, now); err != nil {
			m.log.Error("what the kernel has could not be written down", "address", pair(r.IPv4, r.IPv6), "error", err)
			continue
		}
		if r.Op == opGive {
			m.event("adopted", r.lease(), "the kernel had it, and the file did not")
		}
	}
	for _, a := range changed {
		if s := m.core.seen[a]; s != nil {
			m.event("adopted", m.core.seenLease(s), "the kernel has a route for it that is not ours")
		}
	}
	m.changed = m.changed || len(records)+len(changed) > 0
	if !m.adopted {
		m.adopted = true
		m.wake()
	}
}

// Assign assigns addresses to an attachment. It fails with an *Error. It waits, at most until ctx ends, only when
// nothing is free and a server must decide.
func (m *Manager) Assign(ctx context.Context, req Request) (Lease, error) {
	if err := checkRequest(req); err != nil {
		return Lease{}, err
	}
	m.mu.Lock()
	defer m.unlock()
	if m.pending[req.Key] != nil {
		return Lease{}, &Error{Exists, fmt.Sprintf("interface %s of container %.12s is being given an address already",
			req.Key.Interface, req.Key.ContainerID), "wait for that request"}
	}
	l, err := m.assign(ctx, req)
	if err == nil {
		return l, nil
	}
	refused := Lease{Attachment: req.Attachment, Pool: req.Pool}
	m.event("refused", refused, err.Error())
	return l, err
}

// assign runs with the lock held, and unlocks while it waits.
func (m *Manager) assign(ctx context.Context, req Request) (Lease, error) {
	var waits *waiter
	defer func() {
		if waits != nil {
			delete(m.pending, req.Key)
			waits.cancel()
		}
	}()
	for range maxRounds {
		if err := m.blind(); err != nil {
			return Lease{}, err
		}
		q, err := m.ask(req)
		if err != nil {
			return Lease{}, err
		}
		now := m.now()
		r, need, refused := m.core.assign(q, now.at)
		switch {
		case refused != nil && refused.Code == Exists:
			return m.core.leases[req.Key].Lease, refused
		case refused != nil:
			return Lease{}, m.explain(q, refused)
		case need == nil:
			return m.given(r, now)
		}
		if waits == nil {
			waits = m.newWaiter(ctx, req.Key)
		}
		if err := m.await(waits, *need); err != nil {
			return Lease{}, err
		}
	}
	return Lease{}, &Error{Unavailable, "other requests kept taking the addresses that the servers gave to this node",
		"try again later"}
}

// given writes a lease to the file and returns it.
func (m *Manager) given(r record, now moment) (Lease, error) {
	if err := m.write(r, now); err != nil {
		return Lease{}, &Error{Unavailable, fmt.Sprintf("the address could not be written down: %v", err),
			"see that the state directory can be written"}
	}
	h := m.core.leases[r.key()]
	if b := m.core.blocks[h.block]; b == nil || len(b.held) == 1 {
		m.wake() // one empty block less
	}
	m.changed = true
	m.event("given", h.Lease, "")
	return h.Lease, nil
}

// blind is the reason why nothing may be assigned yet.
func (m *Manager) blind() error {
	switch {
	case m.ctx.Err() != nil:
		return &Error{Unavailable, "the agent is stopping", "try again later"}
	case m.state == nil:
		return &Error{Unavailable, "the agent does not know yet which blocks are this node's", "try again later"}
	case !m.adopted:
		return &Error{Unavailable, "the agent has not read yet which addresses the kernel has", "try again later"}
	}
	return nil
}

func checkRequest(r Request) error {
	if r.Key.ContainerID == "" || r.Key.Interface == "" {
		return &Error{Invalid, "a request needs a container ID and the name of an interface", ""}
	}
	families := map[bool]netip.Addr{}
	for _, a := range r.Addresses {
		if !a.IsValid() || a.Zone() != "" || a.Is4In6() {
			return &Error{Invalid, fmt.Sprintf("%s is not an address that a pod can have", a),
				"ask for a plain IPv4 or IPv6 address"}
		}
		if other, ok := families[a.Is4()]; ok {
			return &Error{Invalid, fmt.Sprintf("both %s and %s were asked for", other, a), "ask for one address of a family " +
				"at most"}
		}
		families[a.Is4()] = a
	}
	return nil
}

// Release ends an attachment's lease, and its request if that still waits. False: it had no lease.
func (m *Manager) Release(k podnet.Key, reason string) (Lease, bool) {
	m.mu.Lock()
	defer m.unlock()
	if p := m.pending[k]; p != nil {
		p.cancel()
	}
	h := m.core.leases[k]
	if h == nil {
		return Lease{}, false
	}
	return m.endLease(h, "taken-back", reason), true
}

// endLease ends a lease. If the file cannot be written, the lease may return after a restart, until an audit.
func (m *Manager) endLease(h *held, what, reason string) Lease {
	now := m.now()
	r := m.core.release(h, reason)
	if err := m.write(r, now); err != nil {
		m.log.Error("an address that was given back could not be written down", "address", pair(h.IPv4, h.IPv6), "error", err)
		m.core.apply(now.stamp(r), now.at)
	}
	if b := m.core.blocks[h.block]; b == nil || len(b.held) == 0 {
		m.wake()
	}
	l := h.Lease
	l.Until = now.at.Round(0)
	m.changed = true
	m.event(what, l, reason)
	return l
}

// Audit compares the leases with the kernel and frees leaked ones: those without link and route whose pod is gone, at
// two audits at least 30 s apart. Argument gone reports whether a lease's network namespace no longer exists.
func (m *Manager) Audit(found []podnet.Found, gone func(Lease) bool) []Lease {
	m.mu.Lock()
	m.adopt(found)
	unfound := m.core.unfound(found, m.cfg.Now())
	m.unlock()
	lost := map[podnet.Key]bool{}
	for _, l := range unfound {
		// Without a path in NetNS only the link showed that the pod exists.
		lost[l.Key] = l.NetNS == "" || gone(l)
	}
	m.mu.Lock()
	defer m.unlock()
	var freed []Lease
	for _, h := range m.core.leaked(unfound, lost, m.cfg.Now()) {
		freed = append(freed, m.endLease(h, "leaked", "its pod is gone and nobody gave it back"))
	}
	return freed
}

// NextAudit is the time from an audit to the next: sooner when something is missing that a second audit may free.
func (m *Manager) NextAudit() time.Duration {
	m.mu.Lock()
	defer m.unlock()
	return m.core.nextAudit(m.cfg.Now())
}

// Close ends running proposals and closes the file.
func (m *Manager) Close() error {
	m.cancel()
	m.wg.Wait()
	m.mu.Lock()
	defer m.unlock()
	if err := m.file.close(); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("close %s: %w", m.cfg.File, err)
	}
	return nil
}
