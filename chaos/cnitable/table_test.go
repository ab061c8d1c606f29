package cnitable

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/internal/marks"
	"github.com/skeinmesh/skein/internal/testenv"
)

// Every verb has its line without a fault, no line stands twice, and each expects something in each version.
func TestCases(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range cases() {
		name := c.Verb + " " + c.Fault
		if seen[name] {
			t.Errorf("%s stands twice", name)
		}
		seen[name] = true
		if c.run == nil || c.want == nil || c.Fault == "" {
			t.Errorf("%s is not whole", name)
		}
		for _, v := range cni.Versions() {
			if code := c.want(v); code == unknownCode || v == "1.1.0" && code == 1 && !strings.Contains(c.Fault, "cniVersion") {
				t.Errorf("%s expects %d in %s", name, code, v)
			}
		}
	}
	for _, verb := range []string{"ADD", "DEL", "CHECK", "STATUS", "VERSION"} {
		if !seen[verb+" "+none] {
			t.Errorf("%s is not tried without a fault", verb)
		}
	}
}

func TestReportGoesBetweenTheMarks(t *testing.T) {
	r := &Report{At: time.Date(2026, 11, 22, 0, 0, 0, 0, time.UTC), CPUs: 2, Seconds: 100,
		Versions: []string{"1.0.0", "1.1.0"}, Rows: []Row{
			{Verb: "ADD", Fault: none, Cells: map[string]Cell{"1.0.0": {Tool: true}, "1.1.0": {}}},
			{Verb: "ADD", Fault: "no agent", Cells: map[string]Cell{"1.0.0": {Code: 11, Want: 11},
				"1.1.0": {Code: 4, Want: 11, Why: "wrong"}}, Says: "container cnitool-0a1b of /run/netns/skcni12-n.p3",
				Details: "a | b"},
		}}
	path := filepath.Join(t.TempDir(), "a.md")
	if err := os.WriteFile(path, []byte("before\n"+Begin+"\nold\n"+marks.End+"\nafter\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.Write(path); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got := string(b)
	for _, want := range []string{"before\n" + Begin + "\nTried on 2026-11-22: 3 of 4 as expected, 1 of them by cnitool " +
		"too", "| ADD | none | ok *c* | ok |", "| ADD | no agent | 11 | **4** | container ID of /run/netns/POD; a \\| b |",
		"Not as expected: ADD, no agent, 1.1.0: wrong", marks.End + "\nafter\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("lacks %q:\n%s", want, got)
		}
	}
	if strings.Contains(got, "old") || r.OK() {
		t.Error("the old table is still there, or a wrong cell counts as right")
	}
	if err := os.WriteFile(path, []byte("no marks"), 0o600); err != nil || r.Write(path) == nil {
		t.Errorf("a document without marks was accepted (%v)", err)
	}
}

// The document holds the whole table as it was tried, and what it says is what is expected.
func TestDocumentHoldsTheTable(t *testing.T) {
	b, err := os.ReadFile("../../docs/cni.md")
	if err != nil {
		t.Fatal(err)
	}
	text, ok := marks.Text(string(b), Begin)
	if !ok {
		t.Fatal("the marks are missing")
	}
	rows := map[string][]string{}
	for _, line := range strings.Split(text, "\n") {
		if cells := strings.Split(strings.Trim(line, "| "), " | "); len(cells) > 5 {
			rows[cells[0]+" "+cells[1]] = cells[2:]
		}
	}
	for _, c := range cases() {
		cells := rows[c.Verb+" "+c.Fault]
		for i, v := range cni.Versions() {
			want := word(c.want(v))
			if c.tool == only && want != "ok" {
				want = "failed"
			}
			if len(cells) <= i || strings.TrimSuffix(cells[i], " *c*") != want {
				t.Errorf("%s, %s, %s: the document has %q, expected is %s; `skein-dev cni --write docs/cni.md` tries anew", c.Verb,
					c.Fault, v, cells, want)
			}
		}
	}
}

// TestQuickTable is the table with faults in the newest version only.
func TestQuickTable(t *testing.T) {
	if testing.Short() {
		t.Skip("real agents: run without -short")
	}
	testenv.NeedRoot(t)
	tools, err := filepath.Abs("../../bin/tools")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append(slices.Clone(chained), "cnitool") {
		if _, err := tool(tools, name); err != nil {
			testenv.Missing(t, err.Error())
		}
	}
	binary := filepath.Join(t.TempDir(), "skein")
	cmd := exec.Command("go", "build", "-o", binary, "../../cmd/skein")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build skein: %v\n%s", err, out)
	}
	dir, err := os.MkdirTemp("", "sk") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	r, err := Run(t.Context(), Options{Quick: true, Dir: dir, Binary: binary, Tools: tools,
		Artifacts: os.Getenv("SKEIN_ARTIFACTS")})
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	r.Text(&text)
	t.Log("\n" + text.String())
	if !r.OK() {
		t.Error("not everything came out as expected")
	}
}
