// Package rpclimit bounds what members ask of this node by RPC, so that one that was broken into takes its own share
// and no more.
package rpclimit

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

// bound is what one member may ask of one procedure. Honest nodes stay far below: the numbers come from what a whole
// fleet that starts at once, or a burst of pods, asks of one node.
type bound struct {
	perSecond rate.Limit
	burst     int
	atOnce    int // of one member
	inAll     int // of all members; 0: no bound beside those
}

// bounds are the bounds of each procedure that other nodes can call.
var bounds = map[string]bound{
	skeinv1connect.ClusterServiceProposeProcedure:          {perSecond: 50, burst: 500, atOnce: 64},
	skeinv1connect.ClusterServiceSubscribeProcedure:        {perSecond: 2, burst: 60, atOnce: 8},
	skeinv1connect.ClusterServiceReadStateProcedure:        {perSecond: 1, burst: 20, atOnce: 2, inAll: 4},
	skeinv1connect.ClusterServiceReadEventsProcedure:       {perSecond: 20, burst: 200, atOnce: 4, inAll: 32},
	skeinv1connect.ClusterServiceFilterTestProcedure:       {perSecond: 50, burst: 500, atOnce: 64},
	skeinv1connect.ClusterServiceHolderProcedure:           {perSecond: 20, burst: 200, atOnce: 16},
	skeinv1connect.ClusterServicePeerPathsProcedure:        {perSecond: 1, burst: 20, atOnce: 2, inAll: 8},
	skeinv1connect.ClusterServicePlanProcedure:             {perSecond: 1, burst: 20, atOnce: 2, inAll: 4},
	skeinv1connect.ClusterServicePlanStepsProcedure:        {perSecond: 1, burst: 20, atOnce: 1, inAll: 2},
	skeinv1connect.EgressServiceRenewLeasesProcedure:       {perSecond: 50, burst: 500, atOnce: 16},
	skeinv1connect.EgressServiceSyncEgressClientsProcedure: {perSecond: 50, burst: 500, atOnce: 32},
	skeinv1connect.EgressServiceTakeOverProcedure:          {perSecond: 50, burst: 500, atOnce: 32},
	skeinv1connect.EgressServiceClockProcedure:             {perSecond: 20, burst: 200, atOnce: 16},
	skeinv1connect.EgressServiceEgressReportProcedure:      {perSecond: 5, burst: 100, atOnce: 8, inAll: 64},
}

// other bounds what is not in the table, such as procedures that do not exist.
var other = bound{perSecond: 5, burst: 50, atOnce: 4}

// Large requests are those that may take megabytes: their length is not told, or it is large, or they are compressed.
const (
	largeFrom   = 256 << 10
	largeAtOnce = 4  // of one member: times the 8 MiB that a service reads at most
	largeInAll  = 16 // of all members
	busyRetry   = 100 * time.Millisecond
	mostCallers = 1024 // remembered before those that are quiet are forgotten
)

// errBusy is why a call is refused for now.
type errBusy struct {
	why   string // "rate", "at once" or "large": what the metric tells
	text  string
	retry time.Duration
}

func (e *errBusy) Error() string { return fmt.Sprintf("%s; try again in %s", e.text, e.retry) }

// Limit is a handler that lets another one answer as many calls as each member may have. It is safe for concurrent
// use.
type Limit struct {
	next    http.Handler
	server  func(identity.ID) bool // the servers forward the commands of everybody, and are not bounded in that
	clock   func() time.Time
	refused *prometheus.CounterVec

	mu      sync.Mutex
	callers map[identity.ID]*caller
	running map[string]int // of all members, by procedure
	large   int
}

// caller is what one member has under way and has asked lately.
type caller struct {
	pace  map[string]*rate.Limiter
	open  map[string]int
	large int
}

// New bounds the calls that reach next. server says whether a member is a server; refused counts by procedure and
// reason.
func New(next http.Handler, server func(identity.ID) bool, refused *prometheus.CounterVec) *Limit {
	return &Limit{next: next, server: server, clock: time.Now, refused: refused, callers: map[identity.ID]*caller{},
		running: map[string]int{}}
}

