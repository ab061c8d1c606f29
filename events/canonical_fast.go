package events

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// appendMessage is appendCanonical with a short way for the messages that change often. The short way
// writes the very same bytes; a test holds the two against each other, field by field.
func appendMessage(b []byte, m proto.Message) []byte {
	if len(m.ProtoReflect().GetUnknown()) == 0 {
		switch m := m.(type) {
		case *skeinv1.Node:
			if m.PodCidrs == nil && m.Settings == nil {
				return appendNode(b, m)
			}
		case *skeinv1.Token:
			return appendToken(b, m)
		case *skeinv1.Block:
			return appendBlock(b, m)
		case *skeinv1.FreedBlock:
			return appendFreed(b, m)
		case *skeinv1.EgressSlot:
			return appendSlot(b, m)
		case *skeinv1.Answer:
			if m.Pool == nil && len(m.Blocks) == 0 && m.Static == nil && m.Grant == nil && len(m.Plan) == 0 && m.Egress == nil &&
				m.Slot == nil && m.PlainPeer == nil {
				return appendAnswer(b, m)
			}
		}
	}
	return appendCanonical(b, m.ProtoReflect())
}

func appendNode(b []byte, n *skeinv1.Node) []byte {
	b = appendText(b, 1, n.GetId())
	b = appendText(b, 2, n.GetName())
	b = appendText(b, 3, n.GetIdentityKey())
	b = appendText(b, 4, n.GetWireguardKey())
	b = appendText(b, 5, n.GetIpv4())
	b = appendText(b, 6, n.GetIpv6())
	for _, k := range slices.Sorted(maps.Keys(n.GetLabels())) {
		b = protowire.AppendTag(b, 7, protowire.BytesType)
		b = appendSized(b, func(b []byte) []byte {
			b = protowire.AppendString(protowire.AppendTag(b, 1, protowire.BytesType), k)
			return protowire.AppendString(protowire.AppendTag(b, 2, protowire.BytesType), n.GetLabels()[k])
		})
	}
	b = appendNumber(b, 8, uint64(n.GetAdmittedAt()))
	b = appendNumber(b, 9, n.GetAdmittedIndex())
	b = appendNumber(b, 10, uint64(n.GetMinSchema()))
	b = appendNumber(b, 11, uint64(n.GetMaxSchema()))
	b = appendNumber(b, 12, protowire.EncodeBool(n.GetAgentsOnly()))
	b = appendNumber(b, 13, protowire.EncodeBool(n.GetDraining()))
	return appendNumber(b, 14, protowire.EncodeBool(n.GetAdmin()))
}

func appendToken(b []byte, t *skeinv1.Token) []byte {
	b = appendText(b, 1, t.GetId())
	b = appendText(b, 2, t.GetSecretHash())
	b = appendNumber(b, 3, uint64(t.GetCreatedAt()))
	b = appendNumber(b, 4, uint64(t.GetExpiresAt()))
	b = appendNumber(b, 5, uint64(t.GetUsesLeft()))
	b = appendNumber(b, 6, uint64(t.GetUses()))
	b = appendText(b, 7, t.GetLabel())
	b = appendNumber(b, 8, protowire.EncodeBool(t.GetAgentsOnly()))
	b = appendText(b, 9, t.GetRole())
	return appendNumber(b, 10, protowire.EncodeBool(t.GetSigned()))
}

func appendBlock(b []byte, v *skeinv1.Block) []byte {
	b = appendText(b, 1, v.GetPool())
	b = appendNumber(b, 2, v.GetNumber())
	b = appendText(b, 3, v.GetIpv4())
	b = appendText(b, 4, v.GetIpv6())
	b = appendText(b, 5, v.GetNodeId())
	b = appendText(b, 6, v.GetReason())
	b = appendNumber(b, 7, uint64(v.GetSince()))
	return appendNumber(b, 8, v.GetIndex())
}

func appendFreed(b []byte, v *skeinv1.FreedBlock) []byte {
	b = appendText(b, 1, v.GetPool())
	b = appendNumber(b, 2, v.GetNumber())
	b = appendNumber(b, 3, uint64(v.GetAt()))
	return appendNumber(b, 4, v.GetIndex())
}

func appendSlot(b []byte, v *skeinv1.EgressSlot) []byte {
	b = appendText(b, 1, v.GetNamespace())
	b = appendText(b, 2, v.GetName())
	b = appendNumber(b, 3, uint64(v.GetNumber()))
	b = appendText(b, 4, v.GetNodeId())
	b = appendNumber(b, 5, v.GetEpoch())
	b = appendNumber(b, 6, uint64(v.GetSince()))
	b = appendText(b, 7, v.GetReason())
	b = appendText(b, 8, v.GetFromNodeId())
	b = appendNumber(b, 9, protowire.EncodeBool(v.GetPlanned()))
	b = appendNumber(b, 10, uint64(v.GetLeaseMillis()))
	return appendNumber(b, 11, uint64(v.GetFormerLeaseMillis()))
}

func appendAnswer(b []byte, a *skeinv1.Answer) []byte {
	b = appendText(b, 1, a.GetRequestId())
	b = appendNumber(b, 2, a.GetIndex())
	if a.Node != nil {
		b = protowire.AppendTag(b, 3, protowire.BytesType)
		b = appendSized(b, func(b []byte) []byte { return appendMessage(b, a.Node) })
	}
	if a.Token != nil {
		b = protowire.AppendTag(b, 4, protowire.BytesType)
		b = appendSized(b, func(b []byte) []byte { return appendMessage(b, a.Token) })
	}
	b = appendText(b, 5, a.GetErrorCode())
	return appendText(b, 6, a.GetErrorMessage())
}

// appendText writes a string or bytes field, unless it is empty.
func appendText[T string | []byte](b []byte, number protowire.Number, v T) []byte {
	if len(v) == 0 {
		return b
	}
	b = protowire.AppendVarint(protowire.AppendTag(b, number, protowire.BytesType), uint64(len(v)))
	return append(b, v...)
}

// appendNumber writes a varint field, unless it is zero.
func appendNumber(b []byte, number protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, number, protowire.VarintType), v)
}

// appendSized writes what f appends, after its length.
func appendSized(b []byte, f func([]byte) []byte) []byte {
	start := len(b)
	b = f(b)
	n := len(b) - start
	size := protowire.SizeVarint(uint64(n))
	b = append(b, make([]byte, size)...)
	copy(b[start+size:], b[start:start+n])
	protowire.AppendVarint(b[:start], uint64(n))
	return b
}
