package docs_test

import (
	"cmp"
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/skeinmesh/skein/"

// TestMap holds the tables of packages in architecture.md to the code: each folder with Go files is in one, and imports
// exactly what stands there. No two folders import each other, on any way.
func TestMap(t *testing.T) {
	text := read(t, "architecture.md")
	imports := ownImports(t)
	for _, c := range []struct {
		header, inside string
		least          int // rows
	}{
		{"| folder | holds | imports of ours |", "", 10},
		{"| package | holds | imports of `agent/` |", "agent", 10},
		{"| package | holds | imports of `relay/` |", "relay", 5},
		{"| package | holds | imports of `dataplane/` |", "dataplane", 10},
	} {
		_, table, found := strings.Cut(text, c.header)
		if !found {
			t.Fatalf("architecture.md has no table %q", c.header)
		}
		table, _, _ = strings.Cut(table, "\n\n")
		drawn := map[string][]string{}
		for _, m := range regexp.MustCompile("(?m)^\\| `([a-z/-]+?)/?` \\| .* \\| ([a-z/, -]+) \\|$").
			FindAllStringSubmatch(table, -1) {
			drawn[m[1]] = nil
			if m[2] != "none" {
				drawn[m[1]] = strings.Split(m[2], ", ")
			}
		}
		if len(drawn) < c.least {
			t.Fatalf("architecture.md: the table %q has %d rows that are understood", c.header, len(drawn))
		}
		have := folded(t, imports, c.inside, drawn)
		for _, folder := range slices.Sorted(maps.Keys(drawn)) {
			want := slices.Sorted(slices.Values(drawn[folder]))
			if got := slices.Sorted(maps.Keys(have[folder])); !slices.Equal(got, want) {
				t.Errorf("architecture.md: %s imports %s, not %s", folder, cmp.Or(strings.Join(got, ", "), "none"),
					cmp.Or(strings.Join(want, ", "), "none"))
			}
		}
		for folder := range have {
			if circle := circleFrom(folder, have); circle != nil {
				t.Errorf("folders import each other: %s", strings.Join(circle, ", "))
			}
		}
	}
}

// ownImports are the packages of this module, each with those of this module that it imports, without tests.
func ownImports(t *testing.T) map[string][]string {
	t.Helper()
	cmd := exec.Command("go", "list", "-f", `{{if .GoFiles}}{{.ImportPath}} {{join .Imports " "}}{{end}}`, "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		words := strings.Fields(line)
		if len(words) == 0 { // it has tests alone
			continue
		}
		name, own := strings.CutPrefix(words[0], module)
		if !own {
			continue
		}
		all[name] = nil
		for _, w := range words[1:] {
			if to, own := strings.CutPrefix(w, module); own {
				all[name] = append(all[name], to)
			}
		}
	}
	return all
}

// folded are imports between the rows of a table: below inside, or of the whole module if that is "".
func folded(
	t *testing.T, imports map[string][]string, inside string, rows map[string][]string,
) map[string]map[string]bool {
	t.Helper()
	row := func(name string) (string, bool) {
		if inside != "" {
			rest, below := strings.CutPrefix(name, inside+"/")
			switch {
			case name == inside:
				return inside, inside != "agent" // nothing imports the daemon; it puts all others together
			case !below:
				return "", false
			}
			name = rest
		}
		best := ""
		for r := range rows {
			if (name == r || strings.HasPrefix(name, r+"/")) && len(r) > len(best) {
				best = r
			}
		}
		return best, true
	}
	have := map[string]map[string]bool{}
	for from, all := range imports {
		a, in := row(from)
		if !in || a == inside && inside != "" {
			continue
		}
		if a == "" {
			t.Errorf("architecture.md: %s is in no row", from)
			continue
		}
		if have[a] == nil {
			have[a] = map[string]bool{}
		}
		for _, to := range all {
			if b, in := row(to); in && a != b && b != "internal" {
				have[a][b] = true
			}
		}
	}
	return have
}

// circleFrom is a way along imports that leads back to its start; nil: there is none.
func circleFrom(start string, imports map[string]map[string]bool) []string {
	seen := map[string]bool{}
	var walk func(way []string) []string
	walk = func(way []string) []string {
		for next := range imports[way[len(way)-1]] {
			if next == start {
				return append(way, next)
			}
			if !seen[next] {
				seen[next] = true
				if c := walk(append(slices.Clone(way), next)); c != nil {
					return c
				}
			}
		}
		return nil
	}
	return walk([]string{start})
}

// walkStep is a step of a walk: a file, and a function or method in it.
var walkStep = regexp.MustCompile("(?m)^[0-9]+\\. `([a-z0-9_/]+\\.go)` `(?:([A-Za-z]+)\\.)?([A-Za-z]+)`: ")

// TestWalks: the function that each step of a walk begins with stands in the file that is named with it.
func TestWalks(t *testing.T) {
	_, walks, found := strings.Cut(read(t, "architecture.md"), "\n## Three walks\n")
	if !found {
		t.Fatal("architecture.md has no walks")
	}
	walks, _, _ = strings.Cut(walks, "\n## ")
	steps := walkStep.FindAllStringSubmatch(walks, -1)
	if written := len(regexp.MustCompile(`(?m)^[0-9]+\. `).FindAllString(walks, -1)); len(steps) != written || written < 30 {
		t.Errorf("%d of %d steps begin with a file and a function", len(steps), written)
	}
	for _, m := range steps {
		receiver := ""
		if m[2] != "" {
			receiver = `\(\w+ \*?` + m[2] + `\) `
		}
		if !regexp.MustCompile(`(?m)^func ` + receiver + m[3] + `\(`).MatchString(read(t, root+"/"+m[1])) {
			t.Errorf("architecture.md: there is no function %s in %s", strings.Trim(m[2]+"."+m[3], "."), m[1])
		}
	}
}
