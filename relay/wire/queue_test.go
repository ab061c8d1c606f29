package wire

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// standing is a relay's.
const standing = 250 * time.Millisecond

func node(n byte) identity.ID { return identity.ID{n} }

func at(d time.Duration) func() time.Duration { return func() time.Duration { return d } }

type sent struct {
	typ     FrameType
	id      identity.ID
	channel byte
	first   byte
}

// takeAll empties a queue that is not empty.
func takeAll(t *testing.T, q *Queue, now time.Duration) []sent {
	t.Helper()
	var all []sent
	for {
		q.mu.Lock()
		empty := len(q.control) == 0 && q.lanes[0].packets+q.lanes[1].packets == 0
		q.mu.Unlock()
		if empty {
			return all
		}
		batch := q.next(batchBytes, at(now))
		if batch == nil {
			t.Fatal("queue closed")
		}
		b := *batch
		for len(b) > 0 {
			typ, body, size, _, err := parse(b)
			if err != nil || size == 0 {
				t.Fatalf("bad frame: %v", err)
			}
			s := sent{typ: typ}
			if typ == FrameData {
				id, ch, p := DecodeData(body)
				s.id, s.channel, s.first = id, ch, p[0]
			}
			all = append(all, s)
			b = b[size:]
		}
	}
}

func TestQueueDropsTheOldest(t *testing.T) {
	q := NewQueue(&PacketPool{}, 3, 1<<20, standing)
	for i := range byte(5) {
		q.Push(0, node(1), ChannelWireGuard, []byte{i})
	}
	all := takeAll(t, q, 0)
	if len(all) != 3 || all[0].first != 2 || all[2].first != 4 || q.dropped.Load() != 2 {
		t.Errorf("sent %v, %d dropped; want the newest three", all, q.dropped.Load())
	}
}

func TestQueueBoundsBytes(t *testing.T) {
	q := NewQueue(&PacketPool{}, 1000, 4*maxFrame, standing)
	for range 50 {
		q.Push(0, node(1), ChannelWireGuard, make([]byte, MaxPayload))
	}
	if n := len(takeAll(t, q, 0)); n != 4 {
		t.Errorf("%d large packets kept, want 4", n)
	}
}

func TestQueueIsFair(t *testing.T) {
	q := NewQueue(&PacketPool{}, 100, 1<<20, standing)
	for range 1000 {
		q.Push(0, node(1), ChannelWireGuard, make([]byte, 1400)) // floods
	}
	q.Push(0, node(2), ChannelWireGuard, []byte{7})
	for range 1000 {
		q.Push(0, node(1), ChannelWireGuard, make([]byte, 1400))
	}
	for i, s := range takeAll(t, q, 0) {
		if s.id == node(2) {
			if i > 3 {
				t.Errorf("the quiet node's packet left as number %d", i)
			}
			return
		}
	}
	t.Error("the quiet node's packet was dropped for the flooder's")
}

func TestQueuePutsControlFirst(t *testing.T) {
	q := NewQueue(&PacketPool{}, 100, 1<<20, standing)
	q.Push(0, node(1), ChannelWireGuard, []byte{1})
	q.Push(0, node(1), ChannelGossip, []byte{2})
	q.PushControl(func(b []byte) []byte { return AppendToken(b, FramePong, 1) })
	all := takeAll(t, q, 0)
	if len(all) != 3 || all[0].typ != FramePong || all[1].channel != ChannelGossip || all[2].channel != ChannelWireGuard {
		t.Errorf("order %v, want pong, gossip, data", all)
	}
}

func TestQueueStarvesNeitherLane(t *testing.T) {
	q := NewQueue(&PacketPool{}, 10000, 64<<20, standing)
	for range 2000 {
		q.Push(0, node(1), ChannelWireGuard, make([]byte, 1400))
		q.Push(0, node(1), ChannelGossip, make([]byte, 1400))
	}
	seen := [2]int{}
	for _, s := range takeAll(t, q, 0)[:100] {
		seen[s.channel]++
	}
	if seen[0] < 30 || seen[1] < 30 {
		t.Errorf("of the first 100 packets %d were data and %d gossip", seen[0], seen[1])
	}
}

func TestQueueForgetsTheOldAndTheKicked(t *testing.T) {
	q := NewQueue(&PacketPool{}, 100, 1<<20, standing)
	q.Push(0, node(1), ChannelWireGuard, []byte{1})
	q.Push(2*maxAge, node(1), ChannelWireGuard, []byte{2})
	q.Push(2*maxAge, node(2), ChannelSignal, []byte{3})
	q.Forget(node(2))
	if all := takeAll(t, q, 2*maxAge); len(all) != 1 || all[0].first != 2 {
		t.Errorf("sent %v, want only packet 2", all)
	}
}

func TestQueueControlIsBounded(t *testing.T) {
	q := NewQueue(&PacketPool{}, 100, 1<<20, standing)
	n := 0
	for q.PushControl(func(b []byte) []byte { return AppendToken(b, FramePong, 1) }) {
		if n++; n > controlBytes {
			t.Fatal("control frames pile up without bound")
		}
	}
}

// TestQueueAgainstModel pushes and takes at random: order per flow holds, and nothing is counted wrong.
func TestQueueAgainstModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	q := NewQueue(&PacketPool{}, 64, 1<<20, standing)
	last := map[identity.ID]int{}
	var pushed, taken uint64
	check := func(all []sent, seqs map[identity.ID][]int) {
		for _, s := range all {
			seq := seqs[s.id][0]
			for byte(seq) != s.first { // dropped ones leave from the front
				seqs[s.id] = seqs[s.id][1:]
				seq = seqs[s.id][0]
			}
			seqs[s.id] = seqs[s.id][1:]
			taken++
		}
	}
	seqs := map[identity.ID][]int{}
	for range 300 {
		for range r.IntN(40) {
			id := node(byte(r.IntN(5)))
			last[id]++
			seqs[id] = append(seqs[id], last[id])
			b := make([]byte, 1+r.IntN(3000))
			b[0] = byte(last[id])
			q.Push(0, id, ChannelWireGuard, b)
			pushed++
		}
		if r.IntN(2) == 0 {
			check(takeAll(t, q, 0), seqs)
			for id := range seqs {
				seqs[id] = nil
			}
		}
	}
	check(takeAll(t, q, 0), seqs)
	if l := &q.lanes[laneBulk]; l.bytes != 0 || l.packets != 0 || len(l.flows) != 0 || l.turn != nil {
		t.Errorf("an empty lane counts %d packets, %d bytes, %d flows", l.packets, l.bytes, len(l.flows))
	}
	if pushed != taken+q.dropped.Load() {
		t.Errorf("%d pushed, %d taken, %d dropped", pushed, taken, q.dropped.Load())
	}
}
