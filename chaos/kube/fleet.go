package kube

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
)

// fleetLab is the mesh below the cluster: a relay with a public address, a control plane behind one NAT, workers behind
// two others, and a virtual machine that is not a Node.
//
//go:embed fleet.yaml
var fleetLab string

// Manifests of what runs in the cluster.
var (
	//go:embed manifests/coredns.yaml
	corednsManifest string
)

// Images of the fleet, in every node's runtime.
const (
	// ToolsImage has a shell and Kubernetes' own test program, agnhost, as its entry point.
	ToolsImage   = "skein.test/tools:1"
	corednsImage = "skein.test/coredns:1"
)

// FleetConfig says what a fleet is raised from.
type FleetConfig struct {
	Root   string   // of this repository
	Dir    string   // the fleet's own; a short path, since sockets are in it
	Binary string   // the skein program
	Name   string   // of the lab
	Lab    string   // the lab's file, with DIR for Dir; empty: the usual one
	Nodes  []string // hosts that are Kubernetes nodes, the control plane's first; empty: the usual ones
	Proxy  string   // mode of kube-proxy; empty: nftables
	Images []Image  // in every node's runtime, beside the fleet's own
	// OtherCNI has CNI's reference plugins bridge and host-local give pods their addresses, of Pods, and skein carry
	// packets between hosts alone.
	OtherCNI bool
	// UseCNI gives a node another CNI than skein's; nil: skein's, or with OtherCNI the reference plugins.
	UseCNI func(ctx context.Context, w *Worker) error
	// OwnCNI leaves the configuration of the container runtimes to the agents, and has kubelets register their Nodes with
	// the taint that the agents take off.
	OwnCNI    bool
	Pods      string // range of pods' addresses; empty: the usual fleet's
	Progress  func(string)
	Artifacts string
}

// Fleet is a Kubernetes cluster on a mesh.
type Fleet struct {
	Config   FleetConfig
	Lab      *lab.Lab
	Cluster  *Cluster
	Machines map[string]*Machine // by the lab's node
	Workers  map[string]*Worker  // likewise
}

// controlPlane is the lab's node that the usual fleet's control plane is on.
const controlPlane = "cp1"

// RaiseFleet raises a mesh, and a cluster on it, and waits until the nodes and the cluster's DNS are ready. On an error
// nothing runs.
func RaiseFleet(ctx context.Context, cfg FleetConfig) (*Fleet, error) {
	if cfg.Progress == nil {
		cfg.Progress = func(string) {}
	}
	if cfg.Lab == "" {
		cfg.Lab = fleetLab
	}
	if len(cfg.Nodes) == 0 {
		cfg.Nodes = []string{controlPlane, "home1", "cloud1"}
	}
	if cfg.Proxy == "" {
		cfg.Proxy = "nftables"
	}
	if cfg.Pods == "" {
		cfg.Pods = "10.100.0.0/16,fd00:100::/112"
	}
	f := &Fleet{Config: cfg, Machines: map[string]*Machine{}, Workers: map[string]*Worker{}}
	if cfg.OtherCNI && cfg.UseCNI == nil {
		f.Config.UseCNI = f.useReferencePlugins
	}
	err := f.raise(ctx)
	if err != nil {
		if cfg.Artifacts != "" {
			kept, aerr := f.SaveArtifacts(context.WithoutCancel(ctx))
			err = errors.Join(fmt.Errorf("%w\nlogs and states are in %s", err, kept), aerr)
		}
		return nil, errors.Join(err, f.Close(context.WithoutCancel(ctx)))
	}
	return f, nil
}

