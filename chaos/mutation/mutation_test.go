package main

import (
	"fmt"
	"strings"
	"testing"
)

func mutatorFor(t *testing.T) *mutator {
	t.Helper()
	p, cleanup, err := newMutator(t.Context(), 2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cleanup)
	return p
}

// Every mutation fits the sources as they are, and is told apart from the others.
func TestEveryPatchFits(t *testing.T) {
	p, names, quick := mutatorFor(t), map[string]bool{}, 0
	for _, b := range allBugs() {
		files, err := p.patch(b)
		if err != nil {
			t.Error(err)
		}
		if len(files) == 0 || len(b.found) == 0 || b.why == "" || names[b.name] {
			t.Errorf("bug %q changes %d files, has %d checks, and says why: %q", b.name, len(files), len(b.found), b.why)
		}
		names[b.name] = true
		if b.quick {
			quick++
		}
	}
	if len(names) < 30 || quick < 3 {
		t.Errorf("%d bugs, %d of them in every test run", len(names), quick)
	}
}

// A patch that does not fit is an error that says what to do.
func TestPatchThatRots(t *testing.T) {
	for _, old := range []string{"this is in no line", "return"} {
		_, err := mutatorFor(t).patch(bug{name: "b", edits: []edit{{"events/decide.go", old, ""}}})
		if err == nil || !strings.Contains(err.Error(), "write the patch anew") {
			t.Errorf("%q: %v", old, err)
		}
	}
}

// The few mutations that are made in every test run are found, and the checks pass without them. `make mutations` makes
// all.
func TestMutationsAreFound(t *testing.T) {
	p := mutatorFor(t)
	var some []bug
	for _, b := range allBugs() {
		if b.quick {
			b.found = b.found[:1]
			some = append(some, b)
		}
	}
	if err := p.baseline(t.Context(), some); err != nil {
		t.Error(err)
	}
	for _, r := range p.each(t.Context(), some, func(result) {}) {
		if !r.ok() {
			t.Error(r.text())
		}
	}
}

// A harmless change is not found, and a check that does not run is no finding.
func TestHarmlessChangeIsNotFound(t *testing.T) {
	p := mutatorFor(t)
	harmless := bug{name: "none", edits: []edit{{"internal/simtime/simtime.go", "running int", "running int // nothing " +
		"else"}},
		found: []check{{"./internal/simtime", "TestLapsedTimers"}}}
	if r := p.try(t.Context(), harmless); r.ok() || r.err != nil || len(r.findings) != 1 || r.findings[0].found {
		t.Errorf("a change of a comment: %v", r.text())
	}
	harmless.found[0].test = "TestThatIsNotThere"
	if r := p.try(t.Context(), harmless); r.err == nil || !strings.Contains(fmt.Sprint(r.err), "did not run") {
		t.Errorf("a test that is not there: %v", r.text())
	}
}
