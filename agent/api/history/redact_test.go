package history

import (
	"bytes"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// harmless are the fields of bytes that may be shown: public keys and hashes. A new field of bytes in
// the schema fails this test until it is either put here or redacted.
var harmless = []protoreflect.Name{"identity_key", "wireguard_key", "secret_hash", "hash", "command_hash",
	"public_key", "carrier_key"}

// fill sets every field of a message, bytes to a mark.
func fill(m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.ContainingOneof() != nil && !f.HasOptionalKeyword() {
			continue // the caller chooses the body
		}
		fillField(m, f, depth)
	}
}

func fillField(m protoreflect.Message, f protoreflect.FieldDescriptor, depth int) {
	mark := []byte("MARK:" + f.Name() + ".") // what follows in the encoding may be a letter
	switch {
	case depth == 0 || f.IsMap():
	case f.IsList() && f.Kind() == protoreflect.BytesKind:
		m.Mutable(f).List().Append(protoreflect.ValueOfBytes(mark))
	case f.IsList() && f.Kind() == protoreflect.MessageKind:
		fill(m.Mutable(f).List().AppendMutable().Message(), depth-1)
	case f.IsList():
	case f.Kind() == protoreflect.BytesKind:
		m.Set(f, protoreflect.ValueOfBytes(mark))
	case f.Kind() == protoreflect.MessageKind:
		fill(m.Mutable(f).Message(), depth-1)
	}
}

// marks lists the fields whose bytes are found in an encoded message.
func marks(t *testing.T, m proto.Message) []protoreflect.Name {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var names []protoreflect.Name
	for {
		_, rest, ok := bytes.Cut(b, []byte("MARK:"))
		if !ok {
			return names
		}
		n := 0
		for n < len(rest) && (rest[n] == '_' || rest[n] >= 'a' && rest[n] <= 'z') {
			n++
		}
		names, b = append(names, protoreflect.Name(rest[:n])), rest
	}
}

func TestNoSecretIsShown(t *testing.T) {
	body := (&skeinv1.Event{}).ProtoReflect().Descriptor().Oneofs().ByName("body").Fields()
	hidden := 0
	for i := range body.Len() {
		e := &skeinv1.Event{Index: 7}
		fill(e.ProtoReflect(), 6)
		fillField(e.ProtoReflect(), body.Get(i), 6)
		before := proto.CloneOf(e)
		shown := redact(e)
		for _, name := range marks(t, shown) {
			if !slices.Contains(harmless, name) {
				t.Errorf("event %s shows %s", body.Get(i).Name(), name)
			}
		}
		if len(marks(t, shown)) < len(marks(t, e)) {
			hidden++
		}
		if !proto.Equal(e, before) {
			t.Errorf("event %s: the log's own copy was changed", body.Get(i).Name())
		}
	}
	if hidden < 2 {
		t.Errorf("%d kinds of event lost something; the cluster's seed and the gossip keys should go", hidden)
	}

	s := &skeinv1.State{}
	fill(s.ProtoReflect(), 6)
	before := proto.CloneOf(s)
	for _, name := range marks(t, redactState(s)) {
		if !slices.Contains(harmless, name) {
			t.Errorf("the state shows %s", name)
		}
	}
	if !slices.Contains(marks(t, s), "psk_seed") || !proto.Equal(s, before) {
		t.Error("the state's own copy was changed")
	}
}
