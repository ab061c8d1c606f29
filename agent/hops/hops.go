// Package hops judges by the counters of packets that travel inside others between sites.
package hops

import (
	"fmt"
	"sync"
	"time"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/hop"
)

const (
	refusedOver    = 10 * time.Second // a rate is told over no less
	Lately         = time.Minute      // one over more says nothing of now
	refusedMatters = 1                // packets a second: a packet here and there is refused whenever sites change
	subjectHops    = "hops"
)

// Reading is what the counters of hops said at a moment.
type Reading struct {
	At     time.Time
	Counts hop.Counts
}

// Watch tells how fast packets of hops are refused. The counters are read when a user asks for status or metrics,
// and never at other times; it keeps those readings.
type Watch struct {
	mu     sync.Mutex
	kept   [2]Reading // the older first, refusedOver or more between them
	newest Reading
}

// Note takes a reading of counters that began at some moment.
func (w *Watch) Note(r Reading, began time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.kept[0].At.IsZero() {
		w.kept = [2]Reading{{At: began}, {At: began}}
	}
	if r.At.Sub(w.kept[1].At) >= refusedOver {
		w.kept[0], w.kept[1] = w.kept[1], r
	}
	w.newest = r
}

// Refused is how many packets were refused lately, and over which time; 0: the readings are too near for a rate.
func (w *Watch) Refused() (packets uint64, over time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if over = w.newest.At.Sub(w.kept[0].At); w.kept[0].At.IsZero() || over < refusedOver {
		return 0, 0
	}
	return RefusedSince(w.kept[0], w.newest), over
}

// RefusedSince is what was refused between two readings. The kernel counts anew whenever its guards change.
func RefusedSince(before, now Reading) uint64 {
	if now.Counts.Refused < before.Counts.Refused {
		return now.Counts.Refused
	}
	return now.Counts.Refused - before.Counts.Refused
}

// Unused reports whether no packet of a hop has been seen yet.
func (w *Watch) Unused() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.newest.Counts == hop.Counts{}
}

// RefusalProblem warns of refused packets of hops; nil: they are too few.
func RefusalProblem(packets uint64, over time.Duration, now time.Time, from string) *skeinv1.Problem {
	if over <= 0 || float64(packets)/over.Seconds() < refusedMatters {
		return nil
	}
	text := fmt.Sprintf("%d packets that others passed on to this node were refused in the last %s",
		packets, over.Round(time.Second))
	if from != "" {
		text += "; " + from + " brought the last one"
	}
	return &skeinv1.Problem{Subject: subjectHops, Severity: string(part.Warns), Message: text,
		Since: now.Add(-over).UnixNano(),
		Advice: "compare SITE and LEADER of skein nodes here and there: the other node sees sites in another way, or " +
			"brings what it may not. Seconds after a change of sites this should be over"}
}
