package gossip

import (
	"context"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	maxPulls    = 4 // streams that this node opens at once
	pullTimeout = 10 * time.Second
	dialTimeout = 3 * time.Second
	dialPerLate = 4 // factor on how late this process wakes, which is added
	// manySources is the number of owners beyond which one exchange of digests with a single peer replaces asking each.
	manySources = 8
	maxTries    = 6 // of one wanted record; later, anti-entropy finds it again
	// packetAnswer is how long to wait for the answer to the first packet; it doubles with each further try.
	packetAnswer = 500 * time.Millisecond
	retryFirst   = 250 * time.Millisecond
	retryMost    = 4 * time.Second
	// settle is how long after a change of this node's records a different hash means nothing yet.
	settle = 400 * time.Millisecond
	// maxUnsettled is how many different hashes in a row are ignored for that reason, and one more for each
	// unsettledMembers members: in a large mesh some change is on its way most of the time.
	maxUnsettled     = 3
	unsettledMembers = 4
	// syncsSpacing is the time, for each member, between two exchanges of digests that a growing roster starts. Otherwise
	// each node would start an exchange for each node that joins, while a mesh comes up.
	syncsSpacing = 25 * time.Millisecond
	// fruitlessPause is how long a difference is ignored that an exchange could not repair, because the rosters differ.
	fruitlessPause = 15 * time.Second
)

// tableKey is a node and a table, as a key of what is kept for both.
type tableKey struct {
	table tableKind
	id    identity.ID
}

type want struct {
	mark   mark
	large  bool        // too large for a packet
	source identity.ID // the node to ask
	at     time.Time
	tries  int
	busy   bool
}

// difference holds two hashes that an exchange did not make equal.
type difference struct {
	ours, theirs [hashPayload]byte
	at           time.Time
}

// puller fetches the records that this node lacks: each once, over few streams at a time.
type puller struct {
	ctx  context.Context
	x    *exchange
	dial func(context.Context, identity.ID) (net.Conn, error)
	// patience is how long a dial may take.
	patience func() time.Duration
	packet   func(identity.ID, []byte)
	others   func(tableKind) []identity.ID // live nodes that hold the table
	late     func() time.Duration
	stats    *stats
	wake     chan struct{}
	wg       sync.WaitGroup

	mu        sync.Mutex
	wants     map[tableKey]*want
	syncs     map[tableKey][hashPayload]byte // due exchanges, by peer, with the hash that the peer showed
	syncing   map[tableKey]bool
	fruitless map[tableKey]difference
	running   int
	next      time.Time // when run wakes by itself
	lastPut   time.Time
	unsettled [2]int
	random    time.Time // when to exchange digests with a random peer; zero: not needed
}

func newPuller(g *Gossip) *puller {
	return &puller{
		ctx: g.ctx, x: g.exchange(), dial: g.dial, patience: g.patience, packet: g.sendTo, others: g.alivePeers,
		late: g.late, stats: &g.stats, wake: make(chan struct{}, 1),
		wants: make(map[tableKey]*want), syncs: make(map[tableKey][hashPayload]byte),
		syncing: make(map[tableKey]bool), fruitless: make(map[tableKey]difference),
	}
}

// need notes that a newer version exists. It is requested after delay, and later on a host that handles packets late,
// unless it has arrived by then. large says that it fits no packet.
func (p *puller) need(t tableKind, m mark, source identity.ID, large bool, delay time.Duration) {
	if !p.x.wanted(t, m) {
		return
	}
	at := time.Now().Add(delay + 4*p.late())
	p.mu.Lock()
	defer p.mu.Unlock()
	w, ok := p.wants[tableKey{t, m.ID}]
	switch {
	case !ok:
		p.wants[tableKey{t, m.ID}] = &want{mark: m, large: large, source: source, at: at}
	case m.newer(w.mark):
		w.mark, w.large, w.source, w.tries = m, large, source, 0
		if at.Before(w.at) {
			w.at = at
		}
	default:
		return
	}
	if at.Before(p.next) {
		signal(p.wake)
	}
}

// changed notes that this node's records have just changed.
func (p *puller) changed() {
	p.mu.Lock()
	p.lastPut = time.Now()
	p.mu.Unlock()
}

