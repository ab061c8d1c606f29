package pcp

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// Port is where a PCP server listens, the same as NAT-PMP's.
const Port = 5351

const (
	version    = 2
	opAnnounce = 0
	opMap      = 1
	answerBit  = 0x80
	protoUDP   = 17

	headerSize = 24
	mapSize    = headerSize + 36
	maxSize    = 1100 // RFC 6887 section 7
)

// Nonce ties a mapping to whoever asked for it (RFC 6887 section 11.1).
type Nonce [12]byte

// MakeNonce derives the nonce of one inner endpoint at one gateway from a secret, so that an agent that comes back
// after a crash still owns its mapping.
func MakeNonce(secret []byte, gateway netip.Addr, inner netip.AddrPort) (n Nonce) {
	h := hmac.New(sha256.New, secret)
	fmt.Fprintf(h, "skein pcp nonce\n%s\n%s", gateway, inner)
	copy(n[:], h.Sum(nil))
	return n
}

// Wish is what is asked for.
type Wish struct {
	Inner    netip.AddrPort // this host's address towards the gateway, and its UDP port
	Outer    netip.AddrPort // suggested; the zero AddrPort, address or port: any
	Lifetime time.Duration  // 0: give the mapping back
	Nonce    Nonce
}

// Grant is what the gateway gave.
type Grant struct {
	Outer    netip.AddrPort
	Lifetime time.Duration
	Epoch    uint32 // seconds that the gateway has kept its state
}

// Errors of decoding an answer.
var (
	// ErrVersion means that the gateway speaks NAT-PMP, or a PCP of another version.
	ErrVersion = errors.New("the gateway does not speak PCP")
	// ErrGarbled means that an answer does not fit its question.
	ErrGarbled = errors.New("garbled PCP answer")
)

// RefusedError is a gateway's no.
type RefusedError struct {
	Code     byte
	Lifetime time.Duration // how long the gateway will go on saying so
}

func (e *RefusedError) Error() string {
	name := fmt.Sprintf("code %d", e.Code)
	if int(e.Code) < len(codes) {
		name = codes[e.Code]
	}
	return "refused by the gateway (PCP): " + name
}

// codes are the result codes of RFC 6887 section 7.4.
var codes = [...]string{
	"success", "unsupported version", "not authorized", "malformed request", "unsupported opcode", "unsupported option",
	"malformed option",
	"network failure", "no resources", "unsupported protocol", "user exceeded quota",
	"cannot provide the external address and port",
	"address mismatch: there is another NAT between", "excessive remote peers",
}

// EncodeMap makes a MAP request.
func EncodeMap(w Wish) []byte {
	b := make([]byte, mapSize)
	header(b, opMap, w.Lifetime, w.Inner.Addr())
	copy(b[24:36], w.Nonce[:])
	b[36] = protoUDP
	binary.BigEndian.PutUint16(b[40:], w.Inner.Port())
	binary.BigEndian.PutUint16(b[42:], w.Outer.Port())
	outer := w.Outer.Addr()
	switch {
	case outer.IsValid():
	case w.Inner.Addr().Is4():
		outer = netip.IPv4Unspecified()
	default:
		outer = netip.IPv6Unspecified()
	}
	a := outer.As16()
	copy(b[44:60], a[:])
	return b
}

// EncodeAnnounce makes an ANNOUNCE request, which only asks for the epoch.
func EncodeAnnounce(inner netip.Addr) []byte {
	b := make([]byte, headerSize)
	header(b, opAnnounce, 0, inner)
	return b
}

func header(b []byte, op byte, lifetime time.Duration, inner netip.Addr) {
	b[0], b[1] = version, op
	binary.BigEndian.PutUint32(b[4:], uint32(lifetime/time.Second))
	a := inner.As16()
	copy(b[8:24], a[:])
}

// decodeHeader reads what all answers begin with.
func decodeHeader(b []byte, op byte) (epoch uint32, lifetime time.Duration, err error) {
	switch {
	case len(b) < 4:
		return 0, 0, fmt.Errorf("%w: %d bytes", ErrGarbled, len(b))
	case b[0] != version:
		return 0, 0, ErrVersion // NAT-PMP answers with its own, which is shorter
	case len(b) < headerSize || len(b) > maxSize || len(b)%4 != 0:
		return 0, 0, fmt.Errorf("%w: %d bytes", ErrGarbled, len(b))
	case b[1] != answerBit|op:
		return 0, 0, fmt.Errorf("%w: opcode %#x", ErrGarbled, b[1])
	}
	lifetime = time.Duration(binary.BigEndian.Uint32(b[4:])) * time.Second
	epoch = binary.BigEndian.Uint32(b[8:])
	switch b[3] {
	case 0:
		return epoch, lifetime, nil
	case 1:
		return 0, 0, ErrVersion
	default:
		return epoch, 0, &RefusedError{Code: b[3], Lifetime: lifetime}
	}
}

// DecodeMap reads the answer to a MAP request. A RefusedError is believed as it comes, since it gives nothing.
func DecodeMap(b []byte, w Wish) (Grant, error) {
	epoch, lifetime, err := decodeHeader(b, opMap)
	if err != nil {
		return Grant{}, err
	}
	if len(b) < mapSize {
		return Grant{}, fmt.Errorf("%w: %d bytes", ErrGarbled, len(b))
	}
	if Nonce(b[24:36]) != w.Nonce || b[36] != protoUDP || binary.BigEndian.Uint16(b[40:]) != w.Inner.Port() {
		return Grant{}, fmt.Errorf("%w: it is for another question", ErrGarbled)
	}
	outer := netip.AddrFrom16([16]byte(b[44:60])).Unmap()
	g := Grant{Outer: netip.AddrPortFrom(outer, binary.BigEndian.Uint16(b[42:])), Lifetime: lifetime, Epoch: epoch}
	if w.Lifetime == 0 {
		return g, nil
	}
	switch {
	case lifetime == 0:
		return Grant{}, fmt.Errorf("%w: granted for no time", ErrGarbled)
	case g.Outer.Port() == 0:
		return Grant{}, fmt.Errorf("%w: granted port 0", ErrGarbled)
	case outer.Is4() != w.Inner.Addr().Is4():
		return Grant{}, fmt.Errorf("%w: granted %s for an address of the other family", ErrGarbled, outer)
	}
	return g, nil
}

// DecodeAnnounce reads an answer to ANNOUNCE, also one that nobody asked for.
func DecodeAnnounce(b []byte) (epoch uint32, err error) {
	epoch, _, err = decodeHeader(b, opAnnounce)
	return epoch, err
}
