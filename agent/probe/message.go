package probe

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"net/netip"

	"github.com/skeinmesh/skein/identity"
)

// Sizes in bytes.
const (
	Size    = 80   // of a ping or pong without padding
	MaxSize = 1452 // of one with padding: it fills plain Ethernet over IPv6, as the tunnel does

	signedSize = 64
	macSize    = Size - signedSize
)

// Offsets of the fields; DESIGN.md draws them.
const (
	offVersion  = 4
	offType     = 5
	offLength   = 6
	offSender   = 8
	offTx       = 16
	offEpoch    = 28
	offCounter  = 36
	offObserved = 44
	offPort     = 60
	offFlags    = 62
)

const (
	magic   = 0xf5736b6e // 0xf5 "skn": no WireGuard type, and outside the range of STUN, DTLS and TURN (RFC 7983)
	version = 1
	// versionRelay marks what a relay and its clients say to each other on its reserved ports (package relay).
	versionRelay = 0x80
)

// flagEcho asks for a pong as long as the ping.
const flagEcho = 1

// Type says what a message is.
type Type uint8

// Types of messages.
const (
	TypePing Type = 1
	TypePong Type = 2
)

// TxID names one ping; its pong carries it back.
type TxID [12]byte

// NewTxID makes a random one.
func NewTxID() TxID {
	var t TxID
	_, _ = rand.Read(t[:]) // crypto/rand.Read never fails
	return t
}

// String is the ID as hex digits.
func (t TxID) String() string { return fmt.Sprintf("%x", t[:]) }

// Message is a ping or a pong.
type Message struct {
	Type     Type
	Sender   identity.ID
	Tx       TxID
	Epoch    uint64         // of the sender's agent, grows at each start
	Counter  uint64         // of the sender towards this peer within the epoch
	Observed netip.AddrPort // pong: where the ping was seen to come from
	Echo     bool           // ping: the pong shall be as long
	Length   int            // whole datagram with padding
}

// Errors of decoding.
var (
	ErrMalformed = errors.New("probe: datagram is not a ping or pong")
	ErrMAC       = errors.New("probe: datagram does not prove the pair's key")
)

// Parse reads the message at the start of b without proving anything. Where the kernel has joined
// several datagrams into one (UDP GRO), the rest of them begins at b[m.Length:].
func Parse(b []byte) (Message, error) {
	var m Message
	if len(b) < Size || binary.BigEndian.Uint32(b) != magic || b[offVersion] != version {
		return m, ErrMalformed
	}
	m.Type = Type(b[offType])
	m.Length = int(binary.BigEndian.Uint16(b[offLength:]))
	if m.Type != TypePing && m.Type != TypePong || m.Length < Size || m.Length > MaxSize || m.Length > len(b) {
		return m, ErrMalformed
	}
	copy(m.Sender[:], b[offSender:])
	copy(m.Tx[:], b[offTx:])
	m.Epoch = binary.BigEndian.Uint64(b[offEpoch:])
	m.Counter = binary.BigEndian.Uint64(b[offCounter:])
	m.Echo = b[offFlags]&flagEcho != 0
	if m.Type == TypePong {
		addr := netip.AddrFrom16([16]byte(b[offObserved:offPort])).Unmap()
		m.Observed = netip.AddrPortFrom(addr, binary.BigEndian.Uint16(b[offPort:]))
	}
	return m, nil
}

// isRelay tells messages of relays.
func isRelay(b []byte) bool {
	return len(b) > offVersion && binary.BigEndian.Uint32(b) == magic && b[offVersion] == versionRelay
}

// Codec writes and proves the messages of one pair of nodes. It is not safe for concurrent use.
type Codec struct {
	mac hash.Hash
	sum [sha256.Size]byte
}

// NewCodec takes the key that only the two nodes know: identity.PairKey with purpose "probe".
func NewCodec(key [32]byte) *Codec {
	return &Codec{mac: hmac.New(sha256.New, key[:])}
}

// EncodePing appends a ping to b. m.Length asks for padding, up to MaxSize.
func (c *Codec) EncodePing(b []byte, m Message) []byte {
	m.Type, m.Observed = TypePing, netip.AddrPort{}
	return c.encode(b, m)
}

// EncodePong appends a pong to b.
func (c *Codec) EncodePong(b []byte, m Message) []byte {
	m.Type = TypePong
	return c.encode(b, m)
}

var zeros [MaxSize]byte

func (c *Codec) encode(b []byte, m Message) []byte {
	m.Length = min(max(m.Length, Size), MaxSize)
	start := len(b)
	b = append(b, zeros[:m.Length]...)
	p := b[start:]
	binary.BigEndian.PutUint32(p, magic)
	p[offVersion], p[offType] = version, byte(m.Type)
	binary.BigEndian.PutUint16(p[offLength:], uint16(m.Length))
	copy(p[offSender:], m.Sender[:])
	copy(p[offTx:], m.Tx[:])
	binary.BigEndian.PutUint64(p[offEpoch:], m.Epoch)
	binary.BigEndian.PutUint64(p[offCounter:], m.Counter)
	if m.Observed.IsValid() {
		a := m.Observed.Addr().As16()
		copy(p[offObserved:], a[:])
		binary.BigEndian.PutUint16(p[offPort:], m.Observed.Port())
	}
	if m.Echo {
		p[offFlags] |= flagEcho
	}
	copy(p[signedSize:Size], c.sign(p[:signedSize]))
	return b
}

// Decode parses a message and proves that the pair's other node wrote it.
func (c *Codec) Decode(b []byte) (Message, error) {
	m, err := Parse(b)
	if err != nil {
		return m, err
	}
	if !hmac.Equal(b[signedSize:Size], c.sign(b[:signedSize])) {
		return m, ErrMAC
	}
	return m, nil
}

func (c *Codec) sign(b []byte) []byte {
	c.mac.Reset()
	c.mac.Write(b)
	return c.mac.Sum(c.sum[:0])[:macSize]
}
