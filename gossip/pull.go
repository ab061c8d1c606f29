package gossip

import (
	"context"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	maxPulls    = 4 // streams we open at once
	pullTimeout = 10 * time.Second
	dialTimeout = 3 * time.Second
	// manySources is when asking each owner for its record gives way to comparing everything with one.
	manySources = 8
	maxTries    = 6 // of one wanted record; later, anti-entropy finds it again
	retryFirst  = 250 * time.Millisecond
	retryMost   = 4 * time.Second
	// settle is how long after a change of our own records a differing hash says nothing yet.
	settle = 400 * time.Millisecond
	// maxUnsettled is how many differing hashes in a row are passed over for that reason.
	maxUnsettled = 3
	// fruitlessPause is how long a difference that an exchange could not mend is left alone: the
	// rosters differ.
	fruitlessPause = 15 * time.Second
)

type want struct {
	mark   mark
	source identity.ID // whom to ask
	at     time.Time
	tries  int
	busy   bool
}

// difference is two hashes that an exchange did not make equal.
type difference struct {
	ours, theirs [hashPayload]byte
	at           time.Time
}

// puller fetches records that this node knows to lack: each once, few streams at a time.
type puller struct {
	ctx    context.Context
	x      *exchange
	dial   func(context.Context, identity.ID) (net.Conn, error)
	others func() []identity.ID
	stats  *stats
	wake   chan struct{}
	wg     sync.WaitGroup

	mu        sync.Mutex
	wants     map[identity.ID]*want
	syncs     map[identity.ID][hashPayload]byte // asked for, by peer, with the hash it showed
	syncing   map[identity.ID]bool
	fruitless map[identity.ID]difference
	running   int
	next      time.Time // when run looks again by itself
	lastPut   time.Time
	unsettled int
}

func newPuller(ctx context.Context, x *exchange, dial func(context.Context, identity.ID) (net.Conn, error), others func() []identity.ID, s *stats) *puller {
	return &puller{
		ctx: ctx, x: x, dial: dial, others: others, stats: s, wake: make(chan struct{}, 1),
		wants: make(map[identity.ID]*want), syncs: make(map[identity.ID][hashPayload]byte),
		syncing: make(map[identity.ID]bool), fruitless: make(map[identity.ID]difference),
	}
}

