// Package race opens a connection by several ways, a little after each other, and takes the first that is up: RFC 8305
// for connections that have to prove more than that they stand.
package race

import (
	"context"
	"time"
)

// Pace is how soon the next way is tried beside those that are under way. A way that fails is followed by the next at
// once.
type Pace struct {
	// Stagger is how long the last way that was begun may take to be connected.
	Stagger time.Duration
	// Proof is how long a way may take for its handshake once it is connected. A handshake costs both ends far more than a
	// connection: more of them at once, since one is slow, keep a busy machine busy.
	Proof time.Duration
}

// Way opens one connection. It calls connected when only the handshake is left.
type Way[C any] func(ctx context.Context, connected func()) (C, error)

// First tries ways in their order until one is up, and then ends the others; what comes of them too late goes to
// discard. When none comes up, errs says why, in the order in which they failed. ctx bounds all of it, and nothing of
// what First returns.
func First[C any](ctx context.Context, pace Pace, ways []Way[C], discard func(C)) (conn C, errs []error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		conn C
		err  error
	}
	results := make(chan result, len(ways))
	connected := make(chan struct{}, len(ways))
	next := time.NewTimer(0)
	defer next.Stop()
	started, ended := 0, 0
	leave := func() { // those under way end by themselves
		for range started - ended {
			if r := <-results; r.err == nil {
				discard(r.conn)
			}
		}
	}
	for ended < len(ways) {
		select {
		case <-next.C:
			if started < len(ways) {
				way := ways[started]
				started++
				go func() {
					c, err := way(ctx, func() { connected <- struct{}{} })
					results <- result{c, err}
				}()
				next.Reset(pace.Stagger)
			}
		case <-connected:
			next.Reset(pace.Proof)
		case r := <-results:
			ended++
			if r.err == nil {
				go leave()
				return r.conn, nil
			}
			errs = append(errs, r.err)
			next.Reset(0)
		case <-ctx.Done():
			go leave()
			return conn, append(errs, ctx.Err())
		}
	}
	return conn, errs
}
