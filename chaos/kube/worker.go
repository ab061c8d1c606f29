package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// WorkerConfig says what a Kubernetes node is made of.
type WorkerConfig struct {
	On        lab.Info
	Machine   *Machine
	Name      string       // of the Node; empty: as the lab's node is called
	Addresses []netip.Addr // of the Node, one of a family; empty: the overlay addresses
	Taints    string       // that kubelet registers the Node with, as its flag has them
	Labels    string       // likewise
	Proxy     string       // mode of kube-proxy: nftables, iptables or, for none, empty
	BinDir    string       // of CNI's plugins; empty: as kubeadm has it
	ConfDir   string       // of CNI's configurations; likewise
	Root      string       // of this repository
}

// Worker is a Kubernetes node: containerd, kubelet and kube-proxy on a machine.
type Worker struct {
	WorkerConfig
	cluster    *Cluster
	containers string // directory of Debian's containerd
	containerd *program
	kubelet    *program
	proxy      *program
}

// Paths in a machine.
const (
	binDir     = "/opt/cni/bin"
	confDir    = "/etc/cni/net.d"
	containers = "/run/containerd/containerd.sock"
	staticPods = "/etc/kubernetes/manifests"
)

// pauseImage is what each pod's sandbox runs.
const pauseImage = "skein.test/pause:1"

const containerdConfig = `version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + pauseImage + `"
  restrict_oom_score_adj = true # where CAP_SYS_RESOURCE is missing
  disable_apparmor = true
  disable_hugetlb_controller = true
  tolerate_missing_hugetlb_controller = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "BINDIR"
    conf_dir = "CONFDIR"
