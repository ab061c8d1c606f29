package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/chaos/kube"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// result is what became of a test.
type result struct {
	name  string
	state string // ginkgo's word, or one of those below
	took  time.Duration
	why   string // when it did not pass
}

const (
	passed = "passed"
	absent = "not run"
)

// testsWithin is how long all tests together may take.
const testsWithin = 25 * time.Minute

// runTests lets ginkgo run tests against a fleet, from its control plane's host, and returns what it reports.
func runTests(
	ctx context.Context, f *kube.Fleet, programs string, tests []string, jobs int, out io.Writer,
) ([]result, error) {
	kubeconfig := f.Cluster.Dir + "/conformance.kubeconfig"
	if err := f.Cluster.KubeconfigFor(kubeconfig, "conformance", "system:masters"); err != nil {
		return nil, err
	}
	const report = "report.json"
	argv := slices.Concat(f.Machines[f.Config.Nodes[0]].Enter(), []string{
		filepath.Join(programs, "ginkgo"), "--no-color", "--silence-skips", fmt.Sprintf("--procs=%d", jobs),
		"--timeout=" + testsWithin.String(), "--json-report=" + report, "--output-dir=" + f.Config.Dir,
		"--focus=" + focus(tests),
		filepath.Join(programs, "e2e.test"), "--",
		"--kubeconfig=" + kubeconfig, "--kubectl-path=" + filepath.Join(programs, "kubectl"), "--provider=skeleton",
	})
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = f.Config.Dir, out, out, time.Second
	// Without go on its path, since ginkgo would compare itself with this module's version of it.
	cmd.Env = []string{"PATH=" + programs, "HOME=/root", "LANG=C.UTF-8"}
	on, err := f.Lab.Node(f.Config.Nodes[0])
	if err != nil {
		return nil, err
	}
	if err := fabric.In(on.Namespace, cmd.Start); err != nil {
		return nil, fmt.Errorf("start ginkgo: %w", err)
	}
	failed := cmd.Wait() // tests that failed are in the report
	b, err := os.ReadFile(filepath.Join(f.Config.Dir, report))
	if err != nil {
		return nil, fmt.Errorf("ginkgo has left no report (%v): %w", failed, err)
	}
	return outcome(tests, b)
}

// focus is a pattern that fits the names of tests and nothing else. Ginkgo has the suite's name before each.
func focus(tests []string) string {
	quoted := make([]string, len(tests))
	for i, t := range tests {
		quoted[i] = regexp.QuoteMeta(t)
	}
	return " (" + strings.Join(quoted, "|") + ")$"
}

// outcome finds each test in ginkgo's report.
func outcome(tests []string, report []byte) ([]result, error) {
	var suites []struct {
		SpecReports []struct {
			ContainerHierarchyTexts []string
			LeafNodeText            string
			State                   string
			RunTime                 time.Duration
			Failure                 struct{ Message string }
		}
	}
	if err := json.Unmarshal(report, &suites); err != nil {
		return nil, fmt.Errorf("ginkgo's report: %w", err)
	}
	found := map[string]result{}
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			name := strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
			found[name] = result{name: name, state: s.State, took: s.RunTime, why: s.Failure.Message}
		}
	}
	results := make([]result, len(tests))
	for i, name := range tests {
		r, ok := found[name]
		if !ok || r.state == "skipped" || r.state == "pending" {
			r = result{name: name, state: absent, why: r.why}
		}
		results[i] = r
	}
	return results, nil
}
