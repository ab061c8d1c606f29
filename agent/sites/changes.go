package sites

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/skeinmesh/skein/identity"
)

// LeaderChanges counts changes of a site's leaders: Own for this host's site, Other for all others.
type LeaderChanges struct{ Own, Other atomic.Uint64 }

// Note counts the changes between a plan and its successor.
func (c *LeaderChanges) Note(before, now *Plan) {
	own, other := changedLeaders(before, now)
	c.Own.Add(own)
	c.Other.Add(other)
}

// changedLeaders counts the sites whose traffic other leaders carry than in the plan before: this host's own site, and
// others. A change of topology, or of this host's site, does not count.
func changedLeaders(before, now *Plan) (own, other uint64) {
	if before == nil || before.Full || now.Full || !before.SameTopology(now) || before.Site != now.Site {
		return 0, 0
	}
	for site, leaders := range now.Leaders {
		former, ok := before.Leaders[site]
		switch {
		case !ok || slices.Equal(carrying(former), carrying(leaders)):
		case site == now.Site:
			own++
		default:
			other++
		}
	}
	return own, other
}

// carrying returns the leaders that carry a site's traffic: those that act and are no reserve.
func carrying(leaders []Leader) (out []identity.ID) {
	for _, l := range leaders {
		if l.Acting && !l.Reserve {
			out = append(out, l.ID)
		}
	}
	slices.SortFunc(out, func(x, y identity.ID) int { return cmp.Compare(x.String(), y.String()) })
	return out
}
