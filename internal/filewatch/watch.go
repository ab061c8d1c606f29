package filewatch

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// ofEntries is what can put another content in an entry's place. IN_MODIFY is not among it: a writer closes the
	// file when it has written all.
	ofEntries = unix.IN_CLOSE_WRITE | unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
		unix.IN_ATTRIB
	ofDirectory = unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK
	bufferSize  = 64 * (unix.SizeofInotifyEvent + unix.NAME_MAX + 1)
)

// watcher holds the watches of one file's way.
type watcher struct {
	file  string
	fd    int
	names map[int]map[string]bool // by watch descriptor: the entries that matter
}

// Watch calls changed whenever the content that file leads to may be another one, until ctx ends; then it returns nil.
// It calls it once when the watches stand, too. A series of events calls it several times. The file's path is taken
// from the working directory if it is relative. An error says that the kernel gives no watches.
func Watch(ctx context.Context, file string, changed func()) error {
	file, err := filepath.Abs(file)
	if err != nil {
		return fmt.Errorf("watch %s: %w", file, err)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fmt.Errorf("watch %s: inotify: %w (raise fs.inotify.max_user_instances?)", file, err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	defer f.Close()
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) }) // ends Read
	defer stop()
	w := &watcher{file: file, fd: fd, names: map[int]map[string]bool{}}
	if err := w.follow(); err != nil {
		return err
	}
	changed()
	buffer := make([]byte, bufferSize)
	for {
		n, err := f.Read(buffer)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("watch %s: %w", file, err)
		case !w.concerns(buffer[:n]):
			continue
		}
		if err := w.follow(); err != nil {
			return err
		}
		changed()
	}
}

// follow watches the way as it is now. It looks again until nothing has changed meanwhile: what changed before its
// watch stood would not be told of.
func (w *watcher) follow() error {
	for steps := way(w.file); ; {
		names := map[int]map[string]bool{}
		for _, s := range steps {
			wd, err := unix.InotifyAddWatch(w.fd, s.dir, ofEntries|ofDirectory)
			switch {
			case err == unix.ENOENT || err == unix.ENOTDIR || err == unix.EACCES:
				continue // it has just gone; the step before it is watched
			case err != nil:
				return fmt.Errorf("watch %s: directory %s: %w (raise fs.inotify.max_user_watches?)", w.file, s.dir, err)
			}
			if names[wd] == nil {
				names[wd] = map[string]bool{}
			}
			names[wd][s.name] = true
		}
		for wd := range w.names {
			if names[wd] == nil {
				_, _ = unix.InotifyRmWatch(w.fd, uint32(wd)) // the kernel removes that of a directory that has gone itself
			}
		}
		settled := maps.EqualFunc(names, w.names, maps.Equal[map[string]bool, map[string]bool])
		w.names = names
		again := way(w.file)
		if settled && slices.Equal(again, steps) {
			return nil
		}
		steps = again
	}
}

// concerns reports whether one of the events is about an entry on the way, or about a directory of it, or says that
// others were lost.
func (w *watcher) concerns(b []byte) bool {
	for len(b) >= unix.SizeofInotifyEvent {
		wd, mask := int(int32(binary.NativeEndian.Uint32(b))), binary.NativeEndian.Uint32(b[4:])
		size := int(binary.NativeEndian.Uint32(b[12:]))
		b = b[unix.SizeofInotifyEvent:]
		size = min(size, len(b))
		name := bytes.TrimRight(b[:size], "\x00")
		b = b[size:]
		switch {
		case mask&unix.IN_Q_OVERFLOW != 0:
			return true
		case w.names[wd] == nil || mask&unix.IN_IGNORED != 0:
		case mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_UNMOUNT) != 0, w.names[wd][string(name)]:
			return true
		}
	}
	return false
}
