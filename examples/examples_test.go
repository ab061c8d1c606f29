package examples

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/owners"
	"github.com/skeinmesh/skein/internal/testenv"
)

// kernelLabs begin the names of examples that the kernel tier runs, in a guest where the host has no WireGuard.
const kernelLabs = "kernel-"

// parallel is how many labs run at once. An agent needs little, but a loaded machine is a slow one.
var parallel = max(1, runtime.NumCPU()/2)

func TestExamples(t *testing.T) {
	if testing.Short() {
		t.Skip("real agents in real scenarios: run without -short")
	}
	testenv.NeedRoot(t)
	files, err := filepath.Glob("*.yaml")
	if err != nil || len(files) < 7 {
		t.Fatalf("%d examples, %v", len(files), err)
	}
	binary := build(t)
	seats := make(chan struct{}, parallel)
	for _, file := range files {
		name := strings.TrimSuffix(file, ".yaml")
		if strings.HasPrefix(name, kernelLabs) {
			t.Logf("%s: not here: the kernel tier runs it", file)
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seats <- struct{}{}
			defer func() { <-seats }()
			runExample(t, file, binary)
		})
	}
	t.Run("owners", func(t *testing.T) {
		t.Parallel()
		seats <- struct{}{}
		defer func() { <-seats }()
		runOwners(t, binary)
	})
}

// runOwners is the short form of `make owners`.
func runOwners(t *testing.T, binary string) {
	dir, err := os.MkdirTemp("", "sk")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	artifacts := os.Getenv("SKEIN_ARTIFACTS")
	if artifacts == "" {
		artifacts = t.TempDir()
	}
	r, err := owners.Run(t.Context(), owners.Options{Name: fmt.Sprintf("x%d-owners", os.Getpid()%10000), Schedules: 6,
		Seed: 1, Artifacts: artifacts, Progress: func(s string) { t.Log(s) },
		Lab: lab.Options{Dir: dir, Binary: binary, Artifacts: artifacts}})
	var text strings.Builder
	r.Text(&text)
	t.Log(text.String())
	if err != nil {
		t.Error(err)
	}
}

func build(t *testing.T) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "skein")
	cmd := exec.Command("go", "build", "-o", binary, "../cmd/skein")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build skein: %v\n%s", err, out)
	}
	return binary
}

func runExample(t *testing.T, file, binary string) {
	spec, err := lab.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	name := spec.Name
	spec.Name = fmt.Sprintf("x%d-%s", os.Getpid()%10000, name) // beside a lab of the same file that is up
	dir, err := os.MkdirTemp("", "sk")                         // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	var mu sync.Mutex
	var said []string
	artifacts := os.Getenv("SKEIN_ARTIFACTS")
	if artifacts == "" {
		artifacts = t.TempDir()
	}
	res, err := lab.Run(t.Context(), spec, lab.RunOptions{Artifacts: artifacts, Options: lab.Options{Dir: dir,
		Binary: binary, Progress: func(s string) {
			mu.Lock()
			said = append(said, s)
			mu.Unlock()
		}}})
	if err != nil {
		t.Errorf("%v\n%s\nfailed: %v", err, strings.Join(said, "\n"), err) // again: a log is often cut at its head
		return
	}
	t.Logf("%d steps held in %.1fs, up in %.1fs", len(res.Steps), res.Seconds, res.UpSeconds)
	if list, err := lab.List(dir); err == nil && slices.Contains(list, spec.Name) {
		t.Error("something of the lab is left")
		_ = lab.Down(context.Background(), spec.Name, dir)
	}
}
