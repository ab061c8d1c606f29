package fabric

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/netnsdir"
)

// Dir is where named network namespaces are found, also by `ip netns exec`.
const Dir = netnsdir.System

// create makes a namespace and gives it a name. The calling thread's own namespace stays as it is.
func create(name string) error {
	unlock, err := netnsdir.Prepare(Dir, 0o755)
	if err != nil {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	defer unlock()
	path := filepath.Join(Dir, name)
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("namespace %s exists already: a lab of this name is up, or was left behind; `skein lab down` "+
			"removes it", name)
	}
	if err != nil {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	f.Close()
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	})
	if err != nil {
		os.Remove(path)
		return fmt.Errorf("namespace %s: %w (root is needed)", name, err)
	}
	return nil
}

// onThread runs fn on an OS thread of its own, which ends with it: whatever fn does to the thread's
// namespaces cannot leak into other goroutines.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread goes away with this goroutine
		if unix.Gettid() == unix.Getpid() {
			// The first thread cannot go away, and it is what others see of this process: in a lab's
			// namespace it would be taken for one of the lab's processes. Keep it busy meanwhile.
			defer runtime.UnlockOSThread()
			done <- onThread(fn)
			return
		}
		done <- fn()
	}()
	return <-done
}

// In runs fn on a thread inside the named namespace. Sockets opened and processes started directly
// by fn live there; goroutines that fn starts do not.
func In(name string, fn func() error) error {
	return onThread(func() error {
		h, err := netns.GetFromPath(Path(name))
		if err != nil {
			return fmt.Errorf("namespace %s: %w", name, err)
		}
		defer h.Close()
		if err := netns.Set(h); err != nil {
			return fmt.Errorf("enter namespace %s: %w", name, err)
		}
		return fn()
	})
}

// open returns a handle on a named namespace.
func open(name string) (netns.NsHandle, error) {
	h, err := netns.GetFromPath(Path(name))
	if err != nil {
		return h, fmt.Errorf("namespace %s: %w", name, err)
	}
	return h, nil
}

// remove takes away a namespace's name; the kernel ends the namespace with its last process.
func remove(name string) error {
	path := Path(name)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) &&
		!errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount namespace %s: %w", name, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove namespace %s: %w", name, err)
	}
	return nil
}

// Namespaces lists the names that belong to a lab. A lab's core tells it from another whose name is
// longer: `skdemo-2-x` is of lab `demo-2` when `skdemo-2-inet` exists, else of `demo`.
func Namespaces(lab string) ([]string, error) {
	all, err := names()
	if err != nil {
		return nil, err
	}
	return belonging(lab, all), nil
}

func names() ([]string, error) {
	entries, err := os.ReadDir(Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all, nil
}

func belonging(lab string, all []string) []string {
	var longer []string // prefixes of other labs that begin like ours
	for _, n := range all {
		if other, ok := strings.CutSuffix(n, "-inet"); ok && other != "sk"+lab && strings.HasPrefix(other, Prefix(lab)) {
			longer = append(longer, other+"-")
		}
	}
	var mine []string
next:
	for _, n := range all {
		if !strings.HasPrefix(n, Prefix(lab)) {
			continue
		}
		for _, l := range longer {
			if strings.HasPrefix(n, l) {
				continue next
			}
		}
		mine = append(mine, n)
	}
	sort.Strings(mine)
	return mine
}

// Labs lists the labs that have a core.
func Labs() ([]string, error) {
	all, err := names()
	if err != nil {
		return nil, err
	}
	var labs []string
	for _, n := range all {
		if lab, ok := strings.CutSuffix(n, "-inet"); ok && strings.HasPrefix(lab, "sk") {
			labs = append(labs, strings.TrimPrefix(lab, "sk"))
		}
	}
	return labs, nil
}

// sysctl writes a setting of the current thread's namespace; one that this kernel lacks is passed over.
func sysctl(key, value string) error {
	err := os.WriteFile("/proc/sys/"+key, []byte(value), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("set %s to %s: %w", key, value, err)
	}
	return nil
}
