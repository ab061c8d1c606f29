package egress

import (
	"maps"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// Reading is what another machine's clock showed when it answered.
type Reading struct {
	Boot string        // readings of different boots are not comparable
	At   time.Duration // since that boot
}

// Readings are those of several machines, including this one. They must not be changed once shared.
type Readings map[identity.ID]Reading

const maxReadings = 64 // of remembered machines

// with returns the newest reading of each machine, also of machines that have not answered this time.
func (r Readings) with(newer Readings) Readings {
	out := maps.Clone(newer)
	for id, reading := range r {
		if _, again := out[id]; !again && len(out) < maxReadings {
			out[id] = reading
		}
	}
	return out
}

// since is the time that one clock shows between its reading in r and a later one; false: they are not comparable.
func (r Readings) since(id identity.ID, after Reading) (time.Duration, bool) {
	before, known := r[id]
	return after.At - before.At, known && before.Boot == after.Boot && after.At >= before.At
}

// longestSince is the longest time that any clock shows between two sets of readings.
func longestSince(before, after Readings) (longest time.Duration) {
	for id, r := range after {
		if passed, ok := before.since(id, r); ok {
			longest = max(longest, passed)
		}
	}
	return longest
}

// proves reports whether readings taken after a ticket began show that it ends before the lease. The lease began
// after the readings of before. At least one other machine's clock must show it, and no clock may contradict. This
// machine's own clock can only contradict: it continues during suspend, but not while a virtual machine is frozen. A
// machine that was frozen together with this one cannot outvote one that was not.
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
