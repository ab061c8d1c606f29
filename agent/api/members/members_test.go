package members

import (
	"bytes"
	"encoding/hex"
	"slices"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// What is shown of gossip keys tells them apart and has nothing of them.
func TestGossipKeysAreToldApart(t *testing.T) {
	keys := [][]byte{bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32), bytes.Repeat([]byte{3}, 32)}
	v := GossipKeys(&skeinv1.GossipKeys{Primary: keys[0], Accepted: keys[1:]}, keys[1])
	marks := append([]string{v.GetAgreed()}, v.GetAccepted()...)
	if len(marks) != 3 || v.GetUsed() != marks[1] || len(slices.Compact(slices.Sorted(slices.Values(marks)))) != 3 {
		t.Errorf("keys are told as %v", v)
	}
	for i, mark := range marks {
		if len(mark) != 8 || strings.Contains(hex.EncodeToString(keys[i]), mark) {
			t.Errorf("key %d is told as %q", i, mark)
		}
	}
	if v := GossipKeys(nil, nil); v != nil {
		t.Errorf("no keys are told as %v", v)
	}
}
