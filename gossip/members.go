package gossip

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/time/rate"
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/identity"
)

const (
	// These times log10 of the number of members are how often each node sends a record, and news of a member. A node
	// that misses a record learns so from hashes. A node that misses a goodbye learns so only from a probe of its own, or
	// from a push/pull: with a factor of three, one of seven nodes would stay out in 3 % of all goodbyes.
	retransmitMult = 3
	memberMult     = 5
	probeInterval  = time.Second
	probeTimeout   = 500 * time.Millisecond
	// A suspect has 4 s to refute in a mesh of up to ten nodes, 9 s among 200; if few others confirm the suspicion, up to
	// twice that.
	suspicionMult    = 4
	suspicionMaxMult = 2
	// a node that misses answers probes up to so many times more rarely, since the node itself may be slow
	awarenessMax   = 8
	gossipInterval = 100 * time.Millisecond
	gossipNodes    = 4
	// bytes of a packet that memberlist does not count: the first message's length, a checksum
	uncounted            = 2 + 5
	lateForStreams       = 200 * time.Millisecond
	pushPullInterval     = time.Minute
	gossipToTheDead      = 30 * time.Second
	streamTimeout        = 10 * time.Second
	handoffQueue         = 4096
	metaGrace            = 400 * time.Millisecond // after a newer number in metadata: its broadcast is on the way
	largeSpread          = 2 * time.Millisecond   // per member, over which pulls of one large record are spread
	maxLargeSpread       = time.Second
	hashPayload          = 16 // bytes of the hash in a probe's acknowledgement
	memberlistErrorsRate = 1  // a second, of memberlist's own complaints
)

func (p *pool) memberlistConfig() *memberlist.Config {
	c, g := memberlist.DefaultLANConfig(), p.g
	c.Name = g.cfg.Self.String()
	c.Transport = p.net
	c.Label = p.label
	c.RequireNodeNames = true
	c.Keyring = g.ring
	c.EnableCompression = false // records hardly shrink
	c.UDPBufferSize = g.cfg.PacketBytes - uncounted
	c.TCPTimeout = streamTimeout
	c.RetransmitMult = memberMult
	c.ProbeInterval, c.ProbeTimeout = probeInterval, probeTimeout
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = suspicionMult, suspicionMaxMult
	c.AwarenessMaxMultiplier = awarenessMax
	// A probe without an answer is followed by a stream only where a stream may do better: packets by a relay travel in a
	// stream already. A stream by a relay costs three handshakes. On hosts that answer late, one for each late answer was
	// most of what made them late.
	c.DisableTcpPingsForNode = func(name string) bool {
		id, err := parseID(name)
		return err != nil || g.late() > lateForStreams || g.cfg.Lossy != nil && !g.cfg.Lossy(id)
	}
	c.GossipInterval, c.GossipNodes = gossipInterval, gossipNodes
	c.GossipToTheDeadTime = gossipToTheDead
	c.PushPullInterval = pushPullInterval
	c.HandoffQueueDepth = handoffQueue
	d := (*delegate)(p)
	c.Delegate, c.Events, c.Alive, c.Merge, c.Ping = d, d, d, d, d
	c.LogOutput, c.Logger = nil, memberlistLogger(g.log)
	return c
}

// delegate receives memberlist's calls. Some of them come under memberlist's locks: none blocks or calls back.
type delegate pool

func (d *delegate) NodeMeta(int) []byte {
	g := d.g
	// Publish holds no lock that memberlist could wait for, so taking this one is safe.
	g.own.mu.Lock()
	epoch, large := g.own.epoch, g.own.large
	g.own.mu.Unlock()
	r, ok := g.table.get(g.cfg.Self)
	kind := meshTable
	if d.near {
		if near, has := g.local.get(g.cfg.Self); has && (!ok || near.mark.newer(r.mark)) {
			r, ok, kind = near, true, siteTable
		}
	}
	m := mark{ID: g.cfg.Self, Epoch: epoch}
	if ok {
		m = r.mark
	}
	large = ok && large
	b := encodeMeta(m, large)
	if d.near {
		b = append(b, byte(kind))
	}
	return b
}

// NotifyMsg receives a user message.
func (d *delegate) NotifyMsg(b []byte) {
	if len(b) > 0 && b[0] == askRecords {
		d.hand(arrival{(*pool)(d), askRecords, append([]byte(nil), b...)})
		return
	}
	g := d.g
	m, signed, err := decodeBroadcast(b)
	if err != nil {
		g.stats.add(&g.stats.BadFrames)
		return
	}
	if len(signed) > MaxRecordBytes {
		d.g.stats.refused(&RefusedError{Node: m.ID, Reason: ErrTooLarge})
		return
	}
	// The record itself says for which table it is. A message can be skipped here only if it is old for both tables.
	far, near := g.table.check(m), outcomeOld
	if d.near {
		near = g.check(siteTable, m)
	}
	switch {
	case far == outcomeSame || near == outcomeSame:
		g.stats.add(&g.stats.Duplicates)
		return
	case far == outcomeOld && near == outcomeOld:
		g.stats.add(&g.stats.Old)
		return
	}
	if !d.g.roster.member(m.ID) {
		d.g.stats.refused(&RefusedError{Node: m.ID, Reason: ErrUnknownNode})
		return
	}
	d.hand(arrival{(*pool)(d), b[0], append([]byte(nil), signed...)})
}

