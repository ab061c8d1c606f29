package wire

import (
	"bytes"
	"errors"
	"testing"

	"github.com/skeinmesh/skein/identity"
)

func samplePairFrames() []byte {
	id := identity.ID{1, 2, 3, 4, 5, 6, 7, 8}
	b := AppendNode(nil, FrameReserve, id)
	b = AppendPairID(b, FrameFailed, 5)
	b = AppendPairID(b, FrameGiveUp, 5)
	b = AppendGrant(b, Grant{5, id, 24001, [PairKeySize]byte{9}})
	b = AppendState(b, 5, PairReady)
	return AppendDenied(b, id, DeniedQuota)
}

func encodePairAgain(typ FrameType, body []byte) []byte {
	switch typ {
	case FrameReserve:
		return AppendNode(nil, typ, DecodeNode(body))
	case FrameFailed, FrameGiveUp:
		return AppendPairID(nil, typ, DecodePairID(body))
	case FramePair:
		if len(body) == pairFrameSize {
			return AppendGrant(nil, DecodeGrant(body))
		}
	case FrameState:
		if len(body) == stateSize {
			return AppendState(nil, PairID(DecodePairID(body)), PairState(body[8]))
		}
	case FrameDenied:
		if len(body) == 9 {
			return AppendDenied(nil, identity.ID(body[:8]), Denial(body[8]))
		}
	}
	return nil
}

func TestBindProvesItsKeyAndNothingElseDoes(t *testing.T) {
	key := [PairKeySize]byte{1}
	sent := BindMessage{Kind: TypeBind, Pair: 7, Counter: 3, Nonce: [NonceSize]byte{4}}
	b := AppendBind(nil, sent, &key)
	got, rest, err := ParseBind(append(bytes.Clone(b), b...)) // as the kernel may join two
	if err != nil || got != sent || !bytes.Equal(rest, b) {
		t.Fatalf("%+v, %d bytes left, %v", got, len(rest), err)
	}
	if err := ProveBind(b, &key); err != nil {
		t.Error(err)
	}
	if err := ProveBind(b, &[PairKeySize]byte{2}); !errors.Is(err, errBindMAC) {
		t.Errorf("with another key: %v", err)
	}
	for i := range b {
		c := bytes.Clone(b)
		c[i] ^= 1
		if _, _, err := ParseBind(c); err == nil && ProveBind(c, &key) == nil {
			t.Errorf("byte %d may be changed", i)
		}
	}
}

func TestChallengeIsNoLongerThanItsBind(t *testing.T) {
	key := [PairKeySize]byte{}
	if a, b := AppendBind(nil, BindMessage{Kind: TypeBind}, &key), AppendBind(nil, BindMessage{Kind: TypeChallenge},
		&key); len(a) != bindSize || len(b) > len(a) {
		t.Errorf("bind %d bytes, challenge %d", len(a), len(b))
	}
}

// FuzzBind parses arbitrary datagrams; what parses must encode to the same bytes but for the MAC.
func FuzzBind(f *testing.F) {
	key := [PairKeySize]byte{1}
	f.Add(AppendBind(nil, BindMessage{Kind: TypeBind, Pair: 1, Counter: 2}, &key))
	f.Add(AppendBind(nil, BindMessage{Kind: TypeChallenge, Pair: 1, Counter: 2, Nonce: [NonceSize]byte{3}}, &key))
	f.Fuzz(func(t *testing.T, b []byte) {
		for len(b) > 0 {
			m, rest, err := ParseBind(b)
			if err != nil {
				return
			}
			if !IsBind(b) {
				t.Fatal("parses, and IsBind says no")
			}
			again := AppendBind(nil, m, &key)
			if !bytes.Equal(again[:bindSigned], b[:bindSigned]) {
				t.Fatalf("%x encodes to %x", b[:bindSize], again)
			}
			_ = ProveBind(b, &key)
			b = rest
		}
	})
}
