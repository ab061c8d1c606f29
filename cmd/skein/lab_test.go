package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/cli"
)

// skein runs the command line and returns what it prints.
func skeinLab(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	root := newRoot()
	root.SetOut(&out)
	root.SetErr(&out)
	root.SetArgs(append([]string{"lab", "--dir", t.TempDir()}, args...))
	err := root.ExecuteContext(t.Context())
	return out.String(), err
}

func TestLabTable(t *testing.T) {
	st := lab.Status{Nodes: []lab.NodeStatus{
		{Name: "dc1", Site: "dc", NAT: "none", Address: "198.18.1.11", IPv4: "10.4.0.1", PID: 7, Phase: "running",
			Server: true, Leader: true, Index: 9, Paths: map[string]string{"home1": "direct", "cloud1": "relay"}},
		{Name: "home1", Site: "home", NAT: "port-restricted-cone", Address: "192.168.2.12", IPv4: "10.4.0.2", PID: 8,
			Phase: "running", Index: 9, Paths: map[string]string{"dc1": "direct", "cloud1": "none"}},
		{Name: "cloud1", Site: "cloud", NAT: "symmetric", Address: "192.168.3.13", PID: 9, Phase: "down",
			Paths: map[string]string{}},
	}, Cuts: []lab.Cut{{From: "dc1", To: "cloud1", Proto: "udp"}, {From: "cloud1", To: "dc1", Percent: 3, Above: 1300}},
		Zombies: []lab.NotForwarded{{Node: "home1", Drops: lab.DropsLarge}}}
	var b bytes.Buffer
	labTable(&b, st)
	want := `#  NODE          SITE   NAT                   ADDRESS       OVERLAY   PID  PHASE    INDEX
1  dc1 (leader)  dc     none                  198.18.1.11   10.4.0.1  7    running  9
2  home1         home   port-restricted-cone  192.168.2.12  10.4.0.2  8    running  9
3  cloud1        cloud  symmetric             192.168.3.13            9    down     0

PATHS, as the row's agent sees them: d direct, r relay, - none, ? not told
        1  2  3
   1    .  d  r  dc1
   2    d  .  -  home1
   3    ?  ?  .  cloud1
cut: udp from dc1 to cloud1
cut: 3 % of everything above 1300 bytes from cloud1 to dc1
zombie: home1 lives and drops of what it passes on: large
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	for _, line := range strings.Split(b.String(), "\n") {
		if len(line) > 100 {
			t.Errorf("a line has %d columns: %s", len(line), line)
		}
	}
}

func TestLabUsage(t *testing.T) {
	for _, args := range [][]string{{}, {"up"}, {"up", "a", "b"}, {"run"}, {"exec", "home1"},
		{"down", "a", "b"}, {"sideways"}} {
		_, err := skeinLab(t, args...)
		var u cli.UsageError
		if !errors.As(err, &u) {
			t.Errorf("skein lab %s: %v; want a mistake in usage", strings.Join(args, " "), err)
		}
	}
}

func TestLabRefusals(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("name: x\nsitez: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		args []string
		want string
	}{
		{[]string{"run", bad}, "bad.yaml:2: unknown key \"sitez\" (did you mean \"sites\"?)"},
		{[]string{"up", "nowhere.yaml"}, "nowhere.yaml"},
		{[]string{"status", "no-such-lab-here"}, "no lab named"},
		{[]string{"exec", "--lab", "no-such-lab-here", "home1", "--", "true"}, "no lab named"},
		{[]string{"down", "Not_A_Name"}, "is not a name of a lab"},
	}
	for _, c := range cases {
		if _, err := skeinLab(t, c.args...); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("skein lab %s: %v; want %s", strings.Join(c.args, " "), err, c.want)
		}
	}
	if _, err := skeinLab(t, "down", "no-such-lab-here"); err != nil {
		t.Errorf("down with nothing there: %v", err)
	}
}
