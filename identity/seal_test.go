package identity

import (
	"bytes"
	"errors"
	"testing"
)

// What is sealed for a key opens with that key alone, whole, and looks different each time.
func TestSeal(t *testing.T) {
	own, err := NewWireGuardKey()
	if err != nil {
		t.Fatal(err)
	}
	other, err := NewWireGuardKey()
	if err != nil {
		t.Fatal(err)
	}
	public, err := own.Public()
	if err != nil {
		t.Fatal(err)
	}
	secret := []byte("the carriers' key and the preshared one")
	sealed, err := Seal(public, secret)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Seal(public, secret); err != nil || bytes.Equal(again, sealed) || bytes.Contains(sealed,
		secret[:8]) {
		t.Errorf("sealed twice it is %x and %x: %v", sealed, again, err)
	}
	if have, err := own.Unseal(sealed); err != nil || !bytes.Equal(have, secret) {
		t.Errorf("it opens as %q: %v", have, err)
	}
	if _, err := other.Unseal(sealed); !errors.Is(err, ErrSealed) {
		t.Errorf("another key: %v", err)
	}
	for i := range sealed {
		bad := bytes.Clone(sealed)
		bad[i] ^= 1
		if _, err := own.Unseal(bad); !errors.Is(err, ErrSealed) {
			t.Fatalf("with byte %d changed: %v", i, err)
		}
	}
	if _, err := own.Unseal(sealed[:20]); !errors.Is(err, ErrSealed) {
		t.Errorf("a piece of it: %v", err)
	}
}
