package strictyaml_test

import (
	"strings"
	"testing"

	"github.com/skeinmesh/skein/internal/strictyaml"
)

type doc struct {
	Name  string            `yaml:"name"`
	Ports ports             `yaml:"ports"`
	List  []ports           `yaml:"list"`
	Map   map[string]string `yaml:"map"`
	On    *bool             `yaml:"on"`
}

type ports struct {
	WireGuard uint16 `yaml:"wireguard"`
	Relay     int    `yaml:"relay"`
}

func TestUnmarshal(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"empty", "", ""},
		{"only a comment", "# nothing\n", ""},
		{"good", "name: a\nports: {wireguard: 1}\nlist: [{relay: 2}]\nmap: {a: b}\non: true\n", ""},
		{"unknown key", "name: a\nprots: {}\n", `f.yaml:2: unknown key "prots"; allowed here: list, map, name, on, ports`},
		{"unknown nested key", "ports:\n  wireguard: 1\n  wg: 2\n",
			`f.yaml:3: unknown key "ports.wg"; allowed here: relay, wireguard`},
		{"unknown key in a list", "list:\n  - relay: 1\n  - rely: 2\n", `f.yaml:3: unknown key "list[1].rely"`},
		{"wrong type", "ports: {wireguard: many}\n", `f.yaml:1: ports.wireguard: want a whole number, have "many"`},
		{"not a mapping", "ports: 7\n", `f.yaml:1: ports: want a mapping`},
		{"not a bool", "on: perhaps\n", `f.yaml:1: on: want true or false, have "perhaps"`},
		{"text wanted", "name: [a]\n", `f.yaml:1: name: want a text`},
		{"twice", "name: a\nname: b\n", `f.yaml:2: `},
		{"out of range", "ports: {wireguard: 70000}\n", `f.yaml:1: `},
		{"broken", "name: {a\n", `f.yaml:1: `},
		{"two documents", "name: a\n---\nname: b\n", `f.yaml:3: a second YAML document`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var d doc
			err := strictyaml.Unmarshal("f.yaml", []byte(c.in), &d)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.HasPrefix(err.Error(), c.want)) {
				t.Fatalf("have %v, want %s", err, c.want)
			}
		})
	}
}

func FuzzUnmarshal(f *testing.F) {
	f.Add([]byte("name: a\nports: {wireguard: 1}\n"))
	f.Add([]byte("? [a]\n: b\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var d doc
		_ = strictyaml.Unmarshal("f.yaml", b, &d)
	})
}
