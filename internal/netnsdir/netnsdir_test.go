package netnsdir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/testenv"
)

// freshRun runs f on a thread with a mount namespace of its own, where /run is empty: like a machine on which no
// namespace was ever named.
func freshRun(t *testing.T, f func() error) {
	t.Helper()
	testenv.NeedRoot(t)
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread is not unlocked: it ends with the goroutine, and its mounts with it
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
		}
		if err == nil {
			err = unix.Mount("tmpfs", "/run", "tmpfs", 0, "")
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// name gives the thread's own network namespace a name, which is enough for what mounts do.
func name(dir, n string) error {
	file := filepath.Join(dir, n)
	if err := os.WriteFile(file, nil, 0o444); err != nil {
		return err
	}
	return unix.Mount("/proc/thread-self/ns/net", file, "", unix.MS_BIND, "")
}

func remove(file string) error {
	if err := unix.Unmount(file, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", file, err)
	}
	return os.Remove(file)
}

func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// mounts counts the mounts on a path.
func mounts(path string) (n int, err error) {
	b, err := os.ReadFile("/proc/thread-self/mountinfo")
	for l := range strings.Lines(string(b)) {
		if f := strings.Fields(l); len(f) > 4 && f[4] == path {
			n++
		}
	}
	return n, err
}

// A name that was made before iproute2's first can be removed after it.
func TestNamesOutliveTheFirstOfIPRoute2(t *testing.T) {
	freshRun(t, func() error {
		unlock, err := Prepare(System, 0o755)
		if err != nil {
			return err
		}
		err = name(System, "ours")
		unlock()
		return errors.Join(err, ip("netns", "add", "theirs"), remove(System+"/ours"), ip("netns", "del", "theirs"))
	})
}

// The fault that Prepare is for, so that the test above is known to look at it.
func TestIPRoute2CoversNamesMadeBefore(t *testing.T) {
	freshRun(t, func() error {
		if err := os.Mkdir(System, 0o755); err != nil {
			return err
		}
		if err := errors.Join(name(System, "ours"), ip("netns", "add", "theirs")); err != nil {
			return err
		}
		if err := remove(System + "/ours"); !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("removing a covered name: %w, want EBUSY: is this iproute2 another?", err)
		}
		return nil
	})
}

// Preparing again makes no further mount, also after iproute2. The first may make two: where /run is shared, as systemd
// has it, the kernel propagates the mount to itself.
func TestPrepareOften(t *testing.T) {
	for _, first := range []string{"iproute2", "skein"} {
		freshRun(t, func() error {
			if first == "iproute2" {
				if err := ip("netns", "add", "theirs"); err != nil {
					return err
				}
			}
			once := 0
			for i := range 3 {
				unlock, err := Prepare(System, 0o755)
				if err != nil {
					return err
				}
				err = name(System, fmt.Sprint("ours", i))
				unlock()
				if err != nil {
					return err
				}
				n, err := mounts(System)
				if err != nil {
					return err
				}
				if i == 0 {
					once = n
				}
				if n != once || n < 1 || n > 2 {
					return fmt.Errorf("%d mounts on %s, and %d after the first time", n, System, once)
				}
			}
			return errors.Join(remove(System+"/ours0"), remove(System+"/ours1"), remove(System+"/ours2"))
		})
	}
}

// Names that an older program made without the mount are not covered.
func TestOlderNamesAreNotCovered(t *testing.T) {
	freshRun(t, func() error {
		dir := "/run/skein/netns"
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		if err := name(dir, "old"); err != nil {
			return err
		}
		unlock, err := Prepare(dir, 0o700)
		if err != nil {
			return err
		}
		unlock()
		return errors.Join(remove(dir+"/old"), os.Remove(dir))
	})
}

// The mount goes with the last name, and the directory can be removed then.
func TestRelease(t *testing.T) {
	freshRun(t, func() error {
		dir := "/run/skein/netns"
		if err := Release(dir); err != nil {
			return fmt.Errorf("without the directory: %w", err)
		}
		unlock, err := Prepare(dir, 0o700)
		if err != nil {
			return err
		}
		err = name(dir, "one")
		unlock()
		if err := errors.Join(err, Release(dir)); err != nil {
			return err
		}
		if n, err := mounts(dir); n != 1 || err != nil {
			return fmt.Errorf("while there is a name: %d mounts, want 1 (%w)", n, err)
		}
		if err := errors.Join(remove(dir+"/one"), Release(dir), Release(dir)); err != nil {
			return err
		}
		return os.Remove(dir)
	})
}

// Somebody else's mount is left alone.
func TestReleaseLeavesOtherMounts(t *testing.T) {
	freshRun(t, func() error {
		dir := "/run/netns-of-a-host"
		if err := errors.Join(os.Mkdir(dir, 0o700), unix.Mount("tmpfs", dir, "tmpfs", 0, "")); err != nil {
			return err
		}
		unlock, err := Prepare(dir, 0o700)
		if err != nil {
			return err
		}
		unlock()
		if err := Release(dir); err != nil {
			return err
		}
		if n, err := mounts(dir); n != 1 || err != nil {
			return fmt.Errorf("%d mounts, want 1 (%w)", n, err)
		}
		return nil
	})
}

func TestPrepareSaysWhatIsInTheWay(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Prepare(file, 0o700)
	if perr := new(fs.PathError); !errors.As(err, &perr) || !strings.Contains(err.Error(), file) {
		t.Errorf("a file in place of the directory: %v", err)
	}
}
