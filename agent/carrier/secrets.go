package carrier

import (
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// Secrets are what the carriers of a plain peer share.
type Secrets struct{ Key, PSK dataplane.Key }

// NewSecrets makes secrets, and the public half of the key.
func NewSecrets() (out Secrets, public []byte, err error) {
	key, err := identity.NewWireGuardKey()
	if err != nil {
		return out, nil, err
	}
	psk, err := identity.NewWireGuardKey() // 32 bytes of the same source
	if err != nil {
		return out, nil, err
	}
	pub, err := key.Public()
	return Secrets{Key: dataplane.Key(key), PSK: dataplane.Key(psk)}, pub[:], err
}

// Seal makes a carrier's secrets readable for that node alone.
func (s Secrets) Seal(node *skeinv1.Node) ([]byte, error) {
	raw := append(append([]byte(nil), s.Key[:]...), s.PSK[:]...)
	defer clear(raw)
	return identity.Seal(identity.WireGuardKey(node.GetWireguardKey()), raw)
}
