package kube

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Image is a container image that is made on this machine: a file system, and how to start it.
type Image struct {
	Names      []string          // with tags; all of them are the same image
	Tree       string            // a directory of this machine that the image begins with; may be empty
	Programs   map[string]string // files of the image, by their paths in it; values are files of this machine
	Links      map[string]string // symbolic links of the image; values are their targets
	Texts      map[string]string // small files of the image; values are their contents
	Entrypoint []string
	Command    []string
	Env        []string
}

// directories are in every image. Runtimes mount over some of them.
var directories = []string{"bin", "dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var"}

// WriteArchive writes images in the format of `docker save`, which container runtimes import.
func WriteArchive(w io.Writer, images ...Image) error {
	t := tar.NewWriter(w)
	var manifest []map[string]any
	layers := layerSet{to: t, written: map[string]bool{}, trees: map[string]string{}}
	for _, im := range images {
		ids, err := layers.add(im)
		if err != nil {
			return fmt.Errorf("image %s: %w", im.Names[0], err)
		}
		var sums, files []string
		var history []any
		for _, id := range ids {
			sums, files = append(sums, "sha256:"+id), append(files, id+"/layer.tar")
			history = append(history, map[string]any{"created_by": "skein's tests"})
		}
		config, err := json.Marshal(map[string]any{
			"architecture": "amd64", "os": "linux",
			"config": map[string]any{"Entrypoint": im.Entrypoint, "Cmd": im.Command,
				"Env": append([]string{"PATH=/bin:/usr/bin:/sbin:/usr/sbin"}, im.Env...)},
			"rootfs":  map[string]any{"type": "layers", "diff_ids": sums},
			"history": history,
		})
		if err != nil {
			return err
		}
		name := digest(config) + ".json"
		if err := put(t, name, config); err != nil {
			return err
		}
		manifest = append(manifest, map[string]any{"Config": name, "RepoTags": im.Names, "Layers": files})
	}
	b, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	if err := put(t, "manifest.json", b); err != nil {
		return err
	}
	return t.Close()
}

// layerSet writes each layer once, whichever images have it.
type layerSet struct {
	to      *tar.Writer
	written map[string]bool
	trees   map[string]string // digests, by directory
}

// add writes an image's layers and returns their digests, the lowest first.
func (s layerSet) add(im Image) (ids []string, err error) {
	if im.Tree != "" {
		if s.trees[im.Tree] == "" {
			b, err := tree(im.Tree)
			if err != nil {
				return nil, err
			}
			if s.trees[im.Tree], err = s.put(b); err != nil {
				return nil, err
			}
		}
		ids = append(ids, s.trees[im.Tree])
	}
	b, err := im.layer()
	if err != nil {
		return nil, err
	}
	id, err := s.put(b)
	return append(ids, id), err
}

func (s layerSet) put(layer []byte) (string, error) {
	id := digest(layer)
	if s.written[id] {
		return id, nil
	}
	s.written[id] = true
	return id, put(s.to, id+"/layer.tar", layer)
}

// tree is a directory of this machine as a layer: its directories, files and symbolic links.
func tree(dir string) ([]byte, error) {
	var buf bytes.Buffer
	t := tar.NewWriter(&buf)
	err := filepath.WalkDir(dir, func(file string, e fs.DirEntry, err error) error {
		name := strings.TrimPrefix(strings.TrimPrefix(file, dir), "/")
		if err != nil || name == "" {
			return err
		}
		return entry(t, file, name)
	})
	return buf.Bytes(), errors.Join(err, t.Close())
}

func entry(t *tar.Writer, file, name string) error {
	st, err := os.Lstat(file)
	if err != nil {
		return err
	}
	h := &tar.Header{Name: name, Mode: int64(st.Mode().Perm())}
	switch st.Mode().Type() {
	case fs.ModeDir:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	case fs.ModeSymlink:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = os.Readlink(file); err != nil {
			return err
		}
	case 0:
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		h.Size = int64(len(b))
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		_, err = t.Write(b)
		return err
	default:
		return nil // a device or a socket
	}
	return t.WriteHeader(h)
}

func put(t *tar.Writer, name string, b []byte) error {
	if err := t.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(b))}); err != nil {
		return err
	}
	_, err := t.Write(b)
	return err
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// layer is the image's own files, over those of its tree.
func (im Image) layer() ([]byte, error) {
	var buf bytes.Buffer
	t := tar.NewWriter(&buf)
	made := map[string]bool{}
	var dir func(string) error
	dir = func(d string) error {
		if d == "." || d == "/" || made[d] {
			return nil
		}
		made[d] = true
		if err := dir(path.Dir(d)); err != nil {
			return err
		}
		mode := int64(0o755)
		if d == "tmp" {
			mode = 0o1777
		}
		return t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: d + "/", Mode: mode})
	}
	for _, d := range directories {
		if err := dir(d); err != nil {
			return nil, err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(im.Programs)) {
		b, err := os.ReadFile(im.Programs[name])
		if err != nil {
			return nil, err
		}
		if err := im.file(t, dir, name, b, 0o755); err != nil {
			return nil, err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(im.Texts)) {
		if err := im.file(t, dir, name, []byte(im.Texts[name]), 0o644); err != nil {
			return nil, err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(im.Links)) {
		n := strings.TrimPrefix(name, "/")
		if err := dir(path.Dir(n)); err != nil {
			return nil, err
		}
		if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: n, Linkname: im.Links[name],
			Mode: 0o777}); err != nil {
			return nil, err
		}
	}
	err := t.Close()
	return buf.Bytes(), err
}

func (im Image) file(t *tar.Writer, dir func(string) error, name string, b []byte, mode int64) error {
	name = strings.TrimPrefix(name, "/")
	if err := dir(path.Dir(name)); err != nil {
		return err
	}
	if err := t.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(b))}); err != nil {
		return err
	}
	_, err := t.Write(b)
	return err
}

// applets are the programs that images have of busybox.
var applets = []string{"cat", "date", "dd", "echo", "env", "false", "grep", "head", "hostname", "id",
	"ip", "kill", "ls",
	"mkdir", "nc", "nslookup", "ping", "printf", "ps", "rm", "seq", "sh", "sleep", "tail", "test", "touch", "true", "wc",
	"wget"}

// busybox is an image with a shell; more programs may be added to it.
func busybox(file string, names ...string) Image {
	im := Image{Names: names, Programs: map[string]string{"bin/busybox": file}, Links: map[string]string{},
		Texts: map[string]string{
			"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
			"etc/group":  "root:x:0:\n",
		}}
	for _, a := range applets {
		im.Links["bin/"+a] = "busybox"
	}
	return im
}
