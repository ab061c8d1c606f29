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
	// These times log10 of the fleet are how often each node sends a record, and news of a member. Whoever misses a
	// record learns so from hashes; whoever misses a goodbye only from a probe of its own, or from a push/pull. Three
	// times would leave one of seven nodes out in 3 % of all goodbyes.
	retransmitMult = 3
	memberMult     = 5
	probeInterval  = time.Second
	probeTimeout   = 500 * time.Millisecond
	// A suspect has 4 s to defend itself in a mesh of up to ten nodes, 9 s among 200; with few
	// confirmations by others up to twice that.
	suspicionMult        = 4
	suspicionMaxMult     = 2
	awarenessMax         = 8 // a node that misses answers probes so much more rarely at most, since it may itself be what is slow
	gossipInterval       = 100 * time.Millisecond
	gossipNodes          = 4
	uncounted            = 2 + 5 // bytes of a packet that memberlist leaves out of its sum: the first message's length, a checksum
	lateForStreams       = 200 * time.Millisecond
	pushPullInterval     = time.Minute
	gossipToTheDead      = 30 * time.Second
	streamTimeout        = 10 * time.Second
	handoffQueue         = 4096
	metaGrace            = 400 * time.Millisecond // a newer number in metadata: its broadcast is on the way
	largeSpread          = 2 * time.Millisecond   // per member, over which pulls of one large record are spread
	maxLargeSpread       = time.Second
	hashPayload          = 16 // bytes of the hash in a probe's acknowledgement
	memberlistErrorsRate = 1  // a second, of memberlist's own complaints
)

func (g *Gossip) memberlistConfig() *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name = g.cfg.Self.String()
	c.Transport = g.net
	c.RequireNodeNames = true
	c.Keyring = g.ring
	c.EnableCompression = false // records hardly shrink
	c.UDPBufferSize = g.cfg.PacketBytes - uncounted
	c.TCPTimeout = streamTimeout
	c.RetransmitMult = memberMult
	c.ProbeInterval, c.ProbeTimeout = probeInterval, probeTimeout
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = suspicionMult, suspicionMaxMult
	c.AwarenessMaxMultiplier = awarenessMax
	// A probe without an answer is followed by a stream where that may do better: packets by a relay are in a stream
	// already. A stream by a relay is three handshakes, and on hosts that answer late one for each late answer was most
	// of what made them late.
	c.DisableTcpPingsForNode = func(name string) bool {
		id, err := parseID(name)
		return err != nil || g.late() > lateForStreams || g.cfg.Lossy != nil && !g.cfg.Lossy(id)
	}
	c.GossipInterval, c.GossipNodes = gossipInterval, gossipNodes
	c.GossipToTheDeadTime = gossipToTheDead
	c.PushPullInterval = pushPullInterval
	c.HandoffQueueDepth = handoffQueue
	c.Delegate, c.Events, c.Alive, c.Merge, c.Ping = (*delegate)(g), (*delegate)(g), (*delegate)(g), (*delegate)(g), (*delegate)(g)
	c.LogOutput, c.Logger = nil, memberlistLogger(g.log)
	return c
}

// delegate is what memberlist calls. Some calls come under its locks: none blocks or calls back.
type delegate Gossip

func (d *delegate) NodeMeta(int) []byte {
	// Publish holds no lock that memberlist could wait for, so taking this one is safe.
	d.own.mu.Lock()
	epoch, large := d.own.epoch, d.own.large
	d.own.mu.Unlock()
	if r, ok := d.table.get(d.cfg.Self); ok {
		return encodeMeta(r.mark, large)
	}
	return encodeMeta(mark{ID: d.cfg.Self, Epoch: epoch}, false)
}

// NotifyMsg gets a broadcast.
func (d *delegate) NotifyMsg(b []byte) {
	if len(b) > 0 && b[0] == askRecords {
		d.hand(arrival{askRecords, append([]byte(nil), b...)})
		return
	}
	m, signed, err := decodeBroadcast(b)
	if err != nil {
		d.stats.add(&d.stats.BadFrames)
		return
	}
	if len(signed) > MaxRecordBytes {
		d.stats.refused(&RefusedError{Node: m.ID, Reason: ErrTooLarge})
		return
	}
	switch d.table.check(m) {
	case outcomeSame:
		d.stats.add(&d.stats.Duplicates)
		return
	case outcomeOld:
		d.stats.add(&d.stats.Old)
		return
	}
	if !d.roster.member(m.ID) {
		d.stats.refused(&RefusedError{Node: m.ID, Reason: ErrUnknownNode})
		return
	}
	d.hand(arrival{b[0], append([]byte(nil), signed...)})
}

func (d *delegate) hand(a arrival) {
	select {
	case d.inbox <- a:
	default:
		d.stats.add(&d.stats.Overflow)
	}
}

func (d *delegate) GetBroadcasts(overhead, limit int) [][]byte {
	d.pace.Load().told()
	return d.queue.GetBroadcasts(overhead, limit)
}

// LocalState goes along with memberlist's own push/pull.
func (d *delegate) LocalState(bool) []byte {
	b, err := proto.Marshal(encodeDigests(d.cfg.Self, d.table.digest()))
	if err != nil {
		d.log.Error("cannot encode digests", "err", err)
		return nil
	}
	return b
}

