package agent

import (
	"slices"

	"github.com/skeinmesh/skein/dataplane"
)

// tunnelStats is what WireGuard counted when it was read last: one entry for each peer, sorted by key. It is not
// changed.
type tunnelStats []dataplane.PeerStatus

// of is what was counted for a peer.
func (s *tunnelStats) of(key dataplane.Key) (dataplane.PeerStatus, bool) {
	if s == nil {
		return dataplane.PeerStatus{}, false
	}
	i, ok := slices.BinarySearchFunc(*s, key, func(p dataplane.PeerStatus, key dataplane.Key) int {
		return p.PublicKey.Compare(key)
	})
	if !ok {
		return dataplane.PeerStatus{}, false
	}
	return (*s)[i], true
}
