package candidate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/pion/stun/v3"
)

// Attributes of ours; both may be ignored by servers that do not know them (RFC 8489 section 18.3).
const (
	attrSilentPort stun.AttrType = 0xff53 // answer from a port that nobody sends to
	attrFill       stun.AttrType = 0xff54 // makes the question as long as its answer
)

// Flags of CHANGE-REQUEST, RFC 5780 section 7.2.
const (
	changeAddress = 0x04
	changePort    = 0x02
)

const (
	requestSize = 92 // bytes: header and three IPv6 addresses, the longest answer
	stunHeader  = 20
	maxSTUN     = 1280
)

// want says from where an answer is asked for.
type want uint8

const (
	wantHere         want = iota // from the address and port asked
	wantOtherPort                // from the server's alternate port
	wantOtherAddress             // from another node
	wantSilentPort               // from a port of the server that nobody sends to
)

// response is an answer to a binding request.
type response struct {
	tx     [stun.TransactionIDSize]byte
	from   netip.AddrPort
	mapped netip.AddrPort
	other  netip.AddrPort // OTHER-ADDRESS; only its port is used
	code   stun.ErrorCode // 0: success
}

func encodeRequest(tx [stun.TransactionIDSize]byte, w want) ([]byte, error) {
	m, err := stun.Build(stun.NewTransactionIDSetter(tx), stun.BindingRequest)
	if err != nil {
		return nil, fmt.Errorf("encode STUN request: %w", err)
	}
	switch w {
	case wantOtherPort:
		m.Add(stun.AttrChangeRequest, []byte{0, 0, 0, changePort})
	case wantOtherAddress:
		m.Add(stun.AttrChangeRequest, []byte{0, 0, 0, changeAddress | changePort})
	case wantSilentPort:
		m.Add(attrSilentPort, nil)
	}
	if fill := requestSize - len(m.Raw) - 4; fill >= 0 {
		m.Add(attrFill, make([]byte, fill))
	}
	return m.Raw, nil
}

// Errors of decoding an answer.
var (
	errNotSTUN  = errors.New("not a STUN message")
	errNoAnswer = errors.New("STUN message is no answer to a binding request")
	errLie      = errors.New("STUN answer claims an address that cannot be")
)

// decodeResponse reads an answer. It believes XOR-MAPPED-ADDRESS alone, and only an address that the question
// can have come from.
func decodeResponse(b []byte, from netip.AddrPort) (response, error) {
	m, err := decodeMessage(b)
	if err != nil {
		return response{}, err
	}
	r := response{tx: m.TransactionID, from: from}
	switch m.Type {
	case stun.BindingError:
		var code stun.ErrorCodeAttribute
		if err := code.GetFrom(m); err != nil || code.Code == 0 {
			return r, errNoAnswer
		}
		r.code = code.Code
		return r, nil
	case stun.BindingSuccess:
	default:
		return r, errNoAnswer
	}
	var mapped stun.XORMappedAddress
	if err := mapped.GetFrom(m); err != nil {
		return r, errNoAnswer
	}
	r.mapped = addrPort(mapped.IP, mapped.Port)
	if !r.mapped.IsValid() || !r.mapped.Addr().IsGlobalUnicast() || r.mapped.Port() == 0 || r.mapped.Addr().Is4() != from.Addr().Is4() {
		return r, errLie
	}
	var other stun.OtherAddress
	if other.GetFrom(m) == nil {
		r.other = addrPort(other.IP, other.Port)
	}
	return r, nil
}

// decodeMessage reads one STUN message; bytes after it, which the kernel may have joined to it, are left alone.
func decodeMessage(b []byte) (*stun.Message, error) {
	n := messageLen(b)
	if n == 0 || n > maxSTUN {
		return nil, errNotSTUN
	}
	m := &stun.Message{Raw: append([]byte(nil), b[:n]...)}
	if err := m.Decode(); err != nil {
		return nil, fmt.Errorf("%w: %w", errNotSTUN, err)
	}
	return m, nil
}

// messageLen is the length of the STUN message at the start of b, or 0.
func messageLen(b []byte) int {
	if len(b) < stunHeader || b[0]>>6 != 0 || !stun.IsMessage(b) {
		return 0
	}
	if n := stunHeader + int(binary.BigEndian.Uint16(b[2:])); n <= len(b) {
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
