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
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(dir)
}

// Config says what a cluster's control plane is made of.
type Config struct {
	On       lab.Info
	Machine  *Machine // where it runs; nil: on this machine's file system
	Dir      string   // the control plane's own
	Programs string
	// Addresses at which the apiserver is reached, one of a family, IPv4 first; empty: the node's overlay addresses.
	Addresses []netip.Addr
	// Pods is the range of pods' addresses, both families with a comma, that kube-proxy takes for the cluster's.
	Pods string
	// NodeCIDRs has the controller manager give each Node its part of Pods, for CNIs that go by that.
	NodeCIDRs bool
	// Whole runs the controller manager and the scheduler too, and gives pods their ServiceAccounts' tokens.
	Whole bool
	// Etcd are the client URLs of an etcd that runs already; empty: one is started beside the apiserver.
	Etcd string
}

// Cluster is a control plane on a node of a lab. Its methods may be called one at a time.
type Cluster struct {
	Config
	ca          *authority
	etcd        *program
	api         *program
	controllers *program
	scheduler   *program
}

// program is a running process.
type program struct {
	*exec.Cmd
	ended chan struct{} // closed when it has
}

// Service addresses that are known before the cluster is.
const (
	serviceRange = "10.96.0.0/16,fd00:96::/112"
	dnsService   = "10.96.0.10"
)

// Raise starts etcd and the apiserver on a node that has joined, and with Whole the rest of a control plane. On an
// error nothing runs.
func Raise(ctx context.Context, cfg Config) (*Cluster, error) {
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := lab.RaiseInotify(); err != nil { // each program of Kubernetes' has some ten
		return nil, err
	}
	c := &Cluster{Config: cfg}
	if len(c.Addresses) == 0 {
		for _, text := range cfg.On.Overlay {
			a, err := netip.ParseAddr(text)
			if err != nil {
				return nil, fmt.Errorf("node %s: overlay address: %w", cfg.On.Name, err)
			}
			c.Addresses = append(c.Addresses, a)
		}
	}
	if len(c.Addresses) == 0 {
		return nil, fmt.Errorf("node %s has told no overlay address", cfg.On.Name)
	}
	if err := c.files(); err != nil {
		return nil, err
	}
	err := c.startEtcd()
	if err == nil {
		err = c.StartAPIServer(ctx)
	}
	if err == nil && c.Whole {
		err = errors.Join(c.startControllers(), c.startScheduler())
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *Cluster) startEtcd() error {
	if c.Etcd != "" {
		return nil
	}
	return c.start(
		&c.etcd,
		"etcd",
		"--data-dir",
		filepath.Join(c.Dir, "etcd"),
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
}

// file is the path of one of the control plane's files.
func (c *Cluster) file(name string) string { return filepath.Join(c.Dir, name) }

func (c *Cluster) startControllers() error {
	var more []string
	if c.NodeCIDRs {
		more = []string{"--allocate-node-cidrs", "--cluster-cidr", c.Pods, "--node-cidr-mask-size-ipv4", "24",
			"--node-cidr-mask-size-ipv6", "64"}
	}
	return c.start(&c.controllers, "kube-controller-manager",
		append(more, "--kubeconfig", c.file("controllers.kubeconfig"),
			"--authentication-kubeconfig", c.file("controllers.kubeconfig"),
			"--authorization-kubeconfig", c.file("controllers.kubeconfig"),
			"--root-ca-file", c.file("ca.crt"), "--service-account-private-key-file", c.file("service-accounts.key"),
			"--use-service-account-credentials", "--leader-elect=false", "--bind-address", "127.0.0.1",
			"--horizontal-pod-autoscaler-sync-period", "2s",
			"--cluster-signing-cert-file", c.file("ca.crt"), "--cluster-signing-key-file", c.file("ca.key"))...)
}

func (c *Cluster) startScheduler() error {
	return c.start(&c.scheduler, "kube-scheduler", "--kubeconfig", c.file("scheduler.kubeconfig"),
		"--authentication-kubeconfig", c.file("scheduler.kubeconfig"),
		"--authorization-kubeconfig", c.file("scheduler.kubeconfig"), "--leader-elect=false",
		"--bind-address", "127.0.0.1")
}

// StartAPIServer starts the apiserver, again after KillAPIServer, and waits until it is ready.
func (c *Cluster) StartAPIServer(ctx context.Context) error {
	etcd := c.Etcd
	if etcd == "" {
		etcd = "http://127.0.0.1:2379"
	}
	args := []string{
		"--etcd-servers", etcd, "--secure-port", fmt.Sprint(apiPort), "--bind-address", "::",
		"--advertise-address", c.Addresses[0].String(), "--service-cluster-ip-range", serviceRange,
		"--tls-cert-file", c.file("apiserver.crt"), "--tls-private-key-file", c.file("apiserver.key"),
		"--client-ca-file", c.file("ca.crt"), "--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", c.file("service-accounts.crt"),
		"--service-account-signing-key-file", c.file("service-accounts.key"), "--authorization-mode", "Node,RBAC",
		"--enable-admission-plugins", "NodeRestriction", "--allow-privileged",
		"--kubelet-certificate-authority", c.file("ca.crt"), "--kubelet-client-certificate", c.file("admin.crt"),
		"--kubelet-client-key", c.file("admin.key"), "--kubelet-preferred-address-types", "InternalIP",
		"--requestheader-client-ca-file", c.file("front-ca.crt"), "--requestheader-allowed-names", "front-proxy",
		"--requestheader-extra-headers-prefix", "X-Remote-Extra-", "--requestheader-group-headers", "X-Remote-Group",
		"--requestheader-username-headers", "X-Remote-User", "--proxy-client-cert-file", c.file("front-proxy.crt"),
		"--proxy-client-key-file", c.file("front-proxy.key"),
	}
	if !c.Whole {
		args = append(args, "--disable-admission-plugins", "ServiceAccount")
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
			return fmt.Errorf("the apiserver has ended; the end of its log:\n%s", tailOf(c.file("kube-apiserver.log")))
		case <-ctx.Done():
			return fmt.Errorf("the apiserver is not ready after %s: %w; the end of its log:\n%s", upWithin, err,
				tailOf(c.file("kube-apiserver.log")))
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// KillAPIServer ends the apiserver as a crash would.
func (c *Cluster) KillAPIServer() error { return stop(&c.api, syscall.SIGKILL) }

// Fail ends the apiserver and its etcd as a crash would.
func (c *Cluster) Fail() error {
	return errors.Join(stop(&c.api, syscall.SIGKILL), stop(&c.etcd, syscall.SIGKILL))
}

// Return starts again what Fail has ended, with etcd's data, and waits until the apiserver is ready.
func (c *Cluster) Return(ctx context.Context) error {
	if err := c.startEtcd(); err != nil {
		return err
	}
	return c.StartAPIServer(ctx)
}

// Close ends the control plane. What is left of one that was not closed ends with the lab, since it lives in its
// namespaces.
func (c *Cluster) Close() error {
	return errors.Join(stop(&c.scheduler, syscall.SIGKILL), stop(&c.controllers, syscall.SIGKILL),
		stop(&c.api, syscall.SIGKILL), stop(&c.etcd, syscall.SIGKILL))
}

// start starts a program of the control plane. Its log is in the control plane's directory.
func (c *Cluster) start(to **program, name string, args ...string) error {
	log, err := os.OpenFile(c.file(name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	argv := append([]string{filepath.Join(c.Programs, name)}, args...)
	if c.Machine != nil {
		argv = append(c.Machine.Enter(), argv...)
	}
	p := exec.Command(argv[0], argv[1:]...)
	p.Dir, p.Stdout, p.Stderr = c.Dir, log, log
	p.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + c.Dir}
	if err := fabric.In(c.On.Namespace, p.Start); err != nil {
		return fmt.Errorf("start %s on %s: %w", name, c.On.Name, err)
	}
	*to = watch(p)
	return nil
}

// watch waits for the end of a process that was started.
func watch(p *exec.Cmd) *program {
	running := &program{Cmd: p, ended: make(chan struct{})}
	go func() {
		_ = p.Wait() // how it ended is in its log
		close(running.ended)
	}()
	return running
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

// tailOf is the end of a log.
func tailOf(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-4000):])
}

// Kubectl runs kubectl on the control plane's node as the cluster's administrator and returns what it prints.
func (c *Cluster) Kubectl(ctx context.Context, stdin []byte, args ...string) (string, error) {
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
				c.file("ca.crt"),
				"--client-certificate",
				c.file("admin.crt"),
				"--client-key",
				c.file("admin.key"),
			},
			args...)...)
}

