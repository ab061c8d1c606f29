package events

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/structpb"
	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

var update = flag.Bool("update", false, "write the golden files anew")

// fill sets random fields of a message, to a bounded depth.
func fill(t *rapid.T, m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if !rapid.Bool().Draw(t, string(f.Name())) {
			continue
		}
		switch {
		case f.IsMap():
			for range rapid.IntRange(1, 4).Draw(t, "entries") {
				v := m.Mutable(f).Map().NewValue()
				if f.MapValue().Kind() == protoreflect.MessageKind {
					if depth > 0 {
						fill(t, v.Message(), depth-1)
					}
				} else {
					v = scalar(t, f.MapValue())
				}
				m.Mutable(f).Map().Set(scalar(t, f.MapKey()).MapKey(), v)
			}
		case f.IsList():
			for range rapid.IntRange(1, 3).Draw(t, "elements") {
				if f.Kind() == protoreflect.MessageKind {
					if v := m.Mutable(f).List().AppendMutable(); depth > 0 {
						fill(t, v.Message(), depth-1)
					}
				} else {
					m.Mutable(f).List().Append(scalar(t, f))
				}
			}
		case f.Kind() == protoreflect.MessageKind:
			if v := m.Mutable(f); depth > 0 {
				fill(t, v.Message(), depth-1)
			}
		default:
			m.Set(f, scalar(t, f))
		}
	}
}

func scalar(t *rapid.T, f protoreflect.FieldDescriptor) protoreflect.Value {
	switch f.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(rapid.Bool().Draw(t, "bool"))
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(rapid.Int32Range(-1, 3).Draw(t, "enum")))
	case protoreflect.Int32Kind, protoreflect.Sint32Kind:
		return protoreflect.ValueOfInt32(rapid.Int32().Draw(t, "int32"))
	case protoreflect.Int64Kind, protoreflect.Sint64Kind:
		return protoreflect.ValueOfInt64(rapid.Int64().Draw(t, "int64"))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(rapid.Uint32().Draw(t, "uint32"))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(rapid.Uint64().Draw(t, "uint64"))
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(rapid.Float64().Draw(t, "double"))
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(rapid.String().Draw(t, "string"))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes(rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "bytes"))
	}
	panic("kind " + f.Kind().String())
}

// samples are messages of every shape that the log or a snapshot can hold, and of shapes it cannot yet.
func samples() []proto.Message {
	return []proto.Message{
		&skeinv1.Node{}, &skeinv1.Token{}, &skeinv1.Answer{}, &skeinv1.State{}, &skeinv1.Event{}, &skeinv1.Batch{},
		&skeinv1.Command{},
		&skeinv1.Record{}, &structpb.Struct{},
	}
}

// TestCanonicalIsProtobuf: the encoding is valid wire format, loses nothing, and does not depend on how
// the message came to be.
func TestCanonicalIsProtobuf(t *testing.T) {
	for _, m := range samples() {
		t.Run(string(m.ProtoReflect().Descriptor().Name()), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				a := m.ProtoReflect().New()
				fill(t, a, 2)
				encoded := Canonical(a.Interface())
				b := m.ProtoReflect().New().Interface()
				if err := proto.Unmarshal(encoded, b); err != nil {
					t.Fatalf("no protobuf: %v", err)
				}
				if !proto.Equal(a.Interface(), b) {
					t.Fatalf("content is lost:\n%v\n%v", a, b)
				}
				if again := Canonical(b); !bytes.Equal(again, encoded) {
					t.Fatalf("not stable:\n%x\n%x", encoded, again)
				}
			})
		})
	}
}

