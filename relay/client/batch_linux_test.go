package client

import (
	"slices"
	"sync/atomic"
	"testing"
)

func TestSendBatchJoinsEqualSizes(t *testing.T) {
	var b sendBatch
	b.plain = new(atomic.Bool)
	for _, n := range []int{100, 100, 60, 100, 100, 200, 100} {
		b.add(make([]byte, n))
	}
	var have []uint64
	for i := range b.messages {
		have = append(have, uint64(b.headers[i].Hdr.Iovlen))
	}
	if want := []uint64{3, 2, 2}; !slices.Equal(have, want) {
		t.Errorf("packets per message %v, want %v", have, want)
	}
	if first := b.flatten(1); first != 3 || b.messages != 7 {
		t.Errorf("flattened from %d to %d messages, want 3 to 7", first, b.messages)
	}
}
