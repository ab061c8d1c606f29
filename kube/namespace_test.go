package kube

import "testing"

// The pool of a Namespace's pods by its annotations: Coil's name counts where skein's own is absent.
func TestPoolOfANamespace(t *testing.T) {
	for _, c := range []struct {
		annotations map[string]string
		want        namespace
	}{
		{nil, ""},
		{map[string]string{"skein.dev/pool": " special "}, "special"},
		{map[string]string{"coil.cybozu.com/pool": "lan"}, "lan"},
		{map[string]string{"coil.cybozu.com/pool": "lan", "skein.dev/pool": "special"}, "special"},
		{map[string]string{"coil.cybozu.com/pool": "lan", "skein.dev/pool": ""}, ""},
		{map[string]string{"example.com/pool": "lan"}, ""},
	} {
		if have := slimNamespace(meta("", "web", c.annotations)); have != c.want {
			t.Errorf("%v: pool %q, want %q", c.annotations, have, c.want)
		}
	}
}
