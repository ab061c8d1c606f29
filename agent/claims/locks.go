package claims

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent/config"
)

// LockHost holds the state directory, the run directory and, with the tunnel, the numbers in the kernel for this
// process alone, before anything is read or changed. What it holds ends with the process, however that ends.
func LockHost(cfg config.Config, tunnel bool) (held *Claims, unlock func(), err error) {
	state, err := LockState(cfg.StateDir)
	if err != nil {
		return nil, nil, err
	}
	if err := os.MkdirAll(cfg.RunDir, 0o755); err != nil {
		state()
		return nil, nil, fmt.Errorf("run directory: %w", err)
	}
	run, err := lockFile(filepath.Join(cfg.RunDir, "lock"))
	if err != nil {
		state()
		return nil, nil, inUse(err, "run directory %s is in use by another agent%s: stop it with `skein down`, or give "+
			"this one its own --run-dir", cfg.RunDir)
	}
	if !tunnel {
		return nil, func() { run(); state() }, nil
	}
	held, release, err := LockNumbers(cfg)
	if err != nil {
		state()
		run()
		return nil, nil, err
	}
	return held, func() { release(); run(); state() }, nil
}

// LockNumbers holds what the agent has in the kernel.
func LockNumbers(cfg config.Config) (held *Claims, release func(), err error) {
	if held, err = Hold(cfg.RunDir, cfg.Dataplane.Numbers()); err != nil {
		return nil, nil, err
	}
	unlock, err := LockLink(cfg.Dataplane.Link)
	if err != nil {
		held.Close()
		return nil, nil, err
	}
	return held, func() { unlock(); held.Close() }, nil
}

// LockState makes the state directory (0700) and holds it for this process alone.
func LockState(dir string) (func(), error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil { // it may have been made by hand, for everybody to read
		return nil, fmt.Errorf("state directory: %w", err)
	}
	unlock, err := lockFile(filepath.Join(dir, "lock"))
	if err != nil {
		return nil, inUse(err, "state directory %s is in use by another agent%s: stop it with `skein down`, or give this "+
			"one its own --state-dir and --run-dir", dir)
	}
	return unlock, nil
}

// errLocked says which process holds a lock file.
type errLocked struct{ pid string }

func (e errLocked) Error() string { return "in use by process " + e.pid }

// inUse words an errLocked for a user; format takes the directory and the process.
func inUse(err error, format, dir string) error {
	var l errLocked
	if !errors.As(err, &l) {
		return err
	}
	process := ""
	if l.pid != "" {
		process = " (process " + l.pid + ")"
	}
	return fmt.Errorf(format, dir, process)
}

func lockFile(path string) (func(), error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock file: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		b, _ := os.ReadFile(path)
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errLocked{strings.TrimSpace(string(b))}
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	_ = f.Truncate(0)
	_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return func() { f.Close() }, nil
}

// LockLink makes sure that no second agent adopts the link of a running one, one of a version too that does not tell
// its numbers. Abstract unix sockets are a network namespace's own, as links are.
func LockLink(link string) (func(), error) {
	unlock, err := LockName("skein-link-" + link)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("the link %s belongs to another agent that runs on this host: stop that one, or give this "+
			"one numbers of its own, such as dataplane.instance: 1 (docs/config.md, Numbers)", link)
	}
	if err != nil {
		return nil, fmt.Errorf("hold the link %s: %w", link, err)
	}
	return unlock, nil
}

// LockName holds a name within this network namespace.
func LockName(name string) (func(), error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + name, Net: "unix"})
	if err != nil {
		return nil, err
	}
	return func() { l.Close() }, nil
}

// CheckHost says in one sentence what this process lacks.
func CheckHost() error {
	var missing []string
	have, err := capabilities()
	if err != nil {
		return err
	}
	for _, c := range []struct {
		bit  int
		name string
	}{{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_NET_RAW, "CAP_NET_RAW"}} {
		if have&(1<<c.bit) == 0 {
			missing = append(missing, c.name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("the agent lacks %s: run it as root, or give it these capabilities (systemd: AmbientCapabilities=)",
			strings.Join(missing, " and "))
	}
	return nil
}

func capabilities() (uint64, error) {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		return 0, fmt.Errorf("read this process's capabilities: %w", err)
	}
	return uint64(data[0].Effective) | uint64(data[1].Effective)<<32, nil
}
