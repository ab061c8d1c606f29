// Package pause waits for a time, or for a condition, or until a context ends.
package pause

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Until repeats check, with a pause of every after each error, until it returns nil. When within has passed or ctx has
// ended, it returns an error that wraps check's last one, and ctx's.
func Until(ctx context.Context, within, every time.Duration, check func() error) error {
	for deadline := time.Now().Add(within); ; {
		err := check()
		switch {
		case err == nil:
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("not so within %s: %w", within, err)
		case !For(ctx, every):
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

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
