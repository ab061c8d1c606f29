package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// commands are the sh blocks under a heading of a document, up to the next heading, as they stand there.
func commands(t *testing.T, document, heading string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../../docs", document))
	if err != nil {
		t.Fatal(err)
	}
	blocks := shBlocks(string(b), heading)
	if blocks == "" {
		t.Fatalf("docs/%s has no commands under %q", document, heading)
	}
	return blocks
}

func shBlocks(text, heading string) string {
	var out strings.Builder
	under, block := false, ""
	for line := range strings.Lines(text) {
		switch trimmed := strings.TrimSpace(line); {
		case block == "" && strings.HasPrefix(line, "#"):
			under = trimmed == heading
		case block == "" && strings.HasPrefix(line, "```"):
			block = strings.TrimPrefix(trimmed, "```")
			if block == "" {
				block = "text"
			}
		case strings.HasPrefix(line, "```"):
			block = ""
		case under && block == "sh":
			out.WriteString(line)
		}
	}
	return out.String()
}

func TestShBlocks(t *testing.T) {
	const text = "## One\n```sh\none\n```\n## Two\nwords\n```yaml\nno\n```\n```sh\ntwo \\\n  wrapped\n# no heading\n```\nwords\n\n```sh\nthree\n```\n### Four\n```sh\nfour\n```\n"
	if got, want := shBlocks(text, "## Two"), "two \\\n  wrapped\n# no heading\nthree\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
