package bench

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
)

func TestQuantiles(t *testing.T) {
	var s sample
	for i := range 100 {
		s.add(time.Duration(i+1)*time.Millisecond, "run")
	}
	for percent, want := range map[int]time.Duration{50: 50 * time.Millisecond, 95: 95 * time.Millisecond,
		99: 99 * time.Millisecond, 100: 100 * time.Millisecond} {
		if got := s.quantile(percent); got != want {
			t.Errorf("p%d is %s, want %s", percent, got, want)
		}
	}
	if f := s.figure("x", 99, 99*time.Millisecond, ""); f.Verdict != Reached || len(f.Detail) != 1 {
		t.Errorf("%+v", f)
	}
	if f := s.figure("x", 100, 99*time.Millisecond, ""); f.Verdict != Missed {
		t.Errorf("%+v", f)
	}
	if f := (&sample{}).figure("x", 99, time.Second, ""); f.Verdict != Failed {
		t.Errorf("without a run: %+v", f)
	}
}

func TestParseBench(t *testing.T) {
	m, err := parseBench([]byte("goos: linux\nBenchmarkCommit/leader-2   20000  100 ns/op  5123 " +
		"commits/s\nBenchmarkCommit/follower-2 20000 100 ns/op 4001.5 commits/s\nPASS\n"))
	if err != nil || m["leader/commits/s"] != 5123 || m["follower/commits/s"] != 4001.5 {
		t.Errorf("%v %v", m, err)
	}
	m, err = parseBench([]byte("BenchmarkProject1000-2 100 4000000 ns/op\n"))
	if err != nil || m["ns/op"] != 4e6 {
		t.Errorf("%v %v", m, err)
	}
	for _, bad := range []string{"", "PASS\n", "BenchmarkX-2 10 fast ns/op\n"} {
		if m, err := parseBench([]byte(bad)); err == nil {
			t.Errorf("%q gives %v", bad, m)
		}
	}
}

func TestParseCounts(t *testing.T) {
	m, err := testMetrics([]byte("    life_test.go:179: endpoint: map[nft:0 route:0 wireguard:1] in 3ms\n    " +
		"life_test.go:198: nothing: map[nft:0 route:0 wireguard:0] in 3ms\n--- PASS: TestX (0.1s)\n"))
	if err != nil || m["endpoint"] != 1 || m["nothing"] != 0 {
		t.Errorf("%v %v", m, err)
	}
	if _, err := testMetrics([]byte("--- SKIP: TestX\n")); err == nil {
		t.Error("a skipped test counts as run")
	}
}

// What a userspace device cannot show must not count as reached.
func TestRestartInUserspaceIsInPart(t *testing.T) {
	m, err := testMetrics([]byte("msg=\"kernel has no WireGuard, running it in this process\"\n--- PASS: TestX (0.1s)\n"))
	if err != nil || m["userspace"] != 1 {
		t.Fatalf("%v %v", m, err)
	}
	if (&Report{Figures: []Figure{{Verdict: Reached}, {Verdict: Partly}}}).Reached() {
		t.Error("a figure measured in part counts as reached")
	}
}

func TestReport(t *testing.T) {
	r := &Report{CPUs: 2, Figures: []Figure{
		{Name: "a", Target: "≤ 1 s", Got: "2 s", How: "a|b", Verdict: Missed, Detail: []string{"x: 2 s"}},
		{Name: "b", Target: "≤ 1 s", Got: "0.5 s", Verdict: Reached},
		{Name: "  beside b", Got: "0.6 s"},
	}}
	var text, doc strings.Builder
	r.Text(&text)
	r.Markdown(&doc)
	if r.Reached() || !strings.Contains(text.String(), "1 of 2 targets reached") ||
		!strings.Contains(text.String(), "x: 2 s") {
		t.Errorf("%s", text.String())
	}
	if !strings.Contains(doc.String(), "| 1 | a | ≤ 1 s | 2 s | MISSED | 0.0 |\n| 2 | b |") ||
		!strings.Contains(doc.String(), "\n1. a|b. Missed by x: 2 s\n") {
		t.Errorf("%s", doc.String())
	}
}

