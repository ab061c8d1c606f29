package overlay

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Edit replaces a text, which the file has exactly once. File is relative to the module's root.
type Edit struct{ File, Old, New string }

// Files gives the sources below root with the edits in them, by path. Callers have a type of their own for edits, which
// they may write without naming its fields.
func Files[E ~struct{ File, Old, New string }](root string, edits []E) (map[string][]byte, error) {
	out := make(map[string][]byte)
	for _, x := range edits {
		e := Edit(x)
		path := filepath.Join(root, e.File)
		text, ok := out[path]
		if !ok {
			var err error
			if text, err = os.ReadFile(path); err != nil {
				return nil, err
			}
		}
		if n := bytes.Count(text, []byte(e.Old)); n != 1 {
			return nil, fmt.Errorf("%s has this text %d times and must have it once; write the patch anew:\n%s",
				e.File, n, e.Old)
		}
		out[path] = bytes.Replace(text, []byte(e.Old), []byte(e.New), 1)
	}
	return out, nil
}

// Write puts edited files and go's list of them into dir, and returns the list's path, for -overlay.
func Write(dir string, files map[string][]byte) (list string, err error) {
	named := struct{ Replace map[string]string }{map[string]string{}}
	for path, text := range files {
		edited := filepath.Join(dir, fmt.Sprintf("%d-%s", len(named.Replace), filepath.Base(path)))
		named.Replace[path] = edited
		if err := os.WriteFile(edited, text, 0o600); err != nil {
			return "", err
		}
	}
	encoded, err := json.Marshal(named)
	if err != nil {
		return "", err
	}
	list = filepath.Join(dir, "overlay.json")
	return list, os.WriteFile(list, encoded, 0o600)
}

// BuildSkein builds the skein of the sources below root, an absolute path, with edited files, and returns the program's
// path in dir. It has nothing for a debugger in it, which halves the time to link.
func BuildSkein(ctx context.Context, root, dir string, files map[string][]byte) (binary string, err error) {
	list, err := Write(dir, files)
	if err != nil {
		return "", err
	}
	binary = filepath.Join(dir, "skein")
	cmd := exec.CommandContext(ctx, "go", "build", "-ldflags=-s -w", "-overlay", list, "-o", binary, "./cmd/skein")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build skein: %w\n%s", err, out)
	}
	return binary, nil
}
