package events

import (
	"crypto/ed25519"
	"crypto/sha256"

	"google.golang.org/protobuf/encoding/protowire"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// A signed token's secret is the seed of an Ed25519 key. The log has the hash of the public key, a join shows the
// public key and a signature over what is joining. So neither a replica of the log nor a member that hands a join on
// can admit anybody else.

// TokenKey is the public key that a join by the token with this secret shows. The secret has 32 bytes.
func TokenKey(secret []byte) []byte {
	return ed25519.NewKeyFromSeed(secret).Public().(ed25519.PublicKey)
}

// ProveJoin signs the admission of a node with a token's secret of 32 bytes.
func ProveJoin(secret []byte, cluster, token string, node *skeinv1.NewNode) []byte {
	return ed25519.Sign(ed25519.NewKeyFromSeed(secret), joinStatement(cluster, token, node))
}

func joinStatement(cluster, token string, node *skeinv1.NewNode) []byte {
	b := []byte("skein join v1\x00")
	for _, part := range [][]byte{[]byte(cluster), []byte(token), Canonical(node)} {
		b = protowire.AppendBytes(b, part)
	}
	return b
}

// checkProof compares what a join shows with a token.
func checkProof(t *skeinv1.Token, c *skeinv1.AdmitNode) error {
	shown := c.GetTokenSecret()
	hash := c.GetTokenSecretHash()
	if len(shown) > 0 {
		sum := sha256.Sum256(shown)
		hash = sum[:]
	}
	switch {
	case t.GetSigned() && len(shown) == ed25519.SeedSize && sameSecret(t.GetSecretHash(), sum256(TokenKey(shown))):
		return refuse(PermissionDenied, "join token %s has to be used with a version of skein that signs joins: upgrade "+
			"skein on %s", t.GetId(), c.GetNode().GetName())
	case !sameSecret(t.GetSecretHash(), hash):
		return wrongToken(t.GetId())
	case !t.GetSigned():
		return nil
	case len(shown) != ed25519.PublicKeySize || !ed25519.Verify(shown, joinStatement(c.GetClusterId(), c.GetTokenId(),
		c.GetNode()), c.GetTokenProof()):
		return refuse(PermissionDenied, "the join with token %s is not signed with the token's secret for this node: join "+
			"again at a seed that runs the version of skein that made the token", t.GetId())
	}
	return nil
}

func sum256(b []byte) []byte {
	sum := sha256.Sum256(b)
	return sum[:]
}

func wrongToken(id string) error {
	return refuse(PermissionDenied, "join token %.40q is wrong or was revoked: make a new one on a member with skein "+
		"token create", id)
}
