package path

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/instant"
	"github.com/skeinmesh/skein/internal/lag"
)

// Prober sends an authenticated ping from WireGuard's port. It must not block.
type Prober interface {
	SendPing(peer identity.ID, to netip.AddrPort) (txid [12]byte, err error)
	// SendPingSize pads the UDP payload to size bytes, and asks for an answer of that size.
	SendPingSize(peer identity.ID, to netip.AddrPort, size int) (txid [12]byte, err error)
}

// Relays knows the best relay that both ends share. It must not block.
type Relays interface {
	Choose(peer identity.ID) (relay identity.ID, rtt time.Duration, ok bool)
	// Absent reports whether there is no relay because the relays report that the peer has no session.
	Absent(peer identity.ID) bool
	// Ask asks the relays whether the peer has a session. The answer arrives through RelaysChanged.
	Ask(peer identity.ID)
}

// Ports asks relays for UDP ports. The answer arrives through Manager.Reserved. It must not block.
type Ports interface {
	Reserve(relay, peer identity.ID) error
	// ReservationFailed tells the relay that nothing passes its port.
	ReservationFailed(relay, peer identity.ID)
	// GiveUpReservation returns the port to the relay.
	GiveUpReservation(relay, peer identity.ID)
}

// Journal stores observations and decisions. It must not block.
type Journal interface {
	Append(*skeinv1.JournalEntry)
}

// Config is what a Manager needs.
type Config struct {
	Self    identity.ID
	Prober  Prober
	Signal  func(peer identity.ID, s *skeinv1.Signal) error // called from one goroutine of its own; may block shortly
	Relays  Relays                                          // nil: no relays
	Journal Journal                                         // nil: none
	// begins port prediction; the zero Prediction ends it. Must not block. The outcome arrives through
	// Manager.PredictionReported
	Predict func(peer identity.ID, g Prediction)
	Ports   Ports // nil: relays reserve no ports
	// called when a direct path has died; must not block. nil: not called
	OnLost func(peer identity.ID)
	Clock  func() time.Time // nil: time.Now
	// lateness of this process: read, and updated with each late wake-up; nil: never late
	Lag *lag.Meter
	Log *slog.Logger // nil: slog.Default()
}

// Counters are what WireGuard counted for a peer.
type Counters struct {
	RxBytes, TxBytes uint64
	// where WireGuard last received from the peer; may be a local proxy. Userspace WireGuard shows where it sends
	// instead
	Endpoint netip.AddrPort
	// ControlRx and ControlTx are the control net's share of these bytes. They show whether the path works, and cause
	// no heartbeats. AcksRx and AcksTx are upper bounds of the acknowledgements for that share.
	ControlRx, ControlTx, AcksRx, AcksTx uint64
	Relayed                              uint64    // the peer's packets that arrived over relay sessions
	Handshake                            time.Time // the last one; zero: never
	At                                   time.Time // just before the counters were read; zero: when passed on

	rawRx, rawTx     uint64 // including the control net's share
	earlyRx, earlyTx uint64 // part of that share that WireGuard had not counted yet
}

const (
	queueMax    = 16384            // waiting inputs; later pings and pongs are dropped, which looks like loss
	signalsMax  = 4096             // waiting punches: one for each peer of a large mesh at the start
	outstanding = 12 * time.Second // how long a pong is recognised; exceeds rttLimit
	refresh     = time.Second      // how old the RTTs in Paths may be; the same again for each refreshEach peers
	refreshEach = 50
)

// Manager runs one Machine per peer.
type Manager struct {
	cfg     Config
	log     *slog.Logger
	metrics Metrics
	paths   atomic.Pointer[map[identity.ID]Path]
	changed chan struct{}
	signals chan signalTo
	count   chan struct{}
	wake    chan struct{}
	stop    context.CancelFunc
	ended   <-chan struct{}
	done    sync.WaitGroup
	talked  instant.Instant // when a reading of the counters last showed traffic

	mu     sync.Mutex
	queue  []event
	noisy  int // pings and pongs in queue
	closed bool

	o owned // only for the loop
}

type signalTo struct {
	peer   identity.ID
	signal *skeinv1.Signal
}

// event is one call waiting for the loop.
type event struct {
	at   time.Time
	peer identity.ID
	in   Input
	tx   [12]byte
	do   func(*Manager, time.Time) // instead of an input
}

// NewManager starts a manager. Close ends it.
func NewManager(cfg Config) *Manager {
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	ctx, stop := context.WithCancel(context.Background())
	m := newManager(cfg, ctx, stop)
	m.done.Go(func() { m.loop(ctx) })
	m.done.Go(func() { m.signalLoop(ctx) })
	return m
}

