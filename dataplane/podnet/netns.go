package podnet

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// CheckNetNS checks the path of a pod's network namespace. The error is ErrNoNetNS if there is none.
func CheckNetNS(path string) error {
	ns, err := openNetNS(path)
	if err != nil {
		return err
	}
	return ns.Close()
}

// openNetNS opens a network namespace that is not the calling thread's own.
func openNetNS(path string) (*os.File, error) {
	if path == "" {
		return nil, fmt.Errorf("%w: its path is empty", ErrNoNetNS)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // opening a pipe must not block
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return nil, fmt.Errorf("%w at %s: there is no such file; the pod may be gone", ErrNoNetNS, path)
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENAMETOOLONG),
		errors.Is(err, unix.EINVAL):
		return nil, fmt.Errorf("%w at %.200s: %w", ErrNoNetNS, path, err)
	case err != nil:
		return nil, fmt.Errorf("opening the network namespace %s: %w", path, err)
	}
	if err := isNetNS(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func isNetNS(f *os.File) error {
	var kind unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &kind); err != nil {
		return fmt.Errorf("looking at %s: %w", f.Name(), err)
	}
	if kind.Type != unix.NSFS_MAGIC {
		return fmt.Errorf("%w at %s: it is a file of another kind", ErrNoNetNS, f.Name())
	}
	what, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE)
	if err != nil {
		return fmt.Errorf("looking at %s: %w", f.Name(), err)
	}
	if what != unix.CLONE_NEWNET {
		return fmt.Errorf("%w at %s: it is a namespace of another kind", ErrNoNetNS, f.Name())
	}
	var there, here unix.Stat_t
	if err := errors.Join(unix.Fstat(int(f.Fd()), &there), unix.Stat("/proc/thread-self/ns/net", &here)); err != nil {
		return fmt.Errorf("comparing %s with the host's own network namespace: %w", f.Name(), err)
	}
	if there.Ino == here.Ino && there.Dev == here.Dev {
		return fmt.Errorf("%w of a pod at %s: it is the host's own", ErrNoNetNS, f.Name())
	}
	return nil
}
