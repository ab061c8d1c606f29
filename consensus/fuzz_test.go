package consensus

import (
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func FuzzBatchRoundTrip(f *testing.F) {
	h, b := newHistory(f)
	for _, b := range []*skeinv1.Batch{b, h.tokens(3)} {
		f.Add(sealed(f, b))
	}
	// base is the greatest index
	f.Add(seal([]byte{0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0x12, 0x00}))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, data := range [][]byte{data, seal(data)} { // also past the checksum
			b, err := DecodeBatch(data)
			if err != nil {
				continue
			}
			for i, e := range b.Events {
				if e.Index != b.Base+1+uint64(i) || e.Index == 0 {
					t.Fatalf("event %d after base %d has index %d", i, b.Base, e.Index)
				}
			}
			again, err := EncodeBatch(b)
			if err != nil {
				t.Fatal(err)
			}
			if c, err := DecodeBatch(again); err != nil || !proto.Equal(b, c) {
				t.Fatalf("another batch after encoding: %v", err)
			}
		}
	})
}

func FuzzStateRoundTrip(f *testing.F) {
	h, _ := newHistory(f)
	h.tokens(3)
	data, err := encodeState(h.state, maxStateBytes)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, data := range [][]byte{data, seal(data)} {
			s, err := DecodeState(data)
			if err != nil {
				continue
			}
			again, err := encodeState(s, maxStateBytes)
			if err != nil {
				t.Fatal(err)
			}
			if c, err := DecodeState(again); err != nil || c.Hash() != s.Hash() {
				t.Fatalf("another state after encoding: %v", err)
			}
		}
	})
}

func FuzzFileRecords(f *testing.F) {
	h, b := newHistory(f)
	event, err := encodeEvent(b.Events[0])
	if err != nil {
		f.Fatal(err)
	}
	point, err := checkpointValue(h.state, maxStateBytes)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(event)
	f.Add(point)
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, data := range [][]byte{data, seal(data)} {
			if e, err := decodeEvent(1, data); err == nil && e.Index != 1 {
				t.Fatal("an event at the wrong place was taken")
			}
			_, _, _ = splitCheckpoint(data)
			_ = checkRaftPair([]byte("logs"), indexKey(1), data)
		}
	})
}
