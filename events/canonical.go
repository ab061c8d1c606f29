package events

import (
	"cmp"
	"math"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Canonical is the one encoding of a message's content: protobuf's wire format with fields ascending
// by number, map entries ascending by key, repeated scalars packed, and fields that this version does not
// know in their places. It is written here because protobuf promises no stable bytes of its own.
func Canonical(m proto.Message) []byte {
	if m == nil {
		return nil
	}
	return appendMessage(nil, m)
}

// piece is a field to be written: a known one, or the raw bytes of an unknown one.
type piece struct {
	number protowire.Number
	field  protoreflect.FieldDescriptor
	value  protoreflect.Value
	raw    []byte
}

func appendCanonical(b []byte, m protoreflect.Message) []byte {
	var on [16]piece
	pieces := on[:0]
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		pieces = append(pieces, piece{number: f.Number(), field: f, value: v})
		return true
	})
	for u := m.GetUnknown(); len(u) > 0; {
		number, _, n := protowire.ConsumeField(u)
		if n < 0 {
			break // unreachable: protobuf keeps only well-formed unknown fields
		}
		pieces = append(pieces, piece{number: number, raw: u[:n]})
		u = u[n:]
	}
	slices.SortStableFunc(pieces, func(x, y piece) int { return cmp.Compare(x.number, y.number) })
	for _, p := range pieces {
		switch {
		case p.field == nil:
			b = append(b, p.raw...)
		case p.field.IsMap():
			b = appendMap(b, p.field, p.value.Map())
		case p.field.IsList():
			b = appendList(b, p.field, p.value.List())
		default:
			b = appendField(b, p.field, p.value)
		}
	}
	return b
}

func appendField(b []byte, f protoreflect.FieldDescriptor, v protoreflect.Value) []byte {
	return appendValue(protowire.AppendTag(b, f.Number(), wireType(f.Kind())), f.Kind(), v)
}

func appendList(b []byte, f protoreflect.FieldDescriptor, l protoreflect.List) []byte {
	if wireType(f.Kind()) == protowire.BytesType {
		for i := range l.Len() {
			b = appendField(b, f, l.Get(i))
		}
		return b
	}
	return appendSized(protowire.AppendTag(b, f.Number(), protowire.BytesType), func(b []byte) []byte {
		for i := range l.Len() {
			b = appendValue(b, f.Kind(), l.Get(i))
		}
		return b
	})
}

func appendMap(b []byte, f protoreflect.FieldDescriptor, m protoreflect.Map) []byte {
	keys := make([]protoreflect.MapKey, 0, m.Len())
	m.Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool {
		keys = append(keys, k)
		return true
	})
	slices.SortFunc(keys, compareKeys)
	for _, k := range keys {
		b = appendSized(protowire.AppendTag(b, f.Number(), protowire.BytesType), func(b []byte) []byte {
			return appendField(appendField(b, f.MapKey(), k.Value()), f.MapValue(), m.Get(k))
		})
	}
	return b
}

func compareKeys(x, y protoreflect.MapKey) int {
	switch v := x.Interface().(type) {
	case string:
		return cmp.Compare(v, y.String())
	case bool:
		return cmp.Compare(protowire.EncodeBool(v), protowire.EncodeBool(y.Bool()))
	case int32, int64:
		return cmp.Compare(x.Int(), y.Int())
	default:
		return cmp.Compare(x.Uint(), y.Uint())
	}
}

func wireType(k protoreflect.Kind) protowire.Type {
	switch k {
	case protoreflect.StringKind, protoreflect.BytesKind, protoreflect.MessageKind:
		return protowire.BytesType
	case protoreflect.Fixed32Kind, protoreflect.Sfixed32Kind, protoreflect.FloatKind:
		return protowire.Fixed32Type
	case protoreflect.Fixed64Kind, protoreflect.Sfixed64Kind, protoreflect.DoubleKind:
		return protowire.Fixed64Type
	case protoreflect.GroupKind:
		return protowire.StartGroupType
	default:
		return protowire.VarintType
	}
}

func appendValue(b []byte, k protoreflect.Kind, v protoreflect.Value) []byte {
	switch k {
	case protoreflect.BoolKind:
		return protowire.AppendVarint(b, protowire.EncodeBool(v.Bool()))
	case protoreflect.EnumKind:
		return protowire.AppendVarint(b, uint64(v.Enum()))
	case protoreflect.Int32Kind, protoreflect.Int64Kind:
		return protowire.AppendVarint(b, uint64(v.Int()))
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind:
		return protowire.AppendVarint(b, v.Uint())
	case protoreflect.Sint32Kind, protoreflect.Sint64Kind:
		return protowire.AppendVarint(b, protowire.EncodeZigZag(v.Int()))
	case protoreflect.Fixed32Kind:
		return protowire.AppendFixed32(b, uint32(v.Uint()))
	case protoreflect.Fixed64Kind:
		return protowire.AppendFixed64(b, v.Uint())
	case protoreflect.Sfixed32Kind:
		return protowire.AppendFixed32(b, uint32(v.Int()))
	case protoreflect.Sfixed64Kind:
		return protowire.AppendFixed64(b, uint64(v.Int()))
	case protoreflect.FloatKind:
		return protowire.AppendFixed32(b, math.Float32bits(float32(v.Float())))
	case protoreflect.DoubleKind:
		return protowire.AppendFixed64(b, math.Float64bits(v.Float()))
	case protoreflect.StringKind:
		return protowire.AppendString(b, v.String())
	case protoreflect.BytesKind:
		return protowire.AppendBytes(b, v.Bytes())
	default:
		return appendSized(b, func(b []byte) []byte { return appendMessage(b, v.Message().Interface()) })
	}
}
