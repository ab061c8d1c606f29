// Package pause waits for a time, or until a context ends.
package pause

import (
	"context"
	"time"
)

// For waits for d, and reports whether it passed before ctx ended.
func For(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