// TestCanonicalShortWay holds the hand-written encoders against the general one.
func TestCanonicalShortWay(t *testing.T) {
	for _, m := range []proto.Message{&skeinv1.Node{}, &skeinv1.Token{}, &skeinv1.Answer{}, &skeinv1.Block{},
		&skeinv1.FreedBlock{}, &skeinv1.EgressSlot{}} {
		t.Run(string(m.ProtoReflect().Descriptor().Name()), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				a := m.ProtoReflect().New()
				fill(t, a, 2)
				short, long := appendMessage(nil, a.Interface()), appendCanonical(nil, a)
				if !bytes.Equal(short, long) {
					t.Fatalf("%v\nshort %x\nlong  %x", a, short, long)
				}
				if n := sizeOf(a.Interface()); n != len(long) || n != proto.Size(a.Interface()) {
					t.Fatalf("%v: its size is %d, measured as %d", a, len(long), n)
				}
			})
			full := m.ProtoReflect().New()
			fields := full.Descriptor().Fields()
			for i := range fields.Len() { // each field alone: none is forgotten when one is added
				one := m.ProtoReflect().New()
				setOne(one, fields.Get(i))
				short, long := appendMessage(nil, one.Interface()), appendCanonical(nil, one)
				if len(long) == 0 || !bytes.Equal(short, long) {
					t.Errorf("field %s: short %x, long %x", fields.Get(i).Name(), short, long)
				}
				if n, ok := one.Interface().(*skeinv1.Node); ok && !proto.Equal(copyNode(n), n) {
					t.Errorf("field %s is lost when a node is copied", fields.Get(i).Name())
				}
				if n := sizeOf(one.Interface()); n != len(long) {
					t.Errorf("field %s: its size is %d, measured as %d", fields.Get(i).Name(), len(long), n)
				}
			}
		})
	}
}

func setOne(m protoreflect.Message, f protoreflect.FieldDescriptor) {
	switch {
	case f.IsMap():
		m.Mutable(f).Map().Set(protoreflect.ValueOfString("k").MapKey(), protoreflect.ValueOfString("v"))
	case f.IsList():
		l := m.Mutable(f).List()
		if f.Kind() == protoreflect.MessageKind {
			l.AppendMutable()
		} else {
			l.Append(protoreflect.ValueOfString("x"))
		}
	case f.Kind() == protoreflect.MessageKind:
		m.Mutable(f)
	case f.Kind() == protoreflect.StringKind:
		m.Set(f, protoreflect.ValueOfString("x"))
	case f.Kind() == protoreflect.BytesKind:
		m.Set(f, protoreflect.ValueOfBytes([]byte{1}))
	case f.Kind() == protoreflect.BoolKind:
		m.Set(f, protoreflect.ValueOfBool(true))
	case f.Kind() == protoreflect.Int64Kind:
		m.Set(f, protoreflect.ValueOfInt64(-1))
	case f.Kind() == protoreflect.Uint32Kind:
		m.Set(f, protoreflect.ValueOfUint32(1))
	case f.Kind() == protoreflect.Uint64Kind:
		m.Set(f, protoreflect.ValueOfUint64(1))
	default:
		panic("kind " + f.Kind().String())
	}
}

// TestCanonicalKeepsUnknownFields: an older replica, which does not know a field, has the bytes of a
// newer one, so that their hashes agree during an upgrade.
func TestCanonicalKeepsUnknownFields(t *testing.T) {
	newer := &skeinv1.Node{Id: "0123456789abcdef", Name: "a", AdmittedAt: 7, Labels: map[string]string{"x": "1"}}
	want := Canonical(newer)
	older := &emptypb.Empty{}
	if err := proto.Unmarshal(want, older); err != nil {
		t.Fatal(err)
	}
	if have := Canonical(older); !bytes.Equal(have, want) {
		t.Fatalf("have %x, want %x", have, want)
	}

	mixed := &skeinv1.Server{NodeId: "0123456789abcdef", Voter: true, Since: 9}
	extra := protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 5)
	extra = protowire.AppendString(protowire.AppendTag(extra, 50, protowire.BytesType), "later")
	mixed.ProtoReflect().SetUnknown(extra)
	encoded := Canonical(mixed)
	var numbers []string
	for b := encoded; len(b) > 0; {
		number, _, n := protowire.ConsumeField(b)
		numbers = append(numbers, fmt.Sprint(number))
		b = b[n:]
	}
	if have := strings.Join(numbers, " "); have != "1 2 3 50 99" {
		t.Fatalf("fields in the order %s", have)
	}
	node := &skeinv1.Node{Id: "0123456789abcdef"}
	node.ProtoReflect().SetUnknown(extra)
	if !bytes.Contains(Canonical(&skeinv1.Answer{Node: node}), []byte("later")) {
		t.Fatal("the short way lost an unknown field")
	}
}

