package testenv_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"github.com/skeinmesh/skein/internal/testenv"
)

// failures is what .ci/failures makes of a tier's output.
func failures(t *testing.T, output string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "output")
	if err := os.WriteFile(file, []byte(output), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("../../.ci/failures", file).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

func TestFailures(t *testing.T) {
	for _, one := range []struct{ name, output, want string }{
		{"subtests", `
2026/01/02 03:04:05 ERROR a log line of some test
--- FAIL: TestBad (0.00s)
    a_test.go:4: of its own
    --- FAIL: TestBad/sub_one (0.10s)
        --- FAIL: TestBad/sub_one/deep (0.00s)
            a_test.go:5: deep
                and its second line
        a_test.go:6: after deep
    a_test.go:7: of its own, later
FAIL
FAIL	x/a	0.012s
ok  	x/b	0.010s
?   	x/c	[no test files]
--- FAIL: ExampleSum (0.00s)
got:
3
want:
4
FAIL
FAIL	x/d	0.012s
FAIL
make: *** [Makefile:41: test-unit] Error 1
`, `  TestBad/sub_one/deep (x/a)
                a_test.go:5: deep
                    and its second line
  ExampleSum (x/d)
    got:
    3
    want:
    4
  TestBad (x/a)
        a_test.go:4: of its own
        a_test.go:7: of its own, later
  TestBad/sub_one (x/a)
            a_test.go:6: after deep
`},
		{"verbose", `=== RUN   TestGood
    a_test.go:3: fine
--- PASS: TestGood (0.00s)
=== RUN   TestOne
=== PAUSE TestOne
=== RUN   TestTwo
=== PAUSE TestTwo
=== CONT  TestOne
    a_test.go:4: of one
=== CONT  TestTwo
what a program printed
=== RUN   TestTwo/part
    a_test.go:9: of the part
=== NAME  TestOne
    a_test.go:5: again of one
--- FAIL: TestOne (0.00s)
--- FAIL: TestTwo (0.00s)
    --- FAIL: TestTwo/part (0.00s)
    --- PASS: TestTwo/other (0.00s)
FAIL
FAIL	x/a	0.012s
`, `  TestOne (x/a)
        a_test.go:4: of one
        a_test.go:5: again of one
  TestTwo/part (x/a)
        a_test.go:9: of the part
  TestTwo (x/a)
    what a program printed
`},
		{"panic", `--- FAIL: TestPanics (0.00s)
    c_test.go:4: before
panic: assignment to entry in nil map [recovered, repanicked]

goroutine 3 [running]:
x/c.TestPanics(0xc00001c6c8)
	/x/c/c_test.go:4 +0x85
FAIL	x/c	0.112s
--- FAIL: TestLater (0.00s)
    d_test.go:1: in the next package
FAIL
FAIL	x/d	0.112s
`, `  panic: assignment to entry in nil map [recovered, repanicked]
    
    goroutine 3 [running]:
    x/c.TestPanics(0xc00001c6c8)
    	/x/c/c_test.go:4 +0x85
  TestPanics (x/c)
        c_test.go:4: before
  TestLater (x/d)
        d_test.go:1: in the next package
`},
		{"time is over", `=== RUN   TestHangs
    d_test.go:3: waiting for it
=== RUN   TestHangs/sub
    d_test.go:4: has begun
panic: test timed out after 3s
	running tests:
		TestHangs (3s)
		TestHangs/sub (2s)

goroutine 5 [running]:
` + strings.Repeat("a frame\n", 100) + `FAIL	x/d	3.042s
FAIL
`, `  panic: test timed out after 3s
    	running tests:
    		TestHangs (3s)
    		TestHangs/sub (2s)
    
    goroutine 5 [running]:
` + strings.Repeat("    a frame\n", 15) + `    ... 85 more lines ...
  TestHangs/sub (x/d)
        d_test.go:4: has begun
  TestHangs (x/d)
        d_test.go:3: waiting for it
`},
		{"builds", `# x/b [x/b.test]
b/b_test.go:3:28: undefined: undefined
# x/a
# [x/a]
a/a_test.go:7:1: ExampleX refers to unknown identifier: X
FAIL	x/a [build failed]
FAIL	x/b [build failed]
ok  	x/c	0.1s
FAIL
`, `  # x/b [x/b.test]
    b/b_test.go:3:28: undefined: undefined
  # x/a
    a/a_test.go:7:1: ExampleX refers to unknown identifier: X
`},
		{"data race", `==================
WARNING: DATA RACE
Read at 0x00c000018268 by goroutine 8:
  x/f.TestRace.func1()
==================
--- FAIL: TestRace (0.00s)
    testing.go:1712: race detected during execution of test
FAIL
FAIL	x/f	0.026s
`, `  WARNING: DATA RACE
    Read at 0x00c000018268 by goroutine 8:
      x/f.TestRace.func1()
  TestRace (x/f)
        testing.go:1712: race detected during execution of test
`},
		{"a package without a failed test", "cannot begin: no such thing\nFAIL\tx/e\t0.028s\nFAIL\n",
			"  FAIL	x/e	0.028s\n    cannot begin: no such thing\n"},
		{"a guest's console", "=== RUN   TestIn\r\n    a_test.go:1: said\r\n--- FAIL: TestIn (0.01s)\r\nFAIL\r\nthe guest " +
			"ends\r\n",
			"  TestIn\n        a_test.go:1: said\n"},
		{"no go test", strings.Repeat("before\n", 30) + "main.go:1:2: this value is never used (SA4006)\nmake: *** [lint] " +
			"Error 1\n",
			"  the last lines\n" + strings.Repeat("    before\n", 18) +
				"    main.go:1:2: this value is never used (SA4006)\n    make: *** [lint] Error 1\n"},
		{"a failure after tests that passed", "=== RUN   TestA\n--- PASS: TestA (0.00s)\nPASS\nok  \tx/a\t0.1s\nlab: no\n",
			"  the last lines\n    === RUN   TestA\n    --- PASS: TestA (0.00s)\n    PASS\n    ok  \tx/a\t0.1s\n    lab: no\n"},
		{"nothing", "", "  it printed nothing\n"},
	} {
		t.Run(one.name, func(t *testing.T) {
			if got := failures(t, one.output); got != one.want {
				t.Errorf("got\n%s\nwant\n%s", got, one.want)
			}
		})
	}
}

// Of a long output the beginning and the end are kept, and where the last messages begin; of many tests the first, and
// names.
func TestFailuresAreBounded(t *testing.T) {
	var output strings.Builder
	output.WriteString("=== RUN   TestLong\n")
	for i := range 1000 {
		fmt.Fprintf(&output, "    a_test.go:1: step %d\n", i)
	}
	output.WriteString("    a_test.go:2: not within 30s: refused\n")
	for i := range 1000 {
		fmt.Fprintf(&output, "        report %d %s\n", i, strings.Repeat("ä", 1000))
	}
	output.WriteString("--- FAIL: TestLong (0.00s)\n")
	for i := range 20 {
		fmt.Fprintf(&output, "=== RUN   Test%d\n    a_test.go:3: no\n--- FAIL: Test%d (0.00s)\n", i, i)
	}
	output.WriteString("FAIL\nFAIL\tx/a\t1s\nFAIL\n")
	got := failures(t, output.String())
	for _, want := range []string{
		"  TestLong (x/a)\n        a_test.go:1: step 0\n", "step 7\n    ... 1981 more lines ...\n        a_test.go:1: step " +
			"998\n",
		"    a_test.go:2: not within 30s: refused\n    ...\n            report 988 ää", "report 999",
		"ää...\n  Test0 (x/a)\n",
		"  Test8 (x/a)\n        a_test.go:3: no\n  and: Test9 (x/a), Test10 (x/a), ",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("it lacks %q", want)
		}
	}
	if lines := strings.Split(got, "\n"); len(lines) > 50 {
		t.Errorf("%d lines", len(lines))
	}
	for line := range strings.Lines(got) {
		if len(line) > 210 || !utf8.ValidString(line) {
			t.Errorf("too long, or no text: %q", line)
		}
	}
	if t.Failed() {
		t.Log(got)
	}
}