// ServeHTTP answers a call, or says when to come again.
func (l *Limit) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id, ok := consensus.PeerFromContext(r.Context())
	if !ok {
		l.next.ServeHTTP(w, r) // which refuses those whom nobody knows
		return
	}
	large := r.ContentLength < 0 && !streaming(r) || r.ContentLength > largeFrom || r.Header.Get("Content-Encoding") != ""
	leave, busy := l.enter(l.clock(), id, r.URL.Path, large)
	if busy != nil {
		l.refused.WithLabelValues(procedureName(r.URL.Path), busy.why).Inc()
		err := connect.NewError(connect.CodeResourceExhausted, busy)
		err.Meta().Set("Retry-After", strconv.Itoa(int((busy.retry+time.Second-1)/time.Second))) // whole seconds: RFC 9110
		err.Meta().Set(consensus.RetryHeader, busy.retry.String())
		_ = connect.NewErrorWriter().Write(w, r, err) // the caller has gone, then
		return
	}
	defer leave()
	l.next.ServeHTTP(w, r)
}

// streaming tells a stream's call, whose one request is short and which tells no length.
func streaming(r *http.Request) bool {
	return r.URL.Path == skeinv1connect.ClusterServiceSubscribeProcedure
}

// procedureName is the last part of a procedure that exists; others share one name, since a caller may invent any
// number.
func procedureName(path string) string {
	if _, ok := bounds[path]; !ok {
		return "other"
	}
	return path[strings.LastIndexByte(path, '/')+1:]
}

// enter lets a call begin, or says why not. Whoever was let in must leave.
func (l *Limit) enter(now time.Time, id identity.ID, path string, large bool) (leave func(), busy *errBusy) {
	b, known := bounds[path]
	if !known {
		path, b = "", other
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.caller(now, id)
	if path == skeinv1connect.ClusterServiceProposeProcedure && l.server(id) {
		return func() {}, nil
	}
	switch {
	case c.open[path] >= b.atOnce:
		return nil, &errBusy{"at once", fmt.Sprintf("node %s has %d such requests under way here", id,
			b.atOnce), busyRetry}
	case b.inAll > 0 && l.running[path] >= b.inAll:
		return nil, &errBusy{"at once", fmt.Sprintf("%d such requests are under way here", b.inAll), busyRetry}
	case large && (c.large >= largeAtOnce || l.large >= largeInAll):
		return nil, &errBusy{"large", "too many large requests are under way here", busyRetry}
	}
	if d := c.reserve(now, path, b); d > 0 {
		return nil, &errBusy{"rate", fmt.Sprintf("node %s asks too often: %g such requests a second, after a burst of %d", id,
			float64(b.perSecond), b.burst), d}
	}
	c.open[path]++
	l.running[path]++
	if large {
		c.large++
		l.large++
	}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if c.open[path]--; c.open[path] == 0 {
			delete(c.open, path)
		}
		l.running[path]--
		if large {
			c.large--
			l.large--
		}
	}, nil
}

// reserve counts one request, or tells how long to wait before it.
func (c *caller) reserve(now time.Time, path string, b bound) time.Duration {
	pace := c.pace[path]
	if pace == nil {
		pace = rate.NewLimiter(b.perSecond, b.burst)
		c.pace[path] = pace
	}
	r := pace.ReserveN(now, 1)
	d := r.DelayFrom(now)
	if d > 0 {
		r.CancelAt(now)
	}
	return d
}

// caller finds a member's account, and forgets those of members who are quiet when there are many. The caller holds mu.
func (l *Limit) caller(now time.Time, id identity.ID) *caller {
	if c := l.callers[id]; c != nil {
		return c
	}
	if len(l.callers) >= mostCallers {
		for other, c := range l.callers {
			if c.quiet(now) {
				delete(l.callers, other)
			}
		}
	}
	c := &caller{pace: map[string]*rate.Limiter{}, open: map[string]int{}}
	l.callers[id] = c
	return c
}

// quiet tells a member of whom nothing needs to be remembered.
func (c *caller) quiet(now time.Time) bool {
	if len(c.open) > 0 {
		return false
	}
	for _, p := range c.pace {
		if p.TokensAt(now) < float64(p.Burst()) {
			return false
		}
	}
	return true
}