// golden compares text with a file of testdata, or writes it with -update.
func golden(t *testing.T, name, have string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(have), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if have != string(want) {
		t.Errorf("%s differs; have:\n%s\nA cluster with mixed versions would take this for divergence: if the change is "+
			"meant, raise hashVersion and run go test -update", path, have)
	}
}

// TestGoldenHash pins the canonical encoding and the hash of every state of recorded logs: what a version folds today,
// every later one folds to the same state. The logs are those that the version before roles decided; they are not
// written anew.
func TestGoldenHash(t *testing.T) {
	for _, prefix := range []string{"", "pool_", "egress_"} {
		var out strings.Builder
		s := NewState()
		for _, e := range recordedLog(t, prefix+"log.jsonl") {
			if err := s.Fold(e); err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&out, "%d %s %x\n", e.GetIndex(), brief(e), s.Hash())
		}
		golden(t, prefix+"hash.golden", out.String())
		golden(t, prefix+"state.golden", hex.Dump(Canonical(s.Proto())))
	}
}

// recordedLog reads a log of testdata, an event a line.
func recordedLog(t *testing.T, name string) (log []*skeinv1.Event) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(b) {
		e := &skeinv1.Event{}
		if err := protojson.Unmarshal(line, e); err != nil {
			t.Fatal(err)
		}
		log = append(log, e)
	}
	return log
}

// history is a fixed sequence of commands that makes an event of every kind of schema 1.
func history(t *testing.T) *world {
	w := newCluster(t)
	w.must(withID("join-b", admit("b", "1", asServer)))
	w.must(withID("promote-b", promote(w.id("b"))))
	w.must(withID("join-c", admit("c", "1", asServer)))
	w.must(changeNode("c", "see", map[string]string{"site": "home"}))
	w.must(rotateKey("b", "new key of b"))
	w.must(changeSettings(&skeinv1.Settings{BirthdayAttack: "enabled", ArchiveMaxEvents: 5000}))
	w.must(addServer(w.id("see")))
	w.must(removeServer(w.id("see")))
	w.must(withID("lost", revoke(w.id("see"))))
	w.must(createToken("2", 3, true))
	w.must(revokeToken("1"))
	w.must(withID("join-d", admit("d", "2")))
	w.must(rotateGossip())
	return w
}

// TestHistoryMakesEveryEvent keeps the golden file complete when an event is added.
func TestHistoryMakesEveryEvent(t *testing.T) {
	seen := map[protoreflect.FieldNumber]bool{}
	for _, e := range slices.Concat(history(t).log, poolHistory(t).log, egressHistory(t).log, clockHistory(t).log,
		podCIDRHistory(t).log, siteHistory(t).log, plainPeerHistory(t).log,
		rangeHistory(t).log, translationHistory(t).log) {
		r := e.ProtoReflect()
		body := r.Descriptor().Oneofs().ByName("body")
		seen[r.WhichOneof(body).Number()] = true
	}
	bodies := (&skeinv1.Event{}).ProtoReflect().Descriptor().Oneofs().ByName("body").Fields()
	for i := range bodies.Len() {
		f := bodies.Get(i)
		if !seen[f.Number()] {
			t.Errorf("no command of the history makes %s", f.Name())
		}
		e := &skeinv1.Event{}
		e.ProtoReflect().Set(f, e.ProtoReflect().NewField(f))
		if v := schemaOf(e); v < SchemaMin || v > SchemaMax {
			t.Errorf("%s has schema %d, outside of %d to %d: enter it into schemaOf", f.Name(), v, SchemaMin, SchemaMax)
		}
	}
}
