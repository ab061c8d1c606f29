package marks

import (
	"os"
	"path/filepath"
	"testing"
)

func TestInsert(t *testing.T) {
	begin := Begin("make it")
	got, err := Insert("before\n"+begin+"\nold\n"+End+"\nafter\n", begin, "new\n")
	if want := "before\n" + begin + "\nnew\n" + End + "\nafter\n"; err != nil || got != want {
		t.Fatalf("%q, %v; want %q", got, err, want)
	}
	if text, ok := Text(got, begin); !ok || text != "\nnew\n" {
		t.Errorf("between the marks: %q, %v", text, ok)
	}
	for _, bad := range []string{"", "no marks", begin, End, End + begin} {
		if got, err := Insert(bad, begin, "new"); err == nil {
			t.Errorf("%q gives %q", bad, got)
		}
	}
}

// TestInsertFile: a document without a place for it stays as it is.
func TestInsertFile(t *testing.T) {
	path, begin := filepath.Join(t.TempDir(), "a.md"), Begin("make it")
	if err := os.WriteFile(path, []byte("no marks"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := InsertFile(path, begin, "new"); err == nil {
		t.Error("a document without marks was written")
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "no marks" {
		t.Errorf("%q, %v", b, err)
	}
	if InsertFile(path+"x", begin, "new") == nil {
		t.Error("a missing document was written")
	}
}
