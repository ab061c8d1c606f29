package main

import (
	"os"
	"path/filepath"
	"testing"
)

// The agents' program is the one that is named, else the one beside this program.
func TestFindSkein(t *testing.T) {
	dir := t.TempDir()
	named := filepath.Join(dir, "other")
	if err := os.WriteFile(named, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := findSkein(named); err != nil || got != named {
		t.Errorf("named: %q, %v", got, err)
	}
	if got, err := findSkein(filepath.Join(dir, "missing")); err == nil {
		t.Errorf("missing: %q", got)
	}
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	beside := filepath.Join(filepath.Dir(own), "skein")
	if err := os.WriteFile(beside, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(beside)
	if got, err := findSkein(""); err != nil || got != beside {
		t.Errorf("beside this program: %q, %v", got, err)
	}
}
