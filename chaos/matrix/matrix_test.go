package matrix

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/marks"
	"github.com/skeinmesh/skein/internal/testenv"
)

// It does not matter who is asked.
func TestExpectedIsSymmetric(t *testing.T) {
	if len(expected) != len(kinds) {
		t.Fatalf("%d rows for %d kinds", len(expected), len(kinds))
	}
	for _, a := range Kinds() {
		for _, b := range Kinds() {
			if Expected(a, b) != Expected(b, a) {
				t.Errorf("%s × %s is %q, the other way round %q", a, b, Expected(a, b), Expected(b, a))
			}
		}
	}
}

// The table, which was written down from what the kinds allow, and the agent's strategy say the same of all pairs
// that meet over IPv4.
func TestExpectedAgreesWithTheStrategy(t *testing.T) {
	types := map[string]skeinv1.NatType{
		"none":                 skeinv1.NatType_NAT_TYPE_NONE,
		"one-to-one":           skeinv1.NatType_NAT_TYPE_FULL_CONE,
		"full-cone":            skeinv1.NatType_NAT_TYPE_FULL_CONE,
		"restricted-cone":      skeinv1.NatType_NAT_TYPE_RESTRICTED_CONE,
		"port-restricted-cone": skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE,
		"symmetric":            skeinv1.NatType_NAT_TYPE_SYMMETRIC,
		"symmetric-sequential": skeinv1.NatType_NAT_TYPE_SYMMETRIC,
		"double":               skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE,
		"portmap":              skeinv1.NatType_NAT_TYPE_FULL_CONE,
		"udp-blocked":          skeinv1.NatType_NAT_TYPE_BLOCKED,
	}
	for a, ta := range types {
		for b, tb := range types {
			rule, _, ok := path.Pair(ta, tb)
			if want := Expected(a, b); ok != (want == Direct) {
				t.Errorf("%s × %s: rule %s says that probing works: %v; the table says %s", a, b, rule, ok, want)
			}
		}
	}
}

// Every pair is in exactly one lab, and every lab's file can be built.
func TestGridsHoldEachPairOnce(t *testing.T) {
	for _, chosen := range [][]Kind{kinds, kinds[:1], kinds[:3], kinds[:5]} {
		seen := map[[2]string]int{}
		for _, m := range append(grids("x", chosen), together("x-t")) {
			spec, err := lab.Parse("m.yaml", []byte(m.file))
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range m.pairs {
				seen[p.Kinds]++
				for _, n := range []string{p.From, p.To} {
					if _, ok := spec.Node(n); !ok {
						t.Errorf("%s: no node %s", p, n)
					}
				}
			}
		}
		for i, a := range chosen {
			for _, b := range chosen[i:] {
				if n := seen[[2]string{a.Name, b.Name}]; n != 1 {
					t.Errorf("of %d kinds: %s × %s is measured %d times", len(chosen), a.Name, b.Name, n)
				}
			}
		}
	}
	if _, err := choose([]string{"none", "cone"}); err == nil {
		t.Error("an unknown kind was accepted")
	}
}

func TestReportGoesBetweenTheMarks(t *testing.T) {
	r := &Report{At: time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC), CPUs: 2, Seconds: 100,
		Kinds: []string{"none", "symmetric"}, Outcomes: []Outcome{
			{Pair: "none × none", Kinds: [2]string{"none", "none"}, Want: "direct", Got: "direct", OK: true, IPv6: true,
				First: 20 * time.Millisecond, Direct: 1234 * time.Millisecond},
			{Pair: "none × symmetric", Kinds: [2]string{"none", "symmetric"}, Want: "direct, by birthday probing", Got: "direct",
				OK: true, First: 30 * time.Millisecond, Direct: 2 * time.Second},
			{Pair: "symmetric × symmetric", Kinds: [2]string{"symmetric", "symmetric"}, Want: "relay", Got: "none", First: -1,
				Direct: -1, Why: "the relay is away"},
			{Pair: "x", Kinds: [2]string{Together, "a LAN"}, Want: "direct", Got: "direct", OK: true, First: 0,
				Direct: time.Millisecond},
			{Pair: "y", Kinds: [2]string{Together, "two homes"}, Want: "relay", Got: "relay", OK: true, UDP: true,
				First: 0, Direct: -1},
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
	for _, want := range []string{"before\n" + Begin + "\nMeasured on 2026-11-21: 4 of 5 pairs as expected",
		"| **none** | direct 1.2s *6*<br>20ms | direct 2s *b*<br>30ms |",
		"| **symmetric** |  | **none**<br>– |", "| a LAN | direct 1ms<br>0s |", "| two homes | relay *u*<br>0s |",
		"Not as expected: symmetric × symmetric is none, not relay. the relay is away", marks.End + "\nafter\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("lacks %q:\n%s", want, got)
		}
	}
	if strings.Contains(got, "old") {
		t.Error("the old matrix is still there")
	}
	if err := os.WriteFile(path, []byte("no marks"), 0o600); err != nil || r.Write(path) == nil {
		t.Errorf("a document without marks was accepted (%v)", err)
	}
	if r.OK() {
		t.Error("a wrong pair counts as right")
	}
}

// The document holds the whole matrix as it was measured, and what it says is what is expected.
func TestDocumentHoldsTheMatrix(t *testing.T) {
	b, err := os.ReadFile("../../docs/nat-traversal.md")
	if err != nil {
		t.Fatal(err)
	}
	text, ok := marks.Text(string(b), Begin)
	if !ok {
		t.Fatal("the marks are missing")
	}
	rows := map[string][]string{}
	for _, line := range strings.Split(text, "\n") {
		if cells := strings.Split(line, " | "); len(cells) > 1 {
			rows[strings.Trim(cells[0], "| *")] = cells[1:]
		}
	}
	for i, a := range Kinds() {
		for j, b := range Kinds()[i:] {
			if cells := rows[a]; len(cells) != len(kinds) || !strings.HasPrefix(cells[i+j], Expected(a, b).Path()) {
				t.Errorf("%s × %s: the document has %q, expected is %s; `skein-dev matrix --write docs/nat-traversal.md` "+
					"measures anew", a, b, cells, Expected(a, b))
			}
		}
	}
	for _, p := range together("x").pairs {
		if cells := rows[p.Kinds[1]]; len(cells) != 1 || !strings.HasPrefix(cells[0], p.Want.Path()) {
			t.Errorf("%s: the document has %q, expected is %s", p, cells, p.Want)
		}
	}
}

// TestQuickMatrix is the pair matrix for a few kinds, with real agents.
func TestQuickMatrix(t *testing.T) {
	if testing.Short() {
		t.Skip("real agents: run without -short")
	}
	testenv.NeedRoot(t)
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
	r, err := Run(t.Context(), Options{Kinds: Quick, Dir: dir, Binary: binary, Artifacts: os.Getenv("SKEIN_ARTIFACTS")})
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	r.Text(&text)
	t.Log("\n" + text.String())
	if !r.OK() {
		t.Error("not every pair came out as expected")
	}
}