`

// AddWorker starts containerd, kubelet and kube-proxy. It does not wait for the Node. On an error nothing runs.
func (c *Cluster) AddWorker(ctx context.Context, cfg WorkerConfig) (*Worker, error) {
	w := &Worker{WorkerConfig: cfg, cluster: c}
	w.BinDir, w.ConfDir = cmp.Or(w.BinDir, binDir), cmp.Or(w.ConfDir, confDir)
	if w.Name == "" {
		w.Name = cfg.On.Name
	}
	if len(w.Addresses) == 0 {
		for _, text := range cfg.On.Overlay {
			a, err := netip.ParseAddr(text)
			if err != nil {
				return nil, fmt.Errorf("node %s: overlay address: %w", cfg.On.Name, err)
			}
			w.Addresses = append(w.Addresses, a)
		}
	}
	root, err := filepath.Abs(cfg.Root)
	if err == nil {
		w.containers, err = filepath.EvalSymlinks(filepath.Join(root, ".cache", "containers"))
	}
	if err != nil {
		return nil, fmt.Errorf("containerd is missing: run .ci/container-tools, or `make test-kube`, which does: %w", err)
	}
	if err := w.files(ctx, root); err != nil {
		return nil, fmt.Errorf("node %s: %w", w.Name, err)
	}
	if err := fabric.In(cfg.On.Namespace, forwarding); err != nil {
		return nil, fmt.Errorf("node %s: %w", w.Name, err)
	}
	if err := w.StartContainerd(ctx); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	if err := errors.Join(w.StartKubelet(), w.StartProxy()); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// forwarding is what Kubernetes asks of every node.
func forwarding() error {
	return errors.Join(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
		os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
}

// files writes what the node's programs read.
func (w *Worker) files(ctx context.Context, root string) error {
	etc := filepath.Join(w.Machine.Dir, "etc", "kubernetes")
	if err := os.MkdirAll(filepath.Join(w.Machine.Dir, staticPods), 0o755); err != nil {
		return err
	}
	file := func(name string) string { return filepath.Join(etc, name) }
	cert, key, err := w.cluster.ca.issue("system:node:"+w.Name, []string{"system:nodes"}, w.Addresses...)
	if err != nil {
		return err
	}
	kubelet, err := json.Marshal(map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"failCgroupV1": false, "failSwapOn": false, "cgroupDriver": "cgroupfs", "cgroupRoot": "/" + w.Machine.cgroup,
		"enforceNodeAllocatable": []string{}, "makeIPTablesUtilChains": false, "localStorageCapacityIsolation": false,
		"containerRuntimeEndpoint": "unix://" + containers,
		"tlsCertFile":              "/etc/kubernetes/kubelet.crt", "tlsPrivateKeyFile": "/etc/kubernetes/kubelet.key",
		"authentication": map[string]any{"anonymous": map[string]any{"enabled": false},
			"webhook": map[string]any{"enabled": true}, "x509": map[string]any{"clientCAFile": "/etc/kubernetes/ca.crt"}},
		"authorization": map[string]any{"mode": "Webhook"},
		"clusterDNS":    []string{dnsService}, "clusterDomain": "cluster.local", "resolvConf": "/etc/resolv.conf",
		"evictionHard":                map[string]string{"memory.available": "10Mi"},
		"imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99, "maxPods": 250,
		"staticPodPath":      staticPods, // pods that need no apiserver
		"registerWithTaints": taints(w.Taints),
	})
	if err != nil {
		return err
	}
	proxy, err := json.Marshal(map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": w.Proxy,
		"clientConnection": map[string]any{"kubeconfig": "/etc/kubernetes/proxy.kubeconfig"},
		"clusterCIDR":      w.cluster.Pods, "hostnameOverride": w.Name, "metricsBindAddress": "127.0.0.1:10249",
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
	})
	if err != nil {
		return err
	}
	runtime := strings.NewReplacer("BINDIR", w.BinDir, "CONFDIR", w.ConfDir).Replace(containerdConfig)
	for name, b := range map[string][]byte{"ca.crt": w.cluster.ca.pem, "kubelet.crt": cert, "kubelet.key": key,
		"kubelet.yaml": kubelet, "proxy.yaml": proxy, "containerd.toml": []byte(runtime)} {
		if err := os.WriteFile(file(name), b, 0o600); err != nil {
			return err
		}
	}
	if err := w.cluster.KubeconfigFor(file("kubelet.kubeconfig"), "system:node:"+w.Name, "system:nodes"); err != nil {
		return err
	}
	if err := w.cluster.KubeconfigFor(file("proxy.kubeconfig"), "system:kube-proxy"); err != nil {
		return err
	}
	tools, err := filepath.EvalSymlinks(filepath.Join(root, "bin", "tools"))
	if err != nil {
		return fmt.Errorf("the reference plugins of CNI are missing: run .ci/cni-tools: %w", err)
	}
	copyPlugins := []string{"cp", "-t", w.BinDir}
	for _, plugin := range []string{"loopback", "portmap", "bandwidth"} {
		copyPlugins = append(copyPlugins, filepath.Join(tools, plugin))
	}
	for _, command := range [][]string{{"mkdir", "-p", w.BinDir, w.ConfDir}, copyPlugins} {
		if _, err := w.Machine.Run(ctx, w.On.Namespace, command...); err != nil {
			return fmt.Errorf("the reference plugins of CNI are missing: run .ci/cni-tools: %w", err)
		}
	}
	return nil
}

// taints reads kubelet's form of taints, KEY=VALUE:EFFECT with commas between.
func taints(text string) []map[string]string {
	out := []map[string]string{}
	for one := range strings.SplitSeq(text, ",") {
		left, effect, ok := strings.Cut(one, ":")
		if !ok {
			continue
		}
		key, value, _ := strings.Cut(left, "=")
		out = append(out, map[string]string{"key": key, "value": value, "effect": effect})
	}
	return out
}

// StartContainerd starts the container runtime, and waits until it answers.
func (w *Worker) StartContainerd(ctx context.Context) error {
	var err error
	w.containerd, err = w.Machine.start(w.On.Namespace, "containerd",
		[]string{"PATH=" + filepath.Join(w.containers, "usr/bin") + ":" + filepath.Join(w.containers, "usr/sbin") + ":" +
			os.Getenv("PATH")},
		filepath.Join(w.containers, "usr/bin/containerd"), "--config", "/etc/kubernetes/containerd.toml")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, upWithin)
	defer cancel()
	for {
		if _, err = w.ctr(ctx, "version"); err == nil {
			return nil
		}
		select {
		case <-w.containerd.ended:
			return fmt.Errorf("node %s: containerd has ended; the end of its log:\n%s", w.Name, w.Machine.tail("containerd"))
		case <-ctx.Done():
			return fmt.Errorf("node %s: %w; the end of containerd's log:\n%s", w.Name, err, w.Machine.tail("containerd"))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// ctr runs containerd's own client, in Kubernetes' namespace.
func (w *Worker) ctr(ctx context.Context, args ...string) (string, error) {
	return w.Machine.Run(ctx, w.On.Namespace,
		append([]string{filepath.Join(w.containers, "usr/bin/ctr"), "-n", "k8s.io"}, args...)...)
}

// Import gives the node's runtime the images of an archive.
func (w *Worker) Import(ctx context.Context, archive string) error {
	_, err := w.ctr(ctx, "images", "import", archive)
	return err
}

// StartKubelet starts kubelet.
func (w *Worker) StartKubelet() error {
	var ips []string
	for _, a := range w.Addresses {
		ips = append(ips, a.String())
	}
	argv := []string{filepath.Join(w.cluster.Programs, "kubelet"), "--config",
		"/etc/kubernetes/kubelet.yaml", "--kubeconfig",
		"/etc/kubernetes/kubelet.kubeconfig", "--hostname-override", w.Name, "--node-ip", strings.Join(ips, ",")}
	if w.Labels != "" {
		argv = append(argv, "--node-labels", w.Labels)
	}
	var err error
	w.kubelet, err = w.Machine.start(w.On.Namespace, "kubelet", nil, argv...)
	return err
}

// StartProxy starts kube-proxy, if the node has one.
func (w *Worker) StartProxy() error {
	if w.Proxy == "" {
		return nil
	}
	var err error
	w.proxy, err = w.Machine.start(w.On.Namespace, "kube-proxy", nil, filepath.Join(w.cluster.Programs, "kube-proxy"),
		"--config", "/etc/kubernetes/proxy.yaml")
	return err
}

// StopProxy ends kube-proxy. Its tables stay.
func (w *Worker) StopProxy() error { return stop(&w.proxy, syscall.SIGTERM) }

// StopKubelet ends kubelet. Its pods go on.
func (w *Worker) StopKubelet() error { return stop(&w.kubelet, syscall.SIGTERM) }

// Close ends the node's programs. Its pods end with the machine.
func (w *Worker) Close() error {
	return errors.Join(stop(&w.proxy, syscall.SIGKILL), stop(&w.kubelet, syscall.SIGKILL),
		stop(&w.containerd, syscall.SIGKILL))
}
