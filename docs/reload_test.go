package docs_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/config"
)

// TestReloadTable holds the table of keys that a reload does not take over, in config.md, to the one by which the agent
// decides. -update writes it anew.
func TestReloadTable(t *testing.T) {
	const file, begin, end = "config.md",
		"<!-- begin: written by `go test ./docs -run TestReloadTable -update` -->\n", "<!-- end -->"
	var want strings.Builder
	want.WriteString("| not at once | | why |\n|---|---|---|\n")
	for _, k := range config.Keys {
		if k.Class != config.Live {
			fmt.Fprintf(&want, "| `%s` | %s | %s |\n", k.Name, k.Class, k.Why)
		}
	}
	text := read(t, file)
	before, rest, ok := strings.Cut(text, begin)
	have, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no place for the table: want the lines %q and %q", file, begin, end)
	}
	if have == want.String() {
		return
	}
	if flag.Lookup("update").Value.String() != "true" {
		t.Fatalf("%s shows another table than config.Keys: run `go test ./docs -run TestReloadTable -update`", file)
	}
	if err := os.WriteFile(file, []byte(before+begin+want.String()+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}
