package soak

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/testenv"
)

// The first minute of what `make soak` does for five.
func TestSoak(t *testing.T) {
	testenv.NeedRoot(t)
	opts := Options{For: 45 * time.Second, Half: 6, Freeze: true, Seed: 1, Progress: t.Logf}
	if testing.Short() {
		opts.For = 10 * time.Second
	}
	ctx, cancel := context.WithTimeout(t.Context(), opts.For+4*time.Minute)
	defer cancel()
	base, err := os.MkdirTemp("", "sks") // unix sockets allow only short paths
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	binary := filepath.Join(base, "skein")
	build := exec.CommandContext(ctx, "go", "build", "-o", binary, "github.com/skeinmesh/skein/cmd/skein")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build skein: %v\n%s", err, out)
	}
	spec, err := lab.Parse("soak.yaml", Mesh)
	if err != nil {
		t.Fatal(err)
	}
	spec.Name = fmt.Sprintf("soak%d", os.Getpid()) // beside a lab that somebody keeps, and another run
	l, err := lab.Up(ctx, spec, lab.Options{Dir: base, Binary: binary})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	report, err := Run(ctx, l, opts)
	if err != nil {
		dir, _ := l.SaveArtifacts(context.WithoutCancel(ctx), filepath.Join(os.TempDir(), "lab-failures"))
		t.Fatalf("%v\nlogs and states are in %s", err, dir)
	}
	t.Logf("%+v", report)
	if report.Resources.Readings < 2 || len(report.Resources.Rest) == 0 {
		t.Errorf("agents were asked %d times what they hold, and %d resources compared", report.Resources.Readings, len(report.Resources.Rest))
	}
	if report.Commands == 0 || report.Looks < 100 {
		t.Errorf("%d commands, %d answers checked: too few to prove anything", report.Commands, report.Looks)
	}
}
