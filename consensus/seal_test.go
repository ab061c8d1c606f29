package consensus

import (
	"bytes"
	"testing"
)

func TestSealShowsEveryChange(t *testing.T) {
	good := seal([]byte("payload"))
	if b, err := unseal(good); err != nil || string(b) != "payload" {
		t.Fatalf("have %q, %v", b, err)
	}
	for i := range good {
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			if b, err := unseal(bad); err == nil {
				t.Errorf("bit %d of byte %d flipped: reads as %q", bit, i, b)
			}
		}
	}
	for n := range good {
		if _, err := unseal(good[:n]); err == nil {
			t.Errorf("cut to %d bytes it still reads", n)
		}
	}
}
