package projection

import (
	"bytes"
	"sync"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// Keys remembers preshared keys: to derive those of forty peers takes longer than all else of a projection. It is safe
// for concurrent use; a nil Keys remembers nothing.
type Keys struct {
	mu     sync.Mutex
	seed   []byte
	byPair map[[2]identity.ID]dataplane.Key
}

// maxKeys bounds what is remembered of peers that have left.
const maxKeys = 1 << 14

func (k *Keys) of(seed []byte, self, peer identity.ID) (dataplane.Key, error) {
	if k == nil {
		return derive(seed, self, peer)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !bytes.Equal(seed, k.seed) || len(k.byPair) >= maxKeys {
		k.seed, k.byPair = bytes.Clone(seed), map[[2]identity.ID]dataplane.Key{}
	}
	pair := [2]identity.ID{self, peer}
	if key, ok := k.byPair[pair]; ok {
		return key, nil
	}
	key, err := derive(seed, self, peer)
	if err == nil {
		k.byPair[pair] = key
	}
	return key, err
}

func derive(seed []byte, self, peer identity.ID) (dataplane.Key, error) {
	key, err := identity.PresharedKey(seed, self, peer)
	return dataplane.Key(key), err
}
