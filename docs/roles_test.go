package docs_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/events"
)

// TestRoles holds the table of roles in security.md to the one by which the leader decides. -update writes it anew.
func TestRoles(t *testing.T) {
	const file, begin, end = "security.md", "<!-- begin: written by `go test ./docs -run TestRoles -update` -->\n",
		"<!-- end -->"
	var want strings.Builder
	want.WriteString("| command | agent | admin | server | |\n|---|---|---|---|---|\n")
	for _, r := range events.Rules {
		fmt.Fprintf(&want, "| `%s` | %s | %s | %s | %s |\n", r.Command, r.Agent, r.Admin, r.Server, r.Why)
	}
	text := read(t, file)
	before, rest, ok := strings.Cut(text, begin)
	have, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no place for the table of roles: want the lines %q and %q", file, begin, end)
	}
	if have == want.String() {
		return
	}
	if flag.Lookup("update").Value.String() != "true" {
		t.Fatalf("%s shows another table than events.Rules: run `go test ./docs -run TestRoles -update`", file)
	}
	if err := os.WriteFile(file, []byte(before+begin+want.String()+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}
