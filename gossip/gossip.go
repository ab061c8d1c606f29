package gossip

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/lag"
)

// Config is what a node needs to gossip.
type Config struct {
	Self      identity.ID
	Key       *identity.Key
	Roster    Roster
	Transport Transport
	// Streams accepts connections of ALPN skein-gossip that have a method Peer() identity.ID. Close closes it.
	Streams net.Listener
	Packets <-chan Packet
	Keys    *skeinv1.GossipKeys
	Dir     string // for the records between starts; empty: they are not kept
	Log     *slog.Logger
	Epoch   uint64     // from NextEpoch
	Lag     *lag.Meter // how late this process woke recently; nil: it never does
	Place   Place      // the first one

	// Lossy reports whether packets to a node may be lost where a stream's would not. nil: it is true for all nodes.
	Lossy func(identity.ID) bool

	// PacketBytes is the largest packet given to Transport.SendPacket; 0 means 1200, which fits the
	// tunnel's MTU on every path that IPv6 allows.
	PacketBytes int

	// verify replaces checkSignature in simulations of many nodes in one process.
	verify func(*skeinv1.SignedRecord, identity.ID, Roster) error
	// share replaces an entry by an equal one, so that many nodes in one process can hold the same decoded record.
	share func(Entry) Entry
}

const (
	defaultPacketBytes = 1200
	minPacketBytes     = 512
	// packetReserve is what encryption, framing and a ping or a membership message take of a packet that also carries a
	// record, in bytes.
	packetReserve = 240

	inboxSize = 1024 // user messages that wait, most of them for a check of their signature

	// keyUseDelay is how long a new gossip key is only accepted, so that the others learn of it first.
	keyUseDelay = 3 * time.Second
	// metaSpacing bounds how often a new (epoch, seq) is announced.
	metaSpacing = 100 * time.Millisecond
	// In a large mesh most members get the record itself before its number, so the number is announced less often.
	metaPerMember   = 50 * time.Millisecond
	metaSpacingMost = 5 * time.Second
	leaveTimeout    = 300 * time.Millisecond
)

// Gossip is a running node.
type Gossip struct {
	cfg     Config
	log     *slog.Logger
	table   *table // of records for everybody
	local   *table // of records for this node's site alone
	putMu   sync.Mutex
	stats   stats
	roster  rosterCache
	ring    *memberlist.Keyring
	pull    *puller
	place   atomic.Pointer[Place]
	homes   atomic.Pointer[homes]
	carried atomic.Pointer[carried]
	shown   atomic.Pointer[shown]
	fetches fetches
	strays  atomic.Bool // dropStrays is scheduled

	poolMu  sync.Mutex           // guards changes of the pools
	wide    atomic.Pointer[pool] // the mesh pool; nil while this node is not in it
	near    atomic.Pointer[pool] // the pool of this node's site; nil while there is none
	stopped bool

	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	closing sync.Once

	inbox   chan arrival
	digests chan arrivedDigests
	changed chan struct{} // for the user
	dirty   chan struct{} // for the disk
	awayDue chan struct{} // the nodes that this node reports as away may have changed
	done    chan struct{} // closed when packets and streams are no longer accepted

	keyMu    sync.Mutex
	keyTimer *time.Timer

	own ownRecord
}

// Start loads the known records, starts memberlist and contacts the other members.
func Start(cfg Config) (*Gossip, error) {
	keys, err := checkConfig(&cfg)
	if err != nil {
		return nil, fmt.Errorf("start gossip: %w", err)
	}
	g := newGossip(cfg)
	if err := g.load(); err != nil {
		g.cancel()
		return nil, fmt.Errorf("start gossip: %w", err)
	}
	if g.ring, err = memberlist.NewKeyring(keys, keys[0]); err == nil {
		g.poolMu.Lock()
		err = g.setPools(&g.cfg.Place)
		g.poolMu.Unlock()
	}
	if err != nil {
		g.stop(false)
		return nil, fmt.Errorf("start gossip: %w", err)
	}
	g.run(func() { g.forward(cfg.Packets) })
	g.run(func() { g.acceptStreams(cfg.Streams, g.serve) })
	g.run(g.ingest)
	g.run(g.mergeDigests)
	g.run(g.pull.run)
	g.run(g.watchAway)
	if cfg.Dir != "" {
		g.run(g.keepOnDisk)
	}
	return g, nil
}