// compare starts an exchange of digests with a peer whose hash differs from this node's, unless the difference is
// probably on its way already.
func (p *puller) compare(t tableKind, peer identity.ID, theirs [hashPayload]byte) {
	h := p.x.tables[t].hash()
	ours := [hashPayload]byte(h[:])
	key := tableKey{t, peer}
	p.mu.Lock()
	defer p.mu.Unlock()
	if ours == theirs {
		delete(p.fruitless, key)
		p.unsettled[t] = 0
		return
	}
	most := maxUnsettled + len(p.x.tables[t].digest())/unsettledMembers
	if time.Since(p.lastPut) < settle+4*p.late() && p.unsettled[t] < most {
		p.unsettled[t]++
		return
	}
	p.unsettled[t] = 0
	if f, ok := p.fruitless[key]; ok && f.ours == ours && f.theirs == theirs && time.Since(f.at) < fruitlessPause {
		return
	}
	p.syncs[key] = theirs
	signal(p.wake)
}

// syncSoon exchanges digests with a node that may be in no pool of this node.
func (p *puller) syncSoon(t tableKind, peer identity.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.syncs[tableKey{t, peer}] = [hashPayload]byte{}
	signal(p.wake)
}

// syncRandom exchanges digests with a random live peer soon.
func (p *puller) syncRandom() {
	wait := jitter(syncsSpacing*time.Duration(len(p.others(meshTable)))) + 4*p.late()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.random.IsZero() {
		p.random = time.Now().Add(wait)
		signal(p.wake)
	}
}

// pick returns a random live peer that holds the table, other than not if there is one.
func (p *puller) pick(t tableKind, not identity.ID) (identity.ID, bool) {
	ids := p.others(t)
	if len(ids) == 0 {
		return identity.ID{}, false
	}
	i := rand.IntN(len(ids))
	if ids[i] == not {
		i = (i + 1) % len(ids)
	}
	return ids[i], true
}

func (p *puller) run() {
	defer p.wg.Wait()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		next, asks := p.dispatch(time.Now())
		for _, a := range asks { // without the lock: memberlist waits for it while it holds a lock that sending needs
			p.stats.add(&p.stats.Asked)
			p.packet(a.source, encodeAsk(p.x.self, a.marks))
		}
		timer.Reset(next)
		select {
		case <-p.ctx.Done():
			return
		case <-p.wake:
		case <-timer.C:
		}
	}
}

// asked is a packet to send: the records to ask for, and the node to ask.
type asked struct {
	source identity.ID
	marks  []mark
}

// dispatch starts what is due. It returns how long until something else is due, and the requests to send by packets.
func (p *puller) dispatch(now time.Time) (next time.Duration, asks []asked) {
	p.mu.Lock()
	defer p.mu.Unlock()
	next = time.Minute
	defer func() { p.next = now.Add(next) }()
	if !p.random.IsZero() && !p.random.After(now) {
		p.random = time.Time{}
		for _, t := range []tableKind{meshTable, siteTable} {
			if peer, ok := p.pick(t, identity.ID{}); ok {
				p.syncs[tableKey{t, peer}] = [hashPayload]byte{}
			}
		}
	} else if !p.random.IsZero() {
		next = min(next, p.random.Sub(now))
	}
	due, byPacket := make(map[tableKey][]mark), make(map[identity.ID][]mark)
	for key, w := range p.wants {
		switch {
		case w.busy:
		case !p.x.wanted(key.table, w.mark):
			delete(p.wants, key)
		case w.at.After(now):
			next = min(next, w.at.Sub(now))
		case !w.large && w.tries >= maxTries:
			delete(p.wants, key)
		case !w.large: // a stream costs several handshakes
			byPacket[w.source] = append(byPacket[w.source], w.mark)
			wait := jitter(min(retryMost, packetAnswer<<w.tries)) + 4*p.late()
			w.tries++
			if other, ok := p.pick(key.table, w.source); ok {
				w.source = other // for the next try
			}
			w.at = now.Add(wait)
			next = min(next, wait)
		default:
			from := tableKey{key.table, w.source}
			due[from] = append(due[from], w.mark)
		}
	}
	for source, marks := range byPacket {
		for some := range slices.Chunk(marks, maxAsked) {
			asks = append(asks, asked{source, some})
		}
	}
	if len(due) > manySources {
		p.compareInstead(due, now)
		due, next = nil, min(next, retryMost/2)
	}
	for source, marks := range due {
		if p.running >= maxPulls {
			return next, asks // finished fetches wake run
		}
		for _, m := range marks {
			p.wants[tableKey{source.table, m.ID}].busy = true
		}
		p.running++
		p.wg.Go(func() { p.fetch(source, marks) })
	}
	for peer, theirs := range p.syncs {
		if p.running >= maxPulls {
			break
		}
		delete(p.syncs, peer)
		if p.syncing[peer] {
			continue
		}
		p.syncing[peer] = true
		p.running++
		p.wg.Go(func() { p.sync(peer, theirs) })
	}
	return next, asks
}

