package main

import (
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func TestClockIsPrinted(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC).UnixNano()
	for _, c := range []struct {
		before time.Duration // what the log's time is ahead of now
		done   bool
		want   string
	}{
		{-time.Hour, false, "the last event, 7, is of 2026-03-01T11:00:00Z, and this host's clock says " +
			"2026-03-01T12:00:00Z: nothing to repair\n"},
		{time.Hour, false, "the last event, 7, is of 2026-03-01T13:00:00Z: 1h0m0s ahead of this host's clock " +
			"(2026-03-01T12:00:00Z)\nif this clock is right, and the leader's: skein cluster repair-clock --yes\n"},
		{time.Hour, true, "the time of the log was 2026-03-01T13:00:00Z and is 2026-03-01T12:00:00Z, from event 7 on\n"},
		{0, true, "the time of the log is right: 2026-03-01T12:00:00Z\n"},
	} {
		var b strings.Builder
		printClock(&b, &skeinv1.RepairClockResponse{Before: now + int64(c.before), After: now, Index: 7}, c.done)
		if b.String() != c.want {
			t.Errorf("have %s\nwant %s", b.String(), c.want)
		}
	}
}
