package overlay

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Several edits of one file are all in it, and go's list names a copy of each file.
func TestEditsOfOneFileAddUp(t *testing.T) {
	root, dir := t.TempDir(), t.TempDir()
	for name, text := range map[string]string{"a.go": "one two three", "b.go": "four"} {
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	files, err := Files(root, []Edit{{"a.go", "one", "1"}, {"b.go", "four", "4"}, {"a.go", "1 two", "2"}})
	if err != nil {
		t.Fatal(err)
	}
	list, err := Write(dir, files)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	var named struct{ Replace map[string]string }
	if err := json.Unmarshal(b, &named); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"a.go": "2 three", "b.go": "4"} {
		b, err := os.ReadFile(named.Replace[filepath.Join(root, name)])
		if err != nil || string(b) != want {
			t.Errorf("%s is replaced by %q, %v; want %q", name, b, err, want)
		}
	}
	if len(named.Replace) != 2 {
		t.Errorf("go's list has %d files: %s", len(named.Replace), b)
	}
}

// An edit that does not fit is an error that says what to do.
func TestEditsThatRot(t *testing.T) {
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "a.go"), []byte("one one two"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, e := range map[string]Edit{
		"a.go has this text 0 times and must have it once; write the patch anew:\nthree": {"a.go", "three", ""},
		"a.go has this text 2 times and must have it once":                               {"a.go", "one", ""},
		"no such file": {"b.go", "one", ""},
	} {
		if _, err := Files(root, []Edit{e}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", e, err, want)
		}
	}
}
