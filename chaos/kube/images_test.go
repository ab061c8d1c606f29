package kube

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// entries are the names in an archive, with the targets of links and a star for programs, and the files' contents.
func entries(t *testing.T, archive []byte) (names []string, files map[string][]byte) {
	t.Helper()
	files = map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names, files
		}
		if err != nil {
			t.Fatal(err)
		}
		name := h.Name
		if h.Typeflag == tar.TypeSymlink {
			name += " -> " + h.Linkname
		} else if h.Mode&0o111 != 0 && h.Typeflag == tar.TypeReg {
			name += "*"
		}
		names = append(names, name)
		if files[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

// Images that begin with the same tree share its layer.
func TestWriteArchiveWithATree(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, "bin"), 0o755), os.Symlink("dash", filepath.Join(dir, "bin/sh")),
		os.WriteFile(filepath.Join(dir, "bin/dash"), []byte("a shell"), 0o755)); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	err := WriteArchive(&out, Image{Names: []string{"a:1", "b:1"}, Tree: dir, Texts: map[string]string{"note": "one"}},
		Image{Names: []string{"c:1"}, Tree: dir, Texts: map[string]string{"note": "other"}})
	if err != nil {
		t.Fatal(err)
	}
	names, files := entries(t, out.Bytes())
	var layers [][]string
	for _, n := range names {
		if strings.HasSuffix(n, "/layer.tar") {
			inside, _ := entries(t, files[n])
			layers = append(layers, inside)
		}
	}
	if len(layers) != 3 {
		t.Fatalf("%d layers, want the tree's and one of each image: %q", len(layers), names)
	}
	if want := []string{"bin/", "bin/dash*", "bin/sh -> dash"}; !slices.Equal(layers[0], want) {
		t.Errorf("the tree's layer has %q, want %q", layers[0], want)
	}
	manifest := string(files["manifest.json"])
	for n := range files {
		if strings.HasSuffix(n, "/layer.tar") && !strings.Contains(manifest, n) {
			t.Errorf("no image has the layer %s", n)
		}
	}
	if !strings.Contains(manifest, `"RepoTags":["a:1","b:1"]`) {
		t.Errorf("the manifest is %s", manifest)
	}
}
