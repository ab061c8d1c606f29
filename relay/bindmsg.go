package relay

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
	bindMagic   = 0xf5736b6e
	bindVersion = 0x80

	bindSize   = 56
	bindSigned = 40
	nonceSize  = 16
)

type bindType byte

const (
	typeBind      bindType = 1
	typeChallenge bindType = 2
)

// bindMessage is a bind or a challenge.
type bindMessage struct {
	kind    bindType
	pair    PairID
	counter uint64
	nonce   [nonceSize]byte
}

var (
	errNoBind  = errors.New("datagram is no bind or challenge of a relay")
	errBindMAC = errors.New("datagram does not prove the reservation's key")
)

// appendBind appends a message with its MAC.
func appendBind(b []byte, m bindMessage, key *[pairKeySize]byte) []byte {
	start := len(b)
	b = binary.BigEndian.AppendUint32(b, bindMagic)
	b = append(b, bindVersion, byte(m.kind))
	b = binary.BigEndian.AppendUint16(b, bindSize)
	b = binary.BigEndian.AppendUint64(b, uint64(m.pair))
	b = binary.BigEndian.AppendUint64(b, m.counter)
	b = append(b, m.nonce[:]...)
	return append(b, bindMAC(b[start:], key)...)
}

// parseBind reads the message that b begins with, proving nothing; rest is what the kernel has joined to it.
func parseBind(b []byte) (m bindMessage, rest []byte, err error) {
	if len(b) < bindSize || binary.BigEndian.Uint32(b) != bindMagic || b[4] != bindVersion ||
		binary.BigEndian.Uint16(b[6:]) != bindSize {
		return m, nil, errNoBind
	}
	m = bindMessage{
		kind: bindType(b[5]), pair: PairID(binary.BigEndian.Uint64(b[8:])), counter: binary.BigEndian.Uint64(b[16:]),
		nonce: [nonceSize]byte(b[24:40]),
	}
	if m.kind != typeBind && m.kind != typeChallenge {
		return m, nil, errNoBind
	}
	return m, b[bindSize:], nil
}

// proveBind checks that the owner of the key wrote what parseBind has read.
func proveBind(b []byte, key *[pairKeySize]byte) error {
	if !hmac.Equal(b[bindSigned:bindSize], bindMAC(b[:bindSigned], key)) {
		return errBindMAC
	}
	return nil
}

func bindMAC(b []byte, key *[pairKeySize]byte) []byte {
	h := hmac.New(sha256.New, key[:])
	h.Write(b)
	return h.Sum(nil)[:bindSize-bindSigned]
}

// IsBind tells whether a datagram that came to WireGuard's port is a relay's.
func IsBind(b []byte) bool {
	return len(b) >= bindSize && binary.BigEndian.Uint32(b) == bindMagic && b[4] == bindVersion
}
