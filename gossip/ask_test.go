package gossip

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/lag"
)

// A request for records is read as it was written; anything else is refused.
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
		"empty": nil, "no mark": b[:9], "half a mark": b[:9+markSize/2], "one mark too many": append(slices.Clone(b),
			b[9:9+markSize]...),
		"a byte too many": append(slices.Clone(b[:9+markSize]), 0), "another kind": other,
	} {
		if _, got, err := decodeAsk(bad); err == nil {
			t.Errorf("%s is taken for %v", name, got)
		}
	}
}

// A record is requested by packets, from its owner first and then from others, and in the end left to the exchange of
// digests. Only a record that fits no packet is requested by a stream.
func TestRecordsAreAskedForByPackets(t *testing.T) {
	g := bareGossip(newRoster(simKey(0), simKey(1), simKey(2), simKey(3)))
	p := g.pull
	p.others = func(tableKind) []identity.ID { return []identity.ID{simKey(1).ID(), simKey(3).ID()} }
	dialed := make(chan identity.ID, 2)
	p.dial = func(_ context.Context, id identity.ID) (net.Conn, error) {
		dialed <- id
		return nil, errors.New("nobody is there")
	}
	now := time.Now()
	small, large := mark{ID: simKey(1).ID(), Epoch: 1, Seq: 1}, mark{ID: simKey(2).ID(), Epoch: 1, Seq: 1}
	p.need(meshTable, small, small.ID, false, 0)
	for i := range maxTries {
		now = now.Add(time.Minute)
		want := []identity.ID{small.ID, simKey(3).ID()}[i%2]
		_, asks := p.dispatch(now)
		if len(asks) != 1 || asks[0].source != want || !slices.Equal(asks[0].marks, []mark{small}) {
			t.Fatalf("try %d: asks %+v", i, asks)
		}
	}
	now = now.Add(time.Minute)
	if _, asks := p.dispatch(now); len(asks) != 0 || len(p.wants) != 0 || len(dialed) != 0 {
		t.Errorf("then asks %+v, wants %v, %d streams", asks, p.wants, len(dialed))
	}
	p.need(meshTable, large, large.ID, true, 0)
	if _, asks := p.dispatch(now.Add(time.Minute)); len(asks) != 0 {
		t.Errorf("asks for a large one by a packet: %+v", asks)
	}
	p.wg.Wait()
	if len(dialed) != 1 || <-dialed != large.ID {
		t.Error("no stream for the large one to its owner")
	}
}

// Streams follow probes only where packets may be lost and a stream's would not be, and not on a host that is late.
func TestStreamsFollowProbesWhereTheyHelp(t *testing.T) {
	g := bareGossip(newRoster(simKey(0), simKey(1), simKey(2)))
	var late lag.Meter
	g.cfg.Lag = &late
	g.cfg.Lossy = func(id identity.ID) bool { return id == simKey(1).ID() }
	off := g.wide.Load().memberlistConfig().DisableTcpPingsForNode
	if off(simKey(1).ID().String()) || !off(simKey(2).ID().String()) {
		t.Error("want a stream to the node whose packets may be lost, and none to the other")
	}
	late.Note(time.Now().Add(-time.Second), time.Now())
	if !off(simKey(1).ID().String()) {
		t.Error("a host that is late opens a stream for each answer that is")
	}
}
