package candidate

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pion/stun/v3"

	"github.com/skeinmesh/skein/internal/nattest"
)

var (
	client4 = ap("198.51.100.9:1234")
	client6 = ap("[2001:db8::9]:1234")
	server4 = serving{local: ap("203.0.113.1:3478"), alternate: 3479, another: true}
	server6 = serving{local: ap("[2001:db8::1]:3478"), alternate: 3479, another: true}
)

func request(t testing.TB, w want) []byte {
	t.Helper()
	b, err := encodeRequest([12]byte{1}, w)
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
		{name: "long enough for details", b: request(t, wantHere), from: client4, s: server4, ok: true, other: 3479},
		{name: "long enough for details, IPv6", b: request(t, wantHere), from: client6, s: server6, ok: true, other: 3479},
		{name: "other port", b: request(t, wantOtherPort), from: client4, s: server4, ok: true, via: viaAlternate, other: 3479},
		{name: "other port, asked at the alternate", b: request(t, wantOtherPort), from: client4, s: onAlternate, ok: true, via: viaPrimary, other: 3479},
		{name: "silent port", b: request(t, wantSilentPort), from: client4, s: server4, ok: true, via: viaSilent, other: 3479},
		{name: "other address", b: request(t, wantOtherAddress), from: client4, s: server4, ok: true, another: true, code: 420},
		{name: "other address, alone", b: request(t, wantOtherAddress), from: client4, s: alone, ok: true, code: 420},
		{name: "other address, request too short to pay for it", b: with(plain, stun.AttrChangeRequest, []byte{0, 0, 0, 6}), from: client4, s: server4, ok: true, code: 420},
		{name: "change request of a wrong length", b: with(plain, stun.AttrChangeRequest, []byte{0, 0}), from: client4, s: server4},
		{name: "what must be understood and is not", b: with(plain, 0x7ffe, nil), from: client4, s: server4, ok: true, code: 420},
		{name: "RESPONSE-PORT, with which others could be shot at", b: with(plain, stun.AttrResponsePort, []byte{1, 2, 0, 0}), from: client4, s: server4, ok: true, code: 420},
		{name: "an answer", b: stun.MustBuild(stun.TransactionID, stun.BindingSuccess).Raw, from: client4, s: server4},
		{name: "an indication", b: stun.MustBuild(stun.TransactionID, stun.NewType(stun.MethodBinding, stun.ClassIndication)).Raw, from: client4, s: server4},
		{name: "a TURN request", b: stun.MustBuild(stun.TransactionID, stun.NewType(stun.MethodAllocate, stun.ClassRequest)).Raw, from: client4, s: server4},
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
			got, err := decodeResponse(r.bytes, tt.s.local)
			if err != nil || got.code != tt.code || got.other.Port() != tt.other || tt.code == 0 && got.mapped != tt.from {
				t.Errorf("the client reads %+v, %v", got, err)
			}
			if len(r.bytes) > max(len(tt.b), 44) {
				t.Errorf("%d bytes answer %d", len(r.bytes), len(tt.b))
			}
		})
	}
}

func FuzzRespond(f *testing.F) {
	for _, w := range []want{wantHere, wantOtherPort, wantOtherAddress, wantSilentPort} {
		f.Add(request(f, w))
	}
	f.Add(with(request(f, wantHere), 0x7001, []byte("x")))
	f.Fuzz(func(t *testing.T, b []byte) {
		for from, s := range map[netip.AddrPort]serving{client4: server4, client6: server6} {
			if r, ok := respond(b, from, s); ok && (len(r.bytes) == 0 || len(r.bytes) > max(len(b), 44)) {
				t.Fatalf("%d bytes answer %d", len(r.bytes), len(b))
			}
		}
	})
}

func FuzzDecodeResponse(f *testing.F) {
	for _, w := range []want{wantHere, wantOtherAddress} {
		r, _ := respond(request(f, w), client6, server6)
		f.Add(r.bytes)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeResponse(b, server4.local)
		if err == nil && r.code == 0 && (!r.mapped.Addr().Is4() || !r.mapped.Addr().IsGlobalUnicast() || r.mapped.Port() == 0) {
			t.Fatalf("believed %s", r.mapped)
		}
		a := newAsker(nil)
		a.waiting[r.tx] = &question{to: server4.local, answer: make(chan response, 1)}
		a.deliver(server4.local, b)
	})
}

