package kerneltest

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// archive writes an initramfs in the "newc" cpio format, which the kernel unpacks.
type archive struct {
	w     io.Writer
	err   error
	inode int
	dirs  map[string]bool
}

func newArchive(w io.Writer) *archive { return &archive{w: w, dirs: map[string]bool{}} }

const (
	modeDir     = 0o040000
	modeFile    = 0o100000
	modeSymlink = 0o120000
	modeChar    = 0o020000
)

// dir makes a directory and those above it.
func (a *archive) dir(name string) {
	name = strings.Trim(path.Clean("/"+name), "/")
	if name == "" || a.dirs[name] {
		return
	}
	a.dir(path.Dir(name))
	a.dirs[name] = true
	a.entry(name, modeDir|0o755, 0, 0, nil)
}

func (a *archive) file(name string, mode uint32, data []byte) {
	a.dir(path.Dir(name))
	a.entry(strings.Trim(name, "/"), modeFile|mode, 0, 0, data)
}

func (a *archive) symlink(name, target string) {
	a.dir(path.Dir(name))
	a.entry(strings.Trim(name, "/"), modeSymlink|0o777, 0, 0, []byte(target))
}

func (a *archive) charDevice(name string, major, minor uint32) {
	a.dir(path.Dir(name))
	a.entry(strings.Trim(name, "/"), modeChar|0o600, major, minor, nil)
}

// copyFile adds a file of this machine.
func (a *archive) copyFile(name string, mode uint32, from string) {
	if a.err != nil {
		return
	}
	data, err := os.ReadFile(from)
	if err != nil {
		a.err = err
		return
	}
	a.file(name, mode, data)
}

// copyTree adds a directory of this machine; none is nothing.
func (a *archive) copyTree(name, from string) {
	if _, err := os.Stat(from); os.IsNotExist(err) || a.err != nil {
		return
	}
	a.err = filepath.WalkDir(from, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(from, p)
		if err != nil {
			return err
		}
		a.copyFile(path.Join(name, filepath.ToSlash(rel)), 0o644, p)
		return a.err
	})
}

func (a *archive) close() error {
	a.entry("TRAILER!!!", 0, 0, 0, nil)
	return a.err
}

func (a *archive) entry(name string, mode, major, minor uint32, data []byte) {
	if a.err != nil {
		return
	}
	a.inode++
	head := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.inode, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name)+1, 0, name)
	for _, b := range [][]byte{[]byte(head), pad(len(head)), data, pad(len(data))} {
		if _, a.err = a.w.Write(b); a.err != nil {
			return
		}
	}
}

// pad fills up to a multiple of four bytes.
func pad(n int) []byte { return make([]byte, (4-n%4)%4) }
