package cni

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestAnnotations(t *testing.T) {
	for _, c := range []struct {
		name, runtime, args string
		want                map[string]string
	}{
		{"none", `{}`, `{}`, nil},
		{"others only", `{"io.kubernetes.cri.pod-annotations":{"prometheus.io/port":"80"}}`, `{}`, nil},
		{"both prefixes",
			`{"io.kubernetes.cri.pod-annotations":{"skein.dev/egress.internet":"nat, other","egress.coil.cybozu.com/dc":"nat","skein.dev/pool":"p"}}`, `{}`,
			map[string]string{"skein.dev/egress.internet": "nat, other", "egress.coil.cybozu.com/dc": "nat"}},
		{"args", `{}`, `{"cni":{"annotations":{"skein.dev/egress.a":"x","b":"c"}}}`,
			map[string]string{"skein.dev/egress.a": "x"}},
		{"the capability counts more", `{"io.kubernetes.cri.pod-annotations":{"skein.dev/egress.a":"y"}}`,
			`{"cni":{"annotations":{"skein.dev/egress.a":"x"}}}`, map[string]string{"skein.dev/egress.a": "y"}},
	} {
		conf, e := parseConfig([]byte(`{"cniVersion":"1.0.0","name":"skein","type":"skein-cni","runtimeConfig":` + c.runtime +
			`,"args":` + c.args + `}`))
		if e != nil {
			t.Errorf("%s: %v", c.name, e)
			continue
		}
		if got := conf.annotations(); !maps.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// What is too much stays visible as too much, and is bounded.
func TestAnnotationsAreBounded(t *testing.T) {
	many := map[string]string{}
	for i := range 1000 {
		many[fmt.Sprintf("%s%04d", EgressAnnotation, i)] = strings.Repeat("é", MaxEgressValue)
	}
	many[EgressAnnotation+strings.Repeat("x", MaxEgressValue)] = "nat"
	got := EgressAnnotations(many)
	if len(got) != MaxEgressAnnotations+1 {
		t.Errorf("%d are passed on", len(got))
	}
	for k, v := range got {
		if len(k) > MaxEgressValue || len(v) <= MaxEgressValue || len(v) > MaxEgressValue+16 || !utf8.ValidString(v) {
			t.Errorf("a key of %d and a value of %d bytes", len(k), len(v))
		}
	}
}
