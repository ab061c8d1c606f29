package owners

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/skeinmesh/skein/chaos/lab"
)

const (
	stuckAfter = 2 * time.Second // a TCP connection without an answer for so long is given up
	tryAgain   = 50 * time.Millisecond
)

// stream is a client that sends all the time: a UDP flow that stays, or TCP connections one after another.
type stream struct {
	pod, proto string
	to         netip.AddrPort
	every      time.Duration // between two numbers

	mu     sync.Mutex
	newest time.Time // of answers
	broken int       // connections that ended before their time
}

// run streams until ctx ends.
func (s *stream) run(ctx context.Context, l *lab.Lab) {
	for ctx.Err() == nil {
		dial, cancel := context.WithTimeout(ctx, stuckAfter)
		f, err := l.OpenFlow(dial, s.pod, s.to, s.proto, s.every)
		cancel()
		if err == nil {
			s.follow(ctx, f)
			f.Abandon()
		}
		pause.For(ctx, tryAgain)
	}
}

// follow watches a flow until it is of no use any more.
func (s *stream) follow(ctx context.Context, f *lab.FlowStream) {
	began := time.Now()
	for pause.For(ctx, tryAgain) {
		newest := f.Newest()
		s.mu.Lock()
		if newest.After(s.newest) {
			s.newest = newest
		}
		s.mu.Unlock()
		if newest.Before(began) {
			newest = began
		}
		if s.proto == "tcp" && (f.Broken() != nil || time.Since(newest) > stuckAfter) {
			s.mu.Lock()
			s.broken++
			s.mu.Unlock()
			return
		}
	}
}

// since tells whether an answer has come after a moment.
func (s *stream) since(t time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.newest.After(t)
}
