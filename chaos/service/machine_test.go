package service

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/testenv"
	"github.com/skeinmesh/skein/internal/testns"
)

// patience bounds every wait. A loaded machine with two cores boots the container in ten seconds.
const patience = 60 * time.Second

// bootScript starts the container again whenever systemd in it asks for a reboot, which systemd-nspawn reports by exit
// status 133. What is written goes to memory. systemd-nspawn is the one of the root file system, with its own
// libraries: this machine needs none. The arguments: the root file system, an empty directory, control groups.
const bootScript = `set -eu
root=$1 dir=$2
shift 2
for group; do echo 0 >"$group/cgroup.procs"; done
mount -t tmpfs -o mode=755 tmpfs "$dir"
mkdir "$dir/upper" "$dir/work" "$dir/root"
mount -t overlay overlay -o "lowerdir=$root,upperdir=$dir/upper,workdir=$dir/work" "$dir/root"
own=$(dirname "$(ls "$root"/usr/lib/*/systemd/libsystemd-shared-*.so | head -n 1)")
while :; do
	status=0
	"$(ls "$root"/lib64/ld-linux* "$root"/lib/ld-linux* 2>/dev/null | head -n 1)" --library-path "$own:$(dirname "$own")" "$root/usr/bin/systemd-nspawn" \
		--boot --directory="$dir/root" --machine=skein-test --register=no --keep-unit --link-journal=no --private-network \
		--capability=CAP_NET_ADMIN,CAP_NET_RAW --bind=/dev/net/tun --console=pipe </dev/null || status=$?
	[ "$status" = 133 ] || exit "$status"
done`

// machine is the container.
type machine struct {
	t      *testing.T
	log    *bytes.Buffer // of systemd-nspawn; read when it has ended
	top    int           // the process that everything of the machine ends with
	ended  chan struct{} // closed when that has ended
	init   int           // its systemd, as this process sees it
	uplink *testns.NS    // where its eth0 leads
}

// boot starts the container and waits until systemd has started everything.
func boot(t *testing.T, uplink *testns.NS) *machine {
	t.Helper()
	testenv.NeedRoot(t)
	root := os.Getenv("SKEIN_SYSTEMD_ROOT")
	if _, err := os.Stat(filepath.Join(root, "usr/bin/systemd-nspawn")); root == "" || err != nil {
		testenv.Missing(t, "needs a root file system with systemd: run `make test-systemd`, which makes it")
	}
	dir, err := os.MkdirTemp("", "skein-systemd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(dir) })
	m := &machine{t: t, log: new(bytes.Buffer), uplink: uplink, ended: make(chan struct{})}
	groups := cgroups(t)
	// Killing unshare ends the PID namespace, and so the container, its mounts and its network.
	cmd := exec.Command("unshare", append([]string{"--mount", "--propagation", "private", "--pid", "--fork",
		"--kill-child", "--mount-proc",
		"/bin/sh", "-c", bootScript, "sh", root, dir}, groups...)...)
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = m.log, m.log, &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	m.top = cmd.Process.Pid
	go func() {
		_ = cmd.Wait()
		close(m.ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-m.ended
		if t.Failed() {
			t.Logf("systemd-nspawn:\n%s", m.log)
		}
	})
	m.up(0)
	return m
}

// up waits for the systemd that comes after another one, and attaches the network.
func (m *machine) up(before int) {
	m.t.Helper()
	within(m.t, "the container's systemd is process 1", func() error {
		select {
		case <-m.ended:
			m.t.Fatal("the container has ended; what systemd-nspawn says is below")
		default:
		}
		init, err := initBelow(m.top)
		if err == nil && init == before {
			err = errors.New("it is still the old one")
		}
		m.init = init
		return err
	})
	m.attach()
	within(m.t, "systemd has booted", func() error {
		out, err := m.try("systemctl", "is-system-running", "--wait")
		if state := strings.TrimSpace(out); state != "running" && state != "degraded" {
			return fmt.Errorf("%s: %w", state, err)
		}
		return nil
	})
}

// reboot asks systemd for a reboot and waits for the next one.
func (m *machine) reboot() {
	m.t.Helper()
	before := m.init
	m.run("systemctl", "reboot")
	m.up(before)
}

// attach gives the container eth0, as a boot finds a network card. The one that a former boot had goes with its network
// namespace, at the latest now.
func (m *machine) attach() {
	m.t.Helper()
	var err error
	m.uplink.Do(func() { err = m.cable() })
	if err != nil {
		m.t.Fatalf("the container's link: %v", err)
	}
	m.run("ip", "addr", "add", serviceAddr+"/24", "dev", "eth0")
	m.run("ip", "link", "set", "eth0", "up")
	m.run("ip", "route", "add", "default", "via", routerAddr)
}

// cable runs on the router.
func (m *machine) cable() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "svc0"
	link := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsPid(m.init)}
	if old, err := netlink.LinkByName(attrs.Name); err == nil {
		if err := netlink.LinkDel(old); err != nil && !errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	if err := netlink.LinkAdd(link); err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(routerAddr + "/24")
	if err != nil {
		return err
	}
	return errors.Join(netlink.AddrAdd(link, addr), netlink.LinkSetUp(link))
}

