package identity

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
)

// ID names a node: 64 bits taken from its identity key. The zero ID names nobody.
type ID [8]byte

// Compare orders IDs by their bytes, which is how their texts are ordered, too.
func (id ID) Compare(o ID) int { return bytes.Compare(id[:], o[:]) }

// ClusterID names a cluster: 128 random bits, given at creation.
type ClusterID [16]byte

// IDOf derives the node ID from an identity key.
func IDOf(key ed25519.PublicKey) ID {
	h := sha256.New()
	h.Write([]byte("skein node id v1\x00"))
	h.Write(key)
	var id ID
	copy(id[:], h.Sum(nil))
	return id
}

// String is the ID as 16 lower-case hex digits.
func (id ID) String() string { return hex.EncodeToString(id[:]) }

// IsZero reports whether the ID names nobody.
func (id ID) IsZero() bool { return id == ID{} }

// MarshalText encodes the ID as String does.
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText decodes what MarshalText wrote.
func (id *ID) UnmarshalText(b []byte) error {
	v, err := ParseID(string(b))
	if err == nil {
		*id = v
	}
	return err
}

// ParseID reads an ID as String prints it.
func ParseID(s string) (ID, error) {
	var id ID
	if len(s) != 2*len(id) {
		return id, fmt.Errorf("node ID %q: want 16 hex digits, have %d characters", s, len(s))
	}
	if _, err := hex.Decode(id[:], []byte(s)); err != nil {
		return ID{}, fmt.Errorf("node ID %q: %w", s, err)
	}
	return id, nil
}

// String is the cluster ID as 32 lower-case hex digits.
func (c ClusterID) String() string { return hex.EncodeToString(c[:]) }

// ParseClusterID reads a cluster ID as String prints it.
func ParseClusterID(s string) (ClusterID, error) {
	var c ClusterID
	if len(s) != 2*len(c) {
		return c, fmt.Errorf("cluster ID %q: want 32 hex digits, have %d characters", s, len(s))
	}
	if _, err := hex.Decode(c[:], []byte(s)); err != nil {
		return ClusterID{}, fmt.Errorf("cluster ID %q: %w", s, err)
	}
	return c, nil
}

// OverlayPrefix is the cluster's IPv6 overlay: fd, 40 bits of the cluster ID, 16 zero bits.
func OverlayPrefix(c ClusterID) netip.Prefix {
	var a [16]byte
	a[0] = 0xfd
	copy(a[1:6], c[:5])
	return netip.PrefixFrom(netip.AddrFrom16(a), 64)
}

// OverlayIPv6 is a node's address for life in its cluster's IPv6 overlay.
func OverlayIPv6(c ClusterID, id ID) netip.Addr {
	a := OverlayPrefix(c).Addr().As16()
	copy(a[8:], id[:])
	return netip.AddrFrom16(a)
}