func newManager(cfg Config, ctx context.Context, stop context.CancelFunc) *Manager {
	m := &Manager{
		cfg: cfg, log: cfg.Log.With("component", "path"), stop: stop, ended: ctx.Done(),
		changed: make(chan struct{}, 1), count: make(chan struct{}, 1), wake: make(chan struct{}, 1),
		signals: make(chan signalTo, signalsMax),
		o:       owned{peers: map[identity.ID]*peer{}, pings: map[[12]byte]pinged{}, unready: map[identity.ID]bool{}},
	}
	m.paths.Store(&map[identity.ID]Path{})
	return m
}

// Close stops the manager. Paths continues to return its last snapshot.
func (m *Manager) Close() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.stop()
	m.done.Wait()
}

// Paths returns the path to every known peer, as an immutable snapshot.
func (m *Manager) Paths() map[identity.ID]Path { return *m.paths.Load() }

// Changed receives after the path to a peer has changed; several changes may be combined. For one consumer.
func (m *Manager) Changed() <-chan struct{} { return m.changed }

// Count receives when the counters should be read at once, because a decision about a path needs them. For one
// consumer.
func (m *Manager) Count() <-chan struct{} { return m.count }

// SetSettings sets the mesh's settings.
func (m *Manager) SetSettings(s Settings) {
	m.run(func(m *Manager, now time.Time) {
		if s.equal(m.o.settings) {
			return
		}
		m.o.settings = s
		m.broadcast(now, Input{Kind: InputSettings, Settings: &s})
	})
}

// SetSelf sets this host's own record, whenever it changes.
func (m *Manager) SetSelf(r *skeinv1.Record) {
	n := NodeOf(r)
	m.run(func(m *Manager, now time.Time) {
		if m.o.self != nil && m.o.self.Equal(n) {
			return
		}
		m.o.self = &n
		m.note(now, identity.ID{}, Input{Kind: InputSelf, Node: &n})
		m.broadcast(now, Input{Kind: InputSelf, Node: &n})
	})
}

// SetPeer sets a peer's record. A change that does not affect paths is cheap.
func (m *Manager) SetPeer(id identity.ID, r *skeinv1.Record) {
	n := NodeOf(r)
	m.run(func(m *Manager, now time.Time) {
		p, ok := m.o.peers[id]
		if !ok {
			p = m.add(id, now)
		} else if p.machine.Known && p.machine.Remote.Equal(n) {
			return
		}
		in := Input{Kind: InputPeer, Node: &n}
		m.note(now, id, in)
		m.step(p, now, in)
	})
}

// Expect announces a peer to which no ping can be sent before Ready, since the prober lacks its key. It must be
// called before SetPeer.
func (m *Manager) Expect(id identity.ID) {
	m.run(func(m *Manager, _ time.Time) {
		if m.o.peers[id] == nil {
			m.o.unready[id] = true
		}
	})
}

// Ready reports that pings can now be sent to a peer and answered.
func (m *Manager) Ready(id identity.ID) {
	m.run(func(m *Manager, now time.Time) {
		delete(m.o.unready, id)
		if p, ok := m.o.peers[id]; ok && p.machine.Unready {
			in := Input{Kind: InputReady}
			m.note(now, id, in)
			m.step(p, now, in)
		}
	})
}

// RemovePeer forgets a peer that left the mesh.
func (m *Manager) RemovePeer(id identity.ID) {
	m.run(func(m *Manager, _ time.Time) {
		delete(m.o.unready, id)
		m.remove(id)
	})
}

// RelaysChanged asks Relays again for every peer.
func (m *Manager) RelaysChanged() {
	m.run(func(m *Manager, now time.Time) {
		for id, p := range m.o.peers {
			m.setRelay(p, now, m.choose(id))
		}
	})
}

// SetReplaceable sets the peers whose traffic others can carry. Path.Suspect is only used for these. The caller must
// not change the map afterwards.
func (m *Manager) SetReplaceable(ids map[identity.ID]bool) {
	m.run(func(m *Manager, now time.Time) {
		m.o.others = ids
		for id, p := range m.o.peers {
			if p.machine.Replaceable != ids[id] {
				m.step(p, now, Input{Kind: InputReplaceable, Reply: ids[id]})
			}
		}
	})
}

// NetworkChanged reports that a link or an address of this host changed; every path is then checked at once.
func (m *Manager) NetworkChanged() {
	m.run(func(m *Manager, now time.Time) {
		in := Input{Kind: InputNetwork}
		m.note(now, identity.ID{}, in)
		m.broadcast(now, in)
	})
}

