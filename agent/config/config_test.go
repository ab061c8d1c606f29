package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/config"
)

func load(t *testing.T, text string) (config.Config, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "skein.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return config.Load(file, true)
}

func TestLoad(t *testing.T) {
	c, err := load(t, "name: dc1\nsite: dc\nserver: true\nrelay: true\nports: {wireguard: 51999}\n")
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "dc1" || c.Relay != config.On || c.Server == nil || !*c.Server || c.Ports.WireGuard != 51999 || c.Ports.Relay != 7443 {
		t.Fatalf("have %+v", c)
	}
}

func TestLoadRefuses(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"unknown key", "name: a\nsit: b\n", `skein.yaml:2: unknown key "sit"; allowed here: dataplane, directRetry`},
		{"unknown nested key", "name: a\nports: {wg: 1}\n", `unknown key "ports.wg"; allowed here: control, metrics, relay, stun, udpRelay, wireguard`},
		{"wrong type", "name: a\nports: {relay: fast}\n", `skein.yaml:2: ports.relay: want a whole number`},
		{"bad name", "name: A_b\n", `name: "A_b" is no host label`},
		{"bad relay", "name: a\nrelay: maybe\n", `relay: "maybe" is not allowed; allowed: auto, true, false`},
		{"same port twice", "name: a\nports: {relay: 7946}\n", `port 7946/tcp is taken by ports.relay`},
		{"port 0", "name: a\nports: {stun: 0}\n", `ports.stun: 0 is not allowed`},
		{"bad endpoint", "name: a\nforceEndpoint: nowhere\n", `"nowhere": want host:port`},
		{"port mapping", "name: a\nnatTraversal: {portMapping: [pcp, ssdp]}\n", `natTraversal.portMapping: "ssdp" is not allowed; allowed: pcp, natpmp, upnp`},
		{"metadata", "name: a\nnatTraversal: {imds: maybe}\n", `natTraversal.imds: "maybe" is not allowed; allowed: auto, true, false`},
		{"host bits", "name: a\noverlay: {ipv4: 10.4.1.0/16}\n", `overlay.ipv4`},
		{"tiny overlay", "name: a\noverlay: {ipv4: 10.4.1.0/30}\n", `overlay.ipv4`},
		{"link name", "name: a\ndataplane: {link: a-name-that-is-too-long}\n", `dataplane.link`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := load(t, c.in)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("have %v, want %s", err, c.want)
			}
		})
	}
}

func TestPortMappingCanBeSwitchedOff(t *testing.T) {
	for in, want := range map[string]string{"name: a\n": "pcp natpmp upnp", "natTraversal: {portMapping: []}\n": "", "natTraversal: {portMapping: [upnp]}\n": "upnp"} {
		c, err := load(t, in)
		if got := strings.Join(c.NatTraversal.Protocols(), " "); err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", in, got, err, want)
		}
	}
}

func TestMissingFile(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none.yaml")
	if _, err := config.Load(missing, true); err == nil {
		t.Fatal("a file that was asked for and is not there must be an error")
	}
	if _, err := config.Load(missing, false); err != nil {
		t.Fatal(err)
	}
}

func FuzzLoad(f *testing.F) {
	f.Add("name: a\nports: {wireguard: 1}\n")
	f.Fuzz(func(t *testing.T, text string) { _, _ = load(t, text) })
}
