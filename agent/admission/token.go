package admission

import (
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

const (
	tokenPrefix   = "skein1_"
	maxTokenBytes = 16 << 10
	// MaxSeeds is how many members to join at a token may name.
	MaxSeeds = 16
)

// EncodeToken is the text form of a join token.
func EncodeToken(t *skeinv1.JoinToken) (string, error) {
	b, err := proto.Marshal(t)
	if err != nil {
		return "", fmt.Errorf("encode the token: %w", err)
	}
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(b), nil
}

// DecodeToken reads what EncodeToken wrote and checks its shape, not its validity.
func DecodeToken(text string) (*skeinv1.JoinToken, error) {
	text = strings.TrimSpace(text)
	body, ok := strings.CutPrefix(text, tokenPrefix)
	if !ok || len(text) > maxTokenBytes {
		return nil, fmt.Errorf("this is not a skein token: it must begin with %q; print one with `skein token create` on "+
			"a member", tokenPrefix)
	}
	b, err := base64.RawURLEncoding.DecodeString(body)
	if err != nil {
		return nil, fmt.Errorf("the token is damaged (%w): copy it again, whole", err)
	}
	t := &skeinv1.JoinToken{}
	if err := proto.Unmarshal(b, t); err != nil {
		return nil, fmt.Errorf("the token is damaged (%w): copy it again, whole", err)
	}
	if _, err := identity.ParseClusterID(t.GetClusterId()); err != nil {
		return nil, fmt.Errorf("the token is damaged (%w): copy it again, whole", err)
	}
	if len(t.GetSecret()) != 32 || t.GetTokenId() == "" {
		return nil, errors.New("the token is damaged: it holds no secret; copy it again, whole")
	}
	if n := len(t.GetSeeds()); n == 0 || n > MaxSeeds {
		return nil, fmt.Errorf("the token is damaged: it names %d seeds instead of 1 to %d; copy it again, whole",
			n, MaxSeeds)
	}
	for _, s := range t.GetSeeds() {
		if len(s.GetIdentityKey()) != ed25519.PublicKeySize || s.GetAddress() == "" {
			return nil, errors.New("the token is damaged: a seed has no address or identity key; copy it again, whole")
		}
	}
	return t, nil
}
