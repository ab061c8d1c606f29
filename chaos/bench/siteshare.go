package bench

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	shareSites = 10   // with IDs of their own
	shareNodes = 1000 // in each, where nodes are bound one by one
	shareMost  = 16   // leaders of a site
	shareSlack = 0.05 // of its nodes that may move beyond 1/n
)

// shareSliced are how many nodes a site has that are bound by slices.
var shareSliced = []int{100, 1000}

// moved is the share of a site's nodes that use another leader after a change.
func moved(nodes int, before, after func(node int) identity.ID) float64 {
	n := 0
	for node := range nodes {
		if before(node) != after(node) {
			n++
		}
	}
	return float64(n) / float64(nodes)
}

// bySlices and oneByOne are who a node uses.
func bySlices(of []sites.Leader) func(node int) identity.ID {
	carriers := sites.Carriers(of)
	return func(node int) identity.ID { return carriers[sliceOf(node)] }
}

func oneByOne(of []sites.Leader, nodes []identity.ID) func(node int) identity.ID {
	return func(node int) identity.ID { return sites.Order(of, nodes[node])[0] }
}

// sliceOf is the slice of a site's nth node, as events gives addresses: its ranges have 2^8 addresses, then twice as
// many each, and are filled by halves in turn.
func sliceOf(n int) int {
	size := 8
	for ; n >= 1<<size; size++ {
		n -= 1 << size
	}
	return int(bits.Reverse64(uint64(n))>>(64-size)) * events.Slices >> size
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
	// One of n lost is the same step the other way: who used it moves, who comes to it moved.
	note := func(n, nodes int, share float64) {
		if over := share - 1/float64(n); over > worst {
			worst, at = over, fmt.Sprintf("%.1f %% of %d where 1/%d are %.1f %%", 100*share, nodes, n, 100/float64(n))
		}
		least = min(least, share)
	}
	for n := 2; n <= shareMost; n++ {
		var leaders []sites.Leader
		for i := range n {
			leaders = append(leaders, sites.Leader{ID: id(), Term: 1, Acting: true, Slot: uint32(i + 1)})
		}
		for _, nodes := range shareSliced {
			for lost := range leaders {
				less := slices.Delete(slices.Clone(leaders), lost, lost+1)
				note(n, nodes, moved(nodes, bySlices(leaders), bySlices(less)))
			}
		}
		for range shareSites {
			ids := make([]identity.ID, shareNodes)
			for i := range ids {
				ids[i] = id()
			}
			for i := range leaders {
				leaders[i].ID = id()
			}
			note(n, shareNodes, moved(shareNodes, oneByOne(leaders, ids), oneByOne(leaders[1:], ids)))
		}
	}
	return []Figure{{
		Name: "one of n leaders added or lost: nodes that move", Target: "≤ 1/n + 5 %",
		Got: fmt.Sprintf("at most %s", at), Load: loadAverage(),
		How: fmt.Sprintf("the agents' own code, 2 to %d leaders: those whose first leader is another one after the change. "+
			"Any one lost of a site of %d or %d nodes that are bound by slices; and %d sites of %d that are bound one by one",
			shareMost, shareSliced[0], shareSliced[1], shareSites, shareNodes),
		Verdict: verdict(worst <= shareSlack && least > 0),
	}}
}

// tenSites measures what a node has of a mesh of ten sites of a hundred nodes, and what making it costs.
func tenSites() job {
	return job{
		name: "10 sites of 100 nodes: what one of them has", target: "≤ 120 routes, ≤ 120 peers, ≤ 20 ms",
		pkg: "./agent/projection", run: "BenchmarkProjectSites", count: "1s",
		how: "state, records and endpoints to a whole Spec, with a block of pods on each node; routes of one address " +
			"family, and processor time",
		judge: func(m metrics) (string, bool) {
			var parts []string
			ok := true
			for _, who := range []string{"member", "leader"} {
				routes, peers, took := m[who+"/routes"], m[who+"/peers"], m[who+"/cpu-ms/op"]
				parts = append(parts, fmt.Sprintf("%s: %.0f routes, %.0f peers, %.1f ms", who, routes, peers, took))
				ok = ok && peers > 0 && routes <= 120 && peers <= 120 && took > 0 && took <= 20
			}
			return strings.Join(parts, "; "), ok
		},
	}
}
