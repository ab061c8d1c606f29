package consensus

import (
	"context"
	"errors"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"connectrpc.com/connect"
)

// RetryHeader carries with an error of code resource_exhausted how long to wait before the next try, as Go writes a
// duration.
const RetryHeader = "Skein-Retry-After"

// retryAtMost bounds what a server can make a client wait.
const retryAtMost = 5 * time.Second

// RetryAfter is how long a node that has refused a request for now wants to be left alone; 0 if it says nothing of
// that.
func RetryAfter(err error) time.Duration {
	var e *connect.Error
	if !errors.As(err, &e) || e.Code() != connect.CodeResourceExhausted {
		return 0
	}
	d, err := time.ParseDuration(e.Meta().Get(RetryHeader))
	if err != nil {
		return 0
	}
	return min(max(d, 0), retryAtMost)
}

// Patiently calls a node, and again when it says when, for at most within. What it returns is the last call's.
func Patiently[T any](ctx context.Context, within time.Duration, call func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for {
		r, err := call(ctx)
		d := RetryAfter(err)
		if d == 0 || !pause.For(ctx, d) {
			return r, err
		}
	}
}
