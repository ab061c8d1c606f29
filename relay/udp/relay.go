package udp

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/time/rate"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/instant"
	"github.com/skeinmesh/skein/relay/wire"
)

// Mapping is all that forwarding a pair takes: the relay's address and reserved port as each end reaches it, and
// where each end's packets come from.
type Mapping struct {
	ALocal, ARemote netip.AddrPort
	BLocal, BRemote netip.AddrPort
}

// IsZero reports whether there is none.
func (m Mapping) IsZero() bool { return m == Mapping{} }

// Kernel forwards pairs inside the kernel.
type Kernel interface {
	// Map replaces a mapping by another; the zero Mapping stands for none. What the kernel remembers of the flows is
	// forgotten, so that the next packet goes the new way.
	Map(old, new Mapping) error
	// Used tells whether the kernel has let packets of a mapping pass in the last minutes.
	Used(Mapping) (bool, error)
	// Ready is nil when this host forwards packets of the family.
	Ready(ipv6 bool) error
}

// Session is a client's session with the relay. Two values are the same session if they are equal.
type Session interface {
	// Node is whose session it is.
	Node() identity.ID
	// PushControl queues a control frame that add appends.
	PushControl(add func([]byte) []byte) bool
}

// Config configures the UDP relay. Zero limits mean the defaults.
type Config struct {
	First, Last    uint16                 // of the ports that may be reserved
	Kernel         Kernel                 // nil: packets are forwarded by this process
	Avoid          func(port uint16) bool // ports not to reserve for now; nil: none
	PairsPerClient int                    // that one client may ask for: 256
	Idle           time.Duration          // after which an unused pair ends: 3 min
	// Control prepares each socket, such as with SO_MARK.
	Control func(network, address string, c syscall.RawConn) error
	// Namespace is where the sockets are opened; nil: the process's own.
	Namespace *netns.NsHandle
	Log       *slog.Logger
}

const (
	defaultPairs = 256
	defaultIdle  = 3 * time.Minute
	// requestsPerSecond is what one client may ask, after a burst of as many as it may have pairs.
	requestsPerSecond = 10
	// provingTime is what both ends have to prove their mappings.
	provingTime = time.Minute
	// challengeGap is the least time between two challenges of one end.
	challengeGap = 10 * time.Millisecond
	// repairGap is the least time between two repairs of one pair's entries in the kernel.
	repairGap = time.Second
	// kernelRetry is how long a pair that the kernel was seen not to forward stays in this process at least: after that
	// the kernel gets it when its mapping is written anew.
	kernelRetry = 10 * time.Minute
	// othersSeen bounds how many other pairs are looked at when one is said to have failed.
	othersSeen = 16
	// fellBackKept bounds the pairs of nodes of which that is remembered beyond the end of their ports.
	fellBackKept = 4096
	// refreshKernel keeps entries from running out, which have a lifetime so that they do not outlive a relay for long.
	refreshKernel = 5 * time.Minute
)

// Relay reserves pairs of ports, proves who is at their ends, and has packets between them forwarded: by the kernel, or
// by this process where that cannot.
type Relay struct {
	cfg     Config
	self    identity.ID                    // this, and the next, are set by Attach
	session func(node identity.ID) Session // nil: the node has none
	buffers chan *batch
	done    sync.WaitGroup
	stop    chan struct{}

	mu      sync.Mutex // guards what follows; pair.mu may be taken under it, not the other way round
	pairs   map[wire.PairID]*pair
	byNodes map[nodes]*pair
	asked   map[identity.ID]int           // pairs that each client asked for
	pace    map[identity.ID]*rate.Limiter // of each client's requests
	fell    map[nodes]time.Time           // until when pairs of these nodes avoid the kernel, of pairs that have ended
	next    uint16                        // where the search for free ports goes on
	closed  bool

	fellAt, worked instant.Instant // when the kernel was last seen not to forward a pair, and to forward one
	counters       counters
}

type counters struct {
	reserved, ready, ended, denied, rebound, refused, fellBack, repaired atomic.Uint64
	packets, bytes, lost                                                 atomic.Uint64
}

// Stats is a snapshot of the UDP relay's counters.
type Stats struct {
	Pairs, Ready, InKernel int
	Ports                  int    // that may be reserved
	Reserved, Ended        uint64 // pairs so far
	Denied                 uint64 // requests
	Proven, Rebound        uint64 // mappings, and those that changed on a pair that was ready
	Refused                uint64 // datagrams that proved nothing
	FellBack               uint64 // pairs that the kernel did not forward
	Repaired               uint64 // pairs whose entries somebody else had removed
	Packets, Bytes, Lost   uint64 // forwarded by this process
}

// nodes names the two ends, the lesser ID first.
type nodes struct{ a, b identity.ID }

func nodesOf(x, y identity.ID) nodes {
	if cmp.Compare(string(x[:]), string(y[:])) > 0 {
		x, y = y, x
	}
	return nodes{x, y}
}

