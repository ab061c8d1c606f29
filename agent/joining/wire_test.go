package joining

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

const testCluster = "000102030405060708090a0b0c0d0e0f"

func message(t testing.TB, m proto.Message) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := WriteMessage(&b, m); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestMessage(t *testing.T) {
	want := &skeinv1.JoinRequest{ClusterId: testCluster, TokenId: "1", RequestId: "r", Node: &skeinv1.NewNode{Name: "a"}}
	b := message(t, want)
	have := &skeinv1.JoinRequest{}
	r := bytes.NewReader(append(b, "what follows"...))
	if err := ReadMessage(r, have, MaxJoinRequest); err != nil || !proto.Equal(have, want) {
		t.Fatalf("have %v, %v; want %v", have, err, want)
	}
	if rest, _ := io.ReadAll(r); string(rest) != "what follows" {
		t.Errorf("%q is left; it should take its own bytes and no more", rest)
	}
	for name, c := range map[string]struct {
		bytes []byte
		want  error
		says  string
	}{
		"nothing":       {nil, io.EOF, "read the length of JoinRequest"},
		"half a length": {b[:2], io.ErrUnexpectedEOF, "read the length of JoinRequest"},
		"cut short":     {b[:len(b)-1], io.ErrUnexpectedEOF, "read JoinRequest"},
		"lying length":  {binary.BigEndian.AppendUint32(nil, MaxJoinRequest), io.ErrUnexpectedEOF, "read JoinRequest"},
		"beyond the size": {binary.BigEndian.AppendUint32(nil, MaxJoinRequest+1), nil, "JoinRequest of 65537 bytes is too " +
			"large (at most 65536)"},
		"no protobuf": {append(binary.BigEndian.AppendUint32(nil, 2), 0xff, 0xff), nil, ""},
	} {
		err := ReadMessage(bytes.NewReader(c.bytes), &skeinv1.JoinRequest{}, MaxJoinRequest)
		if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzReadMessage(f *testing.F) {
	f.Add(message(f, &skeinv1.JoinRequest{ClusterId: testCluster, TokenSecret: []byte("secret")}))
	f.Add(binary.BigEndian.AppendUint32(nil, 1<<31))
	f.Add(append(binary.BigEndian.AppendUint32(nil, 100), "short"...))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		m := &skeinv1.JoinRequest{}
		if err := ReadMessage(r, m, 4096); err != nil {
			return
		}
		if n := binary.BigEndian.Uint32(b); n > 4096 || len(b)-r.Len() != int(n)+4 {
			t.Fatalf("of %d announced bytes it took %d", n, len(b)-r.Len()-4)
		}
	})
}

func FuzzReadJoinResponse(f *testing.F) {
	f.Add(message(f, &skeinv1.JoinResponse{ErrorCode: "permission_denied", ErrorMessage: "no"}))
	f.Add(message(f, &skeinv1.JoinResponse{State: &skeinv1.State{Index: 7},
		Records: []*skeinv1.SignedRecord{{Record: []byte("x")}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := &skeinv1.JoinResponse{}
		if ReadMessage(bytes.NewReader(b), m, 1<<16) == nil {
			_ = m.GetState().GetCluster().GetId()
		}
	})
}

func TestDecodeSignal(t *testing.T) {
	from := identity.ID{1, 2, 3}
	encode := func(s *skeinv1.Signal) []byte {
		b, err := proto.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	punch := &skeinv1.Signal_Punch_{Punch: &skeinv1.Signal_Punch{Addresses: []string{"203.0.113.7:51820"}}}
	if s, err := DecodeSignal(from, encode(&skeinv1.Signal{From: from.String(), Body: punch})); err != nil ||
		len(s.GetPunch().GetAddresses()) != 1 {
		t.Errorf("have %v, %v", s, err)
	}
	for name, b := range map[string][]byte{
		"in another's name": encode(&skeinv1.Signal{From: identity.ID{9}.String(), Body: punch}),
		"in no name":        encode(&skeinv1.Signal{Body: punch}),
		"no protobuf":       {0xff},
		"too large":         encode(&skeinv1.Signal{From: from.String() + strings.Repeat(" ", maxSignal)}),
	} {
		if s, err := DecodeSignal(from, b); err == nil {
			t.Errorf("%s: took %v", name, s)
		}
	}
}

func FuzzDecodeSignal(f *testing.F) {
	from := identity.ID{1, 2, 3}
	b, _ := proto.Marshal(&skeinv1.Signal{From: from.String(),
		Body: &skeinv1.Signal_Punch_{Punch: &skeinv1.Signal_Punch{Addresses: []string{"[2001:db8::1]:51820"}, Reply: true}}})
	f.Add(b)
	f.Add([]byte{0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := DecodeSignal(from, b); err == nil && (s.GetFrom() != from.String() || len(b) > maxSignal) {
			t.Fatalf("took %v of %d bytes", s, len(b))
		}
	})
}