func (d *delegate) hand(a arrival) {
	select {
	case d.g.inbox <- a:
	default:
		d.g.stats.add(&d.g.stats.Overflow)
	}
}

func (d *delegate) GetBroadcasts(overhead, limit int) [][]byte {
	d.pace.Load().collected()
	records := d.queue.GetBroadcasts(overhead, limit)
	if len(records) == 0 && d.queue.NumQueued() > 0 {
		signal(d.crowded)
	}
	return records
}

// LocalState adds digests to memberlist's own push/pull when two nodes meet. Between nodes that have met, the hash in
// each answer to a probe shows sooner whether their records differ.
func (d *delegate) LocalState(join bool) []byte {
	if !join {
		return nil
	}
	b, err := proto.Marshal(encodeDigests(d.g.cfg.Self, d.g.tables()[(*pool)(d).table()].digest()))
	if err != nil {
		d.g.log.Error("cannot encode digests", "error", err)
		return nil
	}
	return b
}

func (d *delegate) MergeRemoteState(b []byte, _ bool) {
	if len(b) > maxDigestBytes {
		d.g.stats.add(&d.g.stats.BadFrames)
		return
	}
	select {
	case d.g.digests <- arrivedDigests{(*pool)(d).table(), append([]byte(nil), b...)}:
	default:
		d.g.stats.add(&d.g.stats.Overflow)
	}
}

// NotifyAlive is called with every alive message, under memberlist's lock.
func (d *delegate) NotifyAlive(n *memberlist.Node) error {
	id, err := parseID(n.Name)
	if err != nil {
		return err
	}
	d.pace.Load().news() // memberlist passes it on
	if id == d.g.cfg.Self {
		return nil
	}
	if !d.g.roster.member(id) {
		d.g.stats.add(&d.g.stats.Strangers)
		return errNotMember
	}
	if !(*pool)(d).admits(id) {
		d.g.stats.add(&d.g.stats.Elsewhere)
		return errElsewhere
	}
	want := syntheticAddr(id)
	if ip, ok := netip.AddrFromSlice(n.Addr); !ok || ip != want.Addr() || n.Port != want.Port() {
		return errors.New("address does not follow from the node ID")
	}
	m, large, err := decodeMeta(n.Meta)
	if err != nil || m.ID != id {
		return errMeta
	}
	if m.Seq == 0 {
		return nil // the member has published nothing in this run
	}
	t := meshTable
	if d.near {
		if t = siteTable; len(n.Meta) <= metaSize || n.Meta[metaSize] != byte(siteTable) {
			t = meshTable
		}
	}
	delay := metaGrace
	if large {
		delay = min(maxLargeSpread, largeSpread*time.Duration(1+d.alive.count()))
	}
	d.g.pull.need(t, m, id, large, jitter(delay))
	return nil
}

// NotifyMerge refuses to merge with a mesh in which no live node is a member of this one.
func (d *delegate) NotifyMerge(peers []*memberlist.Node) error {
	for _, p := range peers {
		if id, err := parseID(p.Name); err == nil && p.State == memberlist.StateAlive && d.g.roster.member(id) {
			return nil
		}
	}
	d.g.stats.add(&d.g.stats.Strangers)
	return errNotMember
}

func (d *delegate) NotifyJoin(n *memberlist.Node) { d.seen(n) }

// seen notes that a member is alive, and the epoch of its run.
func (d *delegate) seen(n *memberlist.Node) {
	id, err := parseID(n.Name)
	if err != nil || id == d.g.cfg.Self {
		return
	}
	epoch := uint64(0)
	if m, _, err := decodeMeta(n.Meta); err == nil && m.ID == id {
		epoch = m.Epoch
	}
	if d.alive.set(id, epoch) {
		signal(d.g.changed)
		d.g.awaySoon()
	}
}

func (d *delegate) NotifyLeave(n *memberlist.Node) {
	d.pace.Load().news()
	if id, err := parseID(n.Name); err == nil && d.alive.remove(id) {
		signal(d.g.changed)
		d.g.awaySoon()
		d.rejoin.wakeUp()
	}
}

func (d *delegate) NotifyUpdate(n *memberlist.Node) { d.seen(n) }

// AckPayload is the hash of this node's records: a node that probes it learns whether both hold the same. In the site's
// pool the hash of the site's records follows.
func (d *delegate) AckPayload() []byte {
	h := d.g.table.hash()
	b := h[:hashPayload:hashPayload]
	if d.near {
		h := d.g.local.hash()
		b = append(b, h[:hashPayload]...)
	}
	return b
}

