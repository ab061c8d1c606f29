package stunserver

import (
	"encoding/binary"
	"net/netip"

	"github.com/pion/stun/v3"

	"github.com/skeinmesh/skein/gossip/candidate/stunmsg"
)

// via is one of the server's sockets in one address family.
type via uint8

const (
	viaPrimary via = iota
	viaAlternate
	viaSilent // never named to anybody, so nobody has sent to it
	sockets
)

// reply is what the server does with a request.
type reply struct {
	via     via
	bytes   []byte
	another bool // ask another node to answer; bytes go out from here if that fails
	tx      stunmsg.TxID
}

// serving is what respond must know of its server.
type serving struct {
	on        via            // the socket that took the request in
	local     netip.AddrPort // its address
	alternate uint16         // port of the alternate socket
	another   bool           // other nodes can be asked
}

// respond decides the answer to a datagram; false means none. The answer is never longer than the request, except that
// one with only an address (44 bytes at most) always goes out, since otherwise plain clients would get nothing.
func respond(b []byte, from netip.AddrPort, s serving) (reply, bool) {
	m, err := stunmsg.Decode(b)
	if err != nil || m.Type != stun.BindingRequest {
		return reply{}, false
	}
	r := reply{via: s.on, tx: m.TransactionID}
	if unknown := unknownAttributes(m); len(unknown) > 0 {
		r.bytes = refusal(m.TransactionID, unknown, len(b))
		return r, r.bytes != nil
	}
	change, ok := changeFlags(m)
	switch {
	case !ok:
		return reply{}, false
	case change&stunmsg.ChangeAddress != 0:
		r.bytes = refusal(m.TransactionID, stun.UnknownAttributes{stun.AttrChangeRequest}, len(b))
		r.another = s.another && len(b) >= stunmsg.RequestSize
		return r, r.bytes != nil
	case change&stunmsg.ChangePort != 0 && s.on == viaPrimary:
		r.via = viaAlternate
	case change&stunmsg.ChangePort != 0:
		r.via = viaPrimary
	case m.Contains(stunmsg.AttrSilentPort):
		r.via = viaSilent
	}
	r.bytes, err = stunmsg.Success(m.TransactionID, from)
	if err != nil {
		return reply{}, false
	}
	r.bytes = addDetails(r.bytes, len(b), s)
	return r, true
}

// addDetails adds OTHER-ADDRESS and RESPONSE-ORIGIN as far as the request was long enough to pay for them.
func addDetails(b []byte, limit int, s serving) []byte {
	if !s.local.IsValid() {
		return b
	}
	m := &stun.Message{Raw: b}
	if m.Decode() != nil {
		return b
	}
	ip := s.local.Addr().Unmap().AsSlice()
	size := 4 + 4 + len(ip)
	if len(m.Raw)+size <= limit {
		_ = (&stun.OtherAddress{IP: ip, Port: int(s.alternate)}).AddTo(m)
	}
	if len(m.Raw)+size <= limit {
		_ = (&stun.ResponseOrigin{IP: ip, Port: int(s.local.Port())}).AddTo(m)
	}
	m.WriteLength()
	return m.Raw
}

// refusal is error 420 with the attributes that were not understood, or nil where that would amplify.
func refusal(tx stunmsg.TxID, unknown stun.UnknownAttributes, limit int) []byte {
	m, err := stun.Build(stun.NewTransactionIDSetter(tx), stun.BindingError,
		stun.ErrorCodeAttribute{Code: stun.CodeUnknownAttribute}, unknown[:min(len(unknown), 4)])
	if err != nil || len(m.Raw) > max(limit, 44) {
		return nil
	}
	return m.Raw
}

// unknownAttributes are those that must be understood (below 0x8000) and are not.
func unknownAttributes(m *stun.Message) stun.UnknownAttributes {
	var out stun.UnknownAttributes
	for _, a := range m.Attributes {
		if a.Type < 0x8000 && a.Type != stun.AttrChangeRequest && a.Type != stun.AttrPadding {
			out = append(out, a.Type)
		}
	}
	return out
}

func changeFlags(m *stun.Message) (uint32, bool) {
	v, err := m.Get(stun.AttrChangeRequest)
	if err != nil {
		return 0, true
	}
	if len(v) != 4 {
		return 0, false
	}
	return binary.BigEndian.Uint32(v), true
}
