package gossip

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/hashicorp/memberlist"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

const gossipKeyBytes = 32

// keyList returns the primary key and then the accepted ones, without duplicates.
func keyList(k *skeinv1.GossipKeys) ([][]byte, error) {
	if k == nil || len(k.GetPrimary()) == 0 {
		return nil, errors.New("no gossip key: the cluster's state has none yet")
	}
	keys := make([][]byte, 0, 1+len(k.GetAccepted()))
	for i, key := range append([][]byte{k.GetPrimary()}, k.GetAccepted()...) {
		if len(key) != gossipKeyBytes {
			return nil, fmt.Errorf("gossip key %d has %d bytes, want %d", i, len(key), gossipKeyBytes)
		}
		if !contains(keys, key) {
			keys = append(keys, bytes.Clone(key))
		}
	}
	return keys, nil
}

func contains(keys [][]byte, key []byte) bool {
	return slices.ContainsFunc(keys, func(k []byte) bool { return bytes.Equal(k, key) })
}

// installKeys makes the ring hold exactly keys; primary, one of them, encrypts. Keys are added before
// they are used, and used before others are removed.
func installKeys(ring *memberlist.Keyring, keys [][]byte, primary []byte) error {
	for _, k := range keys {
		if err := ring.AddKey(k); err != nil {
			return fmt.Errorf("add gossip key: %w", err)
		}
	}
	// RemoveKey shifts the slice that receivers are reading, unless the key is the last. UseKey makes a
	// fresh slice with its key first: using every key that stays leaves those that go at the end.
	for _, k := range slices.Backward(keys) {
		if err := ring.UseKey(k); err != nil {
			return fmt.Errorf("use gossip key: %w", err)
		}
	}
	if err := ring.UseKey(primary); err != nil {
		return fmt.Errorf("use gossip key: %w", err)
	}
	for _, k := range slices.Backward(slices.Clone(ring.GetKeys())) {
		if contains(keys, k) {
			continue
		}
		if err := ring.RemoveKey(k); err != nil {
			return fmt.Errorf("remove gossip key: %w", err)
		}
	}
	return nil
}
