package identity

import (
	"crypto/ecdh"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/skeinmesh/skein/internal/wholefile"
)

// Key is a node's secret identity.
type Key struct {
	private     ed25519.PrivateKey
	id          ID
	certificate func() (tls.Certificate, error) // made once
}

// WireGuardKey is an X25519 key, public or private, as WireGuard uses it.
type WireGuardKey [32]byte

// NewKey makes a fresh identity.
func NewKey() (*Key, error) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make an identity key: %w", err)
	}
	return fromPrivate(private), nil
}

// KeyFromSeed makes the identity that belongs to a 32-byte seed; for tests.
func KeyFromSeed(seed []byte) *Key { return fromPrivate(ed25519.NewKeyFromSeed(seed)) }

func fromPrivate(p ed25519.PrivateKey) *Key {
	k := &Key{private: p, id: IDOf(p.Public().(ed25519.PublicKey))}
	k.certificate = sync.OnceValues(k.makeCertificate)
	return k
}

// ID is the node ID that follows from the key.
func (k *Key) ID() ID { return k.id }

// Public is the half that others know.
func (k *Key) Public() ed25519.PublicKey { return k.private.Public().(ed25519.PublicKey) }

// Sign signs a message with Ed25519.
func (k *Key) Sign(message []byte) []byte { return ed25519.Sign(k.private, message) }

// String names the node and never shows the key.
func (k *Key) String() string { return "identity " + k.id.String() }

// NewWireGuardKey makes a fresh private key.
func NewWireGuardKey() (WireGuardKey, error) {
	var k WireGuardKey
	if _, err := rand.Read(k[:]); err != nil {
		return k, fmt.Errorf("make a WireGuard key: %w", err)
	}
	k[0] &= 248
	k[31] = k[31]&127 | 64
	return k, nil
}

// Public is the public half of a private key.
func (k WireGuardKey) Public() (WireGuardKey, error) {
	private, err := ecdh.X25519().NewPrivateKey(k[:])
	if err != nil {
		return WireGuardKey{}, fmt.Errorf("WireGuard key: %w", err)
	}
	return WireGuardKey(private.PublicKey().Bytes()), nil
}

// PairKey is a key that only the owners of two WireGuard keys know: HKDF-SHA256 over their X25519
// secret, bound to the cluster and to a purpose. Both ends compute the same.
func PairKey(own WireGuardKey, peer WireGuardKey, c ClusterID, purpose string) ([32]byte, error) {
	var out [32]byte
	private, err := ecdh.X25519().NewPrivateKey(own[:])
	if err != nil {
		return out, fmt.Errorf("own WireGuard key: %w", err)
	}
	public, err := ecdh.X25519().NewPublicKey(peer[:])
	if err != nil {
		return out, fmt.Errorf("peer's WireGuard key: %w", err)
	}
	secret, err := private.ECDH(public)
	if err != nil {
		return out, fmt.Errorf("derive the pair's key: %w", err)
	}
	b, err := hkdf.Key(sha256.New, secret, c[:], "skein pair v1 "+purpose, len(out))
	if err != nil {
		return out, fmt.Errorf("derive the pair's key: %w", err)
	}
	return [32]byte(b), nil
}

// PresharedKey is WireGuard's preshared key of a pair, derived from the cluster's seed. The order
// of the two does not matter.
func PresharedKey(seed []byte, a, b ID) ([32]byte, error) {
	if string(a[:]) > string(b[:]) {
		a, b = b, a
	}
	out, err := hkdf.Key(sha256.New, seed, nil, "skein psk v1 "+a.String()+" "+b.String(), 32)
	if err != nil {
		return [32]byte{}, fmt.Errorf("derive the preshared key: %w", err)
	}
	return [32]byte(out), nil
}

const (
	identityFile  = "identity.pem"
	identityBlock = "SKEIN ED25519 SEED"
	wireguardFile = "wireguard.pem"
	formerFile    = "wireguard.former.pem" // until the log has the present one
	wgBlock       = "SKEIN WIREGUARD KEY"
)

// LoadOrCreate reads the node's keys from its state directory, and makes them at the first start.
// Files are 0600. A damaged file is an error and is left as it is.
func LoadOrCreate(dir string) (*Key, WireGuardKey, error) {
	seed, err := secret(filepath.Join(dir, identityFile), identityBlock, func() ([]byte, error) {
		k, err := NewKey()
		if err != nil {
			return nil, err
		}
		return k.private.Seed(), nil
	})
	if err != nil {
		return nil, WireGuardKey{}, err
	}
	wg, err := secret(filepath.Join(dir, wireguardFile), wgBlock, func() ([]byte, error) {
		k, err := NewWireGuardKey()
		return k[:], err
	})
	if err != nil {
		return nil, WireGuardKey{}, err
	}
	return KeyFromSeed(seed), WireGuardKey(wg), nil
}

// ReplaceWireGuard makes a key the host's WireGuard key, and keeps the present one as the former. Where there is a
// former one already it stays that: the log has it.
func ReplaceWireGuard(dir string, next WireGuardKey) error {
	path := filepath.Join(dir, wireguardFile)
	linked := os.Link(path, filepath.Join(dir, formerFile))
	if linked != nil && !errors.Is(linked, fs.ErrExist) {
		return fmt.Errorf("keep the former WireGuard key: %w", linked)
	}
	block := pem.EncodeToMemory(&pem.Block{Type: wgBlock, Bytes: next[:]})
	if err := wholefile.Replace(path, block); err != nil {
		if linked == nil {
			err = errors.Join(err, os.Remove(filepath.Join(dir, formerFile)))
		}
		return err
	}
	return nil
}

// Former is the WireGuard key of before a change that the log does not have yet, if there is one.
func Former(dir string) (k WireGuardKey, has bool, err error) {
	path := filepath.Join(dir, formerFile)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return WireGuardKey{}, false, nil
	}
	b, err := secret(path, wgBlock, nil)
	if err != nil {
		return WireGuardKey{}, false, err
	}
	return WireGuardKey(b), true, nil
}

// ForgetFormer removes the former key, if there is one.
func ForgetFormer(dir string) error {
	if err := os.Remove(filepath.Join(dir, formerFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the former WireGuard key: %w", err)
	}
	return nil
}

func secret(path, block string, create func() ([]byte, error)) ([]byte, error) {
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		v, err := create()
		if err != nil {
			return nil, err
		}
		return v, writeNew(path, pem.EncodeToMemory(&pem.Block{Type: block, Bytes: v}))
	case err != nil:
		return nil, fmt.Errorf("read key file: %w", err)
	}
	p, _ := pem.Decode(b)
	if p == nil || p.Type != block || len(p.Bytes) != 32 {
		return nil, fmt.Errorf("key file %s is damaged (want a PEM block %q of 32 bytes): restore it from a backup, or "+
			"move it away to get a new identity and join again", path, block)
	}
	return p.Bytes, nil
}

// writeNew writes a file that did not exist, whole or not at all.
func writeNew(path string, b []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".new-")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(b)
	if err == nil {
		err = tmp.Sync()
	}
	if e := tmp.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Link(tmp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
