package wire

import "github.com/skeinmesh/skein/identity"

// Frames of packets that go over two relays. All types may be ignored: a relay that does not know them drops the
// packet.
const (
	FrameForward   FrameType = 0xa0 // client to relay: relay 8 · destination 8 · channel 1 · payload
	FrameForwarded FrameType = 0xa1 // relay to relay: origin 8 · destination 8 · channel 1 · payload
	FrameFar       FrameType = 0xa2 // relay to client: relay that handed it over 8 · source 8 · channel 1 · payload
	FrameNoWay     FrameType = 0xa3 // relay to client: relay 8 (NoWayOrigin: origin) · destination 8 · code 1

	farPrefix = 8 + 8 + 1
	noWaySize = 8 + 8 + 1

	// MaxFarPayload is the largest packet that travels over two relays.
	MaxFarPayload = maxBody - farPrefix
)

// NoWayCode is why a relay did not hand a packet on.
type NoWayCode byte

// Reasons in a FrameNoWay.
const (
	NoWayGone    NoWayCode = 0 // the far relay has no session of that node
	NoWayNoRelay NoWayCode = 1 // the near relay has no session with the far one
	// NoWayOrigin is a far relay's NoWayGone to the near one, which tells the packet's origin. Only this one is told on:
	// relays are clients of each other, so that a word which each of them told on would go round among them for ever.
	NoWayOrigin NoWayCode = 2
)

// AppendFar appends a packet that travels over two relays. t is FrameForward, FrameForwarded or FrameFar, and says what
// a and node are.
func AppendFar(b []byte, t FrameType, a, node identity.ID, channel byte, payload []byte) []byte {
	b = AppendHeader(b, t, farPrefix+len(payload))
	b = append(b, a[:]...)
	b = append(b, node[:]...)
	return append(append(b, channel), payload...)
}

// DecodeFar reads the body of what AppendFar makes.
func DecodeFar(b []byte) (a, node identity.ID, channel byte, payload []byte) {
	return identity.ID(b[:8]), identity.ID(b[8:16]), b[16], b[farPrefix:]
}

// AppendNoWay appends the word that a packet for a node was not handed on. a is the far relay, or, with NoWayOrigin,
// the packet's origin.
func AppendNoWay(b []byte, a, node identity.ID, code NoWayCode) []byte {
	b = append(AppendHeader(b, FrameNoWay, noWaySize), a[:]...)
	return append(append(b, node[:]...), byte(code))
}

// DecodeNoWay reads the body of a FrameNoWay.
func DecodeNoWay(b []byte) (a, node identity.ID, code NoWayCode) {
	return identity.ID(b[:8]), identity.ID(b[8:16]), NoWayCode(b[16])
}
