package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/skeinmesh/skein/identity"
)

// A frame is: type (1 byte), length of the body (2 bytes, big endian), body.
const (
	// HeaderSize is what comes before a body.
	HeaderSize = 3
	maxFrame   = 64 << 10
	maxBody    = maxFrame - HeaderSize
	dataPrefix = 8 + 1 // node ID, channel

	// MaxPayload is the largest packet that a session carries. The largest UDP datagram fits.
	MaxPayload = maxBody - dataPrefix
)

// Channels say what a packet is for.
const (
	ChannelWireGuard byte = 0 // WireGuard's own datagrams
	ChannelGossip    byte = 1 // a gossip packet
	ChannelSignal    byte = 2 // a path signal
)

// FrameType is the first byte of a frame.
type FrameType byte

// Types of frames. Those from Ignorable on are skipped by those who do not know them; other unknown types are errors.
const (
	FrameHello FrameType = 0x01 // relay to client: limits
	FramePing  FrameType = 0x02 // client to relay
	FramePong  FrameType = 0x03 // relay to client: the ping's token
	// to the relay: destination; from the relay: source. Empty WireGuard data to the relay asks: is that node here?
	FrameData    FrameType = 0x10
	FrameGone    FrameType = 0x11 // relay to client: no session of that node here; the refused packet may follow
	FrameHere    FrameType = 0x12 // relay to client: a node that was reported gone has come, or was asked for
	FrameOffer   FrameType = 0x20 // relay to client: a stream waits for you
	FrameConnect FrameType = 0x21 // splice: join me to that node
	FrameAccept  FrameType = 0x22 // splice: I take that offer
	FrameReply   FrameType = 0x23 // splice: joined, or why not

	FrameReserve FrameType = 0x30 // client to relay: reserve a pair of UDP ports with that node
	FrameFailed  FrameType = 0x31 // client to relay: that pair is ready, and nothing comes through
	FrameGiveUp  FrameType = 0x32 // client to relay: that pair is not needed any more

	Ignorable FrameType = 0x80

	FrameWindow FrameType = 0x80 // both: bytes read so far, and how many may be under way
	FramePair   FrameType = 0x90 // relay to client: a pair is reserved, whoever asked for it
	FrameState  FrameType = 0x91 // relay to client: a pair became ready, or ended
	FrameDenied FrameType = 0x92 // relay to client: no pair with that node, and why
)

// ErrProtocol is what a peer that breaks the frame format gets.
var ErrProtocol = errors.New("the other end broke the relay protocol")

// SecretSize is the size of an offered stream's secret.
const SecretSize = 16

const (
	tokenSize  = 8
	helloSize  = 1 + 4 + 4 + 2 + 2
	offerSize  = 8 + 8 + SecretSize
	acceptSize = 8 + SecretSize
	windowSize = 8 + 4
	maxReason  = 200
)

// Hello tells a client what the relay grants.
type Hello struct {
	Version     uint8
	QueueBytes  uint32 // per destination
	QueueCount  uint32 // packets per destination
	Streams     uint16 // spliced streams per client
	IdleSeconds uint16 // silence after which the relay ends the session
	UDP         bool   // reserves pairs of UDP ports; a relay that does not know of them sends nothing here
}

// Offer invites a client to take one end of a stream.
type Offer struct {
	Stream uint64
	From   identity.ID
	Secret [SecretSize]byte
}

// ReplyCode is what a relay says of a stream that was asked for.
type ReplyCode byte

const (
	ReplyOK      ReplyCode = 0 // the stream is joined
	ReplyNotHere ReplyCode = 1 // the other end has no session here
	ReplyLimit   ReplyCode = 2 // a limit of streams is reached
	ReplyTimeout ReplyCode = 3 // the other end did not take it
	ReplyRefused ReplyCode = 4 // the request was none, or its secret was wrong
)

// AppendHeader appends the header of a frame with a body of so many bytes.
func AppendHeader(b []byte, t FrameType, body int) []byte {
	return append(b, byte(t), byte(body>>8), byte(body))
}

// AppendHello appends a FrameHello.
func AppendHello(b []byte, h Hello) []byte {
	b = AppendHeader(b, FrameHello, helloSize+1)
	b = append(b, h.Version)
	b = binary.BigEndian.AppendUint32(b, h.QueueBytes)
	b = binary.BigEndian.AppendUint32(b, h.QueueCount)
	b = binary.BigEndian.AppendUint16(b, h.Streams)
	b = binary.BigEndian.AppendUint16(b, h.IdleSeconds)
	return append(b, flag(h.UDP))
}

