package kube

import (
	"time"

	"github.com/skeinmesh/skein/kube/resource"
)

// refusedWishes are resources of which something was refused, by UID.
type refusedWishes map[string]refusedWish

// refusedWish says when a resource is tried again. Another generation is another wish, and is tried at once.
type refusedWish struct {
	generation int64
	until      time.Time
}

// wait is how long a resource is left alone; 0 or less: not at all.
func (r refusedWishes) wait(m resource.Meta, now time.Time) time.Duration {
	if r[m.UID].generation != m.Generation {
		return 0
	}
	return r[m.UID].until.Sub(now)
}
