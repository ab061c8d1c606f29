package wire

import (
	"bytes"
	"net/netip"
	"testing"
	"testing/iotest"

	"github.com/skeinmesh/skein/identity"
)

func sampleFrames() []byte {
	id := identity.ID{1, 2, 3, 4, 5, 6, 7, 8}
	b := AppendHello(nil, Hello{1, 2, 3, 4, 5, true})
	b = AppendToken(b, FramePing, 7)
	b = AppendData(b, id, 2, []byte("payload"))
	b = AppendRefused(b, id, 1, []byte("refused"))
	b = AppendNode(b, FrameGone, id)
	b = AppendNode(b, FrameHere, id)
	b = AppendOffer(b, Offer{9, id, [16]byte{1}})
	b = AppendAccept(b, 9, [16]byte{1})
	b = AppendReply(b, ReplyTimeout, "too late")
	b = AppendNode(b, FrameWhere, id)
	b = AppendSeen(b, id, []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")})
	return append(b, samplePairFrames()...)
}

func TestFrameReaderCutsAnywhere(t *testing.T) {
	b := append(sampleFrames(), AppendData(nil, identity.ID{}, 0, make([]byte, MaxPayload))...)
	r, n := NewFrameReader(), 0
	src := iotest.OneByteReader(bytes.NewReader(b))
	for n < 18 {
		if _, err := r.Fill(src); err != nil {
			t.Fatal(err)
		}
		for {
			_, _, ok, err := r.Next()
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			n++
		}
	}
	if len(b)-r.end+r.start > len(b) || r.start != r.end {
		t.Errorf("%d bytes left over", r.end-r.start)
	}
}

// FuzzFrames decodes arbitrary bytes, and what decodes must encode to the same bytes.
func FuzzFrames(f *testing.F) {
	f.Add(sampleFrames())
	f.Add(AppendHeader(nil, FrameData, maxBody))
	f.Add([]byte{byte(FrameOffer), 0, 3, 1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		for {
			typ, body, size, need, err := parse(b)
			if err != nil || size == 0 {
				if err == nil && (need <= len(b) || need > maxFrame) {
					t.Fatalf("need %d of %d bytes", need, len(b))
				}
				return
			}
			if size > maxFrame {
				t.Fatalf("frame of %d bytes", size)
			}
			if again := encodeAgain(typ, body); again != nil && !bytes.Equal(again, b[:size]) {
				t.Fatalf("frame %x encodes to %x", b[:size], again)
			}
			b = b[size:]
		}
	})
}

func encodeAgain(typ FrameType, body []byte) []byte {
	switch typ {
	case FrameHello:
		if len(body) == helloSize+1 && body[helloSize] <= 1 {
			return AppendHello(nil, DecodeHello(body))
		}
	case FramePing, FramePong:
		return AppendToken(nil, typ, DecodeToken(body))
	case FrameData:
		n, c, p := DecodeData(body)
		return AppendData(nil, n, c, p)
	case FrameGone:
		if len(body) >= dataPrefix {
			n, c, p := DecodeData(body)
			return AppendRefused(nil, n, c, p)
		}
	case FrameSeen:
		if n := len(body) - 8; n%16 == 0 && n/16 <= maxSeen {
			id, addrs := DecodeSeen(body)
			return AppendSeen(nil, id, addrs)
		}
	case FrameHere, FrameConnect, FrameWhere:
		return AppendNode(nil, typ, DecodeNode(body))
	case FrameOffer:
		return AppendOffer(nil, DecodeOffer(body))
	case FrameAccept:
		s, k := DecodeAccept(body)
		return AppendAccept(nil, s, k)
	case FrameReply:
		c, s := DecodeReply(body)
		return AppendReply(nil, c, s)
	}
	return encodePairAgain(typ, body)
}
