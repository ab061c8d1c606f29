package relay

import (
	"encoding/binary"

	"github.com/skeinmesh/skein/identity"
)

// Frames of the UDP relay. Those to the relay go only to one whose hello offers UDP; those to a client may be
// ignored, so that an older one loses nothing but the offer.

// PairID names a pair of reserved ports within one run of a relay.
type PairID uint64

const (
	pairKeySize   = 32
	pairFrameSize = 8 + 8 + 2 + pairKeySize
	stateSize     = 8 + 1
)

// grant is one end's half of a pair.
type grant struct {
	pair PairID
	peer identity.ID
	port uint16 // of the relay, for this end alone
	key  [pairKeySize]byte
}

// pairState is what a relay says of a pair later.
type pairState byte

const (
	pairEnded pairState = 0 // forget it
	pairReady pairState = 1 // both ends have proven their mappings: what is sent to the port arrives at the other end
)

// denial is why a relay gives no pair.
type denial byte

const (
	deniedNotHere denial = 1 // the other end has no session here
	deniedQuota   denial = 2 // this client has its limit of pairs
	deniedFull    denial = 3 // no port is free
	deniedOff     denial = 4 // this relay forwards no UDP now
)

func (d denial) String() string {
	switch d {
	case deniedNotHere:
		return "the peer has no session with this relay"
	case deniedQuota:
		return "this node has its limit of reserved ports there"
	case deniedFull:
		return "the relay has no free port"
	case deniedOff:
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
func pairFrameSizes(t frameType) (lo, hi int) {
	switch t {
	case framePair:
		return pairFrameSize, pairFrameSize + 64 // later versions may say more
	case frameState:
		return stateSize, stateSize + 64
	case frameDenied:
		return 9, 9 + maxReason
	}
	return 8, 8 // reserve: a node; failed, give up: a pair
}

func appendPairID(b []byte, t frameType, pair PairID) []byte {
	return binary.BigEndian.AppendUint64(appendHeader(b, t, 8), uint64(pair))
}

func appendGrant(b []byte, g grant) []byte {
	b = binary.BigEndian.AppendUint64(appendHeader(b, framePair, pairFrameSize), uint64(g.pair))
	b = append(b, g.peer[:]...)
	b = binary.BigEndian.AppendUint16(b, g.port)
	return append(b, g.key[:]...)
}

func appendState(b []byte, pair PairID, s pairState) []byte {
	b = binary.BigEndian.AppendUint64(appendHeader(b, frameState, stateSize), uint64(pair))
	return append(b, byte(s))
}

func appendDenied(b []byte, peer identity.ID, d denial) []byte {
	return append(append(appendHeader(b, frameDenied, 9), peer[:]...), byte(d))
}

// The decoders below take bodies whose length checkHeader has approved.

func decodePairID(b []byte) PairID { return PairID(binary.BigEndian.Uint64(b)) }

func decodeGrant(b []byte) grant {
	return grant{PairID(binary.BigEndian.Uint64(b)), identity.ID(b[8:16]), binary.BigEndian.Uint16(b[16:]),
		[pairKeySize]byte(b[18:])}
}

func decodeState(b []byte) (PairID, pairState) {
	return PairID(binary.BigEndian.Uint64(b)), pairState(b[8])
}

func decodeDenied(b []byte) (identity.ID, denial) { return identity.ID(b[:8]), denial(b[8]) }