// TestMemoryTarget: the limit follows from the driver that the agent has, and a driver without a limit is not a
// success.
func TestMemoryTarget(t *testing.T) {
	for _, c := range []struct {
		driver string
		steady int
		target string
		want   Verdict
	}{
		{"kernel", 64 << 20, "≤ 64 MiB", Reached},
		{"kernel", 64<<20 + 1, "≤ 64 MiB", Missed},
		{"userspace", 80 << 20, "≤ 80 MiB", Reached},
		{"userspace", 80<<20 + 1, "≤ 80 MiB", Missed},
		{"", 1, "≤ 64 MiB with kernel, ≤ 80 MiB with userspace WireGuard", Failed},
	} {
		f := memoryFigures("memory", residence{driver: c.driver, steady: c.steady}, residence{})[0]
		if f.Target != c.target || f.Verdict != c.want {
			t.Errorf("%q WireGuard with %d bytes: target %q, verdict %q, want %q, %q", c.driver, c.steady, f.Target, f.Verdict,
				c.target, c.want)
		}
	}
}

func TestLabsAreValid(t *testing.T) {
	for name, source := range map[string][]byte{"bench.yaml": meshLab, "fleet.yaml": fleetLab, "egress.yaml": egressLab,
		"sites.yaml": sitesLab, "site fleet": siteFleetLab()} {
		if _, err := lab.Parse(name, source); err != nil {
			t.Error(err)
		}
	}
}

// TestChangesByPods: what also happens without pods is not theirs, and what is said of it is both.
func TestChangesByPods(t *testing.T) {
	for _, c := range []struct {
		without, with changes
		want          Verdict
		got           string
	}{
		{changes{}, changes{}, Reached, "0 paths, 0 records more than without"},
		{changes{paths: 2, records: 3}, changes{paths: 2, records: 1}, Reached, "0 paths, 0 records more than without"},
		{changes{paths: 2, records: 3}, changes{paths: 3, records: 3}, Missed, "1 paths, 0 records more than without"},
		{
			changes{records: 3}, changes{records: 5, hostRecords: 2}, Missed,
			"100 pods: 0 paths and 5 records (0 and 2 of the hosts",
		},
	} {
		f := churnFigure("churn", "0", c.without, c.with, 100, churnFor)
		if f.Verdict != c.want || !strings.Contains(f.Got, c.got) {
			t.Errorf("%+v after %+v: %s, %q, want %s, %q", c.with, c.without, f.Verdict, f.Got, c.want, c.got)
		}
	}
}

// TestCountChanges: rates over an interval become counts again.
func TestCountChanges(t *testing.T) {
	got := countChanges(map[string]*skeinv1.UsageRates{
		"dc1": {IntervalNanos: int64(119 * time.Second), PathChangesPerSecond: 3.0 / 119,
			RecordsPublishedPerSecond: 1.0 / 119},
		"home3": {IntervalNanos: int64(7 * time.Second), RecordsPublishedPerSecond: 2.0 / 7},
	})
	want := changes{paths: 3, records: 3, hostRecords: 2, nodes: "dc1 3 paths, 1 records; home3 0 paths, 2 records"}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got.none() || !countChanges(map[string]*skeinv1.UsageRates{"dc1": {IntervalNanos: 1e9}}).none() {
		t.Error("no changes are taken for some, or some for none")
	}
}

// TestPairsThatCanBeDirect: a symmetric NAT meets those that filter by ports only by port prediction.
func TestPairsThatCanBeDirect(t *testing.T) {
	spec, err := lab.Parse("crowd", lab.Crowd("crowd40", 40))
	if err != nil {
		t.Fatal(err)
	}
	f := &field{lab: &lab.Lab{Spec: spec}, names: spec.NodeNames()}
	for p, want := range map[pair]bool{
		{"dc1", "cloud1"}: true, {"cloud1", "flat1"}: true, {"home1", "far1"}: true, {"cloud1", "cloud2"}: true,
		{"cloud1", "home1"}: false, {"home1", "cloud1"}: false, {"far1", "cloud1"}: false,
	} {
		if got := f.canBeDirect(p); got != want {
			t.Errorf("%s can be direct: %t, want %t", p, got, want)
		}
	}
}

// A report in a file takes the place of the one before it, and leaves the sections below to those who write them.
func TestReportKeepsSections(t *testing.T) {
	file := filepath.Join(t.TempDir(), "bench.md")
	for _, name := range []string{"first", "second"} {
		if err := (&Report{Figures: []Figure{{Name: name}}}).WriteFile(file); err != nil {
			t.Fatal(err)
		}
		if name == "first" {
			f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY, 0)
			if err == nil {
				_, err = f.WriteString("\n## Another's\n\nwords\n")
			}
			if err = errors.Join(err, f.Close()); err != nil {
				t.Fatal(err)
			}
		}
	}
	b, err := os.ReadFile(file)
	if text := string(b); err != nil || strings.Contains(text, "first") || !strings.Contains(text, "second") ||
		!strings.HasSuffix(text, "|\n\n\n## Another's\n\nwords\n") {
		t.Errorf("%v\n%s", err, text)
	}
}
