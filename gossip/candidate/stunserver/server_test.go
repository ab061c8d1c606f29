package stunserver

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/pion/stun/v3"

	"github.com/skeinmesh/skein/internal/nattest"

	"github.com/skeinmesh/skein/gossip/candidate/stunmsg"
)

var (
	client4 = ap("198.51.100.9:1234")
	client6 = ap("[2001:db8::9]:1234")
	server4 = serving{local: ap("203.0.113.1:3478"), alternate: 3479, another: true}
	server6 = serving{local: ap("[2001:db8::1]:3478"), alternate: 3479, another: true}
)

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func request(t testing.TB, w stunmsg.Want) []byte {
	t.Helper()
	b, err := stunmsg.EncodeRequest([12]byte{1}, w)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func with(b []byte, kind stun.AttrType, value []byte) []byte {
	m := &stun.Message{Raw: append([]byte(nil), b...)}
	if err := m.Decode(); err != nil {
		panic(err)
	}
	m.Add(kind, value)
	return m.Raw
}

func TestRespond(t *testing.T) {
	plain := stun.MustBuild(stun.TransactionID, stun.BindingRequest).Raw
	onAlternate := server4
	onAlternate.on = viaAlternate
	alone := server4
	alone.another = false
	tests := []struct {
		name    string
		b       []byte
		from    netip.AddrPort
		s       serving
		ok      bool
		via     via
		another bool
		code    stun.ErrorCode
		other   uint16
	}{
		{name: "plain", b: plain, from: client4, s: server4, ok: true},
		{name: "plain IPv6", b: plain, from: client6, s: server6, ok: true},
		{name: "long enough for details", b: request(t, stunmsg.Here), from: client4, s: server4, ok: true, other: 3479},
		{name: "long enough for details, IPv6", b: request(t, stunmsg.Here), from: client6, s: server6,
			ok: true, other: 3479},
		{name: "other port", b: request(t, stunmsg.OtherPort), from: client4, s: server4, ok: true,
			via: viaAlternate, other: 3479},
		{name: "other port, asked at the alternate", b: request(t, stunmsg.OtherPort), from: client4, s: onAlternate,
			ok: true, via: viaPrimary, other: 3479},
		{name: "silent port", b: request(t, stunmsg.SilentPort), from: client4, s: server4, ok: true,
			via: viaSilent, other: 3479},
		{name: "other address", b: request(t, stunmsg.OtherAddress), from: client4, s: server4, ok: true,
			another: true, code: 420},
		{name: "other address, alone", b: request(t, stunmsg.OtherAddress), from: client4, s: alone, ok: true, code: 420},
		{name: "other address, request too short to pay for it", b: with(plain, stun.AttrChangeRequest, []byte{0, 0, 0, 6}),
			from: client4, s: server4, ok: true, code: 420},
		{name: "change request of a wrong length", b: with(plain, stun.AttrChangeRequest, []byte{0, 0}),
			from: client4, s: server4},
		{name: "what must be understood and is not", b: with(plain, 0x7ffe, nil), from: client4, s: server4,
			ok: true, code: 420},
		{name: "RESPONSE-PORT, with which others could be shot at", b: with(plain, stun.AttrResponsePort, []byte{1, 2, 0, 0}),
			from: client4, s: server4, ok: true, code: 420},
		{name: "an answer", b: stun.MustBuild(stun.TransactionID, stun.BindingSuccess).Raw, from: client4, s: server4},
		{name: "an indication", b: stun.MustBuild(stun.TransactionID, stun.NewType(stun.MethodBinding,
			stun.ClassIndication)).Raw, from: client4, s: server4},
		{name: "a TURN request", b: stun.MustBuild(stun.TransactionID, stun.NewType(stun.MethodAllocate,
			stun.ClassRequest)).Raw, from: client4, s: server4},
		{name: "cut short", b: plain[:19], from: client4, s: server4},
		{name: "empty", from: client4, s: server4},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, ok := respond(tt.b, tt.from, tt.s)
			if ok != tt.ok {
				t.Fatalf("answered: %v, want %v", ok, tt.ok)
			}
			if !ok {
				return
			}
			if r.via != tt.via || r.another != tt.another {
				t.Errorf("through socket %d, asking another node %v; want %d, %v", r.via, r.another, tt.via, tt.another)
			}
			got, err := stunmsg.DecodeResponse(r.bytes, tt.s.local)
			if err != nil || got.Code != tt.code || got.Other.Port() != tt.other || tt.code == 0 && got.Mapped != tt.from {
				t.Errorf("the client reads %+v, %v", got, err)
			}
			if len(r.bytes) > max(len(tt.b), 44) {
				t.Errorf("%d bytes answer %d", len(r.bytes), len(tt.b))
			}
		})
	}
}

func FuzzRespond(f *testing.F) {
	for _, w := range []stunmsg.Want{stunmsg.Here, stunmsg.OtherPort, stunmsg.OtherAddress, stunmsg.SilentPort} {
		f.Add(request(f, w))
	}
	f.Add(with(request(f, stunmsg.Here), 0x7001, []byte("x")))
	f.Fuzz(func(t *testing.T, b []byte) {
		for from, s := range map[netip.AddrPort]serving{client4: server4, client6: server6} {
			if r, ok := respond(b, from, s); ok && (len(r.bytes) == 0 || len(r.bytes) > max(len(b), 44)) {
				t.Fatalf("%d bytes answer %d", len(r.bytes), len(b))
			}
		}
	})
}

func TestLimiter(t *testing.T) {
	l := newLimiter(10, 5)
	now := time.Now()
	count := func(a string) (n int) {
		for range 100 {
			if l.allow(netip.MustParseAddr(a), now) {
				n++
			}
		}
		return n
	}
	if n := count("192.0.2.1"); n != 5 {
		t.Errorf("%d at once, want 5", n)
	}
	if n := count("2001:db8::1") + count("2001:db8::2"); n != 5 {
		t.Errorf("%d from one /64, want 5", n)
	}
	now = now.Add(200 * time.Millisecond)
	if n := count("192.0.2.1"); n != 2 {
		t.Errorf("%d after 200 ms, want 2", n)
	}
}

func TestPortInUse(t *testing.T) {
	internet := nattest.New(t)
	internet.Host(nattest.Public).Do(func() {
		s, err := Listen(Config{Port: 3478})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		for _, port := range []int{3478, 3477, 3479} { // 3477: its alternate is taken
			if _, err := Listen(Config{Port: port}); err == nil || !strings.Contains(err.Error(), "set ports.stun") {
				t.Errorf("port %d: %v", port, err)
			}
		}
		if _, err := Listen(Config{Port: 65535}); err == nil {
			t.Error("port 65535 was taken though it has no successor")
		}
	})
}

func BenchmarkRespond(b *testing.B) {
	r := request(b, stunmsg.Here)
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := respond(r, client4, server4); !ok {
			b.Fatal("no answer")
		}
	}
}
