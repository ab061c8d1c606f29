package wire

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
)

// Datagrams by which a client proves its mapping at a reserved port. They share probe's first four bytes, so that
// the filter on WireGuard's port lets a challenge in, and have a version of their own.
//
//	offset  bytes
//	0       4      magic f5 73 6b 6e
//	4       1      version 0x80: the relay's
//	5       1      type: 1 bind (client), 2 challenge (relay)
//	6       2      length of the whole datagram: the kernel may have joined several
//	8       8      pair
//	16      8      counter of the client's binds; a challenge carries the bind's
//	24      16     nonce: of the challenge; in a bind the one that it answers, or zero
//	40      16     MAC: HMAC-SHA256 over bytes 0-39, first 16 bytes, with the key of this end
const (
	// BindMagic begins each of them.
	BindMagic   = 0xf5736b6e
	bindVersion = 0x80

	bindSize   = 56
	bindSigned = 40

	// NonceSize is the size of a challenge's nonce.
	NonceSize = 16
)

// BindType tells a bind from a challenge.
type BindType byte

const (
	TypeBind      BindType = 1 // of a client
	TypeChallenge BindType = 2 // of a relay
)

// BindMessage is a bind or a challenge.
type BindMessage struct {
	Kind    BindType
	Pair    PairID
	Counter uint64
	Nonce   [NonceSize]byte
}

var (
	errNoBind  = errors.New("datagram is not a bind or challenge of a relay")
	errBindMAC = errors.New("datagram does not prove the reservation's key")
)

// AppendBind appends a message with its MAC.
func AppendBind(b []byte, m BindMessage, key *[PairKeySize]byte) []byte {
	start := len(b)
	b = binary.BigEndian.AppendUint32(b, BindMagic)
	b = append(b, bindVersion, byte(m.Kind))
	b = binary.BigEndian.AppendUint16(b, bindSize)
	b = binary.BigEndian.AppendUint64(b, uint64(m.Pair))
	b = binary.BigEndian.AppendUint64(b, m.Counter)
	b = append(b, m.Nonce[:]...)
	return append(b, bindMAC(b[start:], key)...)
}

// ParseBind reads the message that b begins with, proving nothing; rest is what the kernel has joined to it.
func ParseBind(b []byte) (m BindMessage, rest []byte, err error) {
	if len(b) < bindSize || binary.BigEndian.Uint32(b) != BindMagic || b[4] != bindVersion ||
		binary.BigEndian.Uint16(b[6:]) != bindSize {
		return m, nil, errNoBind
	}
	m = BindMessage{
		Kind: BindType(b[5]), Pair: PairID(binary.BigEndian.Uint64(b[8:])), Counter: binary.BigEndian.Uint64(b[16:]),
		Nonce: [NonceSize]byte(b[24:40]),
	}
	if m.Kind != TypeBind && m.Kind != TypeChallenge {
		return m, nil, errNoBind
	}
	return m, b[bindSize:], nil
}

// ProveBind checks that the owner of the key wrote what ParseBind has read.
func ProveBind(b []byte, key *[PairKeySize]byte) error {
	if !hmac.Equal(b[bindSigned:bindSize], bindMAC(b[:bindSigned], key)) {
		return errBindMAC
	}
	return nil
}

func bindMAC(b []byte, key *[PairKeySize]byte) []byte {
	h := hmac.New(sha256.New, key[:])
	h.Write(b)
	return h.Sum(nil)[:bindSize-bindSigned]
}

// IsBind tells whether a datagram that came to WireGuard's port is a relay's.
func IsBind(b []byte) bool {
	return len(b) >= bindSize && binary.BigEndian.Uint32(b) == BindMagic && b[4] == bindVersion
}
