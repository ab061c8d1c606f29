package relay

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
	headerSize = 3
	maxFrame   = 64 << 10
	maxBody    = maxFrame - headerSize
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

type frameType byte

// Types from ignorable on are skipped by those who do not know them; other unknown types are errors.
const (
	frameHello frameType = 0x01 // relay to client: limits
	framePing  frameType = 0x02 // client to relay
	framePong  frameType = 0x03 // relay to client: the ping's token
	// to the relay: destination; from the relay: source. Empty WireGuard data to the relay asks: is that node here?
	frameData    frameType = 0x10
	frameGone    frameType = 0x11 // relay to client: no session of that node here; the refused packet may follow
	frameHere    frameType = 0x12 // relay to client: a node that was reported gone has come, or was asked for
	frameOffer   frameType = 0x20 // relay to client: a stream waits for you
	frameConnect frameType = 0x21 // splice: join me to that node
	frameAccept  frameType = 0x22 // splice: I take that offer
	frameReply   frameType = 0x23 // splice: joined, or why not

	frameReserve frameType = 0x30 // client to relay: reserve a pair of UDP ports with that node
	frameFailed  frameType = 0x31 // client to relay: that pair is ready, and nothing comes through
	frameGiveUp  frameType = 0x32 // client to relay: that pair is not needed any more

	ignorable   frameType = 0x80
	frameWindow frameType = 0x80 // both: bytes read so far, and how many may be under way
	framePair   frameType = 0x90 // relay to client: a pair is reserved, whoever asked for it
	frameState  frameType = 0x91 // relay to client: a pair became ready, or ended
	frameDenied frameType = 0x92 // relay to client: no pair with that node, and why
)

// errProtocol is what a peer that breaks the frame format gets.
var errProtocol = errors.New("the other end broke the relay protocol")

const (
	tokenSize  = 8
	secretSize = 16
	helloSize  = 1 + 4 + 4 + 2 + 2
	offerSize  = 8 + 8 + secretSize
	acceptSize = 8 + secretSize
	windowSize = 8 + 4
	maxReason  = 200
)

// hello tells a client what the relay grants.
type hello struct {
	version     uint8
	queueBytes  uint32 // per destination
	queueCount  uint32 // packets per destination
	streams     uint16 // spliced streams per client
	idleSeconds uint16 // silence after which the relay ends the session
	udp         bool   // reserves pairs of UDP ports; a relay that does not know of them sends nothing here
}

// offer invites a client to take one end of a stream.
type offer struct {
	stream uint64
	from   identity.ID
	secret [secretSize]byte
}

type replyCode byte

const (
	replyOK      replyCode = 0
	replyNotHere replyCode = 1
	replyLimit   replyCode = 2
	replyTimeout replyCode = 3
	replyRefused replyCode = 4
)

func appendHeader(b []byte, t frameType, body int) []byte {
	return append(b, byte(t), byte(body>>8), byte(body))
}

func appendHello(b []byte, h hello) []byte {
	b = appendHeader(b, frameHello, helloSize+1)
	b = append(b, h.version)
	b = binary.BigEndian.AppendUint32(b, h.queueBytes)
	b = binary.BigEndian.AppendUint32(b, h.queueCount)
	b = binary.BigEndian.AppendUint16(b, h.streams)
	b = binary.BigEndian.AppendUint16(b, h.idleSeconds)
	return append(b, flag(h.udp))
}

func appendToken(b []byte, t frameType, token uint64) []byte {
	return binary.BigEndian.AppendUint64(appendHeader(b, t, tokenSize), token)
}

func appendData(b []byte, node identity.ID, channel byte, payload []byte) []byte {
	b = appendHeader(b, frameData, dataPrefix+len(payload))
	b = append(b, node[:]...)
	b = append(b, channel)
	return append(b, payload...)
}

// appendRefused says that a node is gone and hands the packet for it back.
func appendRefused(b []byte, node identity.ID, channel byte, payload []byte) []byte {
	b = appendData(b, node, channel, payload)
	b[len(b)-len(payload)-dataPrefix-headerSize] = byte(frameGone)
	return b
}

func appendNode(b []byte, t frameType, node identity.ID) []byte {
	return append(appendHeader(b, t, len(node)), node[:]...)
}

func appendOffer(b []byte, o offer) []byte {
	b = appendHeader(b, frameOffer, offerSize)
	b = binary.BigEndian.AppendUint64(b, o.stream)
	b = append(b, o.from[:]...)
	return append(b, o.secret[:]...)
}

func appendAccept(b []byte, stream uint64, secret [secretSize]byte) []byte {
	b = appendHeader(b, frameAccept, acceptSize)
	b = binary.BigEndian.AppendUint64(b, stream)
	return append(b, secret[:]...)
}

func appendReply(b []byte, code replyCode, reason string) []byte {
	reason = reason[:min(len(reason), maxReason)]
	b = appendHeader(b, frameReply, 1+len(reason))
	return append(append(b, byte(code)), reason...)
}

func appendWindow(b []byte, total uint64, size uint32) []byte {
	b = binary.BigEndian.AppendUint64(appendHeader(b, frameWindow, windowSize), total)
	return binary.BigEndian.AppendUint32(b, size)
}

