package relay

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

func node(n byte) identity.ID { return identity.ID{n} }

func at(d time.Duration) func() time.Duration { return func() time.Duration { return d } }

type sent struct {
	typ     frameType
	id      identity.ID
	channel byte
	first   byte
}

// takeAll empties a queue that is not empty.
func takeAll(t *testing.T, q *queue, now time.Duration) []sent {
	t.Helper()
	var all []sent
	for {
		q.mu.Lock()
		empty := len(q.control) == 0 && q.lanes[0].packets+q.lanes[1].packets == 0
		q.mu.Unlock()
		if empty {
			return all
		}
		batch := q.take(batchBytes, at(now))
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
			if typ == frameData {
				id, ch, p := decodeData(body)
				s.id, s.channel, s.first = id, ch, p[0]
			}
			all = append(all, s)
			b = b[size:]
		}
	}
}

func TestQueueDropsTheOldest(t *testing.T) {
	q := newQueue(&packetPool{}, 3, 1<<20, serverStanding)
	for i := range byte(5) {
		q.push(0, node(1), ChannelWireGuard, []byte{i})
	}
	all := takeAll(t, q, 0)
	if len(all) != 3 || all[0].first != 2 || all[2].first != 4 || q.dropped.Load() != 2 {
		t.Errorf("sent %v, %d dropped; want the newest three", all, q.dropped.Load())
	}
}

func TestQueueBoundsBytes(t *testing.T) {
	q := newQueue(&packetPool{}, 1000, 4*maxFrame, serverStanding)
	for range 50 {
		q.push(0, node(1), ChannelWireGuard, make([]byte, MaxPayload))
	}
	if n := len(takeAll(t, q, 0)); n != 4 {
		t.Errorf("%d large packets kept, want 4", n)
	}
}

