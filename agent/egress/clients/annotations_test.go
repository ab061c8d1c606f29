package clients

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/egress"
	"github.com/skeinmesh/skein/cni"
)

func TestParseAnnotations(t *testing.T) {
	const ours, coils = cni.EgressAnnotation, cni.EgressAnnotationCoil
	for _, c := range []struct {
		name string
		in   map[string]string
		want string // refs in order
		err  string // part of the error; empty: none
	}{
		{"none", nil, "[]", ""},
		{"others", map[string]string{"a": "b", "skein.dev/pool": "p"}, "[]", ""},
		{"one", map[string]string{ours + "internet": "nat"}, "[internet/nat]", ""},
		{"order", map[string]string{ours + "internet": " z , a,", coils + "dc": "nat"}, "[dc/nat internet/z internet/a]", ""},
		{"the names as users write them", map[string]string{"skein.dev/egress.internet": "nat",
			"egress.coil.cybozu.com/other-net": "egress"}, "[internet/nat other-net/egress]", ""},
		{"both prefixes", map[string]string{coils + "dc": "b,a", ours + "dc": "c,b"}, "[dc/c dc/b dc/a]", ""},
		{"twice", map[string]string{ours + "a": "x,x"}, "[a/x]", ""},
		{"empty value", map[string]string{ours + "a": " , "}, "[]", ""},
		{"bad name", map[string]string{ours + "a": "x,Y!,z"}, "[a/x a/z]",
			`annotation skein.dev/egress.a: "Y!" is not a name of an egress`},
		{"bad namespace", map[string]string{ours + "A/b": "x", ours + "b": "y"}, "[b/y]", `skein.dev/egress.A/b`},
		{"no namespace", map[string]string{ours: "x"}, "[]", "is not a name"},
		{"long", map[string]string{ours + "a": strings.Repeat("x,", 3000), ours + "b": "y"}, "[b/y]",
			"longer than 4096 bytes"},
	} {
		got, err := ParseAnnotations(c.in)
		if fmt.Sprint(got) != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, %v; want %s, %q", c.name, got, err, c.want, c.err)
		}
	}
	many := map[string]string{}
	for i := range 100 {
		many[fmt.Sprintf("%sns%03d", ours, i)] = "a,b"
	}
	if got, err := ParseAnnotations(many); len(got) != MaxEgresses || err == nil {
		t.Errorf("%d egresses of too many, %v", len(got), err)
	}
}

func FuzzParseAnnotations(f *testing.F) {
	f.Add("skein.dev/egress.a", "x,y", "egress.coil.cybozu.com/b", "z")
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2 string) {
		got, _ := ParseAnnotations(map[string]string{k1: v1, k2: v2})
		for i, r := range got {
			if again, err := egress.ParseRef(r.String()); err != nil || again != r || slices.Contains(got[:i], r) {
				t.Errorf("%v in %v: %v", r, got, err)
			}
		}
		if len(got) > MaxEgresses {
			t.Errorf("%d egresses", len(got))
		}
	})
}
