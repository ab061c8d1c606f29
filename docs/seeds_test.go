package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	seedsSame   = "same"
	seedsOther  = "differently"
	seedsNotYet = "not yet"
	seedsHeader = "| in the seed | | skein | tests |"
	seedsNoTest = "no test" // instead of tests: nothing asserts the behaviour
)

var (
	seedsCellRE = regexp.MustCompile(`(?:[^|\\]|\\.)+`)
	seedsTestRE = regexp.MustCompile(`^([a-z0-9/]+): ((?:Test|Fuzz)[A-Z]\w*)((?:/\w+)*)$`)
	seedsLabRE  = regexp.MustCompile(`^examples/[a-z0-9-]+\.yaml$`)
)

// seedsRow is a behaviour of a seed: what it is, how skein stands to it, what skein does, and what would fail without.
type seedsRow struct {
	seed, what, state, skein, tests string
}

// seedsRows reads the tables of seeds.md. A row of another shape is told, and left out.
func seedsRows(t *testing.T) (rows []seedsRow) {
	t.Helper()
	seed, table := "", false
	for i, line := range strings.Split(read(t, "seeds.md"), "\n") {
		if heading, ok := strings.CutPrefix(line, "## "); ok {
			seed = heading
		}
		switch {
		case !strings.HasPrefix(line, "|"):
			table = false
			continue
		case line == seedsHeader:
			table = true
			continue
		case !table || strings.HasPrefix(line, "|---"):
			continue
		}
		var cells []string
		for _, c := range seedsCellRE.FindAllString(line, -1) {
			cells = append(cells, strings.TrimSpace(c))
		}
		if len(cells) != 4 || !strings.HasSuffix(line, " |") {
			t.Errorf("seeds.md:%d has %d columns, want 4: %s", i+1, len(cells), line)
			continue
		}
		rows = append(rows, seedsRow{seed, cells[0], cells[1], cells[2], cells[3]})
	}
	return rows
}

// TestSeeds: each row says how skein stands to a behaviour, why if it is another one, and by which tests and scenarios
// that exist; only what is not there has none.
func TestSeeds(t *testing.T) {
	all, seen, seeds := allTests(t), map[string]bool{}, map[string]int{}
	rows := seedsRows(t)
	for _, r := range rows {
		wrong := func(format string, args ...any) {
			t.Helper()
			t.Errorf("seeds.md, %s, %q: "+format, append([]any{r.seed, r.what}, args...)...)
		}
		if r.what == "" || seen[r.seed+r.what] {
			wrong("there is no behaviour, or it stands there twice")
		}
		seen[r.seed+r.what] = true
		seeds[r.seed]++
		switch r.state {
		case seedsSame:
		case seedsOther:
			if !linkRE.MatchString(r.skein) {
				wrong("no link says why")
			}
		case seedsNotYet:
			if r.skein == "" || r.tests != "–" {
				wrong("it is not there, and says nothing of what is missing, or names tests: %s", r.tests)
			}
			continue
		default:
			wrong("%q is not a state; allowed: %s, %s, %s", r.state, seedsSame, seedsOther, seedsNotYet)
		}
		if r.tests == seedsNoTest {
			continue
		}
		names := spanRE.FindAllStringSubmatch(r.tests, -1)
		if rest := strings.Trim(spanRE.ReplaceAllString(r.tests, ""), ", "); len(names) == 0 || rest != "" {
			wrong("want tests, or %q: %s", seedsNoTest, r.tests)
		}
		for _, n := range names {
			if problem := seedsMissing(t, all, n[1]); problem != "" {
				wrong("%s", problem)
			}
		}
	}
	if len(rows) < 150 || len(seeds) != 5 {
		t.Errorf("%d rows of %d seeds: does this test still read the page?", len(rows), len(seeds))
	}
}

// seedsMissing says what is wrong with the name of a test or of a scenario; "" if it is there.
func seedsMissing(t *testing.T, all map[string][]string, name string) string {
	t.Helper()
	if seedsLabRE.MatchString(name) {
		if _, err := os.Stat(filepath.Join(root, name)); err != nil {
			return "there is no " + name
		}
		return ""
	}
	m := seedsTestRE.FindStringSubmatch(name)
	if m == nil {
		return name + " names neither a test (package: Test) nor a scenario (examples/NAME.yaml)"
	}
	if !slices.Contains(all[m[1]], m[2]) {
		return "there is no " + m[2] + " in " + m[1]
	}
	for _, part := range strings.FieldsFunc(m[3], func(r rune) bool { return r == '/' }) {
		if !seedsInTests(t, m[1], `"`+part+`"`) {
			return "there is no part " + part + " of " + m[2] + " in " + m[1]
		}
	}
	return ""
}

// seedsInTests reports whether a text stands in the tests of a package.
func seedsInTests(t *testing.T, dir, text string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(files, func(file string) bool { return strings.Contains(read(t, file), text) })
}

// TestSeedsMissing: names that are wrong in some way are found.
func TestSeedsMissing(t *testing.T) {
	all := allTests(t)
	for _, name := range []string{"docs: TestSeeds", "chaos/kube: TestFleet/DualStack", "examples/sites.yaml"} {
		if problem := seedsMissing(t, all, name); problem != "" {
			t.Errorf("%s: %s", name, problem)
		}
	}
	for _, name := range []string{
		"docs: TestSeed", "doc: TestSeeds", "path: TestStrategy", "TestSeeds", "chaos/kube: TestFleet/NoSuchPart",
		"examples/no-such.yaml",
		"../examples/sites.yaml", "docs: seedsRows",
	} {
		if seedsMissing(t, all, name) == "" {
			t.Errorf("%s is taken for a test", name)
		}
	}
}
