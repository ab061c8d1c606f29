package probe

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

var (
	atAlice = netip.MustParseAddrPort("192.0.2.1:51820")
	atBob   = netip.MustParseAddrPort("198.51.100.2:51820")
)

// wire is one end of a link that keeps what was sent until the test delivers it.
type wire struct{ sent []packet }

type packet struct {
	to netip.AddrPort
	b  []byte
}

func (w *wire) SendFrom(_ netip.Addr, to netip.AddrPort, b []byte) error {
	w.sent = append(w.sent, packet{to, append([]byte(nil), b...)})
	return nil
}

func (w *wire) take(t *testing.T) packet {
	t.Helper()
	if len(w.sent) != 1 {
		t.Fatalf("%d datagrams were sent, want 1", len(w.sent))
	}
	p := w.sent[0]
	w.sent = nil
	return p
}

type end struct {
	*Prober
	wire  wire
	pings []Ping
	pongs []Pong
	stun  int
}

func newEnd(self, other identity.ID, epoch uint64) *end {
	e := &end{}
	e.Prober = NewProber(ProberConfig{
		Self: self, Epoch: epoch, Socket: &e.wire,
		OnPing: func(p Ping) { e.pings = append(e.pings, p) },
		OnPong: func(p Pong) { e.pongs = append(e.pongs, p) },
		OnSTUN: func(netip.AddrPort, netip.Addr, []byte, time.Time) { e.stun++ },
	})
	e.SetPeer(other, key)
	return e
}

func (e *end) handle(from netip.AddrPort, b []byte) { e.Handle(from, netip.Addr{}, b, time.Now()) }

func TestPingIsAnsweredAndMeasured(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		a, b := newEnd(alice, bob, 1), newEnd(bob, alice, 1)
		tx, err := a.SendPingSize(bob, atBob, 1280)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond) // virtual
		ping := a.wire.take(t)
		b.handle(atAlice, ping.b)
		if len(b.pings) != 1 || b.pings[0].Peer != alice || b.pings[0].From != atAlice || b.pings[0].Size != 1280 {
			t.Errorf("bob saw %+v", b.pings)
		}
		pong := b.wire.take(t)
		if pong.to != atAlice || len(pong.b) != 1280 { // both ways carry as much
			t.Errorf("the pong of %d bytes went to %s", len(pong.b), pong.to)
		}
		time.Sleep(10 * time.Millisecond)
		a.handle(atBob, pong.b)
		want := Pong{Peer: bob, From: atBob, To: atBob, Tx: tx, RTT: 30 * time.Millisecond, Observed: atAlice,
			Size: 1280, At: time.Now()}
		if len(a.pongs) != 1 || a.pongs[0] != want {
			t.Errorf("alice saw %+v, want %+v", a.pongs, want)
		}
		a.handle(atBob, pong.b)
		if len(a.pongs) != 1 || a.Stats().Unsolicited != 1 {
			t.Error("a pong counted twice")
		}
	})
}

func TestWhatIsNotAnswered(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		a, b := newEnd(alice, bob, 5), newEnd(bob, alice, 1)
		carol := newEnd(identity.ID{3}, bob, 1)
		send := func(e *end) []byte {
			if _, err := e.SendPing(bob, atBob); err != nil {
				t.Fatal(err)
			}
			return e.wire.take(t).b
		}
		first, second := send(a), send(a)
		b.handle(atAlice, second)
		b.handle(atAlice, first) // late, and still new
		b.wire.sent = nil
		wrong := send(a)
		wrong[Size-1] ^= 1

		tests := []struct {
			name  string
			bytes []byte
			count func(ProberStats) uint64
		}{
			{"replayed", first, func(s ProberStats) uint64 { return s.Replayed }},
			{"from an older epoch", send(newEnd(alice, bob, 4)), func(s ProberStats) uint64 { return s.Replayed }},
			{"from a stranger", send(carol), func(s ProberStats) uint64 { return s.Strangers }},
			{"with a wrong MAC", wrong, func(s ProberStats) uint64 { return s.BadMAC }},
			{"our own, mirrored", send(func() *end { e := newEnd(bob, bob, 1); return e }()),
				func(s ProberStats) uint64 { return s.Strangers }},
		}
		for _, tt := range tests {
			before := tt.count(b.Stats())
			b.handle(atAlice, tt.bytes)
			if len(b.wire.sent) != 0 {
				t.Errorf("%s: answered", tt.name)
			}
			if got := tt.count(b.Stats()) - before; got != 1 {
				t.Errorf("%s: counted %d times in %+v", tt.name, got, b.Stats())
			}
		}
		if len(b.pings) != 2 {
			t.Errorf("bob was told of %d pings, want 2", len(b.pings))
		}

		b.RemovePeer(alice)
		b.handle(atAlice, send(a))
		if len(b.wire.sent) != 0 {
			t.Error("a removed peer was answered")
		}
		if _, err := b.SendPing(alice, atAlice); !errors.Is(err, ErrUnknownPeer) {
			t.Errorf("ping to a removed peer: %v", err)
		}
	})
}

