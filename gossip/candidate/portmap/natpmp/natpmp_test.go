package natpmp

import (
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/gossip/candidate/portmap/ask"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/asktest"
)

var wish = Wish{Inner: 51820, Outer: 51820, Lifetime: 2 * time.Hour}

func grant(code, inner, outer uint16, lifetime uint32) []byte {
	b := []byte{version, answerBit | opMapUDP}
	b = binary.BigEndian.AppendUint16(b, code)
	b = binary.BigEndian.AppendUint32(b, 777)
	b = binary.BigEndian.AppendUint16(b, inner)
	b = binary.BigEndian.AppendUint16(b, outer)
	return binary.BigEndian.AppendUint32(b, lifetime)
}

// The layout of RFC 6886 sections 3.2 and 3.3.
func TestRequestsAreAsTheRFCDrawsThem(t *testing.T) {
	if got := EncodeMap(wish); !slices.Equal(got, []byte{0, 1, 0, 0, 0xca, 0x6c, 0xca, 0x6c, 0, 0, 0x1c, 0x20}) {
		t.Errorf("map: %x", got)
	}
	if got := EncodeMap(Wish{Inner: 51820, Outer: 51820}); !slices.Equal(got, []byte{0, 1, 0, 0, 0xca, 0x6c, 0,
		0, 0, 0, 0, 0}) {
		t.Errorf("give back: %x", got)
	}
	if got := EncodeAddress(); !slices.Equal(got, []byte{0, 0}) {
		t.Errorf("address: %x", got)
	}
}

func TestAnswersThatDoNotFit(t *testing.T) {
	if g, err := DecodeMap(grant(0, 51820, 9, 7200), wish); err != nil || g != (Grant{9, 2 * time.Hour, 777}) {
		t.Fatalf("%+v, %v", g, err)
	}
	var refused RefusedError
	for name, tt := range map[string]struct {
		b    []byte
		want error
	}{
		"empty":              {nil, ErrGarbled},
		"cut short":          {grant(0, 51820, 9, 7200)[:14], ErrGarbled},
		"too long":           {append(grant(0, 51820, 9, 7200), 0), ErrGarbled},
		"our own question":   {EncodeMap(wish), ErrGarbled},
		"another inner port": {grant(0, 1, 9, 7200), ErrGarbled},
		"port 0":             {grant(0, 51820, 0, 7200), ErrGarbled},
		"no lifetime":        {grant(0, 51820, 9, 0), ErrGarbled},
		"of PCP":             {append([]byte{2}, grant(0, 51820, 9, 7200)[1:]...), ErrGarbled},
		"for TCP":            {append([]byte{0, 130}, grant(0, 51820, 9, 7200)[2:]...), ErrGarbled},
		"refused":            {grant(2, 51820, 0, 0), nil},
		"an unknown code":    {grant(999, 51820, 0, 0), nil},
	} {
		_, err := DecodeMap(tt.b, wish)
		if tt.want != nil && !errors.Is(err, tt.want) || tt.want == nil && !errors.As(err, &refused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if a, epoch, err := DecodeAddress([]byte{0, 128, 0, 0, 0, 0, 0, 7, 11, 22, 33, 4}); err != nil ||
		a.String() != "11.22.33.4" || epoch != 7 {
		t.Errorf("%s, %d, %v", a, epoch, err)
	}
	if _, _, err := DecodeAddress([]byte{0, 128, 0, 3, 0, 0, 0, 7}); !errors.As(err, &refused) {
		t.Errorf("a short refusal: %v", err)
	}
}

func TestGatewaysThatLie(t *testing.T) {
	lie := func([]byte) []byte { return grant(0, 51820, 6, 60) }
	for _, tt := range []struct {
		name    string
		answers [][]byte
		want    string // the error; empty: granted
	}{
		{"the truth", [][]byte{grant(0, 51820, 9, 60)}, ""},
		{"garbage and somebody else's before the truth", [][]byte{{1, 2, 3}, grant(0, 7, 8, 60), grant(0, 51820, 9, 60)}, ""},
		{"port 0 and nothing else", [][]byte{grant(0, 51820, 0, 60)}, "port 0"},
		{"switched off", [][]byte{grant(2, 51820, 0, 0)}, "not authorized"},
		{"nothing", nil, "no answer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := Map(t.Context(), asktest.Gateway(t, func([]byte) [][]byte { return tt.answers }, lie), wish)
			if tt.want == "" && (err != nil || got.Outer != 9) || tt.want != "" &&
				(err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("%+v, %v; want %q", got, err, tt.want)
			}
		})
	}
	if _, _, err := Address(t.Context(), asktest.Nobody(t)); !errors.Is(err, ask.ErrNoAnswer) {
		t.Errorf("nobody listens: %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(grant(0, 51820, 9, 7200))
	f.Add([]byte{0, 128, 0, 0, 0, 0, 0, 7, 11, 22, 33, 4})
	f.Fuzz(func(t *testing.T, b []byte) {
		if g, err := DecodeMap(b, wish); err == nil && (g.Outer == 0 || g.Lifetime <= 0) {
			t.Fatalf("believed %+v", g)
		}
		_, _, _ = DecodeAddress(b)
	})
}
