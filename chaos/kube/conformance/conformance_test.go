package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/internal/testenv"
)

// The document has each network conformance test of the version that .ci/kubernetes has, and no other.
func TestDocumentHasTheList(t *testing.T) {
	dir, err := moduleDir("../../..")
	if err != nil {
		testenv.Missing(t, err.Error())
	}
	list, err := os.ReadFile(filepath.Join(dir, "test/conformance/testdata/conformance.yaml")) // which e2e.test embeds
	if err != nil {
		t.Fatal(err)
	}
	tests, err := networkTests(list)
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, name := range tests {
		want = append(want, shorter(name))
	}
	b, err := os.ReadFile("../../../docs/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	if got := listed(string(b)); !slices.Equal(got, want) {
		t.Errorf("docs/conformance.md lists %d tests, Kubernetes has %d: `make conformance WRITE=docs/conformance.md` "+
			"writes it",
			len(got), len(want))
	}
	if e2e := "../../../.cache/kubernetes/e2e.test"; exists(e2e) {
		printed, err := ask(e2e, "--list-conformance-tests")
		if err != nil {
			t.Fatal(err)
		}
		if got, err := networkTests(printed); err != nil || !slices.Equal(got, tests) {
			t.Errorf("e2e.test prints %d tests, %v; its module lists %d", len(got), err, len(tests))
		}
	}
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

func TestOutcome(t *testing.T) {
	tests := []string{
		"[sig-network] A works [Conformance]", "[sig-network] B fails [Conformance]",
		"[sig-network] C is skipped [Conformance]", "[sig-network] D is not there [Conformance]",
	}
	got, err := outcome(tests, []byte(`[{"SpecReports": [
		{"ContainerHierarchyTexts": null, "LeafNodeText": "", "State": "passed"},
		{"ContainerHierarchyTexts": ["[sig-network] A"], "LeafNodeText": "works [Conformance]", "State": "passed",
			"RunTime": 1500000000},
		{"ContainerHierarchyTexts": ["[sig-network]", "B"], "LeafNodeText": "fails [Conformance]", "State": "failed",
			"Failure": {"Message": "no answer"}},
		{"ContainerHierarchyTexts": ["[sig-network] C"], "LeafNodeText": "is skipped [Conformance]", "State": "skipped"}]}]`))
	if err != nil {
		t.Fatal(err)
	}
	r := report{results: got, version: "1.2.3"}
	var states []string
	for _, one := range got {
		states = append(states, one.state)
	}
	if want := []string{passed, "failed", absent, absent}; !slices.Equal(states, want) {
		t.Errorf("states %q, want %q", states, want)
	}
	if got[0].took.Seconds() != 1.5 || got[1].why != "no answer" {
		t.Errorf("%+v", got)
	}
	err = r.failure()
	if err == nil || strings.Contains(err.Error(), "A works") || !strings.Contains(err.Error(), "D is not") {
		t.Errorf("failure %v", err)
	}
	if r.passed() != 1 {
		t.Errorf("%d passed, want 1", r.passed())
	}
	want := []string{"A works", "B fails", "C is skipped", "D is not there"}
	if got := listed("# Tests\n\n" + begin + "\n" + r.table() + "<!-- end -->\n"); !slices.Equal(got, want) {
		t.Errorf("the table has %q, want %q", got, want)
	}
}

// A name that is part of another's must not choose the other.
func TestFocus(t *testing.T) {
	tests := []string{"[sig-network] Services (a) [Conformance]"}
	if got, want := focus(tests), ` (\[sig-network\] Services \(a\) \[Conformance\])$`; got != want {
		t.Errorf("focus %s, want %s", got, want)
	}
}
