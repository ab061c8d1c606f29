package identity

import (
	"crypto/rand"
	"errors"
	"fmt"

	"golang.org/x/crypto/nacl/box"
)

// ErrSealed is returned for what was not sealed for this key, or was changed since.
var ErrSealed = errors.New("it was sealed for another key, or changed since")

// Seal encrypts a secret so that the holder of a WireGuard key alone can read it: an anonymous box of NaCl, X25519
// with a key made for
// it, XSalsa20 and Poly1305.
func Seal(to WireGuardKey, secret []byte) ([]byte, error) {
	key := [32]byte(to)
	out, err := box.SealAnonymous(nil, secret, &key, rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("sealing a secret: %w", err)
	}
	return out, nil
}

// Unseal reads what was sealed for this private key.
func (k WireGuardKey) Unseal(sealed []byte) ([]byte, error) {
	public, err := k.Public()
	if err != nil {
		return nil, err
	}
	pub, private := [32]byte(public), [32]byte(k)
	defer clear(private[:])
	out, ok := box.OpenAnonymous(nil, sealed, &pub, &private)
	if !ok {
		return nil, ErrSealed
	}
	return out, nil
}
