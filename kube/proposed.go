package kube

import (
	"context"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// proposed is the newest event that the log has made of this controller's commands. What is decided by a snapshot
// without it may be the same command once more, and be refused.
type proposed struct {
	index uint64
	until time.Time // a log that was recovered may begin at a lower index
}

// snapshotAtMost is how long a snapshot with a new event is waited for.
const snapshotAtMost = 3 * time.Second

// wait is how long the controller rests unless another snapshot comes; 0 or less: not at all.
func (p proposed) wait(index uint64, now time.Time) time.Duration {
	if index >= p.index {
		return 0
	}
	return p.until.Sub(now)
}

// propose gives a command to the log.
func (c *controller) propose(ctx context.Context, command *skeinv1.Command) error {
	answer, err := c.p.host.Propose(ctx, command)
	if err == nil {
		c.proposed = proposed{answer.GetIndex(), time.Now().Add(snapshotAtMost)}
	}
	return err
}