// AppendToken appends a FramePing or a FramePong.
func AppendToken(b []byte, t FrameType, token uint64) []byte {
	return binary.BigEndian.AppendUint64(AppendHeader(b, t, tokenSize), token)
}

// AppendData appends a FrameData: a packet for a node (to a relay), or from it (from a relay).
func AppendData(b []byte, node identity.ID, channel byte, payload []byte) []byte {
	b = AppendHeader(b, FrameData, dataPrefix+len(payload))
	b = append(b, node[:]...)
	b = append(b, channel)
	return append(b, payload...)
}

// AppendRefused says that a node is gone and hands the packet for it back.
func AppendRefused(b []byte, node identity.ID, channel byte, payload []byte) []byte {
	b = AppendData(b, node, channel, payload)
	b[len(b)-len(payload)-dataPrefix-HeaderSize] = byte(FrameGone)
	return b
}

// AppendNode appends a frame whose body is a node alone.
func AppendNode(b []byte, t FrameType, node identity.ID) []byte {
	return append(AppendHeader(b, t, len(node)), node[:]...)
}

// AppendOffer appends a FrameOffer.
func AppendOffer(b []byte, o Offer) []byte {
	b = AppendHeader(b, FrameOffer, offerSize)
	b = binary.BigEndian.AppendUint64(b, o.Stream)
	b = append(b, o.From[:]...)
	return append(b, o.Secret[:]...)
}

// AppendAccept appends a FrameAccept.
func AppendAccept(b []byte, stream uint64, secret [SecretSize]byte) []byte {
	b = AppendHeader(b, FrameAccept, acceptSize)
	b = binary.BigEndian.AppendUint64(b, stream)
	return append(b, secret[:]...)
}

// AppendReply appends a FrameReply. A reason that is too long is cut.
func AppendReply(b []byte, code ReplyCode, reason string) []byte {
	reason = reason[:min(len(reason), maxReason)]
	b = AppendHeader(b, FrameReply, 1+len(reason))
	return append(append(b, byte(code)), reason...)
}

func appendWindow(b []byte, total uint64, size uint32) []byte {
	b = binary.BigEndian.AppendUint64(AppendHeader(b, FrameWindow, windowSize), total)
	return binary.BigEndian.AppendUint32(b, size)
}

// parse finds the first frame in b. size is 0 while the frame is not whole; need tells then how
// many bytes it takes, as far as that is known.
func parse(b []byte) (t FrameType, body []byte, size, need int, err error) {
	if len(b) < HeaderSize {
		return 0, nil, 0, HeaderSize, nil
	}
	t, n, err := ParseHeader([HeaderSize]byte(b))
	if err != nil {
		return 0, nil, 0, 0, err
	}
	if len(b) < HeaderSize+n {
		return 0, nil, 0, HeaderSize + n, nil
	}
	return t, b[HeaderSize : HeaderSize+n : HeaderSize+n], HeaderSize + n, HeaderSize + n, nil
}

// ParseHeader reads a frame's type and the length of its body, and refuses impossible ones.
func ParseHeader(header [HeaderSize]byte) (t FrameType, body int, err error) {
	t, body = FrameType(header[0]), int(binary.BigEndian.Uint16(header[1:]))
	return t, body, checkHeader(t, body)
}

// checkHeader refuses impossible frames before their body is waited for.
func checkHeader(t FrameType, n int) error {
	lo, hi := 0, maxBody
	switch t {
	case FrameHello:
		lo, hi = helloSize, 1024 // later versions may say more
	case FramePing, FramePong:
		lo, hi = tokenSize, tokenSize
	case FrameData:
		lo = dataPrefix
	case FrameGone:
		lo = 8
	case FrameHere, FrameConnect:
		lo, hi = 8, 8
	case FrameOffer:
		lo, hi = offerSize, offerSize
	case FrameAccept:
		lo, hi = acceptSize, acceptSize
	case FrameReply:
		lo, hi = 1, 1+maxReason
	case FrameReserve, FrameFailed, FrameGiveUp, FramePair, FrameState, FrameDenied:
		lo, hi = pairFrameSizes(t)
	case FrameWindow:
		lo = windowSize
	case FrameForward, FrameForwarded, FrameFar:
		lo = farPrefix
	case FrameNoWay:
		lo = noWaySize
	case FrameShow:
		hi = 0
	case FrameWhere:
		lo, hi = 8, 8
	case FrameSeen:
		lo = 8
	default:
		if t < Ignorable {
			return fmt.Errorf("%w: unknown frame type 0x%02x", ErrProtocol, byte(t))
		}
	}
	if n < lo || n > hi {
		return fmt.Errorf("%w: frame type 0x%02x with a body of %d bytes (want %d to %d)", ErrProtocol, byte(t), n, lo, hi)
	}
	return nil
}

