package gossip

import (
	"errors"
	"reflect"
	"sync"
	"time"
	"unsafe"

	"github.com/hashicorp/memberlist"

	"github.com/skeinmesh/skein/internal/lag"
)

const (
	gossipFirst = 20 * time.Millisecond // from the first news after a silence until it is sent
	gossipRest  = 5 * time.Second       // between two ticks while there is no news
	quietAfter  = time.Second           // between two checks whether all news has been sent
	gossipMost  = 6 * gossipInterval    // between two rounds of gossip on a host that is late
)

// pacer slows memberlist's gossip ticker while there is nothing to send. The library ticks ten times a second for ever,
// which would be most of what wakes an idle agent.
//
// The ticker and the queue of membership news are private fields of the library; pace_test.go fails when a new version
// has them elsewhere. A nil pacer leaves the ticker as it is.
type pacer struct {
	ticker *time.Ticker
	queues [2]*memberlist.TransmitLimitedQueue // memberlist's and ours
	lag    *lag.Meter

	mu    sync.Mutex
	quick bool          // the ticker runs at every
	first bool          // the ticker's first tick comes sooner
	every time.Duration // between its ticks while it runs
	heard bool          // memberlist has collected messages since the last check, so another node is alive
	look  *time.Timer
	ended bool
}

// newPacer makes a pacer for a memberlist that was just created, and for the queue of records.
func newPacer(ml *memberlist.Memberlist, records *memberlist.TransmitLimitedQueue, late *lag.Meter) (*pacer, error) {
	fields := reflect.ValueOf(ml).Elem()
	tickers, queue := fields.FieldByName("tickers"), fields.FieldByName("broadcasts")
	if !tickers.IsValid() || tickers.Type() != reflect.TypeFor[[]*time.Ticker]() || tickers.Len() != 2 ||
		!queue.IsValid() || queue.Type() != reflect.TypeFor[*memberlist.TransmitLimitedQueue]() {
		return nil, errors.New("this version of memberlist keeps its tickers elsewhere")
	}
	p := &pacer{
		ticker: *(**time.Ticker)(unsafe.Pointer(tickers.Index(1).UnsafeAddr())), // the first one is for probes
		queues: [2]*memberlist.TransmitLimitedQueue{(*memberlist.TransmitLimitedQueue)(queue.UnsafePointer()), records},
		lag:    late, quick: true, every: gossipInterval,
	}
	p.look = time.AfterFunc(quietAfter, p.rest)
	return p, nil
}

// news makes the ticker send soon what is queued.
func (p *pacer) news() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.quick || p.ended {
		return
	}
	p.quick, p.first = true, true
	p.ticker.Reset(gossipFirst)
	p.look.Reset(quietAfter)
}

// collected notes that memberlist has collected queued messages, for a round of gossip or to go along with a probe.
func (p *pacer) collected() {
	if p == nil {
		return
	}
	p.mu.Lock()
	every := gossipEvery(p.lag.Level(time.Now()))
	if p.quick && !p.ended && (p.first || every != p.every) {
		p.every = every
		p.ticker.Reset(every)
	}
	p.first, p.heard = false, true
	p.mu.Unlock()
	if p.queues[0].NumQueued() > 0 { // a suspicion, for which there is no event
		p.news()
	}
}

// gossipEvery returns the time between two rounds of gossip. The later this process wakes, the fewer packets it sends,
// and the more each carries: every packet costs the sender, a relay and the receiver processor time.
func gossipEvery(late time.Duration) time.Duration { return min(gossipInterval+2*late, gossipMost) }

// rest slows the ticker when everything has been sent, or no other node is alive: a node that comes is news.
func (p *pacer) rest() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	heard := p.heard
	p.heard = false
	if heard && p.queues[0].NumQueued()+p.queues[1].NumQueued() > 0 {
		p.look.Reset(quietAfter + 2*(p.every-gossipInterval))
		return
	}
	p.quick, p.first = false, false
	p.ticker.Reset(gossipRest)
}

// end leaves the ticker to memberlist, which stops it.
func (p *pacer) end() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.look.Stop()
}
