package probe

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/identity"
)

var (
	alice = identity.ID{1, 2, 3, 4, 5, 6, 7, 8}
	bob   = identity.ID{9, 9, 9, 9, 9, 9, 9, 9}
	key   = [32]byte{42}
)

func TestMessageRoundTrip(t *testing.T) {
	tests := map[string]Message{
		"ping":        {Type: TypePing, Sender: alice, Tx: NewTxID(), Epoch: 7, Counter: 3},
		"padded ping": {Type: TypePing, Sender: alice, Tx: NewTxID(), Epoch: 7, Counter: 4, Length: 1300},
		"pong v4":     {Type: TypePong, Sender: bob, Tx: NewTxID(), Observed: netip.MustParseAddrPort("203.0.113.9:51820")},
		"pong v6":     {Type: TypePong, Sender: bob, Tx: NewTxID(), Observed: netip.MustParseAddrPort("[2001:db8::1]:9")},
	}
	for name, want := range tests {
		t.Run(name, func(t *testing.T) {
			c := NewCodec(key)
			var b []byte
			if want.Type == TypePing {
				b = c.EncodePing(nil, want)
			} else {
				b = c.EncodePong(nil, want)
			}
			want.Length = max(want.Length, Size)
			if len(b) != want.Length {
				t.Errorf("datagram has %d bytes, want %d", len(b), want.Length)
			}
			got, err := NewCodec(key).Decode(b)
			if err != nil || got != want {
				t.Errorf("decoded %+v, %v; want %+v", got, err, want)
			}
			if _, err := NewCodec([32]byte{1}).Decode(b); !errors.Is(err, ErrMAC) {
				t.Errorf("another pair's key: %v, want ErrMAC", err)
			}
		})
	}
}

func TestEveryChangedByteIsNoticed(t *testing.T) {
	c := NewCodec(key)
	good := c.EncodePong(nil, Message{Sender: bob, Tx: NewTxID(), Epoch: 1,
		Observed: netip.MustParseAddrPort("192.0.2.1:1")})
	for i := range good {
		b := append([]byte(nil), good...)
		b[i] ^= 0x40
		if _, err := c.Decode(b); err == nil {
			t.Errorf("byte %d changed and the message is still taken", i)
		}
	}
	for n := range good {
		if _, err := c.Decode(good[:n]); !errors.Is(err, ErrMalformed) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
}

func TestNeitherWireGuardNorSTUN(t *testing.T) {
	b := NewCodec(key).EncodePing(nil, Message{Sender: alice})
	if b[0] >= 1 && b[0] <= 4 && b[1] == 0 && b[2] == 0 && b[3] == 0 {
		t.Error("begins like a WireGuard message")
	}
	if b[0]>>6 == 0 || binary.BigEndian.Uint32(b[4:]) == stunCookie {
		t.Error("begins like a STUN message")
	}
	if len(b) > 100 {
		t.Errorf("an unpadded ping has %d bytes, want at most 100", len(b))
	}
}

func FuzzDecode(f *testing.F) {
	c := NewCodec(key)
	f.Add(c.EncodePing(nil, Message{Sender: alice, Length: 90}))
	f.Add(c.EncodePong(nil, Message{Sender: bob, Observed: netip.MustParseAddrPort("[::1]:1")}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := c.Decode(b)
		if err != nil {
			return
		}
		if m.Length < Size || m.Length > len(b) {
			t.Fatalf("length %d of %d bytes", m.Length, len(b))
		}
		// Only our own encoder can make what proves the key.
		var again []byte
		if m.Type == TypePing {
			again = c.EncodePing(nil, m)
		} else {
			again = c.EncodePong(nil, m)
		}
		if got, err := c.Decode(again); err != nil || got != m {
			t.Fatalf("encoded again: %+v, %v; want %+v", got, err, m)
		}
	})
}

func FuzzDatagram(f *testing.F) {
	f.Add([]byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 0xca, 0x6c, 0, 8, 0, 0})
	f.Add([]byte{0x4f, 0, 0, 28, 0, 0, 0, 0, 64, 17})
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, parse := range []func([]byte, uint16) (datagram, bool){parseIPv4, parseUDP} {
			if d, ok := parse(b, 51820); ok && len(d.payload) > len(b)-udpHeader {
				t.Fatalf("payload of %d bytes from %d", len(d.payload), len(b))
			}
		}
	})
}

func BenchmarkEncodePing(b *testing.B) {
	c := NewCodec(key)
	buf := make([]byte, 0, MaxSize)
	b.ReportAllocs()
	for b.Loop() {
		buf = c.EncodePing(buf[:0], Message{Sender: alice, Epoch: 1, Counter: 1})
	}
}

func BenchmarkDecodePong(b *testing.B) {
	c := NewCodec(key)
	msg := c.EncodePong(nil, Message{Sender: bob, Observed: netip.MustParseAddrPort("203.0.113.9:51820")})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Decode(msg); err != nil {
			b.Fatal(err)
		}
	}
}