// The decoders below take bodies whose length checkHeader has approved.

// DecodeHello reads the body of a FrameHello.
func DecodeHello(b []byte) Hello {
	return Hello{
		Version:     b[0],
		QueueBytes:  binary.BigEndian.Uint32(b[1:]),
		QueueCount:  binary.BigEndian.Uint32(b[5:]),
		Streams:     binary.BigEndian.Uint16(b[9:]),
		IdleSeconds: binary.BigEndian.Uint16(b[11:]),
		UDP:         len(b) > helloSize && b[helloSize]&1 != 0,
	}
}

// DecodeToken reads the body of a FramePing or a FramePong.
func DecodeToken(b []byte) uint64 { return binary.BigEndian.Uint64(b) }

// DecodeNode reads the node with which a body begins.
func DecodeNode(b []byte) identity.ID { return identity.ID(b[:8]) }

// DecodeData reads the body of a FrameData. payload is a part of b.
func DecodeData(b []byte) (node identity.ID, channel byte, payload []byte) {
	return identity.ID(b[:8]), b[8], b[dataPrefix:]
}

// DecodeRefused reads a gone frame. handed is false when no packet is handed back.
func DecodeRefused(b []byte) (node identity.ID, channel byte, payload []byte, handed bool) {
	if len(b) < dataPrefix {
		return DecodeNode(b), 0, nil, false
	}
	node, channel, payload = DecodeData(b)
	return node, channel, payload, true
}

// DecodeOffer reads the body of a FrameOffer.
func DecodeOffer(b []byte) Offer {
	return Offer{binary.BigEndian.Uint64(b), identity.ID(b[8:16]), [SecretSize]byte(b[16:])}
}

// DecodeAccept reads the body of a FrameAccept.
func DecodeAccept(b []byte) (stream uint64, secret [SecretSize]byte) {
	return binary.BigEndian.Uint64(b), [SecretSize]byte(b[8:])
}

// DecodeWindow returns up to which byte the sender may go.
func DecodeWindow(b []byte) (granted uint64) {
	total, size := binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])
	if size == 0 || total > math.MaxInt64 {
		return unlimited
	}
	return total + uint64(size)
}

// DecodeReply reads the body of a FrameReply.
func DecodeReply(b []byte) (ReplyCode, string) { return ReplyCode(b[0]), string(b[1:]) }

// FrameReader cuts a byte stream into frames without an allocation per frame.
type FrameReader struct {
	buf        []byte
	start, end int
	need       int // bytes of the frame that buf begins with, as far as known
}

// A TLS record holds at most 16 KiB, so one Read never gives more; the rest is room for a frame cut in two.
const readBuffer = 20 << 10

// NewFrameReader makes a FrameReader for one connection.
func NewFrameReader() *FrameReader { return &FrameReader{buf: make([]byte, readBuffer)} }

// Fill reads once from the connection, and tells how many bytes came.
func (r *FrameReader) Fill(c io.Reader) (int, error) {
	if r.start > 0 {
		r.end = copy(r.buf, r.buf[r.start:r.end])
		r.start = 0
	}
	if r.need > len(r.buf) {
		r.buf = append(make([]byte, 0, maxFrame+readBuffer), r.buf[:r.end]...)[:maxFrame+readBuffer]
	}
	n, err := c.Read(r.buf[r.end:])
	r.end += n
	if n > 0 {
		return n, nil // an error comes again with the next Read
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return 0, err
}

// Next returns the next whole frame; ok is false when more must be read first. The body is valid
// until the next fill.
func (r *FrameReader) Next() (t FrameType, body []byte, ok bool, err error) {
	t, body, size, need, err := parse(r.buf[r.start:r.end])
	r.need = need
	if err != nil || size == 0 {
		return 0, nil, false, err
	}
	r.start += size
	return t, body, true, nil
}

// ReadFrame reads exactly one frame and not a byte more: what follows belongs to the stream.
func ReadFrame(c io.Reader, want FrameType) ([]byte, error) {
	var header [HeaderSize]byte
	if _, err := io.ReadFull(c, header[:]); err != nil {
		return nil, err
	}
	t, n, err := ParseHeader(header)
	if err != nil {
		return nil, err
	}
	if t != want || n > 1024 {
		return nil, fmt.Errorf("%w: frame type 0x%02x of %d bytes, want 0x%02x", ErrProtocol, byte(t), n, byte(want))
	}
	body := make([]byte, n)
	_, err = io.ReadFull(c, body)
	return body, err
}
