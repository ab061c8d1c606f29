package gossip

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// A question is read as it was written; whatever else comes is refused.
func TestAskCodec(t *testing.T) {
	from, marks := identity.ID{9}, []mark{}
	for i := range maxAsked {
		marks = append(marks, mark{ID: identity.ID{byte(i)}, Epoch: uint64(i), Seq: 7, Sum: [sumSize]byte{1, byte(i)}})
	}
	b := encodeAsk(from, marks)
	if id, got, err := decodeAsk(b); err != nil || id != from || !slices.Equal(got, marks) {
		t.Errorf("read back %s %v, %v", id, got, err)
	}
	other := slices.Clone(b)
	other[0] = answerRecord
	for name, bad := range map[string][]byte{
		"empty": nil, "no mark": b[:9], "half a mark": b[:9+markSize/2], "one mark too many": append(slices.Clone(b), b[9:9+markSize]...),
		"a byte too many": append(slices.Clone(b[:9+markSize]), 0), "another kind": other,
	} {
		if _, got, err := decodeAsk(bad); err == nil {
			t.Errorf("%s is taken for %v", name, got)
		}
	}
}

// A record is first asked for by packets, and by a stream only when these brought nothing, or when it fits none.
func TestRecordsAreAskedForByPacketsFirst(t *testing.T) {
	g := bareGossip(newRoster(simKey(0), simKey(1), simKey(2)))
	p := g.pull
	dialed := make(chan identity.ID, 2)
	p.dial = func(_ context.Context, id identity.ID) (net.Conn, error) {
		dialed <- id
		return nil, errors.New("nobody is there")
	}
	now := time.Now()
	small, large := mark{ID: simKey(1).ID(), Epoch: 1, Seq: 1}, mark{ID: simKey(2).ID(), Epoch: 1, Seq: 1}
	p.need(small, small.ID, false, 0)
	for i := range packetTries {
		now = now.Add(time.Minute)
		_, asks := p.dispatch(now)
		if len(asks) != 1 || asks[0].source != small.ID || !slices.Equal(asks[0].marks, []mark{small}) || len(dialed) > 0 {
			t.Fatalf("try %d: asks %+v, %d streams", i, asks, len(dialed))
		}
	}
	p.need(large, large.ID, true, 0)
	if _, asks := p.dispatch(now.Add(time.Minute)); len(asks) != 0 {
		t.Errorf("then asks %+v", asks)
	}
	p.wg.Wait()
	if len(dialed) != 2 {
		t.Errorf("%d streams, want one for each", len(dialed))
	}
}
