package owners

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// plant is a bug that makes two owners: a text of the sources that is replaced while a program is built. No program that is built
// without it has it, or a switch for it.
type plant struct{ file, old, new string }

// plants are the bugs that a run has to find, by name.
var plants = map[string]plant{
	// The kernel counts a lease that is five times too long: who waits for the former owner's lease does not wait for its end.
	"long-lease": {"dataplane/egressns/lease.go", "Key: []byte(number(uint32(t))), Timeout: lease}", "Key: []byte(number(uint32(t))), Timeout: 5 * lease}"},
}

// Plants names the bugs that can be planted.
func Plants() []string { return slices.Sorted(maps.Keys(plants)) }

// ErrNotFound says that a run with a planted bug saw no violation.
var ErrNotFound = errors.New("the planted bug was not found")

// BuildPlanted builds skein with a bug in it from the sources that the working directory is in, and returns the program's path in dir.
func BuildPlanted(ctx context.Context, name, dir string) (string, error) {
	p, ok := plants[name]
	if !ok {
		return "", fmt.Errorf("there is no bug %.40q to plant: there are %s", name, strings.Join(Plants(), ", "))
	}
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	mod := strings.TrimSpace(string(out))
	if err != nil || mod == "" || mod == os.DevNull {
		return "", fmt.Errorf("planting %s needs go and skein's sources: run it in them (go env GOMOD: %q, %w)", name, mod, err)
	}
	root := filepath.Dir(mod)
	text, err := os.ReadFile(filepath.Join(root, p.file))
	if err != nil {
		return "", fmt.Errorf("planting %s: %w: run it in skein's sources", name, err)
	}
	if n := bytes.Count(text, []byte(p.old)); n != 1 {
		return "", fmt.Errorf("planting %s: %s has this text %d times and must have it once; write the patch anew: %s", name, p.file, n, p.old)
	}
	patched, list, binary := filepath.Join(dir, "planted.go"), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "skein")
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(root, p.file): patched}})
	if err != nil {
		return "", err
	}
	if err := errors.Join(os.WriteFile(patched, bytes.Replace(text, []byte(p.old), []byte(p.new), 1), 0o600), os.WriteFile(list, overlay, 0o600)); err != nil {
		return "", err
	}
	build := exec.CommandContext(ctx, "go", "build", "-ldflags=-s -w", "-overlay", list, "-o", binary, "./cmd/skein")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building skein with %s: %w\n%s", name, err, out)
	}
	return binary, nil
}

// RunPlanted runs with a bug in all agents. The error is nil only when the observer found it: what Run says then is the report's.
func RunPlanted(ctx context.Context, opts Options, name string) (*Report, error) {
	dir, err := os.MkdirTemp("", "skein-owners-")
	if err != nil {
		return &Report{Seed: opts.Seed}, err
	}
	defer os.RemoveAll(dir)
	if opts.Lab.Binary, err = BuildPlanted(ctx, name, dir); err != nil {
		return &Report{Seed: opts.Seed}, err
	}
	r, err := Run(ctx, opts)
	switch {
	case len(r.Violations) > 0:
		return r, nil
	case err != nil:
		return r, err
	}
	return r, fmt.Errorf("%w: %s, in %d schedules of seed %d", ErrNotFound, name, r.Schedules, r.Seed)
}
