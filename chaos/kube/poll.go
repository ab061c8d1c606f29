package kube

import (
	"context"
	"fmt"
	"time"
)

// tryEvery is the usual pause between two checks.
const tryEvery = 100 * time.Millisecond

// pollRest is how long poll waits between two checks, in times of what one took: most start a kubectl, which is a fifth
// of a second of computing, and tests that run side by side have two processors between them.
const pollRest = 2

// pollRestMost bounds that pause: a check may itself wait for what it asks for, for half a minute, and compute nothing.
const pollRestMost = 5 * time.Second

// poll repeats a check until it holds, for so long at most, and returns how long that took. Between two checks it waits
// for the given pause, longer when checks are slow.
func poll(ctx context.Context, within, pause time.Duration, check func() error) (took time.Duration, err error) {
	began := time.Now()
	for {
		asked := time.Now()
		err := check()
		if err == nil {
			return time.Since(began), nil
		}
		if time.Since(began) > within {
			return time.Since(began), fmt.Errorf("not within %s: %w", within, err)
		}
		select {
		case <-ctx.Done():
			return time.Since(began), fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(max(pause, min(pollRest*time.Since(asked), pollRestMost))):
		}
	}
}
