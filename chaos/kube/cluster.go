package kube

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

const (
	apiPort     = 6443
	upWithin    = 90 * time.Second
	callTimeout = 90 * time.Second
)

// Programs is the directory with Kubernetes' programs. An error says how to get them.
func Programs(root string) (string, error) {
	dir := filepath.Join(root, ".cache", "kubernetes")
	if _, err := os.Stat(filepath.Join(dir, "kube-apiserver")); err != nil {
		return "", fmt.Errorf(
			"Kubernetes' programs are missing: run .ci/kubernetes-tools, or `make test-kube`, which does: %w",
			err,
		)
	}
	return filepath.Abs(dir)
}

// Cluster is a control plane on a node of a lab. Its methods may be called one at a time.
type Cluster struct {
	on       lab.Info
	dir      string
	programs string
	address  netip.Addr
	ca       *authority
	etcd     *program
	api      *program
}

// program is a running process.
type program struct {
	*exec.Cmd
	ended chan struct{} // closed when it has
}

// Raise starts etcd and the apiserver on a node that has joined. dir is the cluster's own; on an error nothing runs.
func Raise(ctx context.Context, on lab.Info, dir, programs string) (*Cluster, error) {
	if len(on.Overlay) == 0 {
		return nil, fmt.Errorf("node %s has told no overlay address", on.Name)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	c := &Cluster{on: on, dir: dir, programs: programs}
	addresses := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("10.96.0.1")}
	for _, text := range on.Overlay {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("node %s: overlay address: %w", on.Name, err)
		}
		addresses = append(addresses, a)
	}
	c.address = addresses[2]
	if err := c.files(addresses); err != nil {
		return nil, err
	}
	err := c.start(
		&c.etcd,
		"etcd",
		"--data-dir",
		filepath.Join(dir, "etcd"),
		"--unsafe-no-fsync",
		"--logger",
		"zap",
		"--log-level",
		"warn",
		"--listen-client-urls",
		"http://127.0.0.1:2379",
		"--advertise-client-urls",
		"http://127.0.0.1:2379",
		"--listen-peer-urls",
		"http://127.0.0.1:2380",
		"--initial-advertise-peer-urls",
		"http://127.0.0.1:2380",
		"--initial-cluster",
		"default=http://127.0.0.1:2380",
	)
	if err == nil {
		err = c.StartAPIServer(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// StartAPIServer starts the apiserver, again after KillAPIServer, and waits until it is ready.
func (c *Cluster) StartAPIServer(ctx context.Context) error {
	file := func(name string) string { return filepath.Join(c.dir, name) }
	args := []string{
		"--etcd-servers", "http://127.0.0.1:2379", "--secure-port", fmt.Sprint(apiPort), "--bind-address", "::",
		"--advertise-address", c.address.String(), "--service-cluster-ip-range", "10.96.0.0/16",
		"--tls-cert-file", file("apiserver.crt"), "--tls-private-key-file", file("apiserver.key"),
		"--client-ca-file", file("ca.crt"), "--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", file("service-accounts.crt"),
		"--service-account-signing-key-file", file("service-accounts.key"), "--authorization-mode", "Node,RBAC",
		"--enable-admission-plugins", "NodeRestriction", "--disable-admission-plugins", "ServiceAccount",
	}
	if err := c.start(&c.api, "kube-apiserver", args...); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, upWithin)
	defer cancel()
	for {
		_, err := c.Kubectl(ctx, nil, "get", "--raw", "/readyz")
		if err == nil {
			return nil
		}
		select {
		case <-c.api.ended:
			return fmt.Errorf("the apiserver has ended; the end of its log:\n%s", c.tail("kube-apiserver"))
		case <-ctx.Done():
			return fmt.Errorf("the apiserver is not ready after %s: %w; the end of its log:\n%s", upWithin, err,
				c.tail("kube-apiserver"))
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// KillAPIServer ends the apiserver as a crash would.
func (c *Cluster) KillAPIServer() error { return stop(&c.api, syscall.SIGKILL) }

// Close ends the control plane. What is left of one that was not closed ends with the lab, since it lives in its
// namespaces.
func (c *Cluster) Close() error {
	return errors.Join(stop(&c.api, syscall.SIGKILL), stop(&c.etcd, syscall.SIGKILL))
}

func (c *Cluster) start(to **program, name string, args ...string) error {
	log, err := os.OpenFile(filepath.Join(c.dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	p := exec.Command(filepath.Join(c.programs, name), args...)
	p.Dir, p.Stdout, p.Stderr = c.dir, log, log
	p.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + c.dir}
	if err := fabric.In(c.on.Namespace, p.Start); err != nil {
		return fmt.Errorf("start %s on %s: %w", name, c.on.Name, err)
	}
	running := &program{Cmd: p, ended: make(chan struct{})}
	*to = running
	go func() {
		_ = p.Wait() // how it ended is in its log
		close(running.ended)
	}()
	return nil
}

func stop(p **program, sig syscall.Signal) error {
	if *p == nil {
		return nil
	}
	err := (*p).Process.Signal(sig)
	<-(*p).ended
	*p = nil
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

func (c *Cluster) tail(name string) string {
	b, err := os.ReadFile(filepath.Join(c.dir, name+".log"))
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-4000):])
}

// Kubectl runs kubectl on the control plane's node as the cluster's administrator and returns what it prints.
func (c *Cluster) Kubectl(ctx context.Context, stdin []byte, args ...string) (string, error) {
	file := func(name string) string { return filepath.Join(c.dir, name) }
	return c.kubectl(
		ctx,
		stdin,
		append(
			[]string{
				"--kubeconfig",
				"/dev/null",
				"--server",
				fmt.Sprintf("https://127.0.0.1:%d", apiPort),
				"--certificate-authority",
				file("ca.crt"),
				"--client-certificate",
				file("admin.crt"),
				"--client-key",
				file("admin.key"),
			},
			args...)...)
}

// As runs kubectl with a token instead.
func (c *Cluster) As(ctx context.Context, token string, stdin []byte, args ...string) (string, error) {
	kubeconfig := filepath.Join(c.dir, "as.kubeconfig")
	if err := c.WriteKubeconfig(kubeconfig, token); err != nil {
		return "", err
	}
	return c.kubectl(ctx, stdin, append([]string{"--kubeconfig", kubeconfig}, args...)...)
}

func (c *Cluster) kubectl(ctx context.Context, stdin []byte, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	p := exec.CommandContext(
		ctx,
		filepath.Join(c.programs, "kubectl"),
		append([]string{"--cache-dir", filepath.Join(c.dir, "kubectl-cache")}, args...)...)
	var out, errs bytes.Buffer
	p.Stdin, p.Stdout, p.Stderr, p.Dir = bytes.NewReader(stdin), &out, &errs, c.dir
	p.Env = []string{"HOME=" + c.dir}
	if err := fabric.In(c.on.Namespace, p.Start); err != nil {
		return "", err
	}
	if err := p.Wait(); err != nil {
		return out.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err,
			strings.TrimSpace(errs.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

// AddNode makes a Node object. One that exists stays.
func (c *Cluster) AddNode(ctx context.Context, name string) error {
	o, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": name}})
	if err == nil {
		_, err = c.Kubectl(ctx, o, "apply", "-f", "-")
	}
	return err
}

// Token is a token of one of skein's ServiceAccounts, bound to a Node.
func (c *Cluster) Token(ctx context.Context, account, node string) (string, error) {
	return c.Kubectl(ctx, nil, "-n", "skein-system", "create", "token", account, "--bound-object-kind", "Node",
		"--bound-object-name", node, "--duration", "2h")
}

// WriteKubeconfig writes what a host needs to use the apiserver with a token, at the overlay address, whole or not at
// all.
func (c *Cluster) WriteKubeconfig(file, token string) error {
	b, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "skein",
		"clusters": []any{map[string]any{"name": "skein", "cluster": map[string]any{
			"server": fmt.Sprintf(
				"https://%s",
				netip.AddrPortFrom(c.address, apiPort),
			), "certificate-authority-data": base64.StdEncoding.EncodeToString(c.ca.pem)}}},
		"users": []any{map[string]any{"name": "skein", "user": map[string]any{"token": token}}},
		"contexts": []any{
			map[string]any{"name": "skein", "context": map[string]any{"cluster": "skein", "user": "skein"}},
		},
	})
	if err != nil {
		return err
	}
	if err := os.WriteFile(file+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}
