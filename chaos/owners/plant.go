package owners

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/skeinmesh/skein/chaos/overlay"
)

// plant is a bug that makes two owners: a text of the sources that is replaced while a program is built. No program
// that is built without it has it, or a switch for it.
type plant struct{ File, Old, New string }

// plants are the bugs that a run has to find, by name.
var plants = map[string]plant{
	// The kernel counts a lease that is five times too long: who waits for the former owner's lease waits too short.
	"long-lease": {"dataplane/egressns/lease.go", "Key: []byte(number(uint32(t))), Timeout: lease}",
		"Key: []byte(number(uint32(t))), Timeout: 5 * lease}"},
}

// Plants names the bugs that can be planted.
func Plants() []string { return slices.Sorted(maps.Keys(plants)) }

// ErrNotFound says that a run with a planted bug saw no violation.
var ErrNotFound = errors.New("the planted bug was not found")

// BuildPlanted builds skein with a bug in it from the sources that the working directory is in, and returns the
// program's path in dir.
func BuildPlanted(ctx context.Context, name, dir string) (string, error) {
	p, ok := plants[name]
	if !ok {
		return "", fmt.Errorf("there is no bug %.40q to plant: there are %s", name, strings.Join(Plants(), ", "))
	}
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	mod := strings.TrimSpace(string(out))
	if err == nil && (mod == "" || mod == os.DevNull) {
		err = errors.New("the working directory is in no module")
	}
	if err != nil {
		return "", fmt.Errorf("planting %s needs go and skein's sources: run it in them: %w", name, err)
	}
	root := filepath.Dir(mod)
	files, err := overlay.Files(root, []plant{p})
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("planting %s: %w: run it in skein's sources", name, err)
	}
	if err != nil {
		return "", fmt.Errorf("planting %s: %w", name, err)
	}
	binary, err := overlay.BuildSkein(ctx, root, dir, files)
	if err != nil {
		return "", fmt.Errorf("planting %s: %w", name, err)
	}
	return binary, nil
}

// RunPlanted runs with a bug in all agents. The error is nil only when the observer found it: what Run says then is the
// report's.
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
