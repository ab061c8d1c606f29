package egress

import (
	"maps"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// Reading is what the clock of another machine showed when it answered.
type Reading struct {
	Boot string        // readings of different boots do not compare
	At   time.Duration // since that boot
}

// Readings are those of several machines, this one among them. They are not changed once somebody has them.
type Readings map[identity.ID]Reading

const maxReadings = 64 // of machines that are remembered

// with are the newest readings of each machine: one that has not answered last is still known by its earlier one.
func (r Readings) with(newer Readings) Readings {
	out := maps.Clone(newer)
	for id, reading := range r {
		if _, again := out[id]; !again && len(out) < maxReadings {
			out[id] = reading
		}
	}
	return out
}

// since is the time between readings of before and one of after by the same clock; not ok: they do not compare.
func (r Readings) since(id identity.ID, after Reading) (time.Duration, bool) {
	before, known := r[id]
	return after.At - before.At, known && before.Boot == after.Boot && after.At >= before.At
}

// longestSince is the longest time that any clock shows between readings of before and after.
func longestSince(before, after Readings) (longest time.Duration) {
	for id, r := range after {
		if passed, ok := before.since(id, r); ok {
			longest = max(longest, passed)
		}
	}
	return longest
}

// proves reports whether readings of after a ticket began show that it ends before the lease does, which began after
// the readings of before: the clock of some other machine says so, and none says the contrary. This machine's own clock
// can only contradict: it goes on through a suspend, but not while a virtual machine is stopped. A machine that stood
// still with this one cannot outvote one that did not.
func proves(self identity.ID, before, after Readings, ticket, lease time.Duration) bool {
	some := false
	for id, r := range after {
		passed, ok := before.since(id, r)
		if !ok {
			continue
		}
		if passed+ticket > lease {
			return false
		}
		some = some || id != self
	}
	return some
}
