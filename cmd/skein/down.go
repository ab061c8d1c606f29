package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

// downPatience is how long an agent that took the order may need to end.
const downPatience = 20 * time.Second

func newDownCmd(g *globals) *cobra.Command {
	var purge, forget, wait bool
	c := &cobra.Command{
		Use:   "down",
		Short: "Stop the agent; with --purge remove what skein put into the kernel",
		Long: "Stop the agent on this host. With kernel WireGuard the tunnel goes on carrying packets until the next\n" +
			"start; --purge removes link, rules, routes, the nft tables, the namespaces of egress gateways and the network\n" +
			"configuration that the agent wrote, and only those. The state directory stays: it is this node's identity.\n" +
			"--forget with --purge removes what is in it: the next start is a new node's.\n\n" +
			"An agent that runs as a service stays down until `systemctl start skein` or the next boot. To keep it from\n" +
			"starting at boot: `systemctl disable skein`.",
		Example: "  skein down\n  skein down --purge\n  systemctl disable skein && skein down --purge",
		Args:    cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if forget && !purge {
				return cli.UsageError{Err: errors.New("--forget needs --purge: what the node has in the kernel must be " +
					"removed before its identity")}
			}
			if err := g.down(cmd, purge, wait); err != nil {
				return err
			}
			if forget {
				if err := g.forget(); err != nil {
					return err
				}
			}
			if wait {
				<-cmd.Context().Done()
			}
			return nil
		},
	}
	c.Flags().BoolVar(&purge, "purge", false, "remove the link, rules, routes and nft table too")
	c.Flags().BoolVar(&forget, "forget", false, "remove this node's identity and state too")
	c.Flags().BoolVar(&wait, "wait", false, "then wait until this command is told to end, as the container of a pod "+
		"does; no agent need be there")
	return c
}

// forget empties this node's directories. They may be mounts of a container, so they stay themselves.
func (g *globals) forget() error {
	c, err := g.load()
	if err != nil {
		return err
	}
	for _, dir := range []string{c.StateDir, c.RunDir} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if err := os.RemoveAll(path.Join(dir, e.Name())); err != nil {
				return fmt.Errorf("forget this node: %w", err)
			}
		}
	}
	return nil
}

// down ends the agent on this host. Who only waits behind that need not find one: a container that waits finds none.
func (g *globals) down(cmd *cobra.Command, purge, wait bool) error {
	process := findAgent(g.socket())
	defer process.close()
	_, err := g.client().Down(cmd.Context(), &skeinv1.DownRequest{Purge: purge})
	gone := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
	switch {
	case err == nil:
		if err := g.waitGone(cmd.Context(), process); err != nil {
			return err
		}
		if process.unit != "" && g.output == "table" {
			fmt.Fprintf(cmd.OutOrStdout(), "%s has ended. If it is enabled, the next boot starts it again: `systemctl disable "+
				"%[1]s` prevents that. `systemctl start %[1]s` starts it now.\n", process.unit)
		}
		return nil
	case gone && purge:
		cfg, err := g.load()
		if err != nil {
			return err
		}
		return agent.Purge(cmd.Context(), cfg, logger(cfg.Log))
	case gone && wait:
		return nil
	}
	return g.plain(err)
}

// agentProcess is the process behind the agent's socket.
type agentProcess struct {
	pid  int    // 0: unknown, or of another PID namespace
	fd   int    // its pidfd; -1: unknown
	unit string // the systemd unit whose main process it is; empty: none, or unknown
}

// findAgent finds the process that listens on a socket. It tells less where that is in another PID namespace.
func findAgent(socket string) agentProcess {
	p := agentProcess{fd: -1}
	c, err := net.Dial("unix", socket)
	if err != nil {
		return p
	}
	defer c.Close() // until then the process ID cannot be another's: the agent holds the other end
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return p
	}
	var peer *unix.Ucred
	if e := raw.Control(func(fd uintptr) {
		peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); e != nil || err != nil || peer.Pid <= 0 {
		return p
	}
	p.pid = int(peer.Pid)
	if p.fd, err = unix.PidfdOpen(int(peer.Pid), unix.PIDFD_NONBLOCK); err != nil {
		p.fd = -1
	}
	dir := path.Join("/proc", strconv.Itoa(int(peer.Pid)))
	environ, _ := os.ReadFile(path.Join(dir, "environ"))
	cgroup, _ := os.ReadFile(path.Join(dir, "cgroup"))
	p.unit = unitOf(int(peer.Pid), string(environ), string(cgroup))
	return p
}

func (p agentProcess) close() {
	if p.fd >= 0 {
		unix.Close(p.fd)
	}
}

// unitOf names the system service whose main process pid is, by its environment and its control groups. What a service
// has started itself (a lab under a CI runner, say) inherits the variable but not the number in it.
func unitOf(pid int, environ, cgroup string) string {
	main := false
	for _, v := range strings.Split(environ, "\x00") {
		main = main || v == "SYSTEMD_EXEC_PID="+strconv.Itoa(pid)
	}
	if !main {
		return ""
	}
	for _, line := range strings.Split(cgroup, "\n") { // hierarchy-ID:controllers:path
		f := strings.SplitN(line, ":", 3)
		if len(f) != 3 || f[1] != "" && f[1] != "name=systemd" {
			continue
		}
		if name := path.Base(f[2]); strings.HasSuffix(name, ".service") && !strings.Contains(f[2], "/user@") {
			return name
		}
	}
	return ""
}

// waitGone waits until the agent's process has ended: then its supervisor knows, too, and a start that follows is not
// taken for one of a service that still runs. Where the process is unknown, its socket has to do.
func (g *globals) waitGone(ctx context.Context, p agentProcess) error {
	ctx, cancel := context.WithTimeout(ctx, downPatience)
	defer cancel()
	for {
		if p.fd >= 0 {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}, 100)
			if n == 1 {
				return nil
			}
			if err != nil && !errors.Is(err, unix.EINTR) {
				return fmt.Errorf("wait for the agent's process to end: %w", err)
			}
		} else if _, err := os.Stat(g.socket()); errors.Is(err, fs.ErrNotExist) {
			return nil
		} else {
			time.Sleep(50 * time.Millisecond)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the agent accepted the request to stop and still runs after %s: see its log", downPatience)
		}
	}
}
