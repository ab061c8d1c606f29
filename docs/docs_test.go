// Package docs_test holds the documents to the code: links resolve, commands and flags exist, and
// docs/config.md and docs/metrics.md name exactly what the agent has.
package docs_test

import (
	"go/scanner"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/skeinmesh/skein/agent/config"
)

const root = ".."

// documents are all Markdown files of the project.
func documents(t *testing.T) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "bin" || d.Name() == "lab-failures" || path != root &&
			strings.HasPrefix(d.Name(), ".")) {
			return filepath.SkipDir
		}
		if strings.HasSuffix(path, ".md") {
			out = append(out, path)
		}
		return nil
	})
	if err != nil || len(out) < 10 {
		t.Fatalf("%d documents, error %v", len(out), err)
	}
	return out
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

var linkRE = regexp.MustCompile(`\]\(([^)\s]+)\)`)

func TestLinks(t *testing.T) {
	for _, file := range documents(t) {
		for _, m := range linkRE.FindAllStringSubmatch(read(t, file), -1) {
			to, _, _ := strings.Cut(m[1], "#")
			if to == "" || strings.Contains(to, "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(file), to)); err != nil {
				t.Errorf("%s: link to %s leads nowhere", file, m[1])
			}
		}
	}
}

var goFileRE = regexp.MustCompile(`\b(?:agent|relay|dataplane|events|gossip|consensus|kube|cni|internal|chaos|cmd|docs)` +
	`/[a-z0-9_/]+\.go\b`)

// TestGoFilesExist: a Go file that a document names is there. Decisions tell of the day when they were made.
func TestGoFilesExist(t *testing.T) {
	for _, file := range documents(t) {
		if strings.Contains(file, "decisions/") {
			continue
		}
		for _, name := range goFileRE.FindAllString(read(t, file), -1) {
			if _, err := os.Stat(filepath.Join(root, name)); err != nil {
				t.Errorf("%s: there is no file %s", file, name)
			}
		}
	}
}

// TestLinesFit: prose and examples end at 120 columns. Rows of tables cannot be broken, nor is what a program writes.
func TestLinesFit(t *testing.T) {
	const columns = 120
	for _, file := range documents(t) {
		written := false
		for i, line := range strings.Split(read(t, file), "\n") {
			if strings.HasPrefix(line, "<!--") {
				written = strings.HasPrefix(line, "<!-- begin")
			}
			if n := utf8.RuneCountInString(line); n > columns && !written && !strings.HasPrefix(strings.TrimSpace(line), "|") {
				t.Errorf("%s:%d has %d columns, more than %d", file, i+1, n, columns)
			}
		}
	}
}

// TestReadmeKnowsAll: who starts at the README finds every document.
func TestReadmeKnowsAll(t *testing.T) {
	readme := read(t, "../README.md")
	files, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if !strings.Contains(readme, "docs/"+file) {
			t.Errorf("README.md does not mention docs/%s", file)
		}
	}
}

// cli asks the real command line, built once, for help.
type cli struct {
	name   string // skein, or skein-dev
	binary string
	mu     sync.Mutex
	help   map[string]string
}

func newCLI(t *testing.T, name string) *cli {
	t.Helper()
	c := &cli{name: name, binary: filepath.Join(t.TempDir(), name), help: map[string]string{}}
	if out, err := exec.Command("go", "build", "-o", c.binary, "../cmd/"+name).CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return c
}

// helpOf is the help of a command; ok is false when there is no such command.
func (c *cli) helpOf(words ...string) (text string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := strings.Join(words, " ")
	if text, ok = c.help[key]; !ok {
		out, err := exec.Command(c.binary, append(slices.Clone(words), "--help")...).CombinedOutput()
		if err == nil {
			text = string(out)
		}
		c.help[key] = text
	}
	// cobra answers for the nearest parent; the usage line tells for whom.
	usage := c.name
	if len(words) > 0 {
		usage += " " + key
	}
	return text, regexp.MustCompile(`(?m)^  ` + regexp.QuoteMeta(usage) + `( |$)`).MatchString(text)
}

var (
	blockRE   = regexp.MustCompile("(?ms)^```(?:sh(?: [a-z0-9]+)?|console|)\n(.*?)^```")
	spanRE    = regexp.MustCompile("`([^`\n]+)`")
	wordRE    = regexp.MustCompile(`^[a-z][a-z-]*$`)
	flagRE    = regexp.MustCompile(`^--?[a-z][a-z-]*`)
	commandRE = regexp.MustCompile(`(?:^|[|&;$(\s])(skein(?:-dev)?)((?:[ \t]+[^\s|&;<>)]+)*)`)
)

