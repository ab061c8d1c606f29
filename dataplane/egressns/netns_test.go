package egressns

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/testenv"
)

// A program that turns the directory into a shared mount later, as iproute2 does with its own, does not cover a
// gateway's name: the name can be removed, and with the last one the directory.
func TestNameIsNotCoveredByALaterMount(t *testing.T) {
	testenv.NeedRoot(t)
	dir := filepath.Join(t.TempDir(), "netns")
	file := filepath.Join(dir, "one")
	ns, made, err := obtain(file)
	if err != nil || !made {
		t.Fatalf("made %t, %v", made, err)
	}
	ns.Close()
	// if this fails, iproute2 mounts over the directory
	if err := unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		t.Errorf("the directory is not a mount: %v", err)
	}
	if err := Remove(file); err != nil {
		t.Error(err)
	}
	if err := os.Remove(dir); err != nil {
		t.Errorf("the directory of namespaces after the last one: %v", err)
	}
}
