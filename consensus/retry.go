package consensus

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"
)

// RetryHeader carries with an error of code resource_exhausted how long to wait before the next try, as Go writes a duration.
const RetryHeader = "Skein-Retry-After"

// retryAtMost bounds what a server can make a client wait.
const retryAtMost = 5 * time.Second

// RetryAfter is how long a node that has refused a request for now wants to be left alone; 0 if it says nothing of that.
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

// patiently calls a server, and again when it says when, as long as one attempt may take.
func patiently[T any](ctx context.Context, call func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, proposeAttempt)
	defer cancel()
	for {
		r, err := call(ctx)
		d := RetryAfter(err)
		if d == 0 || !pause(ctx, d) {
			return r, err
		}
	}
}
