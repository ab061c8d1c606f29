package kube

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
)

// Image is a container image that is made on this machine: a file system of one layer, and how to start it.
type Image struct {
	Names      []string          // with tags; all of them are the same image
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
	for _, im := range images {
		layer, err := im.layer()
		if err != nil {
			return fmt.Errorf("image %s: %w", im.Names[0], err)
		}
		id := digest(layer)
		config, err := json.Marshal(map[string]any{
			"architecture": "amd64", "os": "linux",
			"config": map[string]any{"Entrypoint": im.Entrypoint, "Cmd": im.Command,
				"Env": append([]string{"PATH=/bin:/usr/bin:/sbin:/usr/sbin"}, im.Env...)},
			"rootfs":  map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + id}},
			"history": []any{map[string]any{"created_by": "skein's tests"}},
		})
		if err != nil {
			return err
		}
		name := digest(config) + ".json"
		if err := put(t, name, config); err != nil {
			return err
		}
		if err := put(t, id+"/layer.tar", layer); err != nil {
			return err
		}
		manifest = append(manifest, map[string]any{"Config": name, "RepoTags": im.Names, "Layers": []string{id + "/layer.tar"}})
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

// layer is the image's file system.
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
		if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: n, Linkname: im.Links[name], Mode: 0o777}); err != nil {
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
var applets = []string{"cat", "date", "dd", "echo", "env", "false", "grep", "head", "hostname", "id", "ip", "kill", "ls",
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
