package sites

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/skeinmesh/skein/identity"
)

// LeaderChanges counts how often others led a site than before.
type LeaderChanges struct{ Own, Other atomic.Uint64 }

// Note takes the plan that follows another.
func (c *LeaderChanges) Note(before, now *Plan) {
	own, other := changedLeaders(before, now)
	c.Own.Add(own)
	c.Other.Add(other)
}

// changedLeaders counts the sites that others lead by one plan than by the plan before it: this node's own, and others.
// Another topology, or another site of this node, is no change of leaders.
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

// carrying are the leaders that carry a site's traffic.
func carrying(leaders []Leader) (out []identity.ID) {
	for _, l := range leaders {
		if l.Acting && !l.Reserve {
			out = append(out, l.ID)
		}
	}
	slices.SortFunc(out, func(x, y identity.ID) int { return cmp.Compare(x.String(), y.String()) })
	return out
}