// need notes that a newer version exists; it is asked for after delay unless it has come by then.
func (p *puller) need(m mark, source identity.ID, delay time.Duration) {
	if !p.wanted(m) {
		return
	}
	at := time.Now().Add(delay)
	p.mu.Lock()
	defer p.mu.Unlock()
	w, ok := p.wants[m.ID]
	switch {
	case !ok:
		p.wants[m.ID] = &want{mark: m, source: source, at: at}
	case m.newer(w.mark):
		w.mark, w.source, w.tries = m, source, 0
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

func (p *puller) wanted(m mark) bool {
	if m.Epoch > maxNumber || m.Seq > maxNumber || !p.x.member(m.ID) {
		return false
	}
	o := p.x.table.check(m)
	return o == outcomeNew || o == outcomeTaken
}

// changed notes that our own records changed just now.
func (p *puller) changed() {
	p.mu.Lock()
	p.lastPut = time.Now()
	p.mu.Unlock()
}

// compare starts an exchange of digests with a peer whose hash differs from ours, unless the
// difference is likely to be one that is on its way anyhow.
func (p *puller) compare(peer identity.ID, theirs [hashPayload]byte) {
	h := p.x.table.hash()
	ours := [hashPayload]byte(h[:])
	p.mu.Lock()
	defer p.mu.Unlock()
	if ours == theirs {
		delete(p.fruitless, peer)
		p.unsettled = 0
		return
	}
	if time.Since(p.lastPut) < settle && p.unsettled < maxUnsettled {
		p.unsettled++
		return
	}
	p.unsettled = 0
	if f, ok := p.fruitless[peer]; ok && f.ours == ours && f.theirs == theirs && time.Since(f.at) < fruitlessPause {
		return
	}
	p.syncs[peer] = theirs
	signal(p.wake)
}

// syncRandom exchanges digests with some live peer.
func (p *puller) syncRandom() {
	if peer, ok := p.pick(identity.ID{}); ok {
		p.mu.Lock()
		p.syncs[peer] = [hashPayload]byte{}
		p.mu.Unlock()
		signal(p.wake)
	}
}

// pick chooses a random live peer, another than not if there is one.
func (p *puller) pick(not identity.ID) (identity.ID, bool) {
	ids := p.others()
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
		timer.Reset(p.dispatch(time.Now()))
		select {
		case <-p.ctx.Done():
			return
		case <-p.wake:
		case <-timer.C:
		}
	}
}

// dispatch starts what is due and returns how long nothing else will be.
func (p *puller) dispatch(now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := time.Minute
	defer func() { p.next = now.Add(next) }()
	due := make(map[identity.ID][]mark)
	for id, w := range p.wants {
		switch {
		case w.busy:
		case !p.wanted(w.mark):
			delete(p.wants, id)
		case w.at.After(now):
			next = min(next, w.at.Sub(now))
		default:
			due[w.source] = append(due[w.source], w.mark)
		}
	}
	if len(due) > manySources {
		p.compareInstead(due, now)
		due, next = nil, min(next, retryMost/2)
	}
	for source, marks := range due {
		if p.running >= maxPulls {
			return next // finished wakes us
		}
		for _, m := range marks {
			p.wants[m.ID].busy = true
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
	return next
}

// compareInstead asks one peer for everything instead of many for their own; what it lacks too is
// asked for as usual a little later.
func (p *puller) compareInstead(due map[identity.ID][]mark, now time.Time) {
	peer, ok := p.pick(identity.ID{})
	for source, marks := range due {
		if !ok {
			peer, ok = source, true
		}
		for _, m := range marks {
			p.wants[m.ID].at = now.Add(jitter(retryMost))
		}
	}
	p.syncs[peer] = [hashPayload]byte{}
}

func (p *puller) stream(peer identity.ID, marks []mark) (int, error) {
	ctx, cancel := context.WithTimeout(p.ctx, dialTimeout)
	conn, err := p.dial(ctx, peer)
	cancel()
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	defer context.AfterFunc(p.ctx, func() { _ = conn.Close() })()
	_ = conn.SetDeadline(time.Now().Add(pullTimeout))
	return p.x.ask(conn, marks)
}

func (p *puller) fetch(source identity.ID, marks []mark) {
	p.stats.add(&p.stats.Pulls)
	_, err := p.stream(source, marks)
	if err != nil {
		p.stats.add(&p.stats.PullErrors)
	}
	other, ok := p.pick(source)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running--
	for _, m := range marks {
		w := p.wants[m.ID]
		w.busy = false
		w.tries++
		if !p.wanted(w.mark) || w.tries >= maxTries {
			delete(p.wants, m.ID)
			continue
		}
		if ok {
			w.source = other
		}
		w.at = time.Now().Add(jitter(min(retryMost, retryFirst<<(w.tries-1))))
	}
	signal(p.wake)
}

func (p *puller) sync(peer identity.ID, theirs [hashPayload]byte) {
	p.stats.add(&p.stats.Syncs)
	changed, err := p.stream(peer, nil)
	if err != nil {
		p.stats.add(&p.stats.PullErrors)
	}
	h := p.x.table.hash()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running--
	delete(p.syncing, peer)
	if err == nil && changed == 0 {
		p.fruitless[peer] = difference{[hashPayload]byte(h[:]), theirs, time.Now()}
	} else {
		delete(p.fruitless, peer)
	}
	for id := range p.fruitless {
		if !p.x.member(id) {
			delete(p.fruitless, id)
		}
	}
	signal(p.wake)
}

// serve answers a peer that pulls or compares.
func (g *Gossip) serve(conn net.Conn, peer identity.ID) {
	defer conn.Close()
	defer context.AfterFunc(g.ctx, func() { _ = conn.Close() })()
	_ = conn.SetDeadline(time.Now().Add(pullTimeout))
	if err := g.exchange().answer(conn); err != nil && g.ctx.Err() == nil {
		g.stats.add(&g.stats.BadFrames)
		g.log.Debug("record stream ended early", "peer", peer, "err", err)
	}
}
