package sites

import (
	"testing"

	"github.com/skeinmesh/skein/identity"
)

func TestChangedLeaders(t *testing.T) {
	leader := func(id byte) Leader { return Leader{ID: identity.ID{id}, Acting: true} }
	elected, reserve := Leader{ID: identity.ID{3}}, leader(3)
	reserve.Reserve = true
	plan := func(own []Leader, other ...Leader) *Plan {
		return &Plan{Site: "home", Leaders: map[string][]Leader{"home": own, "dc": other}}
	}
	before := plan([]Leader{leader(1), leader(2)}, leader(5))
	for what, c := range map[string]struct {
		before, now *Plan
		own, other  uint64
	}{
		"the first plan":       {nil, before, 0, 0},
		"the same":             {before, before, 0, 0},
		"another order":        {before, plan([]Leader{leader(2), leader(1)}, leader(5)), 0, 0},
		"one is elected":       {before, plan([]Leader{leader(1), leader(2), elected}, leader(5)), 0, 0},
		"a reserve":            {before, plan([]Leader{leader(1), leader(2), reserve}, leader(5)), 0, 0},
		"one is lost":          {before, plan([]Leader{leader(2)}, leader(5)), 1, 0},
		"another in each site": {before, plan([]Leader{leader(1), leader(3)}, leader(6)), 1, 1},
		"none is left there":   {before, plan([]Leader{leader(1), leader(2)}), 0, 1},
		"a site that is new": {&Plan{Site: "home", Leaders: map[string][]Leader{"home": {leader(1)}}},
			plan([]Leader{leader(1)}, leader(5)), 0, 0},
		"this node's site is another": {before,
			&Plan{Site: "dc", Leaders: map[string][]Leader{"dc": {leader(9)}}}, 0, 0},
		"from topology full": {&Plan{Full: true, Site: "home"}, before, 0, 0},
		"to topology full":   {before, &Plan{Full: true, Site: "home"}, 0, 0},
	} {
		if own, other := changedLeaders(c.before, c.now); own != c.own || other != c.other {
			t.Errorf("%s: %d of its own, %d of others, want %d and %d", what, own, other, c.own, c.other)
		}
	}
}