// A peer that was removed and is back pings with counters that the other end, which had this one all the time, has not
// seen: it would take the pings for replays.
func TestPingsOfAPeerThatIsBackAreAnswered(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		a, b := newEnd(alice, bob, 1), newEnd(bob, alice, 1)
		for round := range 3 {
			for i := range 5 {
				if _, err := a.SendPing(bob, atBob); err != nil {
					t.Fatal(err)
				}
				b.handle(atAlice, a.wire.take(t).b)
				if len(b.wire.sent) != 1 {
					t.Fatalf("round %d: ping %d is not answered: %+v", round, i, b.Stats())
				}
				b.wire.take(t)
			}
			a.RemovePeer(bob)
			a.SetPeer(bob, key)
		}
	})
}

func TestPongsAreLimited(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		a, b := newEnd(alice, bob, 1), newEnd(bob, alice, 1)
		for range 3 * pongBurst {
			_, _ = a.SendPing(bob, atBob)
		}
		for _, p := range a.wire.sent {
			b.handle(atAlice, p.b)
		}
		if got := len(b.wire.sent); got != pongBurst {
			t.Errorf("%d pongs at once, want %d", got, pongBurst)
		}
	})
}

func TestLatePongDoesNotCount(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		a, b := newEnd(alice, bob, 1), newEnd(bob, alice, 1)
		_, _ = a.SendPing(bob, atBob)
		b.handle(atAlice, a.wire.take(t).b)
		time.Sleep(pongWait)
		a.handle(atBob, b.wire.take(t).b)
		if len(a.pongs) != 0 {
			t.Errorf("a pong counted after %s", pongWait)
		}
	})
}

func TestOutstandingIsBounded(t *testing.T) {
	o := outstanding{byTx: make(map[TxID]ping)}
	now := time.Now()
	for i := range 5 * maxOutstanding {
		tx := NewTxID()
		o.add(tx, ping{peer: bob, at: now})
		if i%3 == 0 {
			o.resolve(tx, bob, now)
		}
	}
	if len(o.byTx) > maxOutstanding || len(o.order) > 5*maxOutstanding {
		t.Errorf("holds %d pings and %d places", len(o.byTx), len(o.order))
	}
	o.add(NewTxID(), ping{peer: bob, at: now.Add(pongWait)})
	if len(o.byTx) != 1 {
		t.Errorf("%d pings left after all but one have expired", len(o.byTx))
	}
}

func TestJoinedDatagramsAndSTUN(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		a, b := newEnd(alice, bob, 1), newEnd(bob, alice, 1)
		var joined []byte
		for range 3 {
			_, _ = a.SendPing(bob, atBob)
			joined = append(joined, a.wire.take(t).b...)
		}
		b.handle(atAlice, joined)
		if len(b.pings) != 3 {
			t.Errorf("%d of 3 joined pings were seen", len(b.pings))
		}
		b.handle(atAlice, []byte{1, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42})
		b.handle(atAlice, nil)
		if b.stun != 1 {
			t.Errorf("STUN was handed on %d times, want 1", b.stun)
		}
	})
}

func BenchmarkPingPong(b *testing.B) {
	a, c := newEnd(alice, bob, 1), newEnd(bob, alice, 1)
	c.peers[alice].pongs.SetLimit(1e12)
	c.c.OnPing, a.c.OnPong = nil, nil
	b.ReportAllocs()
	for b.Loop() {
		_, _ = a.SendPing(bob, atBob)
		c.handle(atAlice, a.wire.sent[0].b)
		a.handle(atBob, c.wire.sent[0].b)
		a.wire.sent, c.wire.sent = a.wire.sent[:0], c.wire.sent[:0]
	}
}