func TestQueueIsFair(t *testing.T) {
	q := newQueue(&packetPool{}, 100, 1<<20, serverStanding)
	for range 1000 {
		q.push(0, node(1), ChannelWireGuard, make([]byte, 1400)) // floods
	}
	q.push(0, node(2), ChannelWireGuard, []byte{7})
	for range 1000 {
		q.push(0, node(1), ChannelWireGuard, make([]byte, 1400))
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
	q := newQueue(&packetPool{}, 100, 1<<20, serverStanding)
	q.push(0, node(1), ChannelWireGuard, []byte{1})
	q.push(0, node(1), ChannelGossip, []byte{2})
	q.pushControl(func(b []byte) []byte { return appendToken(b, framePong, 1) })
	all := takeAll(t, q, 0)
	if len(all) != 3 || all[0].typ != framePong || all[1].channel != ChannelGossip || all[2].channel != ChannelWireGuard {
		t.Errorf("order %v, want pong, gossip, data", all)
	}
}

func TestQueueStarvesNeitherLane(t *testing.T) {
	q := newQueue(&packetPool{}, 10000, 64<<20, serverStanding)
	for range 2000 {
		q.push(0, node(1), ChannelWireGuard, make([]byte, 1400))
		q.push(0, node(1), ChannelGossip, make([]byte, 1400))
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
	q := newQueue(&packetPool{}, 100, 1<<20, serverStanding)
	q.push(0, node(1), ChannelWireGuard, []byte{1})
	q.push(2*maxAge, node(1), ChannelWireGuard, []byte{2})
	q.push(2*maxAge, node(2), ChannelSignal, []byte{3})
	q.forget(node(2))
	if all := takeAll(t, q, 2*maxAge); len(all) != 1 || all[0].first != 2 {
		t.Errorf("sent %v, want only packet 2", all)
	}
}

func TestQueueControlIsBounded(t *testing.T) {
	q := newQueue(&packetPool{}, 100, 1<<20, serverStanding)
	n := 0
	for q.pushControl(func(b []byte) []byte { return appendToken(b, framePong, 1) }) {
		if n++; n > controlBytes {
			t.Fatal("control frames pile up without bound")
		}
	}
}

// TestQueueAgainstModel pushes and takes at random: order per flow holds, and nothing is counted wrong.
func TestQueueAgainstModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	q := newQueue(&packetPool{}, 64, 1<<20, serverStanding)
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
			q.push(0, id, ChannelWireGuard, b)
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

func TestPick(t *testing.T) {
	ms := time.Millisecond
	near := option{relay: node(1), healthy: true, own: 5 * ms, peer: 5 * ms}
	far := option{relay: node(2), healthy: true, own: 40 * ms, peer: 40 * ms}
	almost := option{relay: node(3), healthy: true, own: 5 * ms, peer: 4 * ms}
	with := func(o option, change func(*option)) option { change(&o); return o }
	for _, c := range []struct {
		name    string
		options []option
		current byte
		want    byte // 0: none
	}{
		{"none", nil, 0, 0},
		{"least sum of both RTTs", []option{far, near}, 0, 1},
		{"a little better is not worth a change", []option{near, almost}, 1, 1},
		{"much better is", []option{far, near}, 2, 1},
		{"the current is suspect", []option{with(near, func(o *option) { o.healthy = false }), far}, 1, 2},
		{"all are suspect: stay", []option{with(near, func(o *option) {
			o.healthy = false
		}), with(far, func(o *option) { o.healthy = false })}, 2, 1},
		{"the peer is gone from the current", []option{with(near, func(o *option) { o.know = knownGone }), far}, 1, 2},
		{"gone everywhere", []option{with(near, func(o *option) { o.know = knownGone })}, 1, 0},
		{"known beats nearer but unknown", []option{with(near, func(o *option) { o.know = unknown }), far}, 0, 2},
		{"unknown beats unlisted", []option{with(near, func(o *option) {
			o.know = unlisted
		}), with(far, func(o *option) { o.know = unknown })}, 0, 2},
		{"healthy but unlisted beats suspect", []option{with(near, func(o *option) {
			o.healthy = false
		}), with(far, func(o *option) { o.know = unlisted })}, 1, 2},
		{"fresh joiner: by own RTT", []option{
			{relay: node(1), healthy: true, know: unknown, own: 30 * ms}, {relay: node(2), healthy: true, know: unknown,
				own: 3 * ms}}, 0, 2},
	} {
		o, ok := pick(c.options, node(c.current), false, 0)
		if ok != (c.want != 0) || ok && o.relay != node(c.want) {
			t.Errorf("%s: picked %s %v, want %d", c.name, o.relay, ok, c.want)
		}
	}
	suspect := with(far, func(o *option) { o.healthy = false })
	for _, c := range []struct {
		name    string
		options []option
		stay    bool
		late    time.Duration
		want    byte
	}{
		{"the current was chosen a moment ago", []option{far, near}, true, 0, 2},
		{"and is suspect", []option{suspect, near}, true, 0, 1},
		{"this process is later than the gain", []option{far, near}, false, 40 * ms, 2},
		{"it is not", []option{far, near}, false, 30 * ms, 1},
	} {
		if o, _ := pick(c.options, far.relay, c.stay, c.late); o.relay != node(c.want) {
			t.Errorf("%s: picked %s, want %d", c.name, o.relay, c.want)
		}
	}
}

func TestBackoff(t *testing.T) {
	for i, want := range []time.Duration{firstRetry, time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second,
		16 * time.Second, 30 * time.Second, 30 * time.Second} {
		if lo, hi := backoff(i, 0), backoff(i, 1); lo != want/2 || hi != want {
			t.Errorf("after %d failures: %s to %s, want %s to %s", i, lo, hi, want/2, want)
		}
	}
	if d := backoff(1000, 1); d != maxBackoff {
		t.Errorf("after 1000 failures: %s", d)
	}
}

func TestPatienceWithARelay(t *testing.T) {
	const ms = time.Millisecond
	for name, tt := range map[string]struct {
		rtts          []time.Duration
		suspect, dead time.Duration
	}{
		"no answer yet": {nil, 900 * ms, 3 * time.Second},
		"near":          {[]time.Duration{20 * ms, 25 * ms, 300 * ms}, 900 * ms, 3 * time.Second},
		"far":           {[]time.Duration{600 * ms, 610 * ms}, 1800 * ms, 3600 * ms},
		"slow at times": {[]time.Duration{20 * ms, 1200 * ms, 30 * ms}, 2400 * ms, 3600 * ms},
	} {
		if suspect, dead := missing(tt.rtts); suspect != tt.suspect || dead != tt.dead {
			t.Errorf("%s: %s and %s, want %s and %s", name, suspect, dead, tt.suspect, tt.dead)
		}
	}
}
