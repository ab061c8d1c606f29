// Package labtest raises labs of this repository's program for tests, and takes them down.
package labtest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/testenv"
)

// Program builds skein into a directory that goes with the test. The directory's name is short, as paths of unix
// sockets have to be.
func Program(t testing.TB) (dir, binary string) {
	t.Helper()
	testenv.NeedRoot(t)
	dir, err := os.MkdirTemp("", "sk")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	binary = filepath.Join(dir, "skein")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "github.com/skeinmesh/skein/cmd/skein")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build skein: %v\n%s", err, out)
	}
	return dir, binary
}

// Up raises the lab that a YAML text describes, with a directory of the test's own. The process ID behind its name lets
// it stand beside a lab that somebody keeps, and beside another run. When the test has failed, logs and states are
// kept.
func Up(t testing.TB, name, text string) (l *lab.Lab, dir string) {
	t.Helper()
	dir, binary := Program(t)
	spec, err := lab.Parse(name+".yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	spec.Name = fmt.Sprintf("%s%d", name, os.Getpid())
	l, err = lab.Up(t.Context(), spec, lab.Options{Dir: filepath.Join(dir, "lab"), Binary: binary})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			kept, err := l.SaveArtifacts(context.Background(), filepath.Join(os.TempDir(), "lab-failures"))
			t.Logf("logs and states are in %s (%v)", kept, err)
		}
		if err := l.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return l, dir
}