func (f *Fleet) raise(ctx context.Context) error {
	programs, err := Programs(f.Config.Root)
	if err != nil {
		return err
	}
	began := time.Now()
	spec, err := lab.Parse("fleet.yaml", []byte(strings.ReplaceAll(f.Config.Lab, "DIR", f.Config.Dir)))
	if err != nil {
		return err
	}
	spec.Name = f.Config.Name
	for _, n := range f.Config.Nodes {
		m, err := NewMachine(ctx, filepath.Join(f.Config.Dir, "machines", n), n)
		if err != nil {
			return err
		}
		f.Machines[n] = m
	}
	images := make(chan error, 1) // made beside the mesh
	go func() { images <- f.makeImages(ctx, programs) }()
	f.Lab, err = lab.Up(ctx, spec, lab.Options{Dir: filepath.Join(f.Config.Dir, "lab"), Binary: f.Config.Binary,
		Progress: f.Config.Progress, Enter: func(node string) []string {
			if m := f.Machines[node]; m != nil {
				return m.Enter()
			}
			return nil
		}})
	if err != nil {
		return errors.Join(err, <-images)
	}
	if err := errors.Join(f.Lab.WaitConverged(ctx, 30*time.Second), <-images); err != nil {
		return err
	}
	f.progress(began, "the mesh is up")
	on, err := f.Lab.Node(f.Config.Nodes[0])
	if err != nil {
		return err
	}
	f.Cluster, err = Raise(ctx, Config{On: on, Machine: f.Machines[on.Name], Dir: filepath.Join(f.Config.Dir,
		"control-plane"),
		Programs: programs, Pods: f.Config.Pods, NodeCIDRs: f.Config.OtherCNI, Whole: true})
	if err != nil {
		return err
	}
	f.progress(began, "the control plane is up")
	if err := f.addNodes(ctx); err != nil {
		return err
	}
	f.progress(began, "the nodes are ready")
	if _, err := f.Cluster.Kubectl(ctx, []byte(corednsManifest), "apply", "-f", "-"); err != nil {
		return err
	}
	if f.Config.UseCNI != nil {
		return nil // its pods reach no other host before skein is told of them
	}
	if _, err := f.Cluster.Kubectl(ctx, nil, "-n", "kube-system", "rollout", "status", "--timeout=60s",
		"deployment/coredns"); err != nil {
		return err
	}
	f.progress(began, "the cluster's DNS is ready")
	return nil
}

func (f *Fleet) progress(began time.Time, what string) {
	f.Config.Progress(fmt.Sprintf("%s after %s", what, time.Since(began).Round(100*time.Millisecond)))
}

// makeImages makes the archive of the images that every node gets.
func (f *Fleet) makeImages(_ context.Context, programs string) error {
	shell, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("images: %w: run .ci/setup kube", err)
	}
	pause := busybox(shell, pauseImage)
	pause.Entrypoint = []string{"/bin/sleep", "2147483647"}
	tools := busybox(shell, ToolsImage)
	tools.Programs["agnhost"] = filepath.Join(programs, "agnhost")
	tools.Entrypoint, tools.Command = []string{"/agnhost"}, []string{"pause"}
	dns := busybox(shell, corednsImage)
	dns.Programs["coredns"] = filepath.Join(programs, "coredns")
	dns.Entrypoint = []string{"/coredns"}
	return writeArchive(f.archive(), append([]Image{pause, tools, dns}, f.Config.Images...)...)
}

// writeArchive writes images to a file.
func writeArchive(name string, images ...Image) error {
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	defer file.Close()
	return WriteArchive(file, images...)
}

func (f *Fleet) archive() string { return filepath.Join(f.Config.Dir, "images.tar") }

// addNodes gives the cluster its nodes, and each agent its way to the apiserver.
func (f *Fleet) addNodes(ctx context.Context) error {
	for _, file := range []string{"crds", "agent", "admin"} {
		manifest, err := filepath.Abs(filepath.Join(f.Config.Root, "deploy/kubernetes", file+".yaml"))
		if err != nil {
			return err
		}
		if _, err := f.Cluster.Kubectl(ctx, nil, "apply", "-f", manifest); err != nil {
			return err
		}
	}
	failed := make(chan error, len(f.Config.Nodes))
	var workers []*Worker
	for _, n := range f.Config.Nodes {
		w, err := f.addNode(ctx, n)
		if err != nil {
			return err
		}
		f.Workers[n] = w
		workers = append(workers, w)
	}
	for _, w := range workers {
		go func() { failed <- w.Import(ctx, f.archive()) }()
	}
	var err error
	for range workers {
		err = errors.Join(err, <-failed)
	}
	if err != nil {
		return err
	}
	for _, w := range workers {
		if err := f.Cluster.WaitNode(ctx, w.Name); err != nil {
			return fmt.Errorf("%w; the end of kubelet's log:\n%s", err, w.Machine.tail("kubelet"))
		}
		if f.Config.UseCNI != nil {
			if err := f.Config.UseCNI(ctx, w); err != nil {
				return err
			}
		}
		if err := f.GiveKubeconfig(ctx, w); err != nil {
			return err
		}
	}
	_, err = f.Cluster.Kubectl(ctx, nil, "wait", "--for=condition=Ready", "--timeout=90s", "node", "--all")
	return err
}

