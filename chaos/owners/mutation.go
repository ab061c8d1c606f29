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

// mutation makes two owners: a text of the sources that is replaced while a program is built. No program that is built
// without it has it, or a switch for it.
type mutation struct{ File, Old, New string }

// mutations are those that a run has to find, by name.
var mutations = map[string]mutation{
	// The kernel counts a lease that is five times too long: who waits for the former owner's lease waits too short.
	"long-lease": {"dataplane/egressns/lease.go", "Key: []byte(number(uint32(t))), Timeout: lease}",
		"Key: []byte(number(uint32(t))), Timeout: 5 * lease}"},
}

// Mutations returns their names.
func Mutations() []string { return slices.Sorted(maps.Keys(mutations)) }

// ErrNotFound says that a run with a mutation saw no violation.
var ErrNotFound = errors.New("the mutation was not found")

// BuildMutated builds skein with a bug in it from the sources that the working directory is in, and returns the
// program's path in dir.
func BuildMutated(ctx context.Context, name, dir string) (string, error) {
	p, ok := mutations[name]
	if !ok {
		return "", fmt.Errorf("there is no mutation %.40q: there are %s", name, strings.Join(Mutations(), ", "))
	}
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	mod := strings.TrimSpace(string(out))
	if err == nil && (mod == "" || mod == os.DevNull) {
		err = errors.New("the working directory is in no module")
	}
	if err != nil {
		return "", fmt.Errorf("mutation %s needs go and skein's sources: run it in them: %w", name, err)
	}
	root := filepath.Dir(mod)
	files, err := overlay.Files(root, []mutation{p})
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("mutation %s: %w: run it in skein's sources", name, err)
	}
	if err != nil {
		return "", fmt.Errorf("mutation %s: %w", name, err)
	}
	binary, err := overlay.BuildSkein(ctx, root, dir, files)
	if err != nil {
		return "", fmt.Errorf("mutation %s: %w", name, err)
	}
	return binary, nil
}

// RunMutated runs with a bug in all agents. The error is nil only when the observer found it: what Run says then is the
// report's.
func RunMutated(ctx context.Context, opts Options, name string) (*Report, error) {
	dir, err := os.MkdirTemp("", "skein-owners-")
	if err != nil {
		return &Report{Seed: opts.Seed}, err
	}
	defer os.RemoveAll(dir)
	if opts.Lab.Binary, err = BuildMutated(ctx, name, dir); err != nil {
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
