package carrier

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// A carrier reads what was sealed for it, and nothing that was sealed for another, or belongs to another key than the
// log names.
func TestPlainSecretsAreForTheirCarrier(t *testing.T) {
	key := func() (identity.WireGuardKey, []byte) {
		k, err := identity.NewWireGuardKey()
		if err != nil {
			t.Fatal(err)
		}
		p, err := k.Public()
		if err != nil {
			t.Fatal(err)
		}
		return k, p[:]
	}
	own, public := key()
	_, strangers := key()
	secrets, carrierKey, err := NewSecrets()
	if err != nil {
		t.Fatal(err)
	}
	seal := func(to []byte) []byte {
		b, err := secrets.Seal(&skeinv1.Node{WireguardKey: to})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	id := identity.ID{1}
	read := func(node string, sealed, carrierKey []byte) (Secrets, error) {
		p := New(Config{Self: id, Key: func() identity.WireGuardKey { return own }})
		return p.unseal(carried{PlainPeer: &skeinv1.PlainPeer{Name: "phone", CarrierKey: carrierKey, CreatedIndex: 7,
			Carriers: []*skeinv1.PlainCarrier{{NodeId: node, Sealed: sealed}}}})
	}
	if have, err := read(id.String(), seal(public), carrierKey); err != nil || have != secrets {
		t.Errorf("its own: %v", err)
	}
	if _, err := read(id.String(), seal(strangers), carrierKey); !errors.Is(err, identity.ErrSealed) {
		t.Errorf("another's: %v", err)
	}
	if _, err := read(id.String(), seal(public), strangers); !errors.Is(err, errNotSealed) {
		t.Errorf("with another key in the log: %v", err)
	}
	if _, err := read("7ef4fee4c02da850", seal(public), carrierKey); !errors.Is(err, errNotSealed) {
		t.Errorf("a node that is not a carrier: %v", err)
	}
	if bytes.Contains(seal(public), secrets.Key[:]) {
		t.Error("the key is in the clear")
	}
}

func TestStaleSecrets(t *testing.T) {
	member, former := identity.ID{1}, identity.ID{2}
	of := func(name string, carriers ...identity.ID) carried {
		c := carried{PlainPeer: &skeinv1.PlainPeer{Name: name}, carriers: []identity.ID{member}}
		for _, id := range carriers {
			c.Carriers = append(c.Carriers, &skeinv1.PlainCarrier{NodeId: id.String()})
		}
		return c
	}
	fresh, stale := of("fresh", member), of("phone", former, member)
	if text := staleSecrets([]carried{fresh}); text != "" {
		t.Errorf("all are members: %q", text)
	}
	want := "know the secrets of phone (" + former.String() + ")"
	if text := staleSecrets([]carried{fresh, stale}); !strings.HasSuffix(text, want) {
		t.Errorf("one is none: %q", text)
	}
	if text := staleSecrets([]carried{stale, stale, stale, stale, stale}); !strings.HasSuffix(text, " and 2 more") ||
		strings.Count(text, "phone") != 3 {
		t.Errorf("many: %q", text)
	}
}
