package wire

import (
	"encoding/binary"

	"github.com/skeinmesh/skein/identity"
)

// Frames of the UDP relay. Those to the relay go only to one whose hello offers UDP; those to a client may be
// ignored, so that an older one loses nothing but the offer.

// PairID names a pair of reserved ports within one run of a relay.
type PairID uint64

// PairKeySize is the size of a reservation's key.
const PairKeySize = 32

const (
	pairFrameSize = 8 + 8 + 2 + PairKeySize
	stateSize     = 8 + 1
)

// Grant is one end's half of a pair.
type Grant struct {
	Pair PairID
	Peer identity.ID
	Port uint16 // of the relay, for this end alone
	Key  [PairKeySize]byte
}

// PairState is what a relay says of a pair later.
type PairState byte

// States of a pair.
const (
	PairEnded PairState = 0 // forget it
	PairReady PairState = 1 // both ends have proven their mappings: what is sent to the port arrives at the other end
)

// Denial is why a relay gives no pair.
type Denial byte

// Reasons in a FrameDenied.
const (
	DeniedNotHere Denial = 1 // the other end has no session here
	DeniedQuota   Denial = 2 // this client has its limit of pairs
	DeniedFull    Denial = 3 // no port is free
	DeniedOff     Denial = 4 // this relay forwards no UDP now
)

// String says it in words.
func (d Denial) String() string {
	switch d {
	case DeniedNotHere:
		return "the peer has no session with this relay"
	case DeniedQuota:
		return "this node has reached its limit of reserved ports there"
	case DeniedFull:
		return "the relay has no free port"
	case DeniedOff:
		return "the relay forwards no UDP now"
	}
	return "refused"
}

func flag(on bool) byte {
	if on {
		return 1
	}
	return 0
}

// pairFrameSizes bounds the bodies of the UDP relay's frames.
func pairFrameSizes(t FrameType) (lo, hi int) {
	switch t {
	case FramePair:
		return pairFrameSize, pairFrameSize + 64 // later versions may say more
	case FrameState:
		return stateSize, stateSize + 64
	case FrameDenied:
		return 9, 9 + maxReason
	}
	return 8, 8 // reserve: a node; failed, give up: a pair
}

// AppendPairID appends a FrameFailed or a FrameGiveUp.
func AppendPairID(b []byte, t FrameType, pair PairID) []byte {
	return binary.BigEndian.AppendUint64(AppendHeader(b, t, 8), uint64(pair))
}

// AppendGrant appends a FramePair.
func AppendGrant(b []byte, g Grant) []byte {
	b = binary.BigEndian.AppendUint64(AppendHeader(b, FramePair, pairFrameSize), uint64(g.Pair))
	b = append(b, g.Peer[:]...)
	b = binary.BigEndian.AppendUint16(b, g.Port)
	return append(b, g.Key[:]...)
}

// AppendState appends a FrameState.
func AppendState(b []byte, pair PairID, s PairState) []byte {
	b = binary.BigEndian.AppendUint64(AppendHeader(b, FrameState, stateSize), uint64(pair))
	return append(b, byte(s))
}

// AppendDenied appends a FrameDenied.
func AppendDenied(b []byte, peer identity.ID, d Denial) []byte {
	return append(append(AppendHeader(b, FrameDenied, 9), peer[:]...), byte(d))
}

// The decoders below take bodies whose length checkHeader has approved.

// DecodePairID reads the body of a FrameFailed or a FrameGiveUp.
func DecodePairID(b []byte) PairID { return PairID(binary.BigEndian.Uint64(b)) }

// DecodeGrant reads the body of a FramePair.
func DecodeGrant(b []byte) Grant {
	return Grant{PairID(binary.BigEndian.Uint64(b)), identity.ID(b[8:16]), binary.BigEndian.Uint16(b[16:]),
		[PairKeySize]byte(b[18:])}
}

// DecodeState reads the body of a FrameState.
func DecodeState(b []byte) (PairID, PairState) {
	return PairID(binary.BigEndian.Uint64(b)), PairState(b[8])
}

// DecodeDenied reads the body of a FrameDenied.
func DecodeDenied(b []byte) (identity.ID, Denial) { return identity.ID(b[:8]), Denial(b[8]) }
