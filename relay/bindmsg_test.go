package relay

import (
	"bytes"
	"errors"
	"testing"

	"github.com/skeinmesh/skein/identity"
)

func samplePairFrames() []byte {
	id := identity.ID{1, 2, 3, 4, 5, 6, 7, 8}
	b := appendNode(nil, frameReserve, id)
	b = appendPairID(b, frameFailed, 5)
	b = appendPairID(b, frameGiveUp, 5)
	b = appendGrant(b, grant{5, id, 24001, [pairKeySize]byte{9}})
	b = appendState(b, 5, pairReady)
	return appendDenied(b, id, deniedQuota)
}

func encodePairAgain(typ frameType, body []byte) []byte {
	switch typ {
	case frameReserve:
		return appendNode(nil, typ, decodeNode(body))
	case frameFailed, frameGiveUp:
		return appendPairID(nil, typ, decodePairID(body))
	case framePair:
		if len(body) == pairFrameSize {
			return appendGrant(nil, decodeGrant(body))
		}
	case frameState:
		if len(body) == stateSize {
			return appendState(nil, PairID(decodePairID(body)), pairState(body[8]))
		}
	case frameDenied:
		if len(body) == 9 {
			return appendDenied(nil, identity.ID(body[:8]), denial(body[8]))
		}
	}
	return nil
}

func TestBindProvesItsKeyAndNothingElseDoes(t *testing.T) {
	key := [pairKeySize]byte{1}
	sent := bindMessage{kind: typeBind, pair: 7, counter: 3, nonce: [nonceSize]byte{4}}
	b := appendBind(nil, sent, &key)
	got, rest, err := parseBind(append(bytes.Clone(b), b...)) // as the kernel may join two
	if err != nil || got != sent || !bytes.Equal(rest, b) {
		t.Fatalf("%+v, %d bytes left, %v", got, len(rest), err)
	}
	if err := proveBind(b, &key); err != nil {
		t.Error(err)
	}
	if err := proveBind(b, &[pairKeySize]byte{2}); !errors.Is(err, errBindMAC) {
		t.Errorf("with another key: %v", err)
	}
	for i := range b {
		c := bytes.Clone(b)
		c[i] ^= 1
		if _, _, err := parseBind(c); err == nil && proveBind(c, &key) == nil {
			t.Errorf("byte %d may be changed", i)
		}
	}
}

func TestChallengeIsNoLongerThanItsBind(t *testing.T) {
	key := [pairKeySize]byte{}
	if a, b := appendBind(nil, bindMessage{kind: typeBind}, &key), appendBind(nil, bindMessage{kind: typeChallenge},
		&key); len(a) != bindSize || len(b) > len(a) {
		t.Errorf("bind %d bytes, challenge %d", len(a), len(b))
	}
}

// FuzzBind parses arbitrary datagrams; what parses must encode to the same bytes but for the MAC.
func FuzzBind(f *testing.F) {
	key := [pairKeySize]byte{1}
	f.Add(appendBind(nil, bindMessage{kind: typeBind, pair: 1, counter: 2}, &key))
	f.Add(appendBind(nil, bindMessage{kind: typeChallenge, pair: 1, counter: 2, nonce: [nonceSize]byte{3}}, &key))
	f.Fuzz(func(t *testing.T, b []byte) {
		for len(b) > 0 {
			m, rest, err := parseBind(b)
			if err != nil {
				return
			}
			if !IsBind(b) {
				t.Fatal("parses, and IsBind says no")
			}
			again := appendBind(nil, m, &key)
			if !bytes.Equal(again[:bindSigned], b[:bindSigned]) {
				t.Fatalf("%x encodes to %x", b[:bindSize], again)
			}
			_ = proveBind(b, &key)
			b = rest
		}
	})
}
