// Package tunnels judges by what WireGuard counts: with whom sessions are to begin, who answers no handshake, and where
// the device sends otherwise than it was told.
package tunnels

import (
	"slices"

	"github.com/skeinmesh/skein/dataplane"
)

// Stats is what WireGuard counted when it was read last: one entry for each peer, sorted by key. It is not
// changed.
type Stats []dataplane.PeerStatus

// Of is what was counted for a peer.
func (s *Stats) Of(key dataplane.Key) (dataplane.PeerStatus, bool) {
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