// compareInstead asks one peer for everything instead of many peers for their own records. What that peer lacks too is
// requested as usual a little later.
func (p *puller) compareInstead(due map[tableKey][]mark, now time.Time) {
	chosen := map[tableKind]identity.ID{}
	for source, marks := range due {
		if _, ok := chosen[source.table]; !ok {
			if peer, ok := p.pick(source.table, identity.ID{}); ok {
				chosen[source.table] = peer
			} else {
				chosen[source.table] = source.id
			}
		}
		for _, m := range marks {
			p.wants[tableKey{source.table, m.ID}].at = now.Add(jitter(retryMost))
		}
	}
	for t, peer := range chosen {
		p.syncs[tableKey{t, peer}] = [hashPayload]byte{}
	}
}

// open dials a peer for a stream of the record protocol; the caller must call the returned function to close it.
func (p *puller) open(ctx context.Context, peer identity.ID) (net.Conn, func(), error) {
	dialing, cancel := context.WithTimeout(ctx, p.patience())
	conn, err := p.dial(dialing, peer)
	cancel()
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(pullTimeout))
	return conn, func() { stop(); _ = conn.Close() }, nil
}

func (p *puller) stream(ctx context.Context, peer identity.ID, t tableKind, marks []mark) (int, error) {
	conn, done, err := p.open(ctx, peer)
	if err != nil {
		return 0, err
	}
	defer done()
	return p.x.ask(conn, t, marks)
}

func (p *puller) fetch(source tableKey, marks []mark) {
	p.stats.add(&p.stats.Pulls)
	_, err := p.stream(p.ctx, source.id, source.table, marks)
	if err != nil {
		p.stats.add(&p.stats.PullErrors)
	}
	other, ok := p.pick(source.table, source.id)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running--
	for _, m := range marks {
		key := tableKey{source.table, m.ID}
		w := p.wants[key]
		w.busy = false
		w.tries++
		if !p.x.wanted(source.table, w.mark) || w.tries >= maxTries {
			delete(p.wants, key)
			continue
		}
		if ok {
			w.source = other
		}
		w.at = time.Now().Add(jitter(min(retryMost, retryFirst<<(w.tries-1))))
	}
	signal(p.wake)
}

func (p *puller) sync(peer tableKey, theirs [hashPayload]byte) {
	p.stats.add(&p.stats.Syncs)
	changed, err := p.stream(p.ctx, peer.id, peer.table, nil)
	if err != nil {
		p.stats.add(&p.stats.PullErrors)
	}
	h := p.x.tables[peer.table].hash()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running--
	delete(p.syncing, peer)
	if err == nil && changed == 0 {
		p.fruitless[peer] = difference{[hashPayload]byte(h[:]), theirs, time.Now()}
	} else {
		delete(p.fruitless, peer)
	}
	for key := range p.fruitless {
		if !p.x.member(key.id) {
			delete(p.fruitless, key)
		}
	}
	signal(p.wake)
}

// serve answers a peer that pulls records or compares digests.
func (g *Gossip) serve(conn net.Conn, peer identity.ID) {
	defer conn.Close()
	defer context.AfterFunc(g.ctx, func() { _ = conn.Close() })()
	_ = conn.SetDeadline(time.Now().Add(pullTimeout))
	if err := g.exchange().answer(conn, peer); err != nil && g.ctx.Err() == nil {
		g.stats.add(&g.stats.BadFrames)
		g.log.Debug("record stream ended early", "peer", peer, "error", err)
	}
}
