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

// Kinds of user messages, their first byte.
const (
	broadcastRecord = 1 // a mark, an encoded SignedRecord: passed on by whom it is new to
	askRecords      = 2 // the asker's ID, marks: to be answered with answerRecord for each that is known as new as that
	answerRecord    = 3 // as broadcastRecord, and not passed on
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
	away       [][]byte        // whom this node calls away
	former     *skeinv1.Record // of a former run
	told       *skeinv1.Record // the newest one of a former run that is for everybody: others may hold it
	timer      *time.Timer     // a version will be made of last
	jumps      int             // in quick succession
	jumped     time.Time
}

const (
	// publishSpacing bounds how often a new version is made, however often Publish is called.
	publishSpacing = 100 * time.Millisecond
	// passOnPerSecond and passOnBurst bound how often a node's new versions are passed on: no honest node makes more, by
	// publishSpacing.
	passOnPerSecond = 12
	passOnBurst     = 30
	// jumpQuiet is how long no foreign record of ours must be seen for the next jump to be immediate.
	jumpQuiet   = time.Minute
	maxJumpWait = 30 * time.Second
	siteSuffix  = "@"
	// ownRoom is for what gossip adds to a record: the signature; epoch, seq and time as varints; the scope.
	ownRoom = ed25519.SignatureSize + 3*10 + 4
)

// Publish makes r this node's record: fills in node ID, epoch, seq, time, for whom it is and who is away, signs and
// broadcasts it. A record beyond the limits of Verify is refused and the former one stays. What only repeats the former
// one is no change; of changes in quick succession the last is what the others see.
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

// checkOwn is decodeRecord for a record that is still to be numbered and signed.
func checkOwn(r *skeinv1.Record) error {
	b, err := proto.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	_, _, err = decodeRecord(&skeinv1.SignedRecord{Record: b, Signature: make([]byte, ownRoom)})
	return err
}

// sameContent compares two records as Publish got them, but for the time.
func sameContent(a, b *skeinv1.Record) bool {
	if a.GetTime() != b.GetTime() {
		b = proto.CloneOf(b)
		b.Time = a.GetTime()
	}
	return proto.Equal(a, b)
}

// publishSoon makes a version of the last record given, after a wait unless one is under way.
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

// publishVersion signs r under the next number, takes it in and broadcasts it; false when it is too large for a packet.
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

// placeDue tells whether everybody has to be told where this node is, since its record is for its site alone: what they
// hold of it says something else, or the log implies another site.
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

// placeChanged publishes the own record again if the one that is held is not for those for whom it should be.
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

// newest is the newest record that is held of a node, in either table.
func (g *Gossip) newest(id identity.ID) (row, bool) {
	near, hasNear := g.local.get(id)
	far, hasFar := g.table.get(id)
	if hasNear && (!hasFar || near.mark.newer(far.mark)) {
		return near, true
	}
	return far, hasFar
}

// put merges one verified record into its table. A record for everybody puts an older one for the site out of the
// site's table, so that each node has one; the other way round does not hold, since then the nodes of one site would
// hold other records for everybody than those of another.
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

// check says what put would do.
func (g *Gossip) check(t tableKind, m mark) outcome {
	if t == meshTable {
		return g.table.check(m)
	}
	if far, ok := g.table.get(m.ID); ok && Wide(far.Record) && !m.newer(far.mark) {
		return outcomeOld
	}
	return g.local.check(m)
}

// concerns tells whether a record for one site alone is for this node: as long as there is no pool for a site any is.
func (g *Gossip) concerns(r *skeinv1.Record, m mark) bool {
	place := g.place.Load()
	if !place.Sited {
		return true
	}
	if far, ok := g.table.get(m.ID); ok && far.mark.newer(m) && far.Record.GetSite() != r.GetSite() {
		return false // it has moved
	}
	return r.GetSite() == place.Site
}

// straysOnce has strays dropped some time from now.
func (g *Gossip) straysOnce() {
	if g.strays.CompareAndSwap(false, true) {
		g.after(strayFor, func() { g.strays.Store(false); g.dropStrays() })
	}
}

// dropStrays forgets the records of nodes of other sites, some time after a change.
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
		return len(voices[r.Record.GetSite()]) > 0 // others keep it
	})
	g.putMu.Unlock()
	if n > 0 {
		g.touched()
	}
}

