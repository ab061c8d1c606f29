package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

// lockState makes the state directory (0700) and holds it for this process alone.
func lockState(dir string) (func(), error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		b, _ := os.ReadFile(path)
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("state directory %s is in use by another agent (process %s): stop it with `skein down`, or give this one its own --state-dir and --run-dir", dir, strings.TrimSpace(string(b)))
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	_ = f.Truncate(0)
	_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return func() { f.Close() }, nil
}

// checkHost says in one sentence what this process lacks.
func checkHost(config.Config) error {
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
		return fmt.Errorf("the agent lacks %s: run it as root, or give it these capabilities (systemd: AmbientCapabilities=)", strings.Join(missing, " and "))
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

// markSocket marks a socket so that its packets never enter the tunnel.
func markSocket(mark int) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark) }); e != nil {
			return e
		}
		return err
	}
}

// Recover makes a stopped server the only voter of its cluster; see consensus.Recover.
func Recover(cfg config.Config, log *slog.Logger) (*consensus.Recovery, error) {
	unlock, err := lockState(cfg.StateDir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	key, _, err := identity.LoadOrCreate(cfg.StateDir)
	if err != nil {
		return nil, err
	}
	return consensus.Recover(cfg.StateDir, key.ID(), log)
}
