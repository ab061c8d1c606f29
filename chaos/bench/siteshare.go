package bench

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"

	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/identity"
)

const (
	shareSites = 10   // with IDs of their own
	shareNodes = 1000 // in each
	shareMost  = 16   // leaders of a site
	shareSlack = 0.05 // of its nodes that may move beyond 1/n
)

// moved is the share of a site's nodes that use another leader after a change.
func moved(nodes []identity.ID, before, after []sites.Leader) float64 {
	n := 0
	for _, node := range nodes {
		if sites.Order(before, node)[0] != sites.Order(after, node)[0] {
			n++
		}
	}
	return float64(n) / float64(len(nodes))
}

// shareFigures tells how many nodes of a site move when one of its n leaders comes or goes, as the agents' own code has
// it.
func shareFigures() []Figure {
	rng := rand.New(rand.NewPCG(1, 2))
	id := func() (out identity.ID) {
		for i := 0; i+8 <= len(out); i += 8 {
			binary.BigEndian.PutUint64(out[i:], rng.Uint64())
		}
		return out
	}
	worst, at := -1.0, ""
	least := 1.0
	for n := 2; n <= shareMost; n++ {
		for range shareSites {
			var leaders []sites.Leader
			for range n {
				leaders = append(leaders, sites.Leader{ID: id(), Acting: true})
			}
			nodes := make([]identity.ID, shareNodes)
			for i := range nodes {
				nodes[i] = id()
			}
			// One of n lost is the same step the other way: who used it moves, who comes to it moved.
			share := moved(nodes, leaders, leaders[1:])
			if over := share - 1/float64(n); over > worst {
				worst, at = over, fmt.Sprintf("%.1f %% where 1/%d are %.1f %%", 100*share, n, 100/float64(n))
			}
			least = min(least, share)
		}
	}
	return []Figure{{
		Name: "one of n leaders added or lost: nodes that move", Target: "≤ 1/n + 5 %",
		Got: fmt.Sprintf("at most %s", at), Load: loadAverage(),
		How: fmt.Sprintf("the agents' own code, 2 to %d leaders, %d sites of %d nodes each: those whose first leader is "+
			"another one after the change", shareMost, shareSites, shareNodes),
		Verdict: verdict(worst <= shareSlack && least > 0),
	}}
}
