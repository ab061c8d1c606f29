package inet

import (
	"math/rand/v2"
	"testing"
)

// slow is the sum of RFC 1071, word by word.
func slow(b []byte) uint16 {
	s := uint32(0)
	for i, c := range b {
		s += uint32(c) << (8 * (1 - i%2))
		s = s&0xffff + s>>16
	}
	return uint16(s)
}

func TestSumEqualsTheSlowOne(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for n := range 300 {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(random.Uint32())
			if n%7 == 0 {
				b[i] = 0xff
			}
		}
		if got, want := Fold(Sum(b, 0)), slow(b); got != want {
			t.Fatalf("%d bytes: %#x, want %#x", n, got, want)
		}
	}
}

// TestChangedWords: a checksum that is adjusted is the one that would be computed.
func TestChangedWords(t *testing.T) {
	b := []byte{0x45, 0, 0, 20, 1, 2, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2}
	sum := Checksum(b)
	b[10], b[11] = byte(sum>>8), byte(sum)
	if Checksum(b) != 0 {
		t.Errorf("over itself it is %#x", Checksum(b))
	}
	b[1] = 3
	Adjust(b[10:], 0x4500, 0x4503)
	if Checksum(b) != 0 {
		t.Errorf("adjusted it is %#x", Checksum(b))
	}
}
