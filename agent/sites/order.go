package sites

import (
	"cmp"
	"encoding/binary"
	"slices"

	"github.com/skeinmesh/skein/identity"
)

// Order returns the leaders of a site in the order in which a node of the site uses them, and in which others use them
// to reach the node, where members are not bound by slices. Acting leaders come first, then reserves, then those that
// are only elected. Equals are ordered by rendezvous hashing, so that a leader more or less moves only the nodes that
// are bound to it.
func Order(leaders []Leader, node identity.ID) []identity.ID {
	type weighed struct {
		Leader
		weight uint64
	}
	all := make([]weighed, 0, len(leaders))
	for _, l := range leaders {
		all = append(all, weighed{l, weight(l.ID, node)})
	}
	slices.SortFunc(all, func(a, b weighed) int {
		return cmp.Or(
			compareFlags(b.Acting, a.Acting),
			compareFlags(a.Reserve, b.Reserve),
			cmp.Compare(b.weight, a.weight),
			a.ID.Compare(b.ID))
	})
	out := make([]identity.ID, len(all))
	for i := range all {
		out[i] = all[i].ID
	}
	return out
}

// weight is the rendezvous weight of a leader for a node. Nodes of all versions must compute the same weight, so it
// never changes; a test pins values. IDs are hashes already, and two rounds of SplitMix64's finaliser mix them.
func weight(leader, node identity.ID) uint64 {
	return mix(mix(binary.BigEndian.Uint64(leader[:])) ^ binary.BigEndian.Uint64(node[:]))
}

func mix(w uint64) uint64 {
	w += 0x9e3779b97f4a7c15
	w = (w ^ w>>30) * 0xbf58476d1ce4e5b9
	w = (w ^ w>>27) * 0x94d049bb133111eb
	return w ^ w>>31
}
