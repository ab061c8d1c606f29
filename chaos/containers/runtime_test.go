package containers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// runtime is containerd on one lab node.
type runtime struct {
	node   string
	ns     string // the node's network namespace
	dir    string // what it has instead of the machine's /etc, /opt and /run is in here
	cgroup string // of its containers, from the root of each hierarchy
}

// mounts gives a command the node's own /etc, /opt and /run: where ctr looks for network configurations, where for
// plugins, and where containerd, its shims and runc meet. The machine's own stay as they are.
const mounts = `set -e
for d in etc opt run; do mount --bind "$0/$d" "/$d"; done
exec "$@"`

const containerdConfig = `version = 2
root = "%s/lib"
state = "/run/containerd"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "/run/containerd/containerd.sock"
`

// start installs the plugin and starts containerd.
func start(t *testing.T, l *lab.Lab, node, dir string) *runtime {
	t.Helper()
	info, err := l.Node(node)
	if err != nil {
		t.Fatal(err)
	}
	r := &runtime{node: node, ns: info.Namespace, dir: filepath.Join(dir, node), cgroup: "skein-" +
		l.Spec.Name + "-" + node}
	for _, d := range []string{"etc", "opt", "run", "lib"} {
		if err := os.MkdirAll(filepath.Join(r.dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { r.removeCgroups(t) })
	install := []string{"skein", "cni", "install", "--bin-dir", r.dir + "/opt/cni/bin", "--conf-dir",
		r.dir + "/etc/cni/net.d"}
	if out, exit, err := l.Exec(t.Context(), node, install...); err != nil || exit != 0 {
		t.Fatalf("%s: %v: %v, exit status %d\n%s", node, install, err, exit, out)
	}
	config := filepath.Join(r.dir, "containerd.toml")
	if err := os.WriteFile(config, fmt.Appendf(nil, containerdConfig, r.dir), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(r.dir, "containerd.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd, err := r.begin(log, "containerd", "--config", config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil && t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("%s: containerd: %v\n%s", node, err, text)
		}
	})
	within(t, 20*time.Second, node+"'s containerd answers", func() error {
		_, err := r.ctr(t.Context(), "version")
		return err
	})
	return r
}

// begin starts a program in the node's network namespace, with the node's own directories.
func (r *runtime) begin(out io.Writer, argv ...string) (*exec.Cmd, error) {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("unshare", append([]string{"--mount", "--propagation", "private", "/bin/sh", "-c", mounts, r.dir,
		path}, argv[1:]...)...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = os.Environ()
	cmd.WaitDelay = 2 * time.Second
	return cmd, fabric.In(r.ns, cmd.Start)
}

// ctr runs containerd's own client and returns what it prints.
func (r *runtime) ctr(ctx context.Context, args ...string) (string, error) {
	var out bytes.Buffer
	cmd, err := r.begin(&out, append([]string{"ctr"}, args...)...)
	if err != nil {
		return "", err
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	if err := cmd.Wait(); err != nil {
		return "", fmt.Errorf("%s: ctr %s: %w: %s", r.node, strings.Join(args, " "), err, strings.TrimSpace(out.String()))
	}
	return out.String(), nil
}

// container is one that runs, with the ctr that started it and takes it away when it ends.
type container struct {
	on  *runtime
	id  string
	ctr *exec.Cmd
	out bytes.Buffer
	pid int
}

// run starts a container that serves its own name over HTTP. The ctr that starts it asks the plugin for the network,
// and when the container has ended asks for its removal.
func (r *runtime) run(t *testing.T, id string) *container {
	t.Helper()
	root := filepath.Join(r.dir, "rootfs", id)
	makeRoot(t, root, r.node+"/"+id)
	c := &container{on: r, id: id}
	cmd, err := r.begin(&c.out, "ctr", "run", "--rm", "--cni", "--rootfs", "--cgroup", "/"+r.cgroup+"/"+id, "--env",
		"PATH=/bin", root, id,
		"/bin/httpd", "-f", "-p", "80", "-h", "/www")
	if err != nil {
		t.Fatal(err)
	}
	c.ctr = cmd
	within(t, 20*time.Second, r.node+"/"+id+" runs", func() error {
		list, err := r.ctr(t.Context(), "task", "ls")
		if err != nil {
			return err
		}
		m := regexp.MustCompile(`(?m)^` + id + ` +(\d+) +RUNNING`).FindStringSubmatch(list)
		if m == nil {
			return fmt.Errorf("not among\n%s\nctr run says: %s", list, c.out.String())
		}
		c.pid, err = strconv.Atoi(m[1])
		return err
	})
	return c
}

// end kills what runs in the container and waits until ctr has taken it away, network and all.
func (c *container) end(t *testing.T) {
	t.Helper()
	if _, err := c.on.ctr(t.Context(), "task", "kill", "--signal", "SIGKILL", c.id); err != nil {
		t.Error(err)
		return
	}
	done := make(chan error, 1)
	go func() { done <- c.ctr.Wait() }()
	select {
	case err := <-done:
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 128+int(syscall.SIGKILL) || c.out.Len() > 0 {
			t.Errorf("%s/%s: ctr run ended with %v and says: %s", c.on.node, c.id, err, c.out.String())
		}
	case <-time.After(20 * time.Second):
		_ = c.ctr.Process.Kill()
		t.Errorf("%s/%s: ctr run does not end: %s", c.on.node, c.id, c.out.String())
	}
}

// exec runs a command in the container.
func (c *container) exec(ctx context.Context, argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	id := fmt.Sprintf("x%d", time.Now().UnixNano())
	return c.on.ctr(ctx, append([]string{"task", "exec", "--exec-id", id, c.id}, argv...)...)
}

// makeRoot makes a root file system of busybox.
func makeRoot(t *testing.T, root, says string) {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"bin", "dev", "etc", "proc", "sys", "tmp", "www"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	errs := []error{os.WriteFile(filepath.Join(root, "bin/busybox"), program, 0o755),
		os.WriteFile(filepath.Join(root, "www/index.html"), []byte(says+"\n"), 0o644)}
	for _, applet := range []string{"httpd", "ip", "nc", "ping", "sh", "wget"} {
		errs = append(errs, os.Symlink("busybox", filepath.Join(root, "bin", applet)))
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// removeCgroups takes away the containers' cgroups, and kills what a failed test has left in them.
func (r *runtime) removeCgroups(t *testing.T) {
	for _, pattern := range []string{"/sys/fs/cgroup/" + r.cgroup, "/sys/fs/cgroup/*/" + r.cgroup} {
		tops, _ := filepath.Glob(pattern)
		for _, top := range tops {
			within(t, 10*time.Second, top+" is gone", func() error {
				subs, _ := filepath.Glob(top + "/*/cgroup.procs")
				for _, procs := range subs {
					b, _ := os.ReadFile(procs)
					for _, pid := range strings.Fields(string(b)) {
						if n, err := strconv.Atoi(pid); err == nil && n > 1 {
							t.Errorf("process %d was left in %s", n, filepath.Dir(procs))
							_ = syscall.Kill(n, syscall.SIGKILL)
						}
					}
					_ = os.Remove(filepath.Dir(procs))
				}
				if err := os.Remove(top); err != nil && !errors.Is(err, os.ErrNotExist) {
					return err
				}
				return nil
			})
		}
	}
}

// within tries until f gives no error.
func within(t *testing.T, limit time.Duration, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not so within %s: %v", what, limit, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