// commands are the uses of a program in the code of a document, as words after its name.
func commands(text, program string) [][]string {
	var code []string
	for _, m := range blockRE.FindAllStringSubmatch(text, -1) {
		code = append(code, strings.Split(m[1], "\n")...)
	}
	for _, m := range spanRE.FindAllStringSubmatch(blockRE.ReplaceAllString(text, ""), -1) {
		if strings.HasPrefix(m[1], program+" ") {
			code = append(code, m[1])
		}
	}
	var out [][]string
	for _, line := range code {
		line, _, _ = strings.Cut(line, " #")
		if line = strings.TrimPrefix(strings.TrimSpace(line), "$ "); !strings.HasPrefix(line, program+" ") {
			continue
		}
		// What `lab exec NODE --` runs is a command of its own.
		for _, one := range strings.Split(line, " -- ") {
			for _, m := range commandRE.FindAllStringSubmatch(one, -1) {
				if m[1] == program {
					out = append(out, strings.Fields(m[2]))
				}
			}
		}
	}
	return out
}

// TestCommands checks the README and docs/ alone: files of design may speak of what is to come.
func TestCommands(t *testing.T) {
	programs := []*cli{newCLI(t, "skein"), newCLI(t, "skein-dev")}
	files, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	decisions, _ := filepath.Glob("decisions/*.md")
	for _, c := range programs {
		seen := 0
		for _, file := range append(append(files, decisions...), "../README.md") {
			for _, words := range commands(read(t, file), c.name) {
				seen++
				checkCommand(t, c, file, words)
			}
		}
		if seen < 10 {
			t.Errorf("only %d commands of %s found: does this test still read the documents?", seen, c.name)
		}
	}
}

func checkCommand(t *testing.T, c *cli, file string, words []string) {
	t.Helper()
	var path []string
	help, _ := c.helpOf()
	for _, w := range words {
		if !wordRE.MatchString(w) {
			break
		}
		text, ok := c.helpOf(append(slices.Clone(path), w)...)
		if !ok {
			if len(path) == 0 || strings.Contains(help, "Available Commands:") {
				t.Errorf("%s: %s %s: there is no command %q", file, c.name, strings.Join(words, " "), w)
				return
			}
			break // an argument
		}
		path, help = append(path, w), text
	}
	for _, w := range words {
		w = strings.Trim(w, "[]")
		if flag := flagRE.FindString(w); flag != "" && flag != "--help" && !regexp.MustCompile(regexp.QuoteMeta(flag)+
			`\b`).MatchString(help) {
			t.Errorf("%s: %s %s: there is no flag %s", file, c.name, strings.Join(words, " "), flag)
		}
	}
}

var testRE = regexp.MustCompile("`(?:([a-z/]+) )?((?:Test|Fuzz)[A-Z][A-Za-z0-9]*)(?:/[^`]*)?`")

