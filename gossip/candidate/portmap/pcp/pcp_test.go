package pcp

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/gossip/candidate/portmap/ask"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/asktest"
)

var wish = Wish{Inner: netip.MustParseAddrPort("192.168.1.2:51820"), Outer: netip.MustParseAddrPort("0.0.0.0:51820"),
	Lifetime: 2 * time.Hour, Nonce: Nonce{1, 2, 3}}

// grant is a router's answer to a request.
func grant(request []byte, outer string, lifetime uint32) []byte {
	b := slices.Clone(request)
	b[1] |= answerBit
	b[2], b[3] = 0, 0
	binary.BigEndian.PutUint32(b[4:], lifetime)
	clear(b[8:24])
	binary.BigEndian.PutUint32(b[8:], 777)
	o := netip.MustParseAddrPort(outer)
	binary.BigEndian.PutUint16(b[42:], o.Port())
	a := o.Addr().As16()
	copy(b[44:], a[:])
	return b
}

func change(b []byte, at int, to ...byte) []byte {
	b = slices.Clone(b)
	copy(b[at:], to)
	return b
}

// The layout of RFC 6887 sections 7.1 and 11.1.
func TestRequestIsAsTheRFCDrawsIt(t *testing.T) {
	got := EncodeMap(wish)
	want := slices.Concat([]byte{2, 1, 0, 0, 0, 0, 0x1c, 0x20}, make([]byte, 10), []byte{0xff, 0xff, 192, 168, 1, 2},
		[]byte{1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 17, 0, 0, 0, 0xca, 0x6c, 0xca, 0x6c}, make([]byte, 10),
		[]byte{0xff, 0xff, 0, 0, 0, 0})
	if !slices.Equal(got, want) {
		t.Errorf("got  %x\nwant %x", got, want)
	}
}

func TestAnswersThatDoNotFit(t *testing.T) {
	good := grant(EncodeMap(wish), "11.22.33.4:51820", 7200)
	if g, err := DecodeMap(good, wish); err != nil ||
		g != (Grant{netip.MustParseAddrPort("11.22.33.4:51820"), 2 * time.Hour, 777}) {
		t.Fatalf("%+v, %v", g, err)
	}
	var refused *RefusedError
	for name, tt := range map[string]struct {
		b    []byte
		want error
	}{
		"empty":                   {nil, ErrGarbled},
		"cut short":               {good[:48], ErrGarbled},
		"not a multiple of four":  {append(slices.Clone(good), 1), ErrGarbled},
		"too long":                {append(slices.Clone(good), make([]byte, 1100)...), ErrGarbled},
		"our own question":        {EncodeMap(wish), ErrGarbled},
		"another opcode":          {change(good, 1, 0x82), ErrGarbled},
		"another nonce":           {change(good, 24, 9), ErrGarbled},
		"another protocol":        {change(good, 36, 6), ErrGarbled},
		"another inner port":      {change(good, 40, 0, 9), ErrGarbled},
		"outer port 0":            {change(good, 42, 0, 0), ErrGarbled},
		"no lifetime":             {change(good, 4, 0, 0, 0, 0), ErrGarbled},
		"an address of IPv6":      {grant(EncodeMap(wish), "[2001:db8::1]:51820", 7200), ErrGarbled},
		"NAT-PMP's answer":        {[]byte{0, 128, 0, 1, 0, 0, 0, 9}, ErrVersion},
		"an unsupported version":  {change(good, 3, 1), ErrVersion},
		"another version":         {change(good, 0, 3), ErrVersion},
		"refused":                 {change(good, 3, 2), nil},
		"refused without mapping": {change(good, 3, 8)[:24], nil},
		"an unknown code":         {change(good, 3, 99), nil},
	} {
		_, err := DecodeMap(tt.b, wish)
		if tt.want != nil && !errors.Is(err, tt.want) || tt.want == nil && !errors.As(err, &refused) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestNonceStaysTheSame(t *testing.T) {
	gw, inner := netip.MustParseAddr("192.168.1.1"), wish.Inner
	a := MakeNonce([]byte("secret"), gw, inner)
	if a != MakeNonce([]byte("secret"), gw, inner) {
		t.Error("the nonce changes by itself")
	}
	for _, b := range []Nonce{{}, MakeNonce([]byte("other"), gw, inner),
		MakeNonce([]byte("secret"), netip.MustParseAddr("192.168.1.9"), inner), MakeNonce([]byte("secret"), gw,
			netip.MustParseAddrPort("192.168.1.2:1"))} {
		if a == b {
			t.Errorf("nonce %x is used twice", a)
		}
	}
}

// A gateway that answers wrongly first is asked on; a stranger's answer is not heard at all.
func TestGatewaysThatLie(t *testing.T) {
	for _, tt := range []struct {
		name    string
		answers func(request []byte) [][]byte
		want    string // the error; empty: granted
	}{
		{"the truth", func(r []byte) [][]byte { return [][]byte{grant(r, "11.22.33.4:9", 60)} }, ""},
		{"garbage before the truth", func(r []byte) [][]byte {
			return [][]byte{{1, 2, 3}, r, grant(r, "11.22.33.4:9", 60)}
		}, ""},
		{"an old answer before the truth", func(r []byte) [][]byte {
			return [][]byte{change(grant(r, "9.9.9.9:9", 60), 24, 0xee), grant(r, "11.22.33.4:9", 60)}
		}, ""},
		{"port 0 and nothing else", func(r []byte) [][]byte { return [][]byte{grant(r, "11.22.33.4:0", 60)} }, "port 0"},
		{"refused", func(r []byte) [][]byte { return [][]byte{change(grant(r, "0.0.0.0:0", 60), 3, 2)} }, "not authorized"},
		{"NAT-PMP", func([]byte) [][]byte { return [][]byte{{0, 128, 0, 1, 0, 0, 0, 9}} }, "does not speak PCP"},
		{"nothing", func([]byte) [][]byte { return nil }, "no answer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			g := asktest.Gateway(t, tt.answers, func(r []byte) []byte { return grant(r, "66.66.66.66:6", 60) })
			w := wish
			w.Inner = netip.AddrPortFrom(g.Local, 51820)
			got, err := Map(t.Context(), g, w)
			if tt.want == "" && (err != nil || got.Outer.String() != "11.22.33.4:9") || tt.want != "" &&
				(err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("%+v, %v; want %q", got, err, tt.want)
			}
		})
	}
	if _, err := Announce(t.Context(), asktest.Nobody(t)); !errors.Is(err, ask.ErrNoAnswer) {
		t.Errorf("nobody listens: %v", err)
	}
}

func FuzzDecodeMap(f *testing.F) {
	f.Add(grant(EncodeMap(wish), "11.22.33.4:51820", 7200))
	f.Add(EncodeMap(wish))
	f.Add(EncodeAnnounce(wish.Inner.Addr()))
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := DecodeMap(b, wish)
		if err == nil && (g.Outer.Port() == 0 || g.Lifetime <= 0 || !g.Outer.Addr().Is4()) {
			t.Fatalf("believed %+v", g)
		}
		_, _ = DecodeAnnounce(b)
	})
}