func (f *Fleet) addNode(ctx context.Context, name string) (*Worker, error) {
	on, err := f.Lab.Node(name)
	if err != nil {
		return nil, err
	}
	cfg := WorkerConfig{On: on, Machine: f.Machines[name], Proxy: f.Config.Proxy, Root: f.Config.Root}
	if name == f.Config.Nodes[0] {
		cfg.Taints = "node-role.kubernetes.io/control-plane=:NoSchedule"
	}
	if f.Config.OwnCNI {
		cfg.Taints = strings.TrimPrefix(cfg.Taints+",skein.dev/agent-not-ready=:NoSchedule", ",")
	}
	w, err := f.Cluster.AddWorker(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if f.Config.UseCNI != nil || f.Config.OwnCNI {
		return w, nil // another CNI's configuration needs the Node's pod CIDR; an agent writes its own
	}
	out, exit, err := f.Lab.Exec(ctx, name, "skein", "cni", "install", "--chain", "portmap,bandwidth")
	if err != nil || exit != 0 {
		return nil, errors.Join(fmt.Errorf("on %s: install the plugin: exit status %d: %w\n%s", name, exit, err,
			out), w.Close())
	}
	return w, nil
}

// GiveKubeconfig gives a node's agent a token that is bound to its Node.
func (f *Fleet) GiveKubeconfig(ctx context.Context, w *Worker) error {
	account := "skein-agent"
	if w.On.Name == f.Config.Nodes[0] {
		account = "skein-admin"
	}
	token, err := f.Cluster.Token(ctx, account, w.Name)
	if err != nil {
		return err
	}
	return f.Cluster.WriteKubeconfig(filepath.Join(f.Config.Dir, w.On.Name+".kubeconfig"), token)
}

// WaitNode waits until kubelet has registered a Node.
func (c *Cluster) WaitNode(ctx context.Context, name string) error {
	_, err := poll(ctx, upWithin, tryEvery, func() error {
		_, err := c.Kubectl(ctx, nil, "get", "node", name)
		return err
	})
	if err != nil {
		return fmt.Errorf("Node %s: %w", name, err)
	}
	return nil
}

// SaveArtifacts keeps logs and states, and returns where.
func (f *Fleet) SaveArtifacts(ctx context.Context) (string, error) {
	kept := filepath.Join(f.Config.Artifacts, f.Config.Name)
	var incomplete error // what is there of Kubernetes' logs is kept all the same
	if f.Lab != nil {
		if kept, incomplete = f.Lab.SaveArtifacts(ctx, f.Config.Artifacts); kept == "" {
			return "", incomplete
		}
	}
	logs, _ := filepath.Glob(filepath.Join(f.Config.Dir, "machines", "*", "*.log"))
	more, _ := filepath.Glob(filepath.Join(f.Config.Dir, "control-plane", "*.log"))
	for _, from := range append(logs, more...) {
		to := filepath.Join(kept, "kubernetes", filepath.Base(filepath.Dir(from))+"-"+filepath.Base(from))
		b, err := os.ReadFile(from)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(to), 0o755)
		}
		if err == nil {
			err = os.WriteFile(to, b, 0o644)
		}
		if err != nil {
			return kept, errors.Join(incomplete, err)
		}
	}
	return kept, incomplete
}

// Close takes everything down.
func (f *Fleet) Close(ctx context.Context) error {
	var err error
	for _, w := range f.Workers {
		err = errors.Join(err, w.Close())
	}
	if f.Cluster != nil {
		err = errors.Join(err, f.Cluster.Close())
	}
	if f.Lab != nil {
		err = errors.Join(err, f.Lab.Down(ctx))
	}
	for _, m := range f.Machines {
		err = errors.Join(err, m.Close())
	}
	return err
}
