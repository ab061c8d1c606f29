package wholefile

import (
	"os"
	"path/filepath"
	"testing"
)

func TestReplace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "made", "file")
	for _, text := range []string{"first", "", "third"} {
		if err := Replace(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil || string(b) != text {
			t.Errorf("%q, %v, want %q", b, err, text)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("%v beside the file, %v", left, err)
	}
	if err := Replace(filepath.Dir(path), nil); err == nil {
		t.Error("a directory is replaced")
	}
	if left, _ := os.ReadDir(filepath.Dir(filepath.Dir(path))); len(left) != 1 {
		t.Errorf("a failure leaves %v", left)
	}
}
