// Package netnsdir readies a directory for the names of network namespaces, as iproute2 does it.
//
// A name is a file that a namespace is mounted on. iproute2 turns /run/netns into a shared mount, so that names also
// appear in other mount namespaces, when it first makes a name. That mount covers the names that were made before: they
// can be used still, but not removed, since below the new mount another one holds their file. So whoever makes a name
// first makes the mount.
//
// Safe for concurrent use, also by several processes and beside iproute2, which takes the same lock.
package netnsdir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// System is the directory that all software on a host shares; `ip netns` looks for names there.
const System = "/run/netns"

// Prepare makes the directory if it is missing, and a shared mount of it if it is none yet. A directory that has names
// already is left as it is, since a mount would cover them. Names are made before unlock is called, so that Release
// cannot come between.
func Prepare(dir string, mode fs.FileMode) (unlock func(), err error) {
	if err := os.MkdirAll(dir, mode); err != nil {
		return nil, fmt.Errorf("making the directory of network namespaces: %w", err)
	}
	unlock, err = lock(dir)
	if err != nil {
		return nil, err
	}
	if err := share(dir); err != nil {
		unlock()
		return nil, fmt.Errorf("making %s a mount for network namespaces: %w: this needs CAP_SYS_ADMIN", dir, err)
	}
	return unlock, nil
}

func share(dir string) error {
	const all = unix.MS_SHARED | unix.MS_REC
	err := unix.Mount("", dir, "none", all, "")
	if !errors.Is(err, unix.EINVAL) { // which means: no mount
		return err
	}
	if named, err := hasNames(dir); named || err != nil {
		return err
	}
	if err := unix.Mount(dir, dir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	return unix.Mount("", dir, "none", all, "")
}

// Release takes away the mount that Prepare made of a directory, if no name is left there. It is not for System, where
// names of others may come at any time.
func Release(dir string) error {
	unlock, err := lock(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	if named, err := hasNames(dir); named || err != nil {
		return err
	}
	var here, above unix.Stat_t
	if err := errors.Join(unix.Stat(dir, &here), unix.Stat(filepath.Dir(dir), &above)); err != nil {
		return err
	}
	if here.Dev != above.Dev {
		return nil // another file system: mounted by somebody else
	}
	// no mount
	if err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmounting the directory of network namespaces %s: %w", dir, err)
	}
	return nil
}

// lock is the directory's own lock, which iproute2 takes, too, while it prepares it.
func lock(dir string) (unlock func(), err error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the directory of network namespaces: %w", err)
	}
	for {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("locking the directory of network namespaces %s: %w", dir, err)
	}
	return func() { f.Close() }, nil
}

// hasNames reports whether something is mounted on a file in the directory.
func hasNames(dir string) (bool, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false, fmt.Errorf("reading the directory of network namespaces: %w", err)
	}
	var here unix.Stat_t
	if err := unix.Stat(dir, &here); err != nil {
		return false, err
	}
	for _, e := range entries {
		var st unix.Stat_t
		err := unix.Lstat(filepath.Join(dir, e.Name()), &st)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return false, err
		}
		if st.Dev != here.Dev {
			return true, nil
		}
	}
	return false, nil
}