// command is one in the container.
func (m *machine) command(ctx context.Context, argv ...string) *exec.Cmd {
	enter := []string{"-t", strconv.Itoa(m.init), "-m", "-u", "-i", "-n", "-p", "--", "/usr/bin/env", "-i",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C", "SYSTEMD_PAGER=cat"}
	cmd := exec.CommandContext(ctx, "nsenter", append(enter, argv...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // job control would stop it
	cmd.WaitDelay = time.Second
	return cmd
}

// try runs a command and returns what it prints to both.
func (m *machine) try(argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, err := m.command(ctx, argv...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, bytes.TrimSpace(out))
	}
	return string(out), err
}

// run is try for what must not fail.
func (m *machine) run(argv ...string) string {
	m.t.Helper()
	out, err := m.try(argv...)
	if err != nil {
		m.t.Fatal(err)
	}
	return out
}

// install copies a file into the container.
func (m *machine) install(from, to string, mode fs.FileMode) {
	m.t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		m.t.Fatal(err)
	}
	m.write(to, b, mode)
}

func (m *machine) write(to string, b []byte, mode fs.FileMode) {
	m.t.Helper()
	cmd := m.command(m.t.Context(), "sh", "-c", fmt.Sprintf(`mkdir -p "$(dirname "$1")" && cat >"$1" && chmod %o "$1"`,
		mode), "sh", to)
	cmd.Stdin = bytes.NewReader(b)
	if out, err := cmd.CombinedOutput(); err != nil {
		m.t.Fatalf("writing %s: %v: %s", to, err, out)
	}
}

// unit are properties of the service.
func (m *machine) unit(names ...string) map[string]string {
	m.t.Helper()
	out := map[string]string{}
	for line := range strings.Lines(m.run("systemctl", "show", "skein", "--property="+strings.Join(names, ","))) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			out[k] = v
		}
	}
	return out
}

// settled waits until the service neither runs nor ends, and returns what became of it: a service that is to be
// restarted is "auto-restart" then, one that is not is "dead" or "failed".
func (m *machine) settled() map[string]string {
	m.t.Helper()
	var u map[string]string
	within(m.t, "the service has ended", func() error {
		u = m.unit("SubState", "Result", "ExecMainStatus", "NRestarts", "InvocationID")
		switch u["SubState"] {
		case "dead", "failed", "auto-restart":
			return nil
		}
		return fmt.Errorf("it is %v", u)
	})
	return u
}

// running waits until the agent answers, as another process than before.
func (m *machine) running(before string) (pid string) {
	m.t.Helper()
	within(m.t, "the service runs", func() error {
		u := m.unit("SubState", "MainPID")
		if u["SubState"] != "running" || u["MainPID"] == before {
			return fmt.Errorf("it is %v", u)
		}
		pid = u["MainPID"]
		_, err := m.try("skein", "status")
		return err
	})
	return pid
}

// kernel is what a program such as skein can leave behind until the next boot, as text. What a boot decides anew
// (hardware addresses, numbers of links) is left out.
func (m *machine) kernel() string {
	m.t.Helper()
	// A link-local address gets its route once nobody else is found to have it, about a second after boot.
	return m.run("sh", "-c", `for i in $(seq 100); do [ -z "$(ip -6 -o addr show tentative)" ] && break; sleep 0.1; done
ip -br link | sed 's/[@ ].*//'; for f in -4 -6; do ip $f rule; ip $f route show table all | sed 's/ fe80:[0-9a-f:]* / fe80:: /' | sort; done
nft list ruleset; ls /run/netns 2>/dev/null; find /run/skein -mindepth 1 ! -name lock ! -name netns 2>/dev/null; findmnt -rno TARGET | grep skein || true`)
}

// initBelow finds the process that is the first of its PID namespace, in a namespace below that of top's child.
func initBelow(top int) (int, error) {
	var found int
	var visit func(pid, depth int)
	visit = func(pid, depth int) {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		for _, f := range strings.Fields(string(b)) {
			child, err := strconv.Atoi(f)
			if err != nil {
				continue
			}
			comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", child))
			if depth > 0 && strings.TrimSpace(string(comm)) == "systemd" && firstOf(child) {
				found = child
				return
			}
			visit(child, depth+1)
		}
	}
	visit(top, 0)
	if found == 0 {
		return 0, errors.New("there is none")
	}
	return found, nil
}

// firstOf says that a process is number 1 in its own PID namespace.
func firstOf(pid int) bool {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "NSpid:" {
			return f[len(f)-1] == "1"
		}
	}
	return false
}

// cgroups are control groups of the container's own, where systemd-nspawn makes its. Two runs do not meet in them. They
// are removed at the end.
func cgroups(t *testing.T) (dirs []string) {
	for _, h := range []string{"/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		if _, err := os.Stat(filepath.Join(h, "cgroup.procs")); err != nil {
			continue // of this name there is none, in this version
		}
		dir := filepath.Join(h, fmt.Sprintf("skein-systemd-%d", os.Getpid()))
		if err := os.Mkdir(dir, 0o755); err != nil {
			testenv.Missing(t, fmt.Sprintf("needs control groups that it may write: %v", err))
		}
		t.Cleanup(func() { removeTree(t, dir) })
		dirs = append(dirs, dir)
	}
	if len(dirs) == 0 {
		testenv.Missing(t, "needs control groups mounted at /sys/fs/cgroup")
	}
	return dirs
}

// removeTree removes a control group and those below it, as soon as the last process in them is gone.
func removeTree(t *testing.T, dir string) {
	within(t, dir+" is empty", func() error {
		var dirs []string
		_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append([]string{path}, dirs...)
			}
			return nil
		})
		var errs []error
		for _, d := range dirs {
			errs = append(errs, unix.Rmdir(d))
		}
		return errors.Join(errs...)
	})
}

// within tries until f gives no error.
func within(t *testing.T, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not so within %s: %v", what, patience, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