// foreignOwn deals with a record of this node that this run did not write: the state directory was
// restored, or two hosts share an identity. The next number is beyond the one seen; the current content
// is published again, at once the first time and slower and slower while it goes on.
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
		return // the next Publish will be beyond it
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

// broadcast queues a record for the others, in each pool that it is for; false when it is too large for a packet.
func (g *Gossip) broadcast(t tableKind, m mark, s *skeinv1.SignedRecord) bool {
	b, ok := g.message(broadcastRecord, m, s)
	if !ok {
		return false
	}
	name := m.ID.String()
	if t == siteTable {
		name += siteSuffix // one does not replace the other in the queue
	}
	for _, p := range g.pools() {
		if t == meshTable || p.near {
			p.queue.QueueBroadcast(&recordBroadcast{name: name, msg: b})
			p.pace.Load().news()
		}
	}
	return true
}

// message is a record as a user message; false when it is too large for a packet.
func (g *Gossip) message(kind byte, m mark, s *skeinv1.SignedRecord) ([]byte, bool) {
	size := 1 + markSize + proto.Size(s)
	if size > g.cfg.PacketBytes-packetReserve {
		return nil, false
	}
	b := m.append(append(make([]byte, 0, size), kind))
	b, err := proto.MarshalOptions{}.MarshalAppend(b, s)
	return b, err == nil
}

// decodeBroadcast reads a user message. The signed record is left encoded.
func decodeBroadcast(b []byte) (m mark, signed []byte, err error) {
	if len(b) < 1+markSize || b[0] != broadcastRecord && b[0] != answerRecord {
		return mark{}, nil, errFrame
	}
	return decodeMark(b[1:]), b[1+markSize:], nil
}

// recordBroadcast replaces an older one of the same node in the queue.
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

// accept merges one record from outside. fresh: it is now the one we hold.
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

// keepMembers forgets the records of who is no member any more.
func (g *Gossip) keepMembers() {
	g.table.keep(g.roster.member)
	g.local.keep(g.roster.member)
}

// noted sees to what a record for everybody means for the pools and for whom this node calls away.
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
			g.placeChanged() // what a former run said of it
		}
		g.awaySoon()
	}
}

// former notes what a former run of this node has told others.
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

// Former is the newest record of a former run of this node that is known, before the first Publish: from its disk,
// right after Start. It is nil if there is none.
func (g *Gossip) Former() *skeinv1.Record {
	g.own.mu.Lock()
	defer g.own.mu.Unlock()
	return g.own.former
}

// published tells whether this run has said anything of itself. Before, what a former one said is no record of this
// node: its addresses may be others by now. It is only counted on from.
func (g *Gossip) published() bool {
	g.own.mu.Lock()
	defer g.own.mu.Unlock()
	return g.own.last != nil
}

func (g *Gossip) refuse(err error) {
	g.stats.refused(err)
	g.log.Debug("refused a record", "error", err)
}

// take merges records that came over a stream; they are not broadcast again.
func (g *Gossip) take(records []*skeinv1.SignedRecord) int {
	n, _ := g.Merge(records)
	return n
}

// ingest verifies what packets brought, passes on what was broadcast and new, and answers questions.
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

// passOn paces how often new versions of one node's record are passed on, so that a node that makes them without end
// sends its flood alone. What is not passed on is held, and others fetch it. Only ingest uses it.
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

// load takes in the records of the last run; those of nodes that are no longer members stay out.
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
	// diskRate slows writing down for large files: a file of 64 KiB at most once a second.
	diskRate = 64 << 10
	// Writing takes a part in diskShare of the time: on a slow disk, or a host that is late, it takes long. Changes wait
	// diskSlowMax for it at most.
	diskShare   = 40
	diskSlowMax = 10 * time.Second
	// newSooner divides the spacing for nodes that the file does not name.
	newSooner = 10
)

// diskWait is how long changes wait for others behind a write of so many bytes that took so long.
func diskWait(bytes int, took time.Duration) time.Duration {
	return max(diskSpacing*time.Duration(1+bytes/diskRate), min(diskShare*took, diskSlowMax))
}

// keepOnDisk writes the records some time after they changed, and at the end. Nodes that the file does not name are
// written down soon: a node that is killed right after it joined would know none that it could turn to at its next
// start.
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
