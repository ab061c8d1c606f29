package journal

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestTail reads the newest entries of a journal at rest, and leaves it as it was.
func TestTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal.db")
	if _, err := Tail(path, 3); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of none: %v", err)
	}
	j, err := Open(path, 100)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		j.Append(entry(i))
	}
	if err := j.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := Tail(path, 3); !errors.Is(err, ErrInUse) {
		t.Errorf("of one in use: %v", err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	before, _ := os.ReadFile(path)
	got, err := Tail(path, 3)
	if err != nil || len(got) != 3 || got[0].GetSeq() != 8 || got[2].GetSeq() != 10 {
		t.Errorf("%v, %v", got, err)
	}
	if all, err := Tail(path, 1000); err != nil || len(all) != 10 {
		t.Errorf("%d entries, %v", len(all), err)
	}
	if after, _ := os.ReadFile(path); string(after) != string(before) {
		t.Error("reading changed the file")
	}
	if err := os.WriteFile(path, []byte("this is not a journal"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Tail(path, 3); !errors.Is(err, ErrDamaged) {
		t.Errorf("of a damaged one: %v", err)
	}
}
