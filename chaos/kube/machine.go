package kube

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// Machine is a host's own file system on this machine: a mount namespace with its own /etc, /opt, /run, /usr/local/bin,
// /var/lib and /var/log, and its own hostname. Its network namespace is a lab node's. What runs in it sees the paths
// that it has on a real host, and leaves nothing on this one.
type Machine struct {
	Name   string
	Dir    string // etc and opt are in it, and the logs of what runs in the machine
	holder *exec.Cmd
	cgroup string // of its containers, from the root of each hierarchy
}

// makeMachine makes the mounts, says so, and holds the namespace for as long as its standard input is open. What is
// mounted in it stays in it; what is mounted under its own root is shared with the containers that ask for that.
const makeMachine = `set -e
echo "$1" >/proc/sys/kernel/hostname
for d in etc opt; do mount --bind "$0/$d" "/$d"; done
[ ! -d /usr/local/bin ] || mount --bind "$0/bin" /usr/local/bin
for d in run var/lib var/log; do mount -t tmpfs -o mode=755 tmpfs "/$d"; done
mkdir -p /run/netns /run/lock /var/lib/cni /var/lib/kubelet /var/log/pods
while read -r key value; do # what kubelet would set on this machine
	[ -e "/proc/sys/$key" ] || continue
	echo "$value" >"/run/lock/value"
	mount --bind /run/lock/value "/proc/sys/$key"
	rm /run/lock/value
done <<END
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxbytes 25000000
kernel/keys/root_maxkeys 1000000
vm/overcommit_memory 1
vm/panic_on_oom 0
END
mount --make-rshared /
echo ready
exec cat >/dev/null`

// hostFiles are those of this machine's /etc that programs on any host need.
var hostFiles = []string{"alternatives", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
	"nsswitch.conf", "passwd",
	"protocols", "services", "ssl"}

// machines counts those of this process: two fleets may have nodes of one name.
var machines atomic.Int64

// NewMachine makes a machine with its files in dir, which is made.
func NewMachine(ctx context.Context, dir, name string) (*Machine, error) {
	m := &Machine{Name: name, Dir: dir, cgroup: fmt.Sprintf("skein-%d-%d-%s", os.Getpid(), machines.Add(1), name)}
	for _, d := range []string{"etc/cni/net.d", "opt/cni/bin", "bin"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, fmt.Errorf("machine %s: %w", name, err)
		}
	}
	for _, f := range hostFiles {
		if _, err := os.Lstat("/etc/" + f); err != nil {
			continue
		}
		if out, err := exec.CommandContext(ctx, "cp", "-a", "/etc/"+f,
			filepath.Join(dir, "etc")).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("machine %s: copy /etc/%s: %w: %s", name, f, err, out)
		}
	}
	for f, text := range map[string]string{
		"hosts": "127.0.0.1 localhost\n::1 localhost\n", "resolv.conf": "", "hostname": name + "\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, "etc", f), []byte(text), 0o644); err != nil {
			return nil, fmt.Errorf("machine %s: %w", name, err)
		}
	}
	if err := m.makeCgroups(); err != nil {
		return nil, fmt.Errorf("machine %s: %w", name, err)
	}
	m.holder = exec.Command("unshare", "--mount", "--uts", "--propagation", "slave", "/bin/sh", "-c",
		makeMachine, dir, name)
	m.holder.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var errs bytes.Buffer
	m.holder.Stderr = &errs
	if _, err := m.holder.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := m.holder.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := m.holder.Start(); err != nil {
		return nil, fmt.Errorf("machine %s: %w", name, err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		_ = m.holder.Wait()
		return nil, errors.Join(fmt.Errorf("machine %s: its mounts cannot be made: %s", name, errs.String()),
			m.removeCgroups())
	}
	return m, nil
}

// Enter is what stands before a command so that it runs in the machine. It becomes the command: the process is the
// same.
func (m *Machine) Enter() []string {
	pid := m.holder.Process.Pid
	return []string{"nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", pid),
		fmt.Sprintf("--uts=/proc/%d/ns/uts", pid), "--"}
}

// command is a command in the machine and in a network namespace, which Start must be called in (fabric.In).
func (m *Machine) command(env []string, argv ...string) *exec.Cmd {
	argv = slices.Concat(m.Enter(), argv)
	c := exec.Command(argv[0], argv[1:]...)
	c.Dir = "/"
	c.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=/root", "LANG=C.UTF-8"}, env...)
	return c
}

