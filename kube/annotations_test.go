package kube

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/part"
)

func TestWishesOfANode(t *testing.T) {
	ip := netip.MustParseAddr("10.0.0.7")
	for what, c := range map[string]struct {
		annotations, labels map[string]string
		want                part.Wishes
		bad                 string // names of what cannot be used, with blanks between
	}{
		"nothing": {},
		"region": {labels: map[string]string{"topology.kubernetes.io/region": "eu-1"},
			want: part.Wishes{Site: "eu-1"}},
		"location over region": {annotations: map[string]string{"skein.dev/location": "lab"},
			labels: map[string]string{"topology.kubernetes.io/region": "eu-1"}, want: part.Wishes{Site: "lab"}},
		"an empty location": {annotations: map[string]string{"skein.dev/location": ""},
			labels: map[string]string{"topology.kubernetes.io/region": "eu-1"}},
		"Kilo's names": {
			annotations: map[string]string{"kilo.squat.ai/location": "lab", "kilo.squat.ai/leader": "",
				"kilo.squat.ai/force-internal-ip": "10.0.0.7/24",
				"kilo.squat.ai/force-endpoint":    "example.com:1337", "kilo.squat.ai/persistent-keepalive": "10"},
			want: part.Wishes{Site: "lab", Leader: true, InternalIP: ip, ForceEndpoint: "example.com:1337",
				PersistentKeepalive: 10},
		},
		"own names before others'": {
			annotations: map[string]string{"kilo.squat.ai/location": "lab", "skein.dev/location": "attic",
				"wirekube.io/endpoint": "192.0.2.1:1", "skein.dev/force-endpoint": "192.0.2.2:2"},
			want: part.Wishes{Site: "attic", ForceEndpoint: "192.0.2.2:2"},
		},
		"none of them": {annotations: map[string]string{"kilo.squat.ai/force-internal-ip": "-",
			"skein.dev/force-endpoint": "", "kilo.squat.ai/force-endpoint": "192.0.2.1:1",
			"kilo.squat.ai/persistent-keepalive": ""}},
		"WireKube's endpoint": {annotations: map[string]string{"wirekube.io/endpoint": "192.0.2.1:1"},
			want: part.Wishes{ForceEndpoint: "192.0.2.1:1"}},
		"no leader": {annotations: map[string]string{"skein.dev/leader": "false",
			"kilo.squat.ai/leader": "true"}},
		"birthday": {annotations: map[string]string{"skein.dev/birthday-attack": "enabled"},
			want: part.Wishes{BirthdayAttack: "enabled"}},
		"IPv6": {annotations: map[string]string{"skein.dev/force-endpoint": "[2001:db8::1]:51820"},
			want: part.Wishes{ForceEndpoint: "[2001:db8::1]:51820"}},
		"rubbish beside the use": {annotations: map[string]string{"skein.dev/force-endpoint": "nowhere",
			"skein.dev/location": "lab"}, want: part.Wishes{Site: "lab"}, bad: "skein.dev/force-endpoint"},
		"rubbish before another's": {annotations: map[string]string{"skein.dev/force-endpoint": "nowhere",
			"kilo.squat.ai/force-endpoint": "192.0.2.1:1"},
			want: part.Wishes{ForceEndpoint: "192.0.2.1:1"}, bad: "skein.dev/force-endpoint"},
		"all rubbish": {
			annotations: map[string]string{"skein.dev/location": strings.Repeat("x", 65), "skein.dev/leader": "maybe",
				"skein.dev/force-internal-ip": "::1",
				"skein.dev/force-endpoint": "a " +
					"b:1", "skein.dev/persistent-keepalive": "3601", "skein.dev/birthday-attack": "yes"},
			bad: "skein.dev/location skein.dev/leader skein.dev/force-internal-ip skein.dev/force-endpoint " +
				"skein.dev/persistent-keepalive skein.dev/birthday-attack",
		},
	} {
		have, bad := wishesOf(c.annotations, c.labels)
		var names []string
		for _, b := range bad {
			names = append(names, b.Name)
			if b.Problem == "" {
				t.Errorf("%s: nothing is said of %s", what, b.Name)
			}
		}
		if have != c.want || strings.Join(names, " ") != c.bad {
			t.Errorf("%s: %+v, bad %q", what, have, names)
		}
		for name := range c.annotations {
			if !relevantAnnotation(name) {
				t.Errorf("%s is not kept", name)
			}
		}
	}
	if relevantAnnotation("skein.dev/record") || relevantAnnotation("example.com/location") {
		t.Error("an annotation that wishes for nothing is kept")
	}
}
