// Package marks keeps the generated part of a document, which stands between two lines of its own.
package marks

import (
	"fmt"
	"os"
	"strings"
)

// End closes every generated part.
const End = "<!-- end -->"

// Begin opens the part that a command writes.
func Begin(command string) string { return "<!-- begin: written by `" + command + "` -->" }

// Insert puts text between the marks of a document, in place of what was there.
func Insert(document, begin, text string) (string, error) {
	before, rest, ok := strings.Cut(document, begin)
	_, after, ok2 := strings.Cut(rest, End)
	if !ok || !ok2 {
		return "", fmt.Errorf("the document has no place for it: the marks %s and %s are missing", begin, End)
	}
	return before + begin + "\n" + text + End + after, nil
}

// Text is what stands between the marks; ok is false when they are missing.
func Text(document, begin string) (text string, ok bool) {
	_, rest, ok := strings.Cut(document, begin)
	text, _, ok2 := strings.Cut(rest, End)
	return text, ok && ok2
}

// InsertFile is Insert for a file.
func InsertFile(path, begin, text string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("--write: %w", err)
	}
	whole, err := Insert(string(b), begin, text)
	if err != nil {
		return fmt.Errorf("--write %s: %w", path, err)
	}
	return os.WriteFile(path, []byte(whole), 0o644)
}