// start starts a program whose log is name.log in the machine's directory.
func (m *Machine) start(namespace, name string, env []string, argv ...string) (*program, error) {
	log, err := os.OpenFile(filepath.Join(m.Dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	c := m.command(env, argv...)
	c.Stdout, c.Stderr = log, log
	if err := fabric.In(namespace, c.Start); err != nil {
		return nil, fmt.Errorf("start %s on %s: %w", name, m.Name, err)
	}
	return watch(c), nil
}

// Run runs a command to its end and returns what it prints, both outputs together.
func (m *Machine) Run(ctx context.Context, namespace string, argv ...string) (string, error) {
	c := m.command(nil, argv...)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	c.WaitDelay = time.Second
	if err := fabric.In(namespace, c.Start); err != nil {
		return "", fmt.Errorf("on %s: %s: %w", m.Name, argv[0], err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Process.Kill() })
	defer stop()
	if err := c.Wait(); err != nil {
		return out.String(), fmt.Errorf("on %s: %s: %w: %s", m.Name, strings.Join(argv, " "), err,
			strings.TrimSpace(out.String()))
	}
	return out.String(), nil
}

// tail is the end of a program's log.
func (m *Machine) tail(name string) string { return tailOf(filepath.Join(m.Dir, name+".log")) }

// Close ends everything that runs in the machine, its containers included, and the machine.
func (m *Machine) Close() error {
	ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", m.holder.Process.Pid))
	if err != nil {
		return fmt.Errorf("machine %s: %w", m.Name, err)
	}
	err = m.removeCgroups() // containers have mount namespaces of their own
	deadline := time.Now().Add(closeWithin)
	for left := inside(ns, m.holder.Process.Pid); len(left) > 0; left = inside(ns, m.holder.Process.Pid) {
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		if time.Now().After(deadline) {
			return errors.Join(err, fmt.Errorf("machine %s: processes %v do not end", m.Name, left))
		}
		time.Sleep(10 * time.Millisecond)
	}
	_ = m.holder.Process.Kill()
	_ = m.holder.Wait()
	return errors.Join(err, m.removeCgroups()) // what was started meanwhile
}

const closeWithin = 20 * time.Second

// inside lists the processes in a mount namespace, but for one.
func inside(ns string, but int) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == but {
			continue
		}
		if at, err := os.Readlink("/proc/" + e.Name() + "/ns/mnt"); err == nil && at == ns {
			pids = append(pids, pid)
		}
	}
	return pids
}

// hierarchies are the roots of this machine's control groups.
func hierarchies() []string {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return []string{"/sys/fs/cgroup"} // version 2
	}
	all, _ := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	for i, f := range all {
		all[i] = filepath.Dir(f)
	}
	return all
}

// makeCgroups makes the groups that kubelet puts its pods under.
func (m *Machine) makeCgroups() error {
	for _, root := range hierarchies() {
		top := filepath.Join(root, m.cgroup)
		if err := os.Mkdir(top, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		for _, f := range []string{"cpuset.cpus", "cpuset.mems"} { // version 1 has them empty in a new group
			if b, err := os.ReadFile(filepath.Join(root, f)); err == nil {
				if err := os.WriteFile(filepath.Join(top, f), b, 0o644); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// removeCgroups ends what is in the machine's groups, and removes them.
func (m *Machine) removeCgroups() error {
	deadline := time.Now().Add(closeWithin)
	for _, root := range hierarchies() {
		top := filepath.Join(root, m.cgroup)
		for {
			left := removeGroup(top)
			if left == nil {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("machine %s: control group %s: %w", m.Name, top, left)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	return nil
}

// removeGroup kills the processes of a control group and of those below it, and removes them, the lowest first.
func removeGroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			_ = removeGroup(filepath.Join(dir, e.Name())) // the parent's own removal fails for as long as one is there
		}
	}
	b, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	for _, text := range strings.Fields(string(b)) {
		if pid, err := strconv.Atoi(text); err == nil && pid > 1 {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// WriteFile writes a file of the machine's /etc or /opt, whole or not at all. Its path has no / in front.
func (m *Machine) WriteFile(path, text string) error {
	file := filepath.Join(m.Dir, path)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(file+".new", []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}