// pair is two reserved ports and who is at them.
type pair struct {
	id    wire.PairID
	nodes nodes
	asker identity.ID
	made  time.Time

	mu       sync.Mutex
	ends     [2]end
	mapping  Mapping // zero until both ends are proven
	inKernel bool
	avoid    time.Time // until then the kernel is not asked to forward this pair
	since    time.Time // when the mapping was written last
	repaired time.Time
	over     bool
	passed   instant.Instant // when this process forwarded a packet or took a bind
}

// end is one client's half. Guarded by pair.mu but for port, which does not change.
type end struct {
	node    identity.ID
	port    *port
	session Session // that was told the key
	key     [wire.PairKeySize]byte
	counter uint64         // of the newest bind
	remote  netip.AddrPort // proven; invalid: not yet
	local   netip.AddrPort // where it sends to
	asked   netip.AddrPort // who was challenged last
	nonce   [wire.NonceSize]byte
	at      time.Time // when
}

// New makes a UDP relay for Config.UDP. Nothing is opened before a client asks.
func New(cfg Config) (*Relay, error) {
	if cfg.First == 0 || cfg.Last <= cfg.First {
		return nil, fmt.Errorf("ports %d-%d cannot be reserved for a UDP relay: want at least two", cfg.First, cfg.Last)
	}
	if cfg.PairsPerClient <= 0 {
		cfg.PairsPerClient = defaultPairs
	}
	if cfg.Idle <= 0 {
		cfg.Idle = defaultIdle
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Relay{
		cfg: cfg, next: cfg.First, stop: make(chan struct{}), buffers: newBatches(),
		pairs: map[wire.PairID]*pair{}, byNodes: map[nodes]*pair{}, asked: map[identity.ID]int{},
		pace: map[identity.ID]*rate.Limiter{},
		fell: map[nodes]time.Time{},
	}, nil
}

// Driver is kernel or userspace: who forwards the next pair of IPv4 addresses. why tells what keeps the kernel from it,
// if it was wanted.
func (u *Relay) Driver() (name string, why error) {
	if u.cfg.Kernel == nil {
		return "userspace", nil
	}
	if err := u.cfg.Kernel.Ready(false); err != nil {
		return "userspace", err
	}
	if u.kernelDrops(time.Now()) {
		return "userspace", ErrForwardingDropped
	}
	return "kernel", nil
}

// ErrForwardingDropped is what Driver tells when the kernel was seen not to forward a pair, and no other pair of late
// shows that it forwards. It decides nothing: each pair is tried in the kernel, and falls back for itself.
var ErrForwardingDropped = errors.New("this host's firewall drops what the relay should forward: accept forwarded " +
	"packets that ct status dnat marks")

// reserve answers a client that wants a pair with a node.
func (u *Relay) reserve(from Session, node identity.ID) {
	to := u.session(node)
	if node == from.Node() || node == u.self || from.Node() == u.self || to == nil {
		u.deny(from, node, wire.DeniedNotHere)
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	p := u.byNodes[nodesOf(from.Node(), node)]
	if p == nil {
		var d wire.Denial
		if p, d = u.open(from.Node(), node); p == nil {
			u.deny(from, node, d)
			return
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.ends {
		e := &p.ends[i]
		x := from
		if e.node != from.Node() {
			x = to
		}
		u.grant(p, i, x)
	}
	if !p.mapping.IsZero() {
		from.PushControl(func(b []byte) []byte { return wire.AppendState(b, p.id, wire.PairReady) })
	}
}

func (u *Relay) deny(x Session, node identity.ID, d wire.Denial) {
	u.counters.denied.Add(1)
	x.PushControl(func(b []byte) []byte { return wire.AppendDenied(b, node, d) })
}

// grant tells an end its port and key. A new session gets a new key: its client may have forgotten how far it had
// counted.
func (u *Relay) grant(p *pair, side int, x Session) {
	e := &p.ends[side]
	if e.session != x {
		e.session, e.counter = x, 0
		_, _ = rand.Read(e.key[:]) // crypto/rand.Read never fails
	}
	g := wire.Grant{Pair: p.id, Peer: p.ends[1-side].node, Port: e.port.number, Key: e.key}
	x.PushControl(func(b []byte) []byte { return wire.AppendGrant(b, g) })
}

// open makes a pair. The caller holds mu.
func (u *Relay) open(asker, node identity.ID) (*pair, wire.Denial) {
	switch {
	case u.closed:
		return nil, wire.DeniedOff
	case u.asked[asker] >= u.cfg.PairsPerClient:
		return nil, wire.DeniedQuota
	}
	now := time.Now()
	p := &pair{id: newPairID(), nodes: nodesOf(asker, node), asker: asker, made: now}
	p.avoid = u.fell[p.nodes]
	p.passed.Set(now)
	for i, id := range [2]identity.ID{p.nodes.a, p.nodes.b} {
		l, err := u.openPort(p, i)
		if err != nil {
			u.cfg.Log.Warn("no port for a relayed pair", "error", err)
			if i == 1 {
				p.ends[0].port.close()
			}
			return nil, wire.DeniedFull
		}
		p.ends[i] = end{node: id, port: l}
	}
	u.pairs[p.id], u.byNodes[p.nodes] = p, p
	u.asked[asker]++
	u.counters.reserved.Add(1)
	for i := range p.ends {
		u.done.Go(func() { u.read(p, i) })
	}
	return p, 0
}

func newPairID() wire.PairID {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return wire.PairID(binary.BigEndian.Uint64(b[:]))
}

// bind takes what came to a reserved port and is not forwarded.
func (u *Relay) bind(p *pair, side int, from, local netip.AddrPort, b []byte) {
	for len(b) > 0 {
		m, rest, err := wire.ParseBind(b)
		if err != nil || m.Kind != wire.TypeBind || m.Pair != p.id || !u.prove(p, side, from, local, m, b) {
			u.counters.refused.Add(1)
			return
		}
		b = rest
	}
}

// prove takes one bind. It proves a mapping only when it carries the nonce that was sent to where it comes from: a copy
// of somebody's bind, sent from elsewhere, moves nothing.
func (u *Relay) prove(p *pair, side int, from, local netip.AddrPort, m wire.BindMessage, b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := &p.ends[side]
	if p.over || e.session == nil || m.Counter <= e.counter || wire.ProveBind(b, &e.key) != nil {
		return false
	}
	e.counter = m.Counter
	now := time.Now()
	p.passed.Set(now)
	if from == e.remote && local == e.local {
		if p.inKernel && now.Sub(p.since) > repairGap && now.Sub(p.repaired) > repairGap {
			// The kernel should have forwarded this: its entries are gone, or it remembers the flow from before.
			p.repaired = now
			u.counters.repaired.Add(1)
			u.write(p, p.mapping)
		}
		return true
	}
	if m.Nonce != [wire.NonceSize]byte{} && from == e.asked && m.Nonce == e.nonce {
		u.bindEnd(p, e, from, local)
		return true
	}
	if now.Sub(e.at) < challengeGap && from == e.asked {
		return true
	}
	e.asked, e.at = from, now
	_, _ = rand.Read(e.nonce[:])
	challenge := wire.BindMessage{Kind: wire.TypeChallenge, Pair: p.id, Counter: m.Counter, Nonce: e.nonce}
	e.port.send(from, local, wire.AppendBind(nil, challenge, &e.key))
	return true
}

// bindEnd notes an end's proven mapping, and forwards when there are both. The caller holds pair.mu.
func (u *Relay) bindEnd(p *pair, e *end, from, local netip.AddrPort) {
	e.remote, e.local = from, local
	e.asked, e.nonce = netip.AddrPort{}, [wire.NonceSize]byte{}
	u.counters.ready.Add(1)
	a, b := &p.ends[0], &p.ends[1]
	if !a.remote.IsValid() || !b.remote.IsValid() {
		return
	}
	if !p.mapping.IsZero() {
		u.counters.rebound.Add(1)
	}
	u.write(p, Mapping{ALocal: a.local, ARemote: a.remote, BLocal: b.local, BRemote: b.remote})
	u.sendState(p, wire.PairReady)
}

// write has a mapping forwarded, by the kernel if it can. The caller holds pair.mu.
func (u *Relay) write(p *pair, m Mapping) {
	p.since = time.Now()
	old := Mapping{}
	if p.inKernel {
		old = p.mapping
	}
	p.mapping = m
	if p.since.After(p.avoid) && u.kernelCan(m) {
		p.forward(Mapping{})
		err := u.cfg.Kernel.Map(old, m)
		if err == nil {
			p.inKernel = true
			return
		}
		u.cfg.Log.Warn("the kernel refuses a relayed pair; it is forwarded in userspace", "error", err)
	} else if !old.IsZero() {
		if err := u.cfg.Kernel.Map(old, Mapping{}); err != nil {
			u.cfg.Log.Warn("a relayed pair's entries stay in the kernel until they expire", "error", err)
		}
	}
	p.inKernel = false
	p.forward(m)
}

// kernelCan tells whether the kernel is to forward: it translates addresses of one family only.
func (u *Relay) kernelCan(m Mapping) bool {
	ipv6 := m.ARemote.Addr().Is6()
	return u.cfg.Kernel != nil && ipv6 == m.BRemote.Addr().Is6() && u.cfg.Kernel.Ready(ipv6) == nil
}

// kernelDrops tells whether all that was seen lately says that the kernel drops what it should forward. Two members can
// make one pair fail, but not those of others work no more.
func (u *Relay) kernelDrops(now time.Time) bool {
	lately := now.Add(-kernelRetry)
	return u.fellAt.Load().After(lately) && !u.worked.Load().After(lately)
}

// sendState sends both ends a pair's state.
func (u *Relay) sendState(p *pair, s wire.PairState) {
	for i := range p.ends {
		if x := u.session(p.ends[i].node); x != nil && x == p.ends[i].session {
			x.PushControl(func(b []byte) []byte { return wire.AppendState(b, p.id, s) })
		}
	}
}
