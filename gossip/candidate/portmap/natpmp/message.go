package natpmp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// Port is where a NAT-PMP server listens.
const Port = 5351

const (
	version   = 0
	opAddress = 0
	opMapUDP  = 1
	answerBit = 0x80

	addressSize = 12
	mapSize     = 16
)

// Wish is what is asked for.
type Wish struct {
	Inner    uint16
	Outer    uint16        // suggested; 0: any
	Lifetime time.Duration // 0: give the mapping back
}

// Grant is what the gateway gave.
type Grant struct {
	Outer    uint16
	Lifetime time.Duration
	Epoch    uint32 // seconds that the gateway has kept its state
}

// ErrGarbled means that an answer does not fit its question.
var ErrGarbled = errors.New("garbled NAT-PMP answer")

// RefusedError is a gateway's no, with a result code of RFC 6886 section 3.5.
type RefusedError uint16

func (e RefusedError) Error() string {
	name := fmt.Sprintf("code %d", uint16(e))
	if int(e) < len(codes) {
		name = codes[e]
	}
	return "refused by the gateway (NAT-PMP): " + name
}

var codes = [...]string{"success", "unsupported version", "not authorized: the router has port mapping switched off",
	"network failure: the router has no address itself", "out of resources", "unsupported opcode"}

// EncodeAddress asks for the gateway's address outside.
func EncodeAddress() []byte { return []byte{version, opAddress} }

// EncodeMap asks for a mapping.
func EncodeMap(w Wish) []byte {
	b := make([]byte, 12)
	b[0], b[1] = version, opMapUDP
	outer := w.Outer
	if w.Lifetime == 0 {
		outer = 0 // RFC 6886 section 3.4
	}
	binary.BigEndian.PutUint16(b[4:], w.Inner)
	binary.BigEndian.PutUint16(b[6:], outer)
	binary.BigEndian.PutUint32(b[8:], uint32(w.Lifetime/time.Second))
	return b
}

func decodeHeader(b []byte, op byte, size int) (epoch uint32, err error) {
	if len(b) < 8 || b[0] != version || b[1] != answerBit|op {
		return 0, fmt.Errorf("%w: %d bytes", ErrGarbled, len(b))
	}
	if code := binary.BigEndian.Uint16(b[2:]); code != 0 {
		return 0, RefusedError(code)
	}
	if len(b) != size {
		return 0, fmt.Errorf("%w: %d bytes, want %d", ErrGarbled, len(b), size)
	}
	return binary.BigEndian.Uint32(b[4:]), nil
}

// DecodeAddress reads the gateway's address outside; routers announce it unasked too.
func DecodeAddress(b []byte) (outer netip.Addr, epoch uint32, err error) {
	if epoch, err = decodeHeader(b, opAddress, addressSize); err != nil {
		return netip.Addr{}, 0, err
	}
	return netip.AddrFrom4([4]byte(b[8:12])), epoch, nil
}

// DecodeMap reads the answer to a request for a mapping.
func DecodeMap(b []byte, w Wish) (Grant, error) {
	epoch, err := decodeHeader(b, opMapUDP, mapSize)
	if err != nil {
		return Grant{}, err
	}
	if binary.BigEndian.Uint16(b[8:]) != w.Inner {
		return Grant{}, fmt.Errorf("%w: it is for another port", ErrGarbled)
	}
	g := Grant{Outer: binary.BigEndian.Uint16(b[10:]),
		Lifetime: time.Duration(binary.BigEndian.Uint32(b[12:])) * time.Second, Epoch: epoch}
	if w.Lifetime > 0 && g.Outer == 0 {
		return Grant{}, fmt.Errorf("%w: granted port 0", ErrGarbled)
	}
	if w.Lifetime > 0 && g.Lifetime == 0 {
		return Grant{}, fmt.Errorf("%w: granted for no time", ErrGarbled)
	}
	return g, nil
}
