package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// RotateGossipKey has the leader make a new gossip key.
func (s services) RotateGossipKey(ctx context.Context,
	_ *skeinv1.RotateGossipKeyRequest) (*skeinv1.RotateGossipKeyResponse, error) {
	answer, err := s.a.propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_RotateGossipKey{
		RotateGossipKey: &skeinv1.RotateGossipKey{}}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.RotateGossipKeyResponse{
		Keys: gossipKeysView(s.a.replica.State().GossipKeys(), s.a.gossip.KeyUsed()), Index: answer.GetIndex(),
	}, nil
}

// gossipKeysView tells keys apart without showing them; nil: none is agreed.
func gossipKeysView(k *skeinv1.GossipKeys, used []byte) *skeinv1.GossipKeysView {
	if len(k.GetPrimary()) == 0 {
		return nil
	}
	v := &skeinv1.GossipKeysView{Agreed: keyMark(k.GetPrimary()), Used: keyMark(used)}
	for _, one := range k.GetAccepted() {
		v.Accepted = append(v.Accepted, keyMark(one))
	}
	return v
}

// keyMark is by which people tell a random secret of 32 bytes from others.
func keyMark(key []byte) string {
	sum := sha256.Sum256(key)
	return hex.EncodeToString(sum[:4])
}