// PingReceived reports an authenticated ping of the peer and its source address. The caller answers the ping; the
// manager only learns from it.
func (m *Manager) PingReceived(id identity.ID, from netip.AddrPort, at time.Time) {
	m.metrics.pingsReceived.Add(1)
	m.push(event{at: at, peer: id, in: Input{Kind: InputPing, Endpoint: unmap(from)}})
}

// PongReceived reports an authenticated pong of the peer, its source address and its arrival time.
func (m *Manager) PongReceived(id identity.ID, from netip.AddrPort, tx [12]byte, at time.Time) {
	m.push(event{at: at, peer: id, in: Input{Kind: InputPong, Endpoint: unmap(from)}, tx: tx})
}

// PredictionReported reports the progress or outcome of port prediction; at: where the peer was heard, for a hit.
func (m *Manager) PredictionReported(id identity.ID, at netip.AddrPort, ev PredictionEvent) {
	m.run(func(m *Manager, now time.Time) {
		if p, ok := m.o.peers[id]; ok {
			in := Input{Kind: InputPrediction, Endpoint: unmap(at), Prediction: &ev}
			m.note(now, id, in)
			m.step(p, now, in)
		}
	})
}

// Reserved reports the port that a relay has reserved for packets to a peer, and whether both ends are proven to the
// relay. Without an endpoint, refused says why there is no port, or no longer one.
func (m *Manager) Reserved(id, relay identity.ID, at netip.AddrPort, ready bool, refused string) {
	m.run(func(m *Manager, now time.Time) {
		if p, ok := m.o.peers[id]; ok {
			in := Input{Kind: InputReserved, Relay: RelayChoice{ID: relay}, Endpoint: unmap(at), Reply: ready, Error: refused}
			m.note(now, id, in)
			m.step(p, now, in)
		}
	})
}

// Punch handles the peer's request to probe its addresses now.
func (m *Manager) Punch(id identity.ID, p *skeinv1.Signal_Punch) {
	m.metrics.punchesReceived.Add(1)
	if p.GetUnheard() {
		m.push(event{at: m.cfg.Clock(), peer: id, in: Input{Kind: InputUnheard, Reply: true}})
		return
	}
	in := Input{Kind: InputPunch, Reply: p.GetReply()}
	for _, a := range p.GetAddresses()[:min(len(p.GetAddresses()), punchMax)] {
		if e, err := netip.ParseAddrPort(a); err == nil {
			in.Addresses = append(in.Addresses, unmap(e))
		}
	}
	m.push(event{at: m.cfg.Clock(), peer: id, in: in})
}

// Traffic passes on WireGuard's counters, read at any interval; four times a second is enough. See Count.
func (m *Manager) Traffic(c map[identity.ID]Counters) {
	m.run(func(m *Manager, now time.Time) {
		for id, n := range c {
			if p, ok := m.o.peers[id]; ok {
				m.traffic(p, now, n)
			}
		}
	})
}

// TrafficAt is when a reading of the counters last showed traffic of any peer, not counting the control net's.
func (m *Manager) TrafficAt() time.Time { return m.talked.Load() }

// Settle returns when Paths reflects every call made before it, or when the context or the manager ends.
func (m *Manager) Settle(ctx context.Context) {
	done := make(chan struct{})
	m.run(func(m *Manager, _ time.Time) {
		m.publish()
		close(done)
	})
	select {
	case <-done:
	case <-ctx.Done():
	case <-m.ended:
	}
}

// push queues an input; it drops pings and pongs when the loop is far behind.
func (m *Manager) push(e event) {
	m.mu.Lock()
	if m.closed || m.noisy >= queueMax {
		m.mu.Unlock()
		m.metrics.dropped.Add(1)
		return
	}
	m.noisy++
	m.queue = append(m.queue, e)
	m.mu.Unlock()
	m.wakeUp()
}

// run queues a call for the loop; calls are never dropped.
func (m *Manager) run(do func(*Manager, time.Time)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	m.queue = append(m.queue, event{do: do})
	m.wakeUp()
}

func (m *Manager) wakeUp() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// signalLoop sends punches in its own goroutine, so that a slow relay never delays the machines.
func (m *Manager) signalLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-m.signals:
			if err := m.cfg.Signal(s.peer, s.signal); err != nil {
				m.metrics.punchErrors.Add(1)
				m.log.Debug("punch not sent", "peer", s.peer, "error", err)
			}
		}
	}
}
