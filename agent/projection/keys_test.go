package projection

import (
	"testing"

	"github.com/skeinmesh/skein/identity"
)

// A remembered key is the derived one, also after the seed has changed.
func TestKeys(t *testing.T) {
	self, peer := identity.ID{1}, identity.ID{2}
	var k Keys
	for range 2 {
		for _, seed := range []string{"one", "another", "one"} {
			want, err := identity.PresharedKey([]byte(seed), self, peer)
			if err != nil {
				t.Fatal(err)
			}
			for _, keys := range []*Keys{&k, nil} {
				if got, err := keys.of([]byte(seed), self, peer); err != nil || got != want {
					t.Errorf("seed %q: %x, %v; want %x", seed, got, err, want)
				}
			}
		}
	}
}