// parse finds the first frame in b. size is 0 while the frame is not whole; need tells then how
// many bytes it takes, as far as that is known.
func parse(b []byte) (t frameType, body []byte, size, need int, err error) {
	if len(b) < headerSize {
		return 0, nil, 0, headerSize, nil
	}
	t, n := frameType(b[0]), int(binary.BigEndian.Uint16(b[1:]))
	if err := checkHeader(t, n); err != nil {
		return 0, nil, 0, 0, err
	}
	if len(b) < headerSize+n {
		return 0, nil, 0, headerSize + n, nil
	}
	return t, b[headerSize : headerSize+n : headerSize+n], headerSize + n, headerSize + n, nil
}

// checkHeader refuses impossible frames before their body is waited for.
func checkHeader(t frameType, n int) error {
	lo, hi := 0, maxBody
	switch t {
	case frameHello:
		lo, hi = helloSize, 1024 // later versions may say more
	case framePing, framePong:
		lo, hi = tokenSize, tokenSize
	case frameData:
		lo = dataPrefix
	case frameGone:
		lo = 8
	case frameHere, frameConnect:
		lo, hi = 8, 8
	case frameOffer:
		lo, hi = offerSize, offerSize
	case frameAccept:
		lo, hi = acceptSize, acceptSize
	case frameReply:
		lo, hi = 1, 1+maxReason
	case frameReserve, frameFailed, frameGiveUp, framePair, frameState, frameDenied:
		lo, hi = pairFrameSizes(t)
	case frameWindow:
		lo = windowSize
	case frameForward, frameForwarded, frameFar:
		lo = farPrefix
	case frameNoWay:
		lo = noWaySize
	case frameShow:
		hi = 0
	case frameWhere:
		lo, hi = 8, 8
	case frameSeen:
		lo = 8
	default:
		if t < ignorable {
			return fmt.Errorf("%w: unknown frame type 0x%02x", errProtocol, byte(t))
		}
	}
	if n < lo || n > hi {
		return fmt.Errorf("%w: frame type 0x%02x with a body of %d bytes (want %d to %d)", errProtocol, byte(t), n, lo, hi)
	}
	return nil
}

// The decoders below take bodies whose length checkHeader has approved.

func decodeHello(b []byte) hello {
	return hello{
		version:     b[0],
		queueBytes:  binary.BigEndian.Uint32(b[1:]),
		queueCount:  binary.BigEndian.Uint32(b[5:]),
		streams:     binary.BigEndian.Uint16(b[9:]),
		idleSeconds: binary.BigEndian.Uint16(b[11:]),
		udp:         len(b) > helloSize && b[helloSize]&1 != 0,
	}
}

func decodeToken(b []byte) uint64 { return binary.BigEndian.Uint64(b) }

func decodeNode(b []byte) identity.ID { return identity.ID(b[:8]) }

func decodeData(b []byte) (node identity.ID, channel byte, payload []byte) {
	return identity.ID(b[:8]), b[8], b[dataPrefix:]
}

func decodeOffer(b []byte) offer {
	return offer{binary.BigEndian.Uint64(b), identity.ID(b[8:16]), [secretSize]byte(b[16:])}
}

func decodeAccept(b []byte) (stream uint64, secret [secretSize]byte) {
	return binary.BigEndian.Uint64(b), [secretSize]byte(b[8:])
}

// decodeWindow returns up to which byte the sender may go.
func decodeWindow(b []byte) (granted uint64) {
	total, size := binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])
	if size == 0 || total > math.MaxInt64 {
		return unlimited
	}
	return total + uint64(size)
}

func decodeReply(b []byte) (replyCode, string) { return replyCode(b[0]), string(b[1:]) }

// frameReader cuts a byte stream into frames without an allocation per frame.
type frameReader struct {
	buf        []byte
	start, end int
	need       int // bytes of the frame that buf begins with, as far as known
}

// A TLS record holds at most 16 KiB, so one Read never gives more; the rest is room for a frame cut in two.
const readBuffer = 20 << 10

func newFrameReader() *frameReader { return &frameReader{buf: make([]byte, readBuffer)} }

// fill reads once from the connection, and tells how many bytes came.
func (r *frameReader) fill(c io.Reader) (int, error) {
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

// next returns the next whole frame; ok is false when more must be read first. The body is valid
// until the next fill.
func (r *frameReader) next() (t frameType, body []byte, ok bool, err error) {
	t, body, size, need, err := parse(r.buf[r.start:r.end])
	r.need = need
	if err != nil || size == 0 {
		return 0, nil, false, err
	}
	r.start += size
	return t, body, true, nil
}

// readFrame reads exactly one frame and not a byte more: what follows belongs to the stream.
func readFrame(c io.Reader, want frameType) ([]byte, error) {
	var header [headerSize]byte
	if _, err := io.ReadFull(c, header[:]); err != nil {
		return nil, err
	}
	t, n := frameType(header[0]), int(binary.BigEndian.Uint16(header[1:]))
	if err := checkHeader(t, n); err != nil {
		return nil, err
	}
	if t != want || n > 1024 {
		return nil, fmt.Errorf("%w: frame type 0x%02x of %d bytes, want 0x%02x", errProtocol, byte(t), n, byte(want))
	}
	body := make([]byte, n)
	_, err := io.ReadFull(c, body)
	return body, err
}