// allTests are the names of all tests by their package's folder.
func allTests(t *testing.T) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && strings.HasPrefix(d.Name(), "."):
			return filepath.SkipDir
		case strings.HasSuffix(path, "_test.go"):
			dir := strings.TrimPrefix(filepath.ToSlash(filepath.Dir(path)), root+"/")
			for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`).FindAllStringSubmatch(read(t, path), -1) {
				out[dir] = append(out[dir], m[1])
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestBadInputNamesTests: each test that the page of bad input names is there, in the package that it names (once for
// all tests behind it in a cell, and perhaps by the last parts of its path), and each fuzz test is on the page.
func TestBadInputNamesTests(t *testing.T) {
	all, named := allTests(t), map[string]bool{}
	for _, cell := range regexp.MustCompile(`[|\n]`).Split(read(t, "bad-input.md"), -1) {
		in := "chaos/e2e"
		for _, m := range testRE.FindAllStringSubmatch(cell, -1) {
			if m[1] != "" {
				in = m[1]
			}
			named[m[2]] = true
			found := false
			for dir, tests := range all {
				found = found || (dir == in || strings.HasSuffix(dir, "/"+in)) && slices.Contains(tests, m[2])
			}
			if !found {
				t.Errorf("bad-input.md: there is no %s in %s", m[2], in)
			}
		}
	}
	if len(named) < 60 {
		t.Errorf("only %d tests found: does this test still read the page?", len(named))
	}
	for dir, tests := range all {
		for _, name := range tests {
			if strings.HasPrefix(name, "Fuzz") && !named[name] {
				t.Errorf("bad-input.md does not tell of %s in %s", name, dir)
			}
		}
	}
}

// keys are the configuration's keys, as a path with dots.
func keys(t reflect.Type, prefix string) []string {
	var out []string
	for i := range t.NumField() {
		f := t.Field(i)
		key := prefix + f.Tag.Get("yaml")
		if f.Type.Kind() == reflect.Struct {
			out = append(out, keys(f.Type, key+".")...)
			continue
		}
		out = append(out, key)
	}
	slices.Sort(out)
	return out
}

// firstColumn are the names that begin a table's rows in a document, up to the section named end.
func firstColumn(t *testing.T, file, name, end string) []string {
	t.Helper()
	text := read(t, file)
	if end != "" {
		text, _, _ = strings.Cut(text, end)
	}
	var out []string
	for _, m := range regexp.MustCompile("(?m)^\\| `("+name+")` \\|").FindAllStringSubmatch(text, -1) {
		out = append(out, m[1])
	}
	slices.Sort(out)
	return out
}

func same(t *testing.T, file string, documented, real []string) {
	t.Helper()
	for _, k := range real {
		if !slices.Contains(documented, k) {
			t.Errorf("%s: does not tell of %s", file, k)
		}
	}
	for _, k := range documented {
		if !slices.Contains(real, k) {
			t.Errorf("%s: tells of %s, which does not exist", file, k)
		}
	}
	if len(slices.Compact(slices.Clone(documented))) != len(documented) {
		t.Errorf("%s: tells of something twice", file)
	}
}

func TestConfigKeys(t *testing.T) {
	same(t, "config.md", firstColumn(t, "config.md", `[A-Za-z0-9.]+`, "## The cluster's settings"),
		keys(reflect.TypeFor[config.Config](), ""))
}

// TestConfigExample loads the examples as an agent would.
func TestConfigExample(t *testing.T) {
	for _, doc := range []string{"config.md", "../README.md"} {
		for _, m := range regexp.MustCompile("(?ms)^```yaml\n(.*?)^```").FindAllStringSubmatch(read(t, doc), -1) {
			file := filepath.Join(t.TempDir(), "skein.yaml")
			if err := os.WriteFile(file, []byte(m[1]), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := config.Load(file, true); err != nil {
				t.Errorf("%s: an example is refused: %v", doc, err)
			}
		}
	}
}

var metricRE = regexp.MustCompile(`"(skein_[a-z_]+)"`)

func TestMetrics(t *testing.T) {
	var real []string
	files, err := filepath.Glob("../agent/metrics/*.go")
	if err != nil {
		t.Fatal(err)
	}
	files = slices.DeleteFunc(files, func(name string) bool { return strings.HasSuffix(name, "_test.go") })
	files = append(files, "../kube/metrics.go")
	for _, file := range files {
		for _, m := range metricRE.FindAllStringSubmatch(read(t, file), -1) {
			real = append(real, m[1])
		}
	}
	same(t, "metrics.md", firstColumn(t, "metrics.md", `skein_[a-z_]+`, ""), real)
	for _, file := range []string{"../deploy/prometheus/skein.rules.yaml", "../deploy/grafana/skein.json"} {
		used := regexp.MustCompile(`skein_[a-z_]+`).FindAllString(read(t, file), -1)
		if len(used) == 0 {
			t.Errorf("%s uses no metric", file)
		}
		for _, m := range used {
			if !slices.Contains(real, strings.TrimSuffix(m, "_bucket")) { // a histogram's buckets
				t.Errorf("%s: metric %s does not exist", file, m)
			}
		}
	}
}

// TestPagesSayForWhom: each page begins with whom it is for.
func TestPagesSayForWhom(t *testing.T) {
	pages, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range append(pages, "decisions/README.md") {
		if !regexp.MustCompile(`^# [^\n]+\n\nFor [a-z]`).MatchString(read(t, page)) {
			t.Errorf("%s does not begin with whom it is for", page)
		}
	}
}

// TestGoLinesFit: lines of Go end at 120 columns. What stands between backquotes cannot be broken, nor is what a
// program writes.
func TestGoLinesFit(t *testing.T) {
	const columns = 120
	generated := regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)
	files := 0
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && strings.HasPrefix(d.Name(), "."):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go"):
			return nil
		}
		text := read(t, path)
		if generated.MatchString(text) {
			return nil
		}
		files++
		quoted := quotedLines(text)
		for i, line := range strings.Split(text, "\n") {
			if n := utf8.RuneCountInString(line); n > columns && !quoted[i+1] {
				t.Errorf("%s:%d has %d columns, more than %d", path, i+1, n, columns)
			}
		}
		return nil
	})
	if err != nil || files < 500 {
		t.Fatalf("%d files, error %v", files, err)
	}
}

// quotedLines are those with a part of what stands between backquotes.
func quotedLines(text string) map[int]bool {
	out, set := map[int]bool{}, token.NewFileSet()
	file := set.AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, []byte(text), nil, 0)
	for {
		pos, kind, literal := s.Scan()
		switch {
		case kind == token.EOF:
			return out
		case kind == token.STRING && literal[0] == '`':
			first := file.Line(pos)
			for i := range strings.Count(literal, "\n") + 1 {
				out[first+i] = true
			}
		}
	}
}

// TestDecisions: the list of decisions has each page, under its title.
func TestDecisions(t *testing.T) {
	list := read(t, "decisions/README.md")
	pages, err := filepath.Glob("decisions/[0-9]*.md")
	if err != nil || len(pages) < 50 {
		t.Fatalf("%d pages, error %v", len(pages), err)
	}
	for _, page := range pages {
		title, _, _ := strings.Cut(read(t, page), "\n")
		number := filepath.Base(page)[:4]
		title = strings.TrimPrefix(title, "# "+number+": ")
		if row := "| [" + number + "](" + filepath.Base(page) + ") | " + title + " |\n"; !strings.Contains(list, row) {
			t.Errorf("decisions/README.md has no row %q", row)
		}
	}
}
