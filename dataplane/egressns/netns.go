package egressns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/rtnl"
	"github.com/skeinmesh/skein/internal/netnsdir"
)

// inside runs f in a network namespace, on a separate thread.
func inside(ns *os.File, f func() error) error { return rtnl.Inside(netns.NsHandle(ns.Fd()), f) }

// obtain opens the namespace at file, and makes it if there is none.
func obtain(file string) (ns *os.File, made bool, err error) {
	unlock, err := netnsdir.Prepare(filepath.Dir(file), 0o700)
	if err != nil {
		return nil, false, err
	}
	defer unlock()
	switch err := podnet.CheckNetNS(file); {
	case err == nil:
		ns, err = os.Open(file)
		return ns, false, err
	case !errors.Is(err, podnet.ErrNoNetNS):
		return nil, false, err
	}
	// An earlier run may have ended between making the file and mounting, or the machine has rebooted since.
	st, err := os.Lstat(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, false, err
	case !st.Mode().IsRegular() || st.Size() != 0:
		return nil, false, fmt.Errorf("%s is where an egress's network namespace belongs, and is neither a namespace nor "+
			"an empty file: move it away", file)
	}
	if err := mounted(file, mountNew); err != nil {
		return nil, false, err
	}
	ns, err = os.Open(file)
	return ns, true, err
}

// mounted makes a file on which mount then mounts a namespace.
func mounted(file string, mount func(file string) error) error {
	f, err := os.OpenFile(file, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	f.Close()
	if err := mount(file); err != nil {
		err = fmt.Errorf("mounting a network namespace at %s: %w: this needs CAP_SYS_ADMIN", file, err)
		return errors.Join(err, os.Remove(file))
	}
	return nil
}

// mountNew makes a namespace and binds it to the file, which keeps it alive without a process.
func mountNew(file string) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", file, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	return <-done
}

// Rename renames a namespace without interrupting it. If from is not a namespace, nothing happens; if both names are of
// one namespace, from is removed.
func Rename(from, to string) error {
	if from == to {
		return nil
	}
	switch err := podnet.CheckNetNS(from); {
	case errors.Is(err, podnet.ErrNoNetNS):
		return nil
	case err != nil:
		return err
	}
	same, err := sameFile(from, to)
	if err != nil {
		return fmt.Errorf("renaming network namespace %s to %s: %w", from, to, err)
	}
	if !same { // otherwise an earlier rename was interrupted between its two steps
		if err := bind(from, to); err != nil {
			return err
		}
	}
	if err := unix.Unmount(from, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmounting network namespace %s, which is also mounted at %s: %w", from, to, err)
	}
	return os.Remove(from)
}

// bind gives the namespace at from a second name.
func bind(from, to string) error {
	return mounted(to, func(to string) error { return unix.Mount(from, to, "", unix.MS_BIND, "") })
}

// sameFile reports whether two names are of one namespace. If the second is another namespace's, it returns an error.
func sameFile(from, to string) (bool, error) {
	switch err := podnet.CheckNetNS(to); {
	case errors.Is(err, podnet.ErrNoNetNS):
		return false, nil
	case err != nil:
		return false, err
	}
	a, err := os.Stat(from)
	if err != nil {
		return false, err
	}
	b, err := os.Stat(to)
	if err != nil {
		return false, err
	}
	if !os.SameFile(a, b) {
		return false, errors.New("both exist and differ: remove the one that no egress uses")
	}
	return true, nil
}

// Remove removes the namespace at file with everything in it, including the link to the host. A missing file is no
// error, and a file of another kind is kept.
func Remove(file string) error {
	err := podnet.CheckNetNS(file)
	switch {
	case errors.Is(err, podnet.ErrNoNetNS):
		st, serr := os.Lstat(file)
		if errors.Is(serr, fs.ErrNotExist) {
			return nil
		}
		if serr == nil && st.Mode().IsRegular() && st.Size() == 0 {
			return errors.Join(os.Remove(file), netnsdir.Release(filepath.Dir(file))) // left by an interrupted start
		}
		return fmt.Errorf("removing an egress's network namespace: %w", err)
	case err != nil:
		return err
	}
	// The kernel frees a namespace some time after its last use. Its link is removed now, which ends forwarding.
	var errs []error
	if err := removeUplink(file); err != nil {
		errs = append(errs, fmt.Errorf("removing the link of network namespace %s: %w", file, err))
	}
	if err := unix.Unmount(file, unix.MNT_DETACH); err != nil {
		return errors.Join(append(errs, fmt.Errorf("unmounting network namespace %s: %w", file, err))...)
	}
	return errors.Join(append(errs, os.Remove(file), netnsdir.Release(filepath.Dir(file)))...)
}

func removeUplink(file string) error {
	ns, err := netns.GetFromPath(file)
	if err != nil {
		return err
	}
	defer ns.Close()
	c, err := rtnl.OpenAt(ns)
	if err != nil {
		return err
	}
	defer c.Close()
	l, there, err := c.Link(Uplink)
	if err != nil || !there {
		return err
	}
	return c.One().LinkDel(l)
}

// Files lists the namespaces in a directory, sorted. A missing directory has none.
func Files(dir string) ([]string, error) {
	es, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the directory of network namespaces: %w", err)
	}
	var out []string
	for _, e := range es {
		if file := filepath.Join(dir, e.Name()); podnet.CheckNetNS(file) == nil {
			out = append(out, file)
		}
	}
	slices.Sort(out)
	return out, nil
}
