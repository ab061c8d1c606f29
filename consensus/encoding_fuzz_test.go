package consensus

import (
	"bytes"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Beside fuzz_test.go: single events, and the seal that every record carries.

func sampleBatch() *skeinv1.Batch {
	return &skeinv1.Batch{Base: 6,
		Events: []*skeinv1.Event{{Index: 7, Time: 1,
			Body: &skeinv1.Event_TokenRevoked{TokenRevoked: &skeinv1.TokenRevoked{TokenId: "1"}}}}}
}

func FuzzDecodeEvent(f *testing.F) {
	good, err := encodeEvent(sampleBatch().Events[0])
	if err != nil {
		f.Fatal(err)
	}
	f.Add(uint64(7), good)
	f.Add(uint64(8), good)
	f.Fuzz(func(t *testing.T, index uint64, b []byte) {
		for _, in := range [][]byte{b, seal(b)} {
			if e, err := decodeEvent(index, in); err == nil && e.GetIndex() != index {
				t.Fatalf("event %d passes for %d", e.GetIndex(), index)
			}
		}
	})
}

func TestSealShowsEveryChange(t *testing.T) {
	good := seal([]byte("payload"))
	if b, err := unseal(good); err != nil || string(b) != "payload" {
		t.Fatalf("have %q, %v", b, err)
	}
	for i := range good {
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			if b, err := unseal(bad); err == nil {
				t.Errorf("bit %d of byte %d flipped: reads as %q", bit, i, b)
			}
		}
	}
	for n := range good {
		if _, err := unseal(good[:n]); err == nil {
			t.Errorf("cut to %d bytes it still reads", n)
		}
	}
}
