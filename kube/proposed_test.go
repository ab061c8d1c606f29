package kube

import (
	"testing"
	"time"
)

// The controller decides by a snapshot that has what it proposed last, or after a while by whichever there is.
func TestSnapshotHasWhatWasProposed(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	p := proposed{index: 7, until: now.Add(snapshotAtMost)}
	for _, c := range []struct {
		name  string
		p     proposed
		index uint64
		at    time.Duration
		want  time.Duration
	}{
		{"nothing was proposed", proposed{}, 0, 0, 0},
		{"a snapshot of before", p, 6, time.Second, 2 * time.Second},
		{"the snapshot with it", p, 7, 0, 0},
		{"a later one", p, 9, 0, 0},
		{"the log was recovered", p, 3, snapshotAtMost, 0},
	} {
		if got := c.p.wait(c.index, now.Add(c.at)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}
