package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/skeinmesh/skein/chaos/overlay"
)

// bug is a mistake that somebody could make.
type bug struct {
	name  string
	why   string // what goes wrong with it
	edits []edit
	found []check // the tests that must fail
	quick bool    // one of the few that every test run makes
}

// edit replaces a text, which the file has exactly once.
type edit struct{ File, Old, New string }

// check is a test of a package.
type check struct{ pkg, test string }

func (c check) String() string { return strings.TrimPrefix(c.pkg, "./") + " " + c.test }

// finding is what a check said of a bug.
type finding struct {
	check check
	found bool
	took  time.Duration // of the test alone
	says  string        // the first line of its complaint
	end   []byte        // of all that it said
}

type result struct {
	bug      bug
	findings []finding
	err      error
}

func (r result) ok() bool {
	return r.err == nil && !slices.ContainsFunc(r.findings, func(f finding) bool { return !f.found })
}

// Limits for one test. One that hangs with a bug has found it; one without a bug may be slow, on a machine that is
// busy.
const (
	testTimeout     = 90 * time.Second
	baselineTimeout = 10 * time.Minute
)

// mutator makes mutations of the sources below root.
type mutator struct {
	root string // of the module
	tmp  string
	jobs int
}

// patch gives the files with the bug in them, by their paths.
func (p *mutator) patch(b bug) (map[string][]byte, error) {
	files, err := overlay.Files(p.root, b.edits)
	if err != nil {
		return nil, fmt.Errorf("bug %q cannot be made: %w", b.name, err)
	}
	return files, nil
}

// try builds the tests with the mutation and runs them.
func (p *mutator) try(ctx context.Context, b bug) result {
	r := result{bug: b}
	dir, err := os.MkdirTemp(p.tmp, "bug-")
	var files map[string][]byte
	if err == nil {
		files, err = p.patch(b)
	}
	var list string
	if err == nil {
		list, err = overlay.Write(dir, files)
	}
	if err == nil {
		r.findings, err = p.runAll(ctx, dir, list, b.found, testTimeout)
	}
	r.err = err
	return r
}

// runAll builds each package once and runs its checks. list is go's list of edited files; empty: there are none.
func (p *mutator) runAll(
	ctx context.Context, dir, list string, checks []check, limit time.Duration,
) (out []finding, err error) {
	built := make(map[string]string)
	for _, c := range checks {
		if built[c.pkg] == "" {
			binary := filepath.Join(dir, strings.ReplaceAll(strings.TrimPrefix(c.pkg, "./"), "/", "-")+".test")
			if err := p.build(ctx, list, c.pkg, binary); err != nil {
				return nil, err
			}
			built[c.pkg] = binary
		}
		f, err := p.run(ctx, dir, built[c.pkg], c, limit)
		if err != nil {
			return nil, err
		}
		out = append(out, f)
	}
	return out, nil
}

func (p *mutator) build(ctx context.Context, list, pkg, binary string) error {
	// without what a debugger needs it links in half the time
	args := []string{"test", "-c", "-vet=off", "-ldflags=-s -w", "-o", binary}
	if list != "" {
		args = append(args, "-overlay", list)
	}
	cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
	cmd.Dir = p.root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the tests of %s: %w\n%s", pkg, err, out)
	}
	return nil
}

var complaint = regexp.MustCompile(`(?m)^\s+[\w.]+\.go:\d+: (.*)$|^(panic: .*)$|^(fatal error: .*)$`)

// run runs one test. A test that did not run at all is an error and no finding.
func (p *mutator) run(ctx context.Context, dir, binary string, c check, limit time.Duration) (finding, error) {
	ctx, cancel := context.WithTimeout(ctx, limit+30*time.Second)
	defer cancel()
	args := []string{"-test.run", "^" + c.test + "$", "-test.v", "-test.failfast", "-test.timeout", limit.String()}
	if p.knows(ctx, binary, "rapid.nofailfile") {
		args = append(args, "-rapid.nofailfile")
	}
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir = filepath.Join(p.root, c.pkg)
	// it ends with the first that fails
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, "SKEIN_TEST_HISTORIES="+dir, "SKEIN_TEST_SEEDS=8")
	began := time.Now()
	out, err := cmd.CombinedOutput()
	f := finding{check: c, took: time.Since(began)}
	var exit *exec.ExitError
	switch {
	case !bytes.Contains(out, []byte("=== RUN   "+c.test)):
		return f, fmt.Errorf("%s did not run: %v\n%s", c, err, tail(out))
	case err == nil:
		return f, nil
	case !errors.As(err, &exit):
		return f, fmt.Errorf("run %s: %w", c, err)
	}
	f.found, f.says, f.end = true, firstComplaint(out), tail(out)
	return f, nil
}

// knows reports whether a test binary has a flag.
func (p *mutator) knows(ctx context.Context, binary, flag string) bool {
	out, _ := exec.CommandContext(ctx, binary, "-help").CombinedOutput() // it exits with 2
	return bytes.Contains(out, []byte("-"+flag))
}

func firstComplaint(out []byte) string {
	m := complaint.FindSubmatch(out)
	if m == nil {
		return ""
	}
	return string(bytes.Join(m[1:], nil))
}

func tail(b []byte) []byte { return b[max(0, len(b)-2000):] }

// each makes the mutations, several at a time, and tells of each as soon as it is known.
func (p *mutator) each(ctx context.Context, bugs []bug, tell func(result)) []result {
	out := make([]result, len(bugs))
	slots := make(chan struct{}, p.jobs)
	var all sync.WaitGroup
	var telling sync.Mutex
	for i, b := range bugs {
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			out[i] = p.try(ctx, b)
			telling.Lock()
			defer telling.Unlock()
			tell(out[i])
		})
	}
	all.Wait()
	return out
}

// baseline runs all checks of the bugs without any bug. Each must pass.
func (p *mutator) baseline(ctx context.Context, bugs []bug) error {
	var checks []check
	for _, b := range bugs {
		checks = append(checks, b.found...)
	}
	slices.SortFunc(checks, func(a, b check) int { return strings.Compare(a.String(), b.String()) })
	dir, err := os.MkdirTemp(p.tmp, "none-")
	if err != nil {
		return err
	}
	found, err := p.runAll(ctx, dir, "", slices.Compact(checks), baselineTimeout)
	for _, f := range found {
		if f.found {
			err = errors.Join(err, fmt.Errorf("%s fails without a bug, so that its failing says nothing: %s\n%s",
				f.check, f.says, f.end))
		}
	}
	return err
}
