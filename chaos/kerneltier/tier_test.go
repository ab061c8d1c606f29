package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Packages that test against a kernel run in the tier that has other kernels, too.
func TestKernelTestsAreInTheTier(t *testing.T) {
	files, err := filepath.Glob("../../dataplane/*/kernel_test.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d packages with tests of the kernel, %v", len(files), err)
	}
	for _, f := range files {
		if dir := "./" + strings.TrimPrefix(filepath.Dir(f), "../../"); !slices.Contains(defaultPackages, dir) {
			t.Errorf("%s is not among defaultPackages", dir)
		}
	}
	for _, dir := range defaultPackages {
		if _, err := os.Stat(filepath.Join("../..", dir)); err != nil {
			t.Error(err)
		}
	}
}
