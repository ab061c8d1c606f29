package relay

import (
	"bytes"
	"net/netip"
	"testing"
	"testing/iotest"

	"github.com/skeinmesh/skein/identity"
)

func sampleFrames() []byte {
	id := identity.ID{1, 2, 3, 4, 5, 6, 7, 8}
	b := appendHello(nil, hello{1, 2, 3, 4, 5, true})
	b = appendToken(b, framePing, 7)
	b = appendData(b, id, 2, []byte("payload"))
	b = appendRefused(b, id, 1, []byte("refused"))
	b = appendNode(b, frameGone, id)
	b = appendNode(b, frameHere, id)
	b = appendOffer(b, offer{9, id, [16]byte{1}})
	b = appendAccept(b, 9, [16]byte{1})
	b = appendReply(b, replyTimeout, "too late")
	b = appendNode(b, frameWhere, id)
	b = appendSeen(b, id, []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")})
	return append(b, samplePairFrames()...)
}

func TestFrameReaderCutsAnywhere(t *testing.T) {
	b := append(sampleFrames(), appendData(nil, identity.ID{}, 0, make([]byte, MaxPayload))...)
	r, n := newFrameReader(), 0
	src := iotest.OneByteReader(bytes.NewReader(b))
	for n < 18 {
		if _, err := r.fill(src); err != nil {
			t.Fatal(err)
		}
		for {
			_, _, ok, err := r.next()
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
	f.Add(appendHeader(nil, frameData, maxBody))
	f.Add([]byte{byte(frameOffer), 0, 3, 1, 2, 3})
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

func encodeAgain(typ frameType, body []byte) []byte {
	switch typ {
	case frameHello:
		if len(body) == helloSize+1 && body[helloSize] <= 1 {
			return appendHello(nil, decodeHello(body))
		}
	case framePing, framePong:
		return appendToken(nil, typ, decodeToken(body))
	case frameData:
		n, c, p := decodeData(body)
		return appendData(nil, n, c, p)
	case frameGone:
		if len(body) >= dataPrefix {
			n, c, p := decodeData(body)
			return appendRefused(nil, n, c, p)
		}
	case frameSeen:
		if n := len(body) - 8; n%16 == 0 && n/16 <= maxSeen {
			id, addrs := decodeSeen(body)
			return appendSeen(nil, id, addrs)
		}
	case frameHere, frameConnect, frameWhere:
		return appendNode(nil, typ, decodeNode(body))
	case frameOffer:
		return appendOffer(nil, decodeOffer(body))
	case frameAccept:
		s, k := decodeAccept(body)
		return appendAccept(nil, s, k)
	case frameReply:
		c, s := decodeReply(body)
		return appendReply(nil, c, s)
	}
	return encodePairAgain(typ, body)
}
