package consensus

import (
	"bytes"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// What peers send over Raft streams and what lies on disk is decoded here; noise must be an error.

func sampleBatch() *skeinv1.Batch {
	return &skeinv1.Batch{Base: 6, Events: []*skeinv1.Event{{Index: 7, Time: 1, Body: &skeinv1.Event_TokenRevoked{TokenRevoked: &skeinv1.TokenRevoked{TokenId: "1"}}}}}
}

func FuzzDecodeBatch(f *testing.F) {
	good, err := EncodeBatch(sampleBatch())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Add(seal([]byte{0xff, 0xff}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, in := range [][]byte{b, seal(b)} { // sealed too, or nothing gets past the checksum
			batch, err := DecodeBatch(in)
			if err != nil {
				continue
			}
			if n := len(batch.Events); n == 0 || n > maxBatchEvents || batch.Events[0].GetIndex() != batch.Base+1 {
				t.Fatalf("took %v", batch)
			}
		}
	})
}

func FuzzDecodeStateFile(f *testing.F) {
	good, err := EncodeState(events.NewState())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:len(good)/2])
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, in := range [][]byte{b, seal(b)} {
			s, err := DecodeState(in)
			if err != nil {
				continue
			}
			if _, err := EncodeState(s); err != nil {
				t.Fatalf("what was read cannot be written: %v", err)
			}
		}
	})
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