// newGossip makes a node that holds records but does not run yet.
func newGossip(cfg Config) *Gossip {
	g := &Gossip{
		cfg: cfg, log: cfg.Log, table: newTable(), local: newTable(),
		inbox: make(chan arrival, inboxSize), digests: make(chan arrivedDigests, 16),
		changed: make(chan struct{}, 1), dirty: make(chan struct{}, 1), awayDue: make(chan struct{}, 1),
		done: make(chan struct{}),
	}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.place.Store(&cfg.Place)
	g.own.epoch = cfg.Epoch
	g.roster.self, g.roster.selfKey = cfg.Self, cfg.Key.Public()
	g.roster.refresh(cfg.Roster)
	g.pull = newPuller(g)
	return g
}

// late is how late this process woke recently.
func (g *Gossip) late() time.Duration { return g.cfg.Lag.Late(time.Now()) }

func (g *Gossip) exchange() *exchange {
	return &exchange{
		self: g.cfg.Self, tables: g.tables(), member: g.roster.member, take: g.mergeStreamed, wanted: g.wanted,
		near: func(id identity.ID) bool { near := g.near.Load(); return near != nil && near.speaksTo(id) },
		site: g.siteRecords,
	}
}

func (g *Gossip) tables() [2]*table { return [2]*table{meshTable: g.table, siteTable: g.local} }

// wanted reports whether a version of a member's record would be kept.
func (g *Gossip) wanted(t tableKind, m mark) bool {
	if m.Epoch > maxNumber || m.Seq > maxNumber || !g.roster.member(m.ID) {
		return false
	}
	o := g.check(t, m)
	return o == outcomeNew || o == outcomeTaken
}

