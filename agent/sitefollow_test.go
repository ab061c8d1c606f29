package agent

import (
	"maps"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/identity"
)

// TestPathsHearWhoCanBeReplaced: following a plan tells the paths in whose place other leaders carry, and another plan
// tells them anew.
func TestPathsHearWhoCanBeReplaced(t *testing.T) {
	self := newHost(t, "self")
	a := newTestAgent(self, newWorld(t, self).state)
	a.id = identity.ID{3} // planFor's third node leads nothing
	a.paths = path.NewManager(path.Config{Self: a.id, Prober: pinger{a}, Log: quiet()})
	t.Cleanup(a.paths.Close)
	two, one := map[identity.ID]uint64{{1}: 1, {2}: 1, {4}: 1, {5}: 1}, map[identity.ID]uint64{{1}: 1, {4}: 1, {5}: 1}
	for _, c := range []struct {
		terms map[identity.ID]uint64
		want  map[identity.ID]bool
	}{{two, map[identity.ID]bool{{1}: true, {2}: true}}, {one, map[identity.ID]bool{}}} {
		a.sitePlan.Store(planFor(a.id, sites.Site, c.terms))
		a.followPlan(time.Now())
		if got := a.loop.replaceable; !maps.Equal(got, c.want) {
			t.Errorf("leaders %v: the paths hear that %v can be replaced, want %v", c.terms, got, c.want)
		}
	}
}