func TestLiesAreNotBelieved(t *testing.T) {
	server := server4.local
	tx := [12]byte{1}
	answer := func(mapped string) []byte {
		b, err := success(tx, ap(mapped))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	mappedOnly := stun.MustBuild(stun.NewTransactionIDSetter(tx), stun.BindingSuccess, &stun.MappedAddress{IP: []byte{198, 51, 100, 9}, Port: 7}).Raw
	foreign, _ := success([12]byte{2}, client4)
	tests := []struct {
		name string
		from netip.AddrPort
		b    []byte
		want bool
	}{
		{"the truth", server, answer("198.51.100.9:7"), true},
		{"the truth from another port", ap("203.0.113.1:3479"), answer("198.51.100.9:7"), false},
		{"the truth from another address", ap("203.0.113.2:3478"), answer("198.51.100.9:7"), false},
		{"another transaction", server, foreign, false},
		{"loopback", server, answer("127.0.0.1:7"), false},
		{"unspecified", server, answer("0.0.0.0:7"), false},
		{"multicast", server, answer("224.0.0.1:7"), false},
		{"broadcast", server, answer("255.255.255.255:7"), false},
		{"link-local", server, answer("169.254.1.1:7"), false},
		{"port 0", server, answer("198.51.100.9:0"), false},
		{"the other family", server, answer("[2001:db8::9]:7"), false},
		{"MAPPED-ADDRESS alone, which gateways rewrite", server, mappedOnly, false},
		{"an error from elsewhere", ap("203.0.113.2:3478"), refusal(tx, nil, 100), false},
		{"our own question", server, request(t, wantHere), false},
		{"nothing", server, nil, false},
	}
	for _, tt := range tests {
		a := newAsker(nil)
		q := &question{to: server, answer: make(chan response, 1)}
		a.waiting[tx] = q
		a.deliver(tt.from, tt.b)
		a.deliver(tt.from, tt.b) // copies do no harm
		if got := len(q.answer) == 1; got != tt.want {
			t.Errorf("%s: believed %v, want %v", tt.name, got, tt.want)
		}
	}
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
		s, err := ListenSTUN(StunConfig{Port: 3478})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		for _, port := range []int{3478, 3477, 3479} { // 3477: its alternate is taken
			if _, err := ListenSTUN(StunConfig{Port: port}); err == nil || !strings.Contains(err.Error(), "set ports.stun") {
				t.Errorf("port %d: %v", port, err)
			}
		}
		if _, err := ListenSTUN(StunConfig{Port: 65535}); err == nil {
			t.Error("port 65535 was taken though it has no successor")
		}
	})
}

func TestServerOnTheWire(t *testing.T) {
	internet := nattest.New(t)
	host := internet.Host(nattest.Public)
	var asked atomic.Int64
	release := make(chan struct{})
	var s *StunServer
	fresh := map[string]*freshSocket{}
	host.Do(func() {
		var err error
		s, err = ListenSTUN(StunConfig{Port: 3478, Mark: 0x20, ChangeIP: func(ctx context.Context, _ netip.AddrPort, _ [12]byte) error {
			asked.Add(1)
			select {
			case <-release:
			case <-ctx.Done():
			}
			return errors.New("nobody else here")
		}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		for _, network := range []string{"udp4", "udp6"} {
			f, err := openFresh(network, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(f.close)
			fresh[network] = f
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for network, at := range map[string]netip.Addr{"udp4": host.Addr, "udp6": host.Addr6} {
		r, _, err := fresh[network].ask(ctx, netip.AddrPortFrom(at, 3478), wantHere)
		if err != nil || r.other != netip.AddrPortFrom(at, 3479) || r.mapped.Addr() != at {
			t.Errorf("%s: %+v, %v", network, r, err)
		}
		for w, ports := range map[want]string{wantOtherPort: "3479", wantSilentPort: ""} {
			r, _, err := fresh[network].ask(ctx, netip.AddrPortFrom(at, 3478), w)
			if err != nil || r.from.Addr() != at || r.from.Port() == 3478 || ports == "" && r.from.Port() == 3479 {
				t.Errorf("%s, wish %d: from %s, %v", network, w, r.from, err)
			}
		}
	}
	// The question is repeated while the other node is being asked, and asked of it once.
	time.AfterFunc(400*time.Millisecond, func() { close(release) })
	if _, _, err := fresh["udp4"].ask(ctx, netip.AddrPortFrom(host.Addr, 3478), wantOtherAddress); !errors.Is(err, errUnsupported) {
		t.Errorf("another address was wished for: %v", err)
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("the other node was asked %d times, want once", n)
	}
	for _, bad := range []string{"127.0.0.1:1", "224.0.0.1:1", "203.0.113.9:0", "[::]:1"} {
		if err := s.Answer(ap(bad), [12]byte{}); err == nil {
			t.Errorf("answered to %s", bad)
		}
	}
	limited := false
	for range 2 * answerBurst {
		limited = s.Answer(ap("203.0.113.200:9"), [12]byte{}) != nil || limited
	}
	if !limited {
		t.Error("answers for other nodes are not limited")
	}
}

func BenchmarkRespond(b *testing.B) {
	r := request(b, wantHere)
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := respond(r, client4, server4); !ok {
			b.Fatal("no answer")
		}
	}
}