// As runs kubectl with a token instead.
func (c *Cluster) As(ctx context.Context, token string, stdin []byte, args ...string) (string, error) {
	kubeconfig := filepath.Join(c.Dir, "as.kubeconfig")
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
		filepath.Join(c.Programs, "kubectl"),
		append([]string{"--cache-dir", filepath.Join(c.Dir, "kubectl-cache")}, args...)...)
	var out, errs bytes.Buffer
	p.Stdin, p.Stdout, p.Stderr, p.Dir = bytes.NewReader(stdin), &out, &errs, c.Dir
	p.Env = []string{"HOME=" + c.Dir}
	if err := fabric.In(c.On.Namespace, p.Start); err != nil {
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

// WriteKubeconfig writes what a host needs to use the apiserver with a token, whole or not at all.
func (c *Cluster) WriteKubeconfig(file, token string) error {
	return c.kubeconfig(file, map[string]any{"token": token})
}

// KubeconfigFor writes a kubeconfig with a certificate for a user of Kubernetes' own.
func (c *Cluster) KubeconfigFor(file, user string, groups ...string) error {
	cert, key, err := c.ca.issue(user, groups)
	if err != nil {
		return fmt.Errorf("certificate of %s: %w", user, err)
	}
	return c.kubeconfig(file, map[string]any{"client-certificate-data": base64.StdEncoding.EncodeToString(cert),
		"client-key-data": base64.StdEncoding.EncodeToString(key)})
}

func (c *Cluster) kubeconfig(file string, user map[string]any) error {
	b, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "skein",
		"clusters": []any{map[string]any{"name": "skein", "cluster": map[string]any{
			"server":                     "https://" + netip.AddrPortFrom(c.Addresses[0], apiPort).String(),
			"certificate-authority-data": base64.StdEncoding.EncodeToString(c.ca.pem)}}},
		"users": []any{map[string]any{"name": "skein", "user": user}},
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