// tiers is a project whose tiers are soon done: one has a failed test, one fails and leaves a process behind that keeps
// its output open, one beside another fails.
const tiers = `build:
	@echo builds
test-unit:
	@echo '--- FAIL: TestBad (0.00s)'; echo '    a_test.go:4: why'; echo 'FAIL	x/a	0.1s'; exit 3
test-race test-lab test-kube-tools test-containers test-systemd:
	@echo $@ passes
test-lint:
	@echo 'not gofmt-ed:' >&2; echo x.go; exit 1
test-kube:
	@sleep 30 & echo $$! >left; echo cannot begin; exit 1
test-kernel:
	@echo the end of the kernel tier
`

// TestEndOfTheTiers: the last lines of .ci/test tell which tiers failed, and below each of these why.
func TestEndOfTheTiers(t *testing.T) {
	path, err := filepath.Abs("../../.cache/path")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		testenv.Missing(t, "needs .cache/path, which .ci/setup makes: "+err.Error())
	}
	dir := t.TempDir()
	for _, name := range []string{".ci", ".cache"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(path, filepath.Join(dir, ".cache/path")); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, script := range []string{".ci/test", ".ci/failures"} {
		b, err := os.ReadFile(filepath.Join("../..", script))
		if err != nil {
			t.Fatal(err)
		}
		write(script, string(b), 0o700)
	}
	write(".ci/setup", "#!/bin/sh\n", 0o700) // this project needs nothing
	write("Makefile", tiers, 0o600)
	t.Cleanup(func() {
		var pid int
		if b, err := os.ReadFile(filepath.Join(dir, "left")); err != nil {
			t.Error(err)
		} else if _, err := fmt.Sscan(string(b), &pid); err != nil {
			t.Error(err)
		} else if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Errorf("kill what the tier left: %v", err)
		}
	})

	// Its output is a file: what the tier left behind keeps it open.
	output := filepath.Join(dir, "output")
	run := exec.Command("sh", "-c", "exec .ci/test >output 2>&1")
	run.Dir = dir
	// a make that runs this test would be told of in messages
	run.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "MAKE") || strings.HasPrefix(v, "MFLAGS=")
	})
	err = run.Run()
	b, readErr := os.ReadFile(output)
	if readErr != nil {
		t.Fatal(readErr)
	}
	if run.ProcessState.ExitCode() != 1 {
		t.Errorf("it ended with %v; want exit status 1", err)
	}
	said, summary, _ := strings.Cut(string(b), "=== tiers\n")
	for _, want := range []string{"test-lab passes\n", "not gofmt-ed:\nx.go\n", "cannot begin\n", "the end of the " +
		"kernel tier\n"} {
		if !strings.Contains(said, want) {
			t.Errorf("it does not show %q, which a tier said:\n%s", want, said)
		}
	}
	want := []string{
		"build          ok       *s", "unit           FAIL     *s", "  TestBad (x/a)", "        a_test.go:4: why",
		"race           ok       *s", "lint           FAIL     *s", "  the last lines", "    not gofmt-ed:", "    x.go",
		"    make: * Error 1", "kube-tools     ok       *s, beside lint", "lab            ok       *s",
		"containers     ok       *s", "kube           FAIL     *s", "  the last lines", "    cannot begin",
		"    make: * Error 1", "systemd        ok       *s",
		"kernel         ok       *s", "7 passed, 3 failed",
	}
	lines := strings.Split(strings.TrimSuffix(summary, "\n"), "\n")
	for i := range max(len(lines), len(want)) {
		if i >= len(lines) || i >= len(want) {
			t.Errorf("%d lines; want %d", len(lines), len(want))
			break
		}
		begin, end, _ := strings.Cut(want[i], "*")
		if !strings.HasPrefix(lines[i], begin) || !strings.HasSuffix(lines[i], end) {
			t.Errorf("line %d is %q; want %q", i+1, lines[i], want[i])
		}
	}
	if t.Failed() {
		t.Log(string(b))
	}
}
