package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

// Note says that an attachment was taken away while no agent answered. The agent gives its addresses back when it reads
// it.
type Note struct {
	podnet.Key
	NetNS string `json:"netns,omitempty"`
}

// Bounds of notes.
const (
	maxNote  = 8 << 10 // bytes
	maxNotes = 1 << 14 // files that are read at a time
)

// NoteDir is where notes for the agent on this socket lie.
func NoteDir(socket string) string { return filepath.Join(filepath.Dir(socket), "cni-deleted") }

// file is the name of a note's file. Container IDs may hold hyphens, so the content counts and not the name.
func (n Note) file() string { return n.ContainerID + "-" + n.Interface }

// WriteNote leaves a note; one that lies there already is replaced.
func WriteNote(dir string, n Note) error {
	if err := checkNames(n.Key); err != nil {
		return err
	}
	b, err := json.Marshal(n)
	if err != nil {
		return fmt.Errorf("note for the agent: %w", err)
	}
	if len(b) > maxNote {
		n.NetNS = "" // the rest is bounded by checkNames
		return WriteNote(dir, n)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("note for the agent: %w", err)
	}
	if err := writeFile(filepath.Join(dir, n.file()), b, 0o600); err != nil {
		return fmt.Errorf("note for the agent: %w", err)
	}
	return nil
}

// parseNote reads a note. It takes any bytes.
func parseNote(b []byte) (Note, error) {
	var n Note
	if err := json.Unmarshal(b, &n); err != nil {
		return Note{}, fmt.Errorf("a note that cannot be read: %w", err)
	}
	if err := checkNames(n.Key); err != nil {
		return Note{}, fmt.Errorf("a note that names no attachment: %w", err)
	}
	return n, nil
}

// ReadNotes returns the notes in a directory, up to 16384 of them. A file that is not a note is removed and told in the
// error; the rest is returned all the same. A directory that is not there holds none.
func ReadNotes(dir string) ([]Note, error) {
	d, err := os.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("notes of the plugin: %w", err)
	}
	defer d.Close()
	names, err := d.Readdirnames(maxNotes)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("notes of the plugin: %w", err)
	}
	var notes []Note
	var errs []error
	for _, name := range names {
		if strings.HasPrefix(name, ".") { // being written
			continue
		}
		n, err := readNote(filepath.Join(dir, name))
		switch {
		case errors.Is(err, os.ErrNotExist):
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", name, err), os.Remove(filepath.Join(dir, name)))
		default:
			notes = append(notes, n)
		}
	}
	return notes, errors.Join(errs...)
}

func readNote(path string) (Note, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return Note{}, err
	}
	defer f.Close()
	if i, err := f.Stat(); err != nil || !i.Mode().IsRegular() {
		return Note{}, errors.Join(err, errors.New("not a regular file"))
	}
	b, err := readBounded(f, maxNote)
	if err != nil {
		return Note{}, err
	}
	n, err := parseNote(b)
	if err == nil && n.file() != filepath.Base(path) {
		return Note{}, errors.New("its file name belongs to another attachment")
	}
	return n, err
}

// HasNote tells whether there is one for this attachment.
func HasNote(dir string, k podnet.Key) bool {
	_, err := os.Lstat(filepath.Join(dir, Note{Key: k}.file()))
	return err == nil
}

// RemoveNote takes a note away that was acted on; there may be none.
func RemoveNote(dir string, k podnet.Key) error {
	err := os.Remove(filepath.Join(dir, Note{Key: k}.file()))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("note of the plugin: %w", err)
	}
	return nil
}

// errTooLong is what readBounded says of more than it may read.
var errTooLong = errors.New("too long")

// readBounded reads all there is, if that is at most limit bytes.
func readBounded(r io.Reader, limit int) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, int64(limit)+1))
	if err == nil && len(b) > limit {
		err = fmt.Errorf("%w: more than %d bytes", errTooLong, limit)
	}
	return b, err
}

// writeFile puts a whole file into place, or leaves what was there.
func writeFile(path string, b []byte, mode os.FileMode) error {
	return place(path, mode, func(f *os.File) error { _, err := f.Write(b); return err })
}

// place makes a file beside its place and moves it there when it is complete and on the disk.
func place(path string, mode os.FileMode, fill func(*os.File) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".skein-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	err = fill(f)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