func (d *delegate) MergeRemoteState(b []byte, _ bool) {
	if len(b) > maxDigestBytes {
		d.stats.add(&d.stats.BadFrames)
		return
	}
	select {
	case d.digests <- append([]byte(nil), b...):
	default:
		d.stats.add(&d.stats.Overflow)
	}
}

// NotifyAlive sees every alive message, under memberlist's lock.
func (d *delegate) NotifyAlive(n *memberlist.Node) error {
	id, err := parseID(n.Name)
	if err != nil {
		return err
	}
	d.pace.Load().news() // memberlist passes it on
	if id == d.cfg.Self {
		return nil
	}
	if !d.roster.member(id) {
		d.stats.add(&d.stats.Strangers)
		return errNotMember
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
		return nil // has published nothing in this run
	}
	delay := metaGrace
	if large {
		delay = min(maxLargeSpread, largeSpread*time.Duration(1+d.alive.count()))
	}
	d.pull.need(m, id, large, jitter(delay))
	return nil
}

// NotifyMerge refuses to merge with a mesh in which no live node is a member of ours.
func (d *delegate) NotifyMerge(peers []*memberlist.Node) error {
	for _, p := range peers {
		if id, err := parseID(p.Name); err == nil && p.State == memberlist.StateAlive && d.roster.member(id) {
			return nil
		}
	}
	d.stats.add(&d.stats.Strangers)
	return errNotMember
}

func (d *delegate) NotifyJoin(n *memberlist.Node) { d.seen(n) }

// seen notes that a member is alive, and in which run.
func (d *delegate) seen(n *memberlist.Node) {
	id, err := parseID(n.Name)
	if err != nil || id == d.cfg.Self {
		return
	}
	epoch := uint64(0)
	if m, _, err := decodeMeta(n.Meta); err == nil && m.ID == id {
		epoch = m.Epoch
	}
	if d.alive.set(id, epoch) {
		signal(d.changed)
	}
}

func (d *delegate) NotifyLeave(n *memberlist.Node) {
	d.pace.Load().news()
	if id, err := parseID(n.Name); err == nil && d.alive.remove(id) {
		signal(d.changed)
		d.rejoin.wakeUp()
	}
}

func (d *delegate) NotifyUpdate(n *memberlist.Node) { d.seen(n) }

// AckPayload is the hash of our records: whoever probes us learns whether it holds the same.
func (d *delegate) AckPayload() []byte {
	h := d.table.hash()
	return h[:hashPayload]
}

func (d *delegate) NotifyPingComplete(n *memberlist.Node, _ time.Duration, payload []byte) {
	id, err := parseID(n.Name)
	if err != nil || len(payload) != hashPayload || !d.roster.member(id) {
		return
	}
	d.pull.compare(id, [hashPayload]byte(payload))
}

// announce makes memberlist spread our new (epoch, seq).
func (g *Gossip) announce() {
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-g.renewed:
		}
		g.pace.Load().news()
		// It waits for the broadcast to have gone out, or for the timeout; there is nothing to wait for.
		if err := g.ml.UpdateNode(time.Millisecond); err != nil {
			g.log.Debug("own number is still being announced", "err", err)
		}
		select {
		case <-g.ctx.Done():
			return
		case <-time.After(max(metaSpacing, min(metaPerMember*time.Duration(g.alive.count()), metaSpacingMost))):
		}
	}
}

// mergeDigests pulls what a push/pull showed us to lack. The other end does the same.
func (g *Gossip) mergeDigests() {
	for {
		select {
		case <-g.ctx.Done():
			return
		case b := <-g.digests:
			from, theirs, err := decodeDigests(b)
			if err != nil {
				g.stats.add(&g.stats.BadFrames)
				continue
			}
			for _, m := range theirs {
				if g.roster.member(m.ID) {
					g.pull.need(m, from, false, 0)
				}
			}
		}
	}
}

// aliveSet is whom memberlist sees alive, without the node itself, and the epoch of the run in which it does. An epoch
// is what the newest accepted alive message says, and not the highest ever heard: so one that somebody has forged ends
// as the member refutes it.
type aliveSet struct {
	mu sync.RWMutex
	m  map[identity.ID]uint64
}

func (a *aliveSet) set(id identity.ID, epoch uint64) (changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	old, was := a.m[id]
	if a.m == nil {
		a.m = make(map[identity.ID]uint64)
	}
	a.m[id] = epoch
	return !was || old != epoch
}

func (a *aliveSet) remove(id identity.ID) (was bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, was = a.m[id]
	delete(a.m, id)
	return was
}

// epoch is that of a member's run; 0: it is not alive, or does not say.
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

func (a *aliveSet) count() int {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return len(a.m)
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
	for id := range a.m {
		if !kept(id) {
			delete(a.m, id)
		}
	}
}

// memberlistLogger passes memberlist's lines on: complaints as warnings at a bounded rate, the rest
// only to those who debug.
func memberlistLogger(l *slog.Logger) *log.Logger {
	if !l.Enabled(context.Background(), slog.LevelWarn) {
		return log.New(io.Discard, "", 0) // which does not even format
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
		w.log.Warn("memberlist complains", "text", text)
	} else if w.log.Enabled(context.Background(), slog.LevelDebug) {
		w.log.Debug("memberlist says", "text", line)
	}
	return len(b), nil
}

// joinName is how memberlist wants a node named that it does not know yet.
func joinName(id identity.ID) string {
	return fmt.Sprintf("%s/%s", id, syntheticAddr(id))
}
