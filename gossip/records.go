package gossip

import (
	"crypto/ed25519"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/time/rate"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Kinds of user messages: the first byte.
const (
	broadcastRecord = 1 // a mark, an encoded SignedRecord; a node to which it is new broadcasts it
	askRecords      = 2 // the asker's ID, marks; the answer is an answerRecord for each record that is at least as new
	answerRecord    = 3 // like broadcastRecord, but not broadcast again
)

// RoleRelay is the role, in its record, of a node that relays and does nothing else.
const RoleRelay = "relay"

// ownRecord is what this node says of itself.
type ownRecord struct {
	mu         sync.Mutex
	epoch, seq uint64          // last used
	last       *skeinv1.Record // as the user gave it
	large      bool
	at         time.Time       // of the newest version
	away       [][]byte        // nodes that this node reports as away
	former     *skeinv1.Record // newest record of a former run
	told       *skeinv1.Record // newest record of a former run for everybody: others may hold it
	timer      *time.Timer     // publishes last when it fires
	jumps      int             // foreign records of this node in quick succession; see foreignOwn
	jumped     time.Time
}

const (
	// publishSpacing is the least time between two versions, however often Publish is called.
	publishSpacing = 100 * time.Millisecond
	// passOnPerSecond and passOnBurst bound how often new versions of one node's record are passed on. No honest node
	// makes more, because of publishSpacing.
	passOnPerSecond = 12
	passOnBurst     = 30
	// jumpQuiet is how long no foreign record of this node must come until the next jump is immediate again.
	jumpQuiet   = time.Minute
	maxJumpWait = 30 * time.Second
	siteSuffix  = "@"
	// ownRoom is what gossip adds to a record, in bytes: the signature; epoch, seq and time as varints; the scope.
	ownRoom = ed25519.SignatureSize + 3*10 + 4
)

// Publish makes r this node's record: it fills in node ID, epoch, seq, time, scope and who is away, signs and
// broadcasts it. A record beyond the limits of Verify is refused, and the former one stays. A record that repeats the
// former one is not a change. Of changes in quick succession, the others see the last.
func (g *Gossip) Publish(r *skeinv1.Record) error {
	g.own.mu.Lock()
	defer g.own.mu.Unlock()
	r = proto.CloneOf(r)
	r.NodeId, r.Epoch, r.Seq, r.Scope, r.Away = g.cfg.Self.String(), 0, 0, 0, nil
	if err := checkOwn(r); err != nil {
		g.stats.refused(err)
		return fmt.Errorf("publish own record: %w", err)
	}
	if old := g.own.last; old != nil && sameContent(old, r) {
		return nil
	}
	if g.own.last.GetLeads() != r.GetLeads() {
		g.awaySoon()
	}
	g.own.last = r
	g.publishSoon(publishSpacing - time.Since(g.own.at))
	return nil
}

// checkOwn is decodeRecord for a record that has no number and no signature yet.
func checkOwn(r *skeinv1.Record) error {
	b, err := proto.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	_, _, err = decodeRecord(&skeinv1.SignedRecord{Record: b, Signature: make([]byte, ownRoom)})
	return err
}

// sameContent compares two records as Publish got them, except for the time.
func sameContent(a, b *skeinv1.Record) bool {
	if a.GetTime() != b.GetTime() {
		b = proto.CloneOf(b)
		b.Time = a.GetTime()
	}
	return proto.Equal(a, b)
}

// publishSoon publishes the last record after a wait, unless a wait is in progress already.
func (g *Gossip) publishSoon(wait time.Duration) {
	if wait <= 0 {
		g.publishNow()
		return
	}
	if g.own.timer != nil {
		return
	}
	g.own.timer = time.AfterFunc(wait, func() {
		g.own.mu.Lock()
		defer g.own.mu.Unlock()
		if g.own.timer != nil && g.ctx.Err() == nil {
			g.publishNow()
		}
	})
}

func (g *Gossip) publishNow() {
	if g.own.timer != nil {
		g.own.timer.Stop()
		g.own.timer = nil
	}
	place := g.place.Load()
	if g.placeDue(place) {
		g.publishVersion(&skeinv1.Record{NodeId: g.cfg.Self.String(), Site: place.Site,
			Scope: skeinv1.RecordScope_RECORD_SCOPE_PLACE})
	}
	r := proto.CloneOf(g.own.last)
	var site string
	if r.Scope, site = g.scope(place); r.Scope != skeinv1.RecordScope_RECORD_SCOPE_MESH {
		r.Site = site
	}
	if r.Scope == skeinv1.RecordScope_RECORD_SCOPE_BOTH {
		r.Away = g.own.away
		const each = 2 + len(identity.ID{})
		room := MaxRecordBytes - ownRoom - proto.Size(r) + each*len(r.Away)
		r.Away = r.Away[:max(0, min(len(r.Away), room/each))]
	}
	g.own.large = !g.publishVersion(r)
}

// publishVersion signs r under the next number, keeps it and broadcasts it; false: it is too large for a packet.
func (g *Gossip) publishVersion(r *skeinv1.Record) bool {
	r.Epoch, r.Seq = g.own.epoch, g.own.seq+1
	if r.GetTime() == 0 {
		r.Time = time.Now().UnixNano()
	}
	s, err := Sign(g.cfg.Key, r)
	if err != nil {
		g.log.Error("cannot publish the own record", "error", err)
		return true
	}
	g.own.seq++
	g.own.at = time.Now()
	m := markOf(g.cfg.Self, r, s)
	g.put(Entry{Record: r, Signed: s, ReceivedAt: g.own.at}, m)
	fits := g.broadcast(tableOf(r), m, s)
	g.stats.add(&g.stats.Published)
	for _, p := range g.pools() {
		signal(p.renewed)
	}
	g.pull.changed()
	g.touched()
	return fits
}

// placeDue reports whether this node must tell everybody where it is. That is so if its record is for its site alone,
// and others hold something else of it or the log implies another site.
func (g *Gossip) placeDue(place *Place) bool {
	if place.isWide() {
		return false
	}
	told := g.own.told
	if held, ok := g.table.get(g.cfg.Self); ok {
		told = held.Record
	}
	if told != nil {
		wide := g.wide.Load()
		return Wide(told) && (wide == nil || wide.leaving.Load()) || place.siteIn(told, g.cfg.Self) != place.Site
	}
	home, ok := place.home(g.cfg.Self)
	return !ok || home != place.Site
}

// placeChanged publishes this node's record again if the held one has the wrong scope or site.
func (g *Gossip) placeChanged() {
	g.own.mu.Lock()
	defer g.own.mu.Unlock()
	if g.own.last == nil {
		return
	}
	place := g.place.Load()
	held, ok := g.newest(g.cfg.Self)
	scope, site := g.scope(place)
	moved := scope != skeinv1.RecordScope_RECORD_SCOPE_MESH && held.Record.GetSite() != site
	if !ok || held.Record.GetScope() != scope || moved || g.placeDue(place) {
		g.publishSoon(publishSpacing - time.Since(g.own.at))
	}
}

// newest returns the newest record held of a node, in either table.
func (g *Gossip) newest(id identity.ID) (row, bool) {
	near, hasNear := g.local.get(id)
	far, hasFar := g.table.get(id)
	if hasNear && (!hasFar || near.mark.newer(far.mark)) {
		return near, true
	}
	return far, hasFar
}

// put merges one verified record into its table. A record for everybody removes an older one from the site's table, so
// that each node has one. A record for a site does not remove an older one for everybody: otherwise the nodes of one
// site would hold other records for everybody than those of another.
func (g *Gossip) put(e Entry, m mark) outcome {
	g.putMu.Lock()
	defer g.putMu.Unlock()
	if tableOf(e.Record) == siteTable {
		if far, ok := g.table.get(m.ID); ok && Wide(far.Record) && !m.newer(far.mark) {
			return outcomeOld
		}
		return g.local.put(e, m)
	}
	result := g.table.put(e, m)
	if (result == outcomeNew || result == outcomeTaken) && Wide(e.Record) {
		if near, ok := g.local.get(m.ID); ok && !near.mark.newer(m) {
			g.local.drop(func(id identity.ID, _ row) bool { return id == m.ID })
		}
	}
	return result
}

// check returns what put would return.
func (g *Gossip) check(t tableKind, m mark) outcome {
	if t == meshTable {
		return g.table.check(m)
	}
	if far, ok := g.table.get(m.ID); ok && Wide(far.Record) && !m.newer(far.mark) {
		return outcomeOld
	}
	return g.local.check(m)
}

// concerns reports whether a record for one site alone is for this node. Without a pool for a site, every record is.
func (g *Gossip) concerns(r *skeinv1.Record, m mark) bool {
	place := g.place.Load()
	if !place.Sited {
		return true
	}
	if far, ok := g.table.get(m.ID); ok && far.mark.newer(m) && far.Record.GetSite() != r.GetSite() {
		return false // the owner has moved
	}
	return r.GetSite() == place.Site
}

// straysOnce schedules dropStrays, once.
func (g *Gossip) straysOnce() {
	if g.strays.CompareAndSwap(false, true) {
		g.after(strayFor, func() { g.strays.Store(false); g.dropStrays() })
	}
}

// dropStrays forgets the records for other sites alone, some time after a change.
func (g *Gossip) dropStrays() {
	g.putMu.Lock()
	place := g.place.Load()
	voices := g.table.speaking()
	n := g.local.drop(func(id identity.ID, r row) bool {
		switch {
		case id == g.cfg.Self:
			return false
		case place.Sited:
			return !g.concerns(r.Record, r.mark)
		}
		return len(voices[r.Record.GetSite()]) > 0 // other nodes keep it
	})
	g.putMu.Unlock()
	if n > 0 {
		g.touched()
	}
}

// foreignOwn handles a record of this node that this run did not write: the state directory was restored, or two hosts
// share an identity. The next number is beyond the one seen, and the current content is published again: at once the
// first time, and after longer and longer waits while foreign records keep coming.
func (g *Gossip) foreignOwn(m mark) {
	g.own.mu.Lock()
	defer g.own.mu.Unlock()
	if m.Epoch < g.own.epoch || m.Epoch == g.own.epoch && m.Seq < g.own.seq {
		return
	}
	g.stats.add(&g.stats.Jumps)
	raised := m.Epoch > g.own.epoch
	g.own.epoch, g.own.seq = m.Epoch, m.Seq
	if raised && g.cfg.Dir != "" {
		if err := raiseEpoch(g.cfg.Dir, m.Epoch); err != nil {
			g.log.Error("cannot note the higher epoch", "error", err)
		}
	}
	if time.Since(g.own.jumped) > jumpQuiet {
		g.own.jumps = 0
	}
	g.own.jumps++
	g.own.jumped = time.Now()
	if g.own.jumps == 3 {
		g.log.Warn("records of this node keep coming from elsewhere: does another host use a copy of its state directory?",
			"node", g.cfg.Self)
	}
	if g.own.last == nil {
		return // the next Publish uses a higher number
	}
	if g.own.jumps == 1 {
		g.publishNow()
		return
	}
	g.publishSoon(min(maxJumpWait, time.Second<<min(g.own.jumps-2, 10)))
}

func markOf(id identity.ID, r *skeinv1.Record, s *skeinv1.SignedRecord) mark {
	return mark{ID: id, Epoch: r.GetEpoch(), Seq: r.GetSeq(), Sum: sumOf(s.GetRecord())}
}

// broadcast queues a record in each pool that it is for; false: it is too large for a packet.
func (g *Gossip) broadcast(t tableKind, m mark, s *skeinv1.SignedRecord) bool {
	b, ok := g.message(broadcastRecord, m, s)
	if !ok {
		return false
	}
	name := m.ID.String()
	if t == siteTable {
		name += siteSuffix // so that neither replaces the other in the queue
	}
	for _, p := range g.pools() {
		if t == meshTable || p.near {
			p.queue.QueueBroadcast(&recordBroadcast{name: name, msg: b})
			p.pace.Load().news()
		}
	}
	return true
}

// message encodes a record as a user message; false: it is too large for a packet.
func (g *Gossip) message(kind byte, m mark, s *skeinv1.SignedRecord) ([]byte, bool) {
	size := 1 + markSize + proto.Size(s)
	if size > g.cfg.PacketBytes-packetReserve {
		return nil, false
	}
	b := m.append(append(make([]byte, 0, size), kind))
	b, err := proto.MarshalOptions{}.MarshalAppend(b, s)
	return b, err == nil
}

// decodeBroadcast reads a user message. The signed record stays encoded.
func decodeBroadcast(b []byte) (m mark, signed []byte, err error) {
	if len(b) < 1+markSize || b[0] != broadcastRecord && b[0] != answerRecord {
		return mark{}, nil, errFrame
	}
	return decodeMark(b[1:]), b[1+markSize:], nil
}

// recordBroadcast replaces an older broadcast of the same node in the queue.
type recordBroadcast struct {
	name string
	msg  []byte
}

var _ memberlist.NamedBroadcast = (*recordBroadcast)(nil)

func (b *recordBroadcast) Name() string    { return b.name }
func (b *recordBroadcast) Message() []byte { return b.msg }
func (b *recordBroadcast) Finished()       {}
func (b *recordBroadcast) Invalidates(o memberlist.Broadcast) bool {
	r, ok := o.(*recordBroadcast)
	return ok && r.name == b.name
}

// accept merges one record from outside. fresh reports whether this node now holds it.
func (g *Gossip) accept(s *skeinv1.SignedRecord) (fresh bool, t tableKind, m mark, err error) {
	r, id, err := decodeRecord(s)
	if err != nil {
		g.refuse(err)
		return false, t, m, err
	}
	m = markOf(id, r, s)
	t = tableOf(r)
	if t == siteTable && !g.concerns(r, m) {
		g.stats.add(&g.stats.Elsewhere)
		return false, t, m, nil
	}
	switch g.check(t, m) {
	case outcomeSame:
		g.stats.add(&g.stats.Duplicates)
		return false, t, m, nil
	case outcomeOld:
		g.stats.add(&g.stats.Old)
		return false, t, m, nil
	}
	if err := g.cfg.verify(s, id, &g.roster); err != nil {
		g.refuse(err)
		return false, t, m, err
	}
	if id == g.cfg.Self && !g.published() {
		g.stats.add(&g.stats.Old)
		g.former(r)
		g.foreignOwn(m)
		return false, t, m, nil
	}
	e := Entry{Record: r, Signed: s, ReceivedAt: time.Now()}
	if g.cfg.share != nil {
		e = g.cfg.share(e)
	}
	result := g.put(e, m)
	if !g.roster.member(id) { // revoked between check and put
		g.keepMembers()
		return false, t, m, &RefusedError{Node: id, Reason: ErrUnknownNode}
	}
	switch result {
	case outcomeSame:
		g.stats.add(&g.stats.Duplicates)
	case outcomeOld:
		g.stats.add(&g.stats.Old)
	case outcomeTaken, outcomeKept:
		g.stats.add(&g.stats.Equivocations)
		g.log.Warn("a node signed two records with the same number", "node", id, "epoch", m.Epoch, "seq", m.Seq)
	}
	fresh = result == outcomeNew || result == outcomeTaken
	if fresh {
		g.stats.add(&g.stats.Accepted)
		g.pull.changed()
		g.touched()
	}
	if id == g.cfg.Self && result != outcomeSame && result != outcomeOld {
		g.foreignOwn(m)
	}
	if fresh {
		g.noted(r, id)
	}
	return fresh, t, m, nil
}

// keepMembers forgets the records of nodes that are no longer members.
func (g *Gossip) keepMembers() {
	g.table.keep(g.roster.member)
	g.local.keep(g.roster.member)
}

// noted draws the consequences of a new record for the pools, and for the list of away nodes.
func (g *Gossip) noted(r *skeinv1.Record, id identity.ID) {
	if r.GetScope() == skeinv1.RecordScope_RECORD_SCOPE_PLACE {
		if p := g.wide.Load(); p != nil {
			p.alive.forget(id)
		}
		g.straysOnce()
	}
	if !g.place.Load().Sited {
		return
	}
	if tableOf(r) == meshTable {
		if id == g.cfg.Self {
			g.placeChanged() // a former run's record for everybody may make a PLACE due
		}
		g.awaySoon()
	}
}

// former notes a record of a former run of this node, which others may hold.
func (g *Gossip) former(r *skeinv1.Record) {
	g.own.mu.Lock()
	defer g.own.mu.Unlock()
	if later(r, g.own.former) {
		g.own.former = r
	}
	if tableOf(r) == meshTable && later(r, g.own.told) {
		g.own.told = r
	}
}

// Former returns the newest known record of a former run of this node, before the first Publish: from disk, right after
// Start. It is nil if there is none.
func (g *Gossip) Former() *skeinv1.Record {
	g.own.mu.Lock()
	defer g.own.mu.Unlock()
	return g.own.former
}

// published reports whether this run has published a record. Before that, a former run's record does not count as this
// node's, since its addresses may have changed; only its number counts.
func (g *Gossip) published() bool {
	g.own.mu.Lock()
	defer g.own.mu.Unlock()
	return g.own.last != nil
}

func (g *Gossip) refuse(err error) {
	g.stats.refused(err)
	g.log.Debug("refused a record", "error", err)
}

// mergeStreamed merges records that came over a stream; they are not broadcast again.
func (g *Gossip) mergeStreamed(records []*skeinv1.SignedRecord) int {
	n, _ := g.Merge(records)
	return n
}

// ingest verifies records that came in packets, passes on broadcasts that are new, and answers requests.
func (g *Gossip) ingest() {
	var pace passOn
	answers := rate.NewLimiter(answersPerSecond, answersBurst)
	for {
		select {
		case <-g.ctx.Done():
			return
		case a := <-g.inbox:
			if a.kind == askRecords {
				g.answer(a, answers)
				continue
			}
			s := &skeinv1.SignedRecord{}
			if err := unmarshal.Unmarshal(a.data, s); err != nil {
				g.refuse(&RefusedError{Reason: ErrMalformed, Detail: err.Error()})
				continue
			}
			fresh, t, m, _ := g.accept(s)
			if fresh && a.kind == broadcastRecord && m.ID != g.cfg.Self && pace.allow(m.ID, time.Now()) {
				g.broadcast(t, m, s)
			}
		}
	}
}

// passOn limits how often new versions of one node's record are passed on: a node that makes versions without end must
// send its flood alone. A version that is not passed on is still kept, and others fetch it. Only ingest uses it.
type passOn map[identity.ID]*rate.Limiter

func (p *passOn) allow(id identity.ID, now time.Time) bool {
	if *p == nil {
		*p = passOn{}
	}
	l := (*p)[id]
	if l == nil {
		if len(*p) >= maxDigests {
			clear(*p)
		}
		l = rate.NewLimiter(passOnPerSecond, passOnBurst)
		(*p)[id] = l
	}
	return l.AllowN(now, 1)
}

// load merges the records of the last run; those of nodes that are no longer members are refused.
func (g *Gossip) load() error {
	if g.cfg.Dir == "" {
		return nil
	}
	records, err := loadRecords(g.cfg.Dir)
	if err != nil {
		return err
	}
	g.Merge(records)
	return nil
}

const (
	diskSpacing = time.Second
	// diskRate, in bytes a second, slows writing for large files: each 64 KiB add a second to diskSpacing.
	diskRate = 64 << 10
	// Writing takes at most one part in diskShare of the time, because it takes long on a slow disk or a late host.
	// Changes wait for that at most diskSlowMax.
	diskShare   = 40
	diskSlowMax = 10 * time.Second
	// newSooner divides the wait when there are records of nodes that the file does not contain.
	newSooner = 10
)

// diskWait returns how long changes wait for further ones, after a write of so many bytes that took so long.
func diskWait(bytes int, took time.Duration) time.Duration {
	return max(diskSpacing*time.Duration(1+bytes/diskRate), min(diskShare*took, diskSlowMax))
}

// keepOnDisk writes the records some time after they changed, and at the end. Nodes that are not in the file yet are
// written sooner: a node that is killed right after it joined would know nobody to contact at its next start.
func (g *Gossip) keepOnDisk() {
	written, named := [2][32]byte{}, 0
	spacing := diskSpacing
	write := func() {
		hash := [2][32]byte{g.table.hash(), g.local.hash()}
		if hash == written {
			return
		}
		records := append(g.table.signed(), g.local.signed()...)
		bytes := 0
		for _, s := range records {
			bytes += len(s.GetRecord())
		}
		began := time.Now()
		err := saveRecords(g.cfg.Dir, records)
		spacing = diskWait(bytes, time.Since(began))
		if err != nil {
			g.stats.add(&g.stats.DiskErrors)
			g.log.Error("cannot keep the records on disk", "error", err)
			return
		}
		g.stats.add(&g.stats.DiskWrites)
		written, named = hash, len(records)
	}
	defer write()
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-g.dirty:
		}
		due := time.Now().Add(spacing) // more changes will follow the first
		for wait := true; wait; {
			soon := time.Now().Add(spacing / newSooner)
			if g.table.count()+g.local.count() > named && soon.Before(due) {
				due = soon
			}
			select {
			case <-g.ctx.Done():
				return
			case <-g.dirty:
			case <-time.After(time.Until(due)):
				wait = false
			}
		}
		write()
	}
}
