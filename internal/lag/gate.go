package lag

import (
	"context"
	"sync"
	"time"
)

// A Gate lets work in that many peers' needs add up to, such as handshakes: at most Most at a time, half as many for
// each step that the process is late, and always one. Work waits for its turn in the order in which it came. It is safe
// for concurrent use; a nil Gate lets everything in.
type Gate struct {
	Meter *Meter
	Most  int

	mu      sync.Mutex
	inside  int
	waiting []chan struct{}
}

// Enter waits for a turn, and must be followed by Leave; unless ctx ends first, whose error it returns.
func (g *Gate) Enter(ctx context.Context) error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	if len(g.waiting) == 0 && g.inside < g.limit() {
		g.inside++
		g.mu.Unlock()
		return nil
	}
	turn := make(chan struct{})
	g.waiting = append(g.waiting, turn)
	g.mu.Unlock()
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, w := range g.waiting {
		if w == turn {
			g.waiting = append(g.waiting[:i], g.waiting[i+1:]...)
			return context.Cause(ctx)
		}
	}
	g.leave() // the turn came at the same moment
	return context.Cause(ctx)
}

// Leave ends a turn.
func (g *Gate) Leave() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leave()
}

func (g *Gate) leave() {
	g.inside--
	for len(g.waiting) > 0 && g.inside < g.limit() {
		close(g.waiting[0])
		g.waiting = g.waiting[1:]
		g.inside++
	}
}

// limit is how many may be inside now.
func (g *Gate) limit() int {
	n := max(g.Most, 1)
	for late := g.Meter.Late(time.Now()); late >= step && n > 1; late /= 2 {
		n /= 2
	}
	return n
}
