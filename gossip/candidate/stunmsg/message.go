package stunmsg

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/pion/stun/v3"
)

// Attributes of ours; both may be ignored by servers that do not know them (RFC 8489 section 18.3).
const (
	AttrSilentPort stun.AttrType = 0xff53 // answer from a port that nobody sends to
	attrFill       stun.AttrType = 0xff54 // makes the question as long as its answer
)

// Flags of CHANGE-REQUEST, RFC 5780 section 7.2.
const (
	ChangeAddress = 0x04
	ChangePort    = 0x02
)

// Sizes in bytes.
const (
	RequestSize = 92   // of a question: header and three IPv6 addresses, the longest answer
	MaxSize     = 1280 // of what is read at all
	headerSize  = 20
)

// TxID is a transaction's ID.
type TxID = [stun.TransactionIDSize]byte

// Want says from where an answer is asked for.
type Want uint8

// What can be wanted.
const (
	Here         Want = iota // from the address and port asked
	OtherPort                // from the server's alternate port
	OtherAddress             // from another node
	SilentPort               // from a port of the server that nobody sends to
)

// Response is an answer to a binding request.
type Response struct {
	Tx     TxID
	From   netip.AddrPort
	Mapped netip.AddrPort
	Other  netip.AddrPort // OTHER-ADDRESS, or the zero AddrPort
	Code   stun.ErrorCode // 0: success
}

// EncodeRequest makes a question that pays for the longest answer.
func EncodeRequest(tx TxID, w Want) ([]byte, error) {
	m, err := stun.Build(stun.NewTransactionIDSetter(tx), stun.BindingRequest)
	if err != nil {
		return nil, fmt.Errorf("encode STUN request: %w", err)
	}
	switch w {
	case OtherPort:
		m.Add(stun.AttrChangeRequest, []byte{0, 0, 0, ChangePort})
	case OtherAddress:
		m.Add(stun.AttrChangeRequest, []byte{0, 0, 0, ChangeAddress | ChangePort})
	case SilentPort:
		m.Add(AttrSilentPort, nil)
	}
	if fill := RequestSize - len(m.Raw) - 4; fill >= 0 {
		m.Add(attrFill, make([]byte, fill))
	}
	return m.Raw, nil
}

// Errors of decoding an answer.
var (
	errNotSTUN = errors.New("not a STUN message")
	// ErrNoAnswer is a good message of another kind.
	ErrNoAnswer = errors.New("STUN message is not an answer to a binding request")
	errLie      = errors.New("STUN answer claims an impossible address")
)

// DecodeResponse reads an answer. It believes XOR-MAPPED-ADDRESS alone, and only an address that the question
// can have come from.
func DecodeResponse(b []byte, from netip.AddrPort) (Response, error) {
	m, err := Decode(b)
	if err != nil {
		return Response{}, err
	}
	r := Response{Tx: m.TransactionID, From: from}
	switch m.Type {
	case stun.BindingError:
		var code stun.ErrorCodeAttribute
		if err := code.GetFrom(m); err != nil || code.Code == 0 {
			return r, ErrNoAnswer
		}
		r.Code = code.Code
		return r, nil
	case stun.BindingSuccess:
	default:
		return r, ErrNoAnswer
	}
	var mapped stun.XORMappedAddress
	if err := mapped.GetFrom(m); err != nil {
		return r, ErrNoAnswer
	}
	r.Mapped = addrPort(mapped.IP, mapped.Port)
	if !r.Mapped.IsValid() || !r.Mapped.Addr().IsGlobalUnicast() || r.Mapped.Port() == 0 ||
		r.Mapped.Addr().Is4() != from.Addr().Is4() {
		return r, errLie
	}
	var other stun.OtherAddress
	if other.GetFrom(m) == nil {
		r.Other = addrPort(other.IP, other.Port)
	}
	return r, nil
}

// Decode reads one STUN message; bytes after it, which the kernel may have joined to it, are left alone.
func Decode(b []byte) (*stun.Message, error) {
	n := Len(b)
	if n == 0 || n > MaxSize {
		return nil, errNotSTUN
	}
	m := &stun.Message{Raw: append([]byte(nil), b[:n]...)}
	if err := m.Decode(); err != nil {
		return nil, fmt.Errorf("%w: %w", errNotSTUN, err)
	}
	return m, nil
}

// Len is the length of the STUN message at the start of b, or 0.
func Len(b []byte) int {
	if len(b) < headerSize || b[0]>>6 != 0 || !stun.IsMessage(b) {
		return 0
	}
	if n := headerSize + int(binary.BigEndian.Uint16(b[2:])); n <= len(b) {
		return n
	}
	return 0
}

func addrPort(ip []byte, port int) netip.AddrPort {
	a, ok := netip.AddrFromSlice(ip)
	if !ok || port < 0 || port > 65535 {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a.Unmap(), uint16(port))
}

// Success is the smallest answer: the address that the request came from.
func Success(tx TxID, mapped netip.AddrPort) ([]byte, error) {
	m, err := stun.Build(stun.NewTransactionIDSetter(tx), stun.BindingSuccess,
		&stun.XORMappedAddress{IP: mapped.Addr().Unmap().AsSlice(), Port: int(mapped.Port())})
	if err != nil {
		return nil, fmt.Errorf("encode STUN answer: %w", err)
	}
	return m.Raw, nil
}
