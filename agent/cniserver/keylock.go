package cniserver

import (
	"context"
	"sync"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

// keyLock lets one request at a time at an attachment. The zero value is ready.
type keyLock struct {
	mu   sync.Mutex
	held map[podnet.Key]*turn
}

// turn is the queue of one attachment: who has the token may go.
type turn struct {
	token chan struct{}
	users int // that hold the token or wait for it
}

// with runs f when nobody else has the key; it gives up waiting when ctx ends.
func (l *keyLock) with(ctx context.Context, key podnet.Key, f func() error) error {
	l.mu.Lock()
	if l.held == nil {
		l.held = map[podnet.Key]*turn{}
	}
	t := l.held[key]
	if t == nil {
		t = &turn{token: make(chan struct{}, 1)}
		l.held[key] = t
	}
	t.users++
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if t.users--; t.users == 0 {
			delete(l.held, key)
		}
	}()
	select {
	case t.token <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-t.token }()
	return f()
}