func checkConfig(cfg *Config) ([][]byte, error) {
	switch {
	case cfg.Key == nil || cfg.Key.ID() != cfg.Self:
		return nil, fmt.Errorf("the identity key is not that of node %s", cfg.Self)
	case cfg.Roster == nil || cfg.Transport == nil || cfg.Streams == nil || cfg.Packets == nil:
		return nil, errors.New("roster, transport, streams and packets are all needed")
	case cfg.Epoch >= maxNumber:
		return nil, fmt.Errorf("epoch %d is beyond %d", cfg.Epoch, uint64(maxNumber))
	}
	if cfg.PacketBytes == 0 {
		cfg.PacketBytes = defaultPacketBytes
	}
	if cfg.PacketBytes < minPacketBytes {
		return nil, fmt.Errorf("packets of %d bytes are too small, want at least %d", cfg.PacketBytes, minPacketBytes)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.verify == nil {
		cfg.verify = checkSignature
	}
	return keyList(cfg.Keys)
}

func (g *Gossip) run(f func()) { g.wg.Go(f) }

// Close leaves the pools, stops everything and writes the records.
func (g *Gossip) Close() { g.stop(true) }

func (g *Gossip) stop(leave bool) {
	g.closing.Do(func() {
		g.poolMu.Lock()
		g.stopped = true
		pools := g.pools()
		g.poolMu.Unlock()
		var leaving sync.WaitGroup
		for _, p := range pools {
			leaving.Go(func() { p.close(leave) })
		}
		leaving.Wait()
		g.cancel()
		close(g.done)
		g.keyMu.Lock()
		if g.keyTimer != nil {
			g.keyTimer.Stop()
		}
		g.keyMu.Unlock()
		g.own.mu.Lock()
		if g.own.timer != nil {
			g.own.timer.Stop()
		}
		g.own.mu.Unlock()
		_ = g.cfg.Streams.Close()
		g.wg.Wait()
	})
}

// Hash covers (epoch, seq) and content of every record for everybody, sorted by ID: nodes with equal hashes hold equal
// records. The records of this node's site alone have another hash, see Held.
func (g *Gossip) Hash() [32]byte { return g.table.hash() }

// Outdated reports whether a member has restarted since it wrote the newest record that this node holds of it. What
// that record says of the process no longer holds, because the process has ended. Like Alive it is a hint, which any
// member can forge until the other one refutes it.
func (g *Gossip) Outdated(id identity.ID) bool {
	r, ok := g.newest(id)
	return ok && id != g.cfg.Self && slices.ContainsFunc(g.pools(), func(p *pool) bool {
		return r.mark.Epoch < p.alive.epoch(id)
	})
}

// Changed receives a value after records or liveness changed; changes in quick succession give one value.
func (g *Gossip) Changed() <-chan struct{} { return g.changed }

// Stats returns counts of what happened since the start.
func (g *Gossip) Stats() Stats { return g.stats.snapshot() }

// Merge adds records that came another way: by a join answer, or by node annotations. It returns how many were new, and
// one error for each that was refused.
func (g *Gossip) Merge(records []*skeinv1.SignedRecord) (n int, errs []error) {
	for _, s := range records {
		fresh, _, _, err := g.accept(s)
		if err != nil {
			errs = append(errs, err)
		}
		if fresh {
			n++
		}
	}
	return n, errs
}

// RosterChanged must be called when members were admitted or revoked. It drops the records of nodes that left, and
// contacts new members.
func (g *Gossip) RosterChanged() {
	added, removed := g.roster.refresh(g.cfg.Roster)
	if removed > 0 {
		g.keepMembers()
		for _, p := range g.pools() {
			p.alive.keep(g.roster.member)
		}
		g.touched()
	}
	if added+removed > 0 {
		g.awaySoon()
	}
	if added > 0 {
		for _, p := range g.pools() {
			p.rejoin.wakeUp()
		}
		g.pull.syncRandom() // records of the new members may have been refused before
	}
}

// SetKeys changes the gossip keys. All are accepted from now on. A new primary key encrypts only after keyUseDelay, so
// that the other nodes know it by then, unless the old one is no longer accepted.
func (g *Gossip) SetKeys(k *skeinv1.GossipKeys) error {
	keys, err := keyList(k)
	if err != nil {
		return fmt.Errorf("set gossip keys: %w", err)
	}
	g.keyMu.Lock()
	defer g.keyMu.Unlock()
	if g.keyTimer != nil {
		g.keyTimer.Stop()
		g.keyTimer = nil
	}
	primary := keys[0]
	if current := g.ring.GetPrimaryKey(); contains(keys[1:], current) {
		primary = current
		g.keyTimer = time.AfterFunc(keyUseDelay, func() { g.useKeys(keys) })
	}
	if err := installKeys(g.ring, keys, primary); err != nil {
		return fmt.Errorf("set gossip keys: %w", err)
	}
	return nil
}

// KeyUsed is the key that encrypts now: the newest, or for keyUseDelay after a rotation the one before.
func (g *Gossip) KeyUsed() []byte { return g.ring.GetPrimaryKey() }

func (g *Gossip) useKeys(keys [][]byte) {
	g.keyMu.Lock()
	defer g.keyMu.Unlock()
	if g.ctx.Err() != nil || !contains(g.ring.GetKeys(), keys[0]) {
		return
	}
	if err := installKeys(g.ring, keys, keys[0]); err != nil {
		g.log.Error("cannot use the new gossip key", "error", err)
	}
}

// touched signals a change to the user and to keepOnDisk.
func (g *Gossip) touched() {
	signal(g.changed)
	signal(g.dirty)
}

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// jitter returns a random duration between half and one and a half of d.
func jitter(d time.Duration) time.Duration {
	return d/2 + rand.N(d+1)
}

// rosterCache answers questions about members without a call to the Roster, as memberlist's callbacks need.
type rosterCache struct {
	self    identity.ID
	selfKey ed25519.PublicKey // a node is always a member to itself
	mu      sync.RWMutex
	members map[identity.ID]ed25519.PublicKey

	versions uint64 // counts refreshes
}

// keys is an optional interface of a Roster: it returns all keys in a map that never changes, so that it can be shared.
type keys interface {
	Keys() map[identity.ID]ed25519.PublicKey
}

func (c *rosterCache) refresh(r Roster) (added, removed int) {
	var members map[identity.ID]ed25519.PublicKey
	if k, ok := r.(keys); ok {
		members = k.Keys()
	} else {
		members = make(map[identity.ID]ed25519.PublicKey)
		for _, id := range r.Members() {
			if key, ok := r.Key(id); ok {
				members[id] = key
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for id := range members {
		if _, ok := c.members[id]; !ok && id != c.self {
			added++
		}
	}
	for id := range c.members {
		if _, ok := members[id]; !ok && id != c.self {
			removed++
		}
	}
	c.members = members
	c.versions++
	return added, removed
}

func (c *rosterCache) version() uint64 {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.versions
}

func (c *rosterCache) member(id identity.ID) bool {
	_, ok := c.Key(id)
	return ok
}

// Key makes the cache itself a Roster.
func (c *rosterCache) Key(id identity.ID) (ed25519.PublicKey, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if id == c.self {
		return c.selfKey, true
	}
	k, ok := c.members[id]
	return k, ok
}

// Members returns all members but the node itself.
func (c *rosterCache) Members() []identity.ID {
	c.mu.RLock()
	defer c.mu.RUnlock()
	ids := make([]identity.ID, 0, len(c.members))
	for id := range c.members {
		if id != c.self {
			ids = append(ids, id)
		}
	}
	return ids
}