func (d *delegate) NotifyPingComplete(n *memberlist.Node, _ time.Duration, payload []byte) {
	want := hashPayload
	if d.near {
		want = 2 * hashPayload
	}
	id, err := parseID(n.Name)
	if err != nil || len(payload) != want || !d.g.roster.member(id) {
		return
	}
	d.g.pull.compare(meshTable, id, [hashPayload]byte(payload))
	if d.near {
		d.g.pull.compare(siteTable, id, [hashPayload]byte(payload[hashPayload:]))
	}
}

// announce makes memberlist spread this node's new (epoch, seq).
func (p *pool) announce() {
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.renewed:
		}
		p.pace.Load().news()
		// UpdateNode waits until the broadcast has gone out, or for the timeout. Nothing here needs that wait.
		if err := p.ml.UpdateNode(time.Millisecond); err != nil {
			p.g.log.Debug("own number is still being announced", "error", err)
		}
		select {
		case <-p.ctx.Done():
			return
		case <-time.After(max(metaSpacing, min(metaPerMember*time.Duration(p.alive.count()), metaSpacingMost))):
		}
	}
}

// arrivedDigests are digests of one table that came by a push/pull, encoded.
type arrivedDigests struct {
	table tableKind
	data  []byte
}

// mergeDigests pulls the records that this node lacks by the digests of a push/pull. The other end does the same.
func (g *Gossip) mergeDigests() {
	for {
		select {
		case <-g.ctx.Done():
			return
		case d := <-g.digests:
			from, theirs, err := decodeDigests(d.data)
			if err != nil {
				g.stats.add(&g.stats.BadFrames)
				continue
			}
			for _, m := range theirs {
				if g.roster.member(m.ID) {
					g.pull.need(d.table, m, from, false, 0)
				}
			}
		}
	}
}

// aliveSet holds the nodes that memberlist sees alive, without this node, and the epoch of each one's run. An epoch is
// that of the alive message accepted last, not the highest ever seen: so a forged epoch ends when the member refutes
// it.
type aliveSet struct {
	mu   sync.RWMutex
	m    map[identity.ID]uint64
	ever map[identity.ID]struct{} // seen alive at any time
}

func (a *aliveSet) set(id identity.ID, epoch uint64) (changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	old, was := a.m[id]
	if a.m == nil {
		a.m, a.ever = make(map[identity.ID]uint64), make(map[identity.ID]struct{})
	}
	a.m[id], a.ever[id] = epoch, struct{}{}
	return !was || old != epoch
}

func (a *aliveSet) remove(id identity.ID) (was bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, was = a.m[id]
	delete(a.m, id)
	return was
}

// epoch returns the epoch of a member's run; 0: it is not alive, or does not say.
func (a *aliveSet) epoch(id identity.ID) uint64 {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.m[id]
}

func (a *aliveSet) has(id identity.ID) bool {
	a.mu.RLock()
	defer a.mu.RUnlock()
	_, ok := a.m[id]
	return ok
}

// met reports whether a node was ever seen alive.
func (a *aliveSet) met(id identity.ID) bool {
	a.mu.RLock()
	defer a.mu.RUnlock()
	_, ok := a.ever[id]
	return ok
}

// forget makes a node that is not alive count as never met.
func (a *aliveSet) forget(id identity.ID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.ever, id)
}

func (a *aliveSet) count() int {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return len(a.m)
}

// any returns one of the nodes at random.
func (a *aliveSet) any() (id identity.ID, ok bool) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	for id = range a.m {
		return id, true // where a map's iteration begins is random
	}
	return id, false
}

func (a *aliveSet) others() []identity.ID {
	a.mu.RLock()
	defer a.mu.RUnlock()
	ids := make([]identity.ID, 0, len(a.m))
	for id := range a.m {
		ids = append(ids, id)
	}
	return ids
}

func (a *aliveSet) keep(kept func(identity.ID) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for id := range a.ever {
		if !kept(id) {
			delete(a.m, id)
			delete(a.ever, id)
		}
	}
}

// memberlistLogger forwards memberlist's log lines: errors as warnings at a bounded rate, the rest at debug level.
func memberlistLogger(l *slog.Logger) *log.Logger {
	if !l.Enabled(context.Background(), slog.LevelWarn) {
		return log.New(io.Discard, "", 0) // a logger that does not even format
	}
	return log.New(&lineWriter{log: l, limit: rate.NewLimiter(memberlistErrorsRate, 5)}, "", 0)
}

type lineWriter struct {
	log   *slog.Logger
	limit *rate.Limiter
}

func (w *lineWriter) Write(b []byte) (int, error) {
	line := strings.TrimSpace(string(b))
	text, isError := strings.CutPrefix(line, "[ERR] memberlist: ")
	if isError && w.limit.Allow() {
		w.log.Warn("memberlist reports an error", "text", text)
	} else if w.log.Enabled(context.Background(), slog.LevelDebug) {
		w.log.Debug("memberlist says", "text", line)
	}
	return len(b), nil
}

// joinName is the form in which memberlist needs the name of a node that it does not know yet.
func joinName(id identity.ID) string {
	return fmt.Sprintf("%s/%s", id, syntheticAddr(id))
}
