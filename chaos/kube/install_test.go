package kube

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/testenv"
)

// TestInstall carries out docs/kubernetes.md on hosts that have nothing yet, one behind a NAT of its own each. kubeadm
// and k3s are not to be had here: in their place the test starts the programs that they start, as the files say that
// the document has the reader write.
func TestInstall(t *testing.T) {
	testenv.NeedRoot(t)
	for _, one := range []layout{
		{name: "Kubeadm", heading: "With kubeadm", binDir: binDir, confDir: confDir, kubeconfig: "/etc/kubernetes/admin.conf",
			server: (*installed).kubeadmInit, agent: (*installed).kubeadmJoin,
			serverCommand: "kubeadm init --config /etc/kubernetes/kubeadm.yaml",
			agentCommand:  "kubeadm join "},
		{name: "K3s", heading: "With k3s", binDir: "/var/lib/rancher/k3s/data/cni",
			confDir:    "/var/lib/rancher/k3s/agent/etc/cni/net.d",
			kubeconfig: "/etc/rancher/k3s/k3s.yaml", server: (*installed).k3sServer, agent: (*installed).k3sAgent,
			serverCommand: "systemctl start k3s", agentCommand: "systemctl start k3s-agent"},
	} {
		t.Run(one.name, func(t *testing.T) { install(t, one) })
	}
}

// layout is a distribution of Kubernetes, as far as its paths and files go.
type layout struct {
	name, heading, binDir, confDir, kubeconfig string
	serverCommand, agentCommand                string
	server, agent                              func(*installed, context.Context) error
}

const installLab = `name: install
sites:
  dc:     {nat: none}
  office: {nat: restricted-cone}
  home:   {nat: port-restricted-cone}
nodes:
  hub:   {site: dc, server: true, relay: true}
  cp1:   {site: office, role: host}
  home1: {site: home, role: host}
`

// installed is what the document's reader has made so far.
type installed struct {
	*testing.T
	*Fleet
	layout
	document string
	root     string // what the reader has of this repository: the program, built, and deploy
	agents   map[string]*program
	replace  map[string]string
}

func install(t *testing.T, how layout) {
	in := &installed{T: t, Fleet: bareFleet(t, "i"), layout: how, agents: map[string]*program{},
		replace: map[string]string{}}
	text, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	in.document = string(text)
	in.root = filepath.Join(in.Config.Dir, "checkout")
	deploy, err := filepath.Abs("../../deploy")
	if err == nil {
		err = errors.Join(os.MkdirAll(filepath.Join(in.root, "bin"), 0o755),
			os.Symlink(deploy, filepath.Join(in.root, "deploy")),
			os.Symlink(in.Config.Binary, filepath.Join(in.root, "bin/skein")))
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"cp1", "home1"} { // the mesh, before there is a cluster
		in.token(host)
		in.walk("The mesh, on each host", host, map[string]func(context.Context, string) error{
			"skein up --join": func(ctx context.Context, command string) error { return in.join(ctx, host, command) },
			// There is no systemd: the test starts what the unit says.
			"systemctl daemon-reload":      nil,
			"systemctl enable --now skein": func(ctx context.Context, _ string) error { return in.startAgent(ctx, host) },
		})
	}
	delete(in.replace, "TOKEN")
	for i, a := range in.overlay("cp1") {
		in.replace[[]string{"OVERLAY4", "OVERLAY6"}[i]] = a.String()
	}
	in.cluster()
	for host, account := range map[string]string{"cp1": "skein-admin", "home1": "skein-agent"} {
		in.replace["NODE"], in.replace["ACCOUNT"] = host, account
		in.tellAgent(host)
	}
	in.works()
}

// bareFleet is a lab whose hosts have nothing but a network, and machines for those that get Kubernetes.
func bareFleet(t *testing.T, name string) *Fleet {
	dir, err := os.MkdirTemp("", "ski")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	f := &Fleet{Machines: map[string]*Machine{}, Workers: map[string]*Worker{},
		Config: FleetConfig{Root: "../..", Dir: dir,
			Binary: filepath.Join(dir, "skein"), Name: fmt.Sprintf("%s%d", name, os.Getpid()),
			Artifacts: os.Getenv("SKEIN_ARTIFACTS")}}
	build := exec.Command("go", "build", "-o", f.Config.Binary, "../../cmd/skein")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build skein: %v\n%s", err, out)
	}
	t.Cleanup(func() {
		if t.Failed() && f.Config.Artifacts != "" {
			kept, err := f.SaveArtifacts(context.Background())
			t.Log("logs and states are in", kept, err)
		}
		if err := f.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	for _, host := range []string{"cp1", "home1"} {
		if f.Machines[host], err = NewMachine(t.Context(), filepath.Join(dir, "machines", host), host); err != nil {
			delete(f.Machines, host)
			t.Fatal(err)
		}
		for _, d := range []string{"etc/systemd/system", "etc/default"} { // as every host with systemd has them
			if err := os.MkdirAll(filepath.Join(f.Machines[host].Dir, d), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	spec, err := lab.Parse("install.yaml", []byte(installLab))
	if err != nil {
		t.Fatal(err)
	}
	spec.Name = f.Config.Name
	if f.Lab, err = lab.Up(t.Context(), spec, lab.Options{Dir: filepath.Join(dir, "lab"),
		Binary: f.Config.Binary}); err != nil {
		t.Fatal(err)
	}
	return f
}

// run runs a script on a host that has a machine, as its root.
func (in *installed) run(ctx context.Context, host, script string) (string, error) {
	on, err := in.Lab.Node(host)
	if err != nil {
		return "", err
	}
	programs, err := Programs(in.Config.Root)
	if err != nil {
		return "", err
	}
	return in.Machines[host].Run(ctx, on.Namespace, "/bin/sh", "-c",
		fmt.Sprintf("export PATH=\"/usr/local/bin:$PATH:%s\" HOME='%s' KUBECONFIG='%s'\n%s",
			programs, in.Machines[host].Dir, in.kubeconfig, script))
}

// walk carries out a section, for one host.
func (in *installed) walk(heading, host string, instead map[string]func(context.Context, string) error) {
	in.Helper()
	on := func(host string) Host {
		return func(ctx context.Context, script string) (string, error) { return in.run(ctx, host, script) }
	}
	w := Walk{Document: in.document, Heading: heading, Replace: in.replace, Instead: instead, Root: in.root,
		State:    in.Config.Dir,
		Progress: func(s string) { in.Log(s) }, Hosts: map[string]Host{"cp": on("cp1"), "admin": on("cp1"), "node": on(host),
			"hub": func(ctx context.Context, script string) (string, error) { return shell(ctx, in.Lab, "hub", script) }}}
	if err := w.Run(in.Context()); err != nil {
		in.Fatal(err)
	}
}

// token is what the document's commands on the hub print: it goes to the host that it is for.
func (in *installed) token(host string) {
	role := map[string]string{"cp1": "admin", "home1": "agent"}[host]
	out, err := shell(in.Context(), in.Lab, "hub", "skein token create --role "+role)
	if err != nil {
		in.Fatal(err)
	}
	in.replace["TOKEN"] = strings.Fields(out)[0]
}

// join runs `skein up --join` until it answers, and ends it, as Ctrl-C would.
func (in *installed) join(ctx context.Context, host, command string) error {
	err := in.start(host, "joining", "/bin/sh", "-c", "PATH=/usr/local/bin:$PATH exec "+command)
	if err == nil {
		err = in.answers(ctx, host)
	}
	return errors.Join(err, in.end(host))
}

var execStart = regexp.MustCompile(`(?m)^ExecStart=(.*)$`)

// startAgent starts what the unit of systemd says.
func (in *installed) startAgent(ctx context.Context, host string) error {
	unit, err := os.ReadFile(filepath.Join(in.Machines[host].Dir, "etc/systemd/system/skein.service"))
	if err != nil {
		return err
	}
	if err := in.start(host, "skein", strings.Fields(execStart.FindStringSubmatch(string(unit))[1])...); err != nil {
		return err
	}
	return in.answers(ctx, host)
}

func (in *installed) start(host, log string, argv ...string) error {
	on, err := in.Lab.Node(host)
	if err != nil {
		return err
	}
	in.agents[host], err = in.Machines[host].start(on.Namespace, log, nil, argv...)
	return err
}

func (in *installed) end(host string) error {
	p := in.agents[host]
	return stop(&p, syscall.SIGINT)
}

// answers waits until `skein status` does, and has an address.
func (in *installed) answers(ctx context.Context, host string) error {
	return in.within(ctx, 30*time.Second, func() error {
		out, err := in.run(ctx, host, "skein status && ip -o address show dev skein0 scope global")
		if err == nil && !strings.Contains(out, "inet6") {
			err = fmt.Errorf("no address yet: %s", out)
		}
		return err
	})
}

func (in *installed) within(ctx context.Context, d time.Duration, f func() error) error {
	_, err := poll(ctx, d, tryEvery, f)
	return err
}

// overlay are a host's overlay addresses, IPv4 first.
func (in *installed) overlay(host string) []netip.Addr {
	out, err := in.run(in.Context(), host, `ip -o address show dev skein0 scope global | awk '{print $4}'`)
	if err != nil {
		in.Fatal(err)
	}
	var all []netip.Addr
	for _, text := range strings.Fields(out) {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			in.Fatal(err)
		}
		all = append(all, p.Addr())
	}
	if len(all) != 2 || !all[0].Is4() {
		in.Fatalf("%s has overlay addresses %v", host, all)
	}
	return all
}

// cluster carries out the distribution's section.
func (in *installed) cluster() {
	in.replace["JOINTOKEN"], in.replace["HASH"] = "abcdef.0123456789abcdef", "0000"
	if in.name == "K3s" {
		delete(in.replace, "HASH")
	}
	in.walk(in.heading, "home1", map[string]func(context.Context, string) error{
		in.serverCommand: func(ctx context.Context, _ string) error { return in.server(in, ctx) },
		in.agentCommand:  func(ctx context.Context, _ string) error { return in.agent(in, ctx) },
	})
	for _, k := range []string{"JOINTOKEN", "HASH", "OVERLAY6"} {
		delete(in.replace, k)
	}
}

// etc reads a file of a host that the document has the reader write.
func (in *installed) etc(host, path string) ([]byte, error) {
	return os.ReadFile(filepath.Join(in.Machines[host].Dir, path))
}

// raiseAt raises the control plane as the document's files have it, with certificates for sans alone.
func (in *installed) raiseAt(ctx context.Context, advertise string, sans []string, pods, services string) (err error) {
	if services != serviceRange {
		return fmt.Errorf("the document's Services are %s, the test's %s", services, serviceRange)
	}
	if len(sans) == 0 || sans[0] != advertise {
		return fmt.Errorf("the apiserver is at %s, and its certificate for %v", advertise, sans)
	}
	cfg := Config{Machine: in.Machines["cp1"], Dir: filepath.Join(in.Config.Dir, "control-plane"), Pods: pods, Whole: true}
	for _, s := range sans {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return err
		}
		cfg.Addresses = append(cfg.Addresses, a)
	}
	if cfg.On, err = in.Lab.Node("cp1"); err != nil {
		return err
	}
	if cfg.Programs, err = Programs(in.Config.Root); err != nil {
		return err
	}
	if in.Cluster, err = Raise(ctx, cfg); err != nil {
		return err
	}
	file := filepath.Join(in.Machines["cp1"].Dir, in.kubeconfig)
	return errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), in.Cluster.KubeconfigFor(file, "administrator",
		"system:masters"))
}

// node starts containerd, kubelet and kube-proxy on a host, at the addresses that the document gives kubelet.
func (in *installed) node(ctx context.Context, host, ips string) error {
	cfg := WorkerConfig{Machine: in.Machines[host], Proxy: "nftables", Root: in.Config.Root, BinDir: in.binDir,
		ConfDir: in.confDir}
	for text := range strings.SplitSeq(ips, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(text))
		if err != nil {
			return fmt.Errorf("kubelet's --node-ip: %w", err)
		}
		cfg.Addresses = append(cfg.Addresses, a)
	}
	var err error
	if cfg.On, err = in.Lab.Node(host); err != nil {
		return err
	}
	w, err := in.Cluster.AddWorker(ctx, cfg)
	if err != nil {
		return err
	}
	in.Workers[host] = w
	if _, err := os.Stat(in.archive()); err != nil {
		if err := in.makeImages(ctx, in.Cluster.Programs); err != nil {
			return err
		}
	}
	return errors.Join(w.Import(ctx, in.archive()), in.Cluster.WaitNode(ctx, w.Name))
}

// nodeIP is kubelet's flag in the file that kubeadm's unit of kubelet reads.
func (in *installed) nodeIP(host string) (string, error) {
	b, err := in.etc(host, "etc/default/kubelet")
	_, ips, ok := strings.Cut(strings.TrimSpace(string(b)), "KUBELET_EXTRA_ARGS=--node-ip=")
	if err == nil && !ok {
		err = fmt.Errorf("/etc/default/kubelet is %q", b)
	}
	return ips, err
}

func (in *installed) kubeadmInit(ctx context.Context) error {
	b, err := in.etc("cp1", "etc/kubernetes/kubeadm.yaml")
	if err != nil {
		return err
	}
	var all struct { // of the three documents
		ControlPlaneEndpoint string
		APIServer            struct {
			CertSANs []string `yaml:"certSANs"`
		} `yaml:"apiServer"`
		Networking struct {
			PodSubnet     string `yaml:"podSubnet"`
			ServiceSubnet string `yaml:"serviceSubnet"`
		}
		LocalAPIEndpoint struct {
			AdvertiseAddress string `yaml:"advertiseAddress"`
		} `yaml:"localAPIEndpoint"`
	}
	for part := range strings.SplitSeq(string(b), "\n---\n") {
		if err := yaml.Unmarshal([]byte(part), &all); err != nil {
			return err
		}
	}
	if err := in.raiseAt(ctx, all.LocalAPIEndpoint.AdvertiseAddress, all.APIServer.CertSANs, all.Networking.PodSubnet,
		all.Networking.ServiceSubnet); err != nil {
		return err
	}
	ips, err := in.nodeIP("cp1")
	return errors.Join(err, in.node(ctx, "cp1", ips))
}

func (in *installed) kubeadmJoin(ctx context.Context) error {
	ips, err := in.nodeIP("home1")
	return errors.Join(err, in.node(ctx, "home1", ips))
}

// k3s is k3s' own configuration, as far as the document uses it.
type k3s struct {
	FlannelBackend       string   `yaml:"flannel-backend"`
	DisableNetworkPolicy bool     `yaml:"disable-network-policy"`
	NodeIP               string   `yaml:"node-ip"`
	AdvertiseAddress     string   `yaml:"advertise-address"`
	TLSSAN               []string `yaml:"tls-san"`
	ClusterCIDR          string   `yaml:"cluster-cidr"`
	ServiceCIDR          string   `yaml:"service-cidr"`
	Server, Token        string
}

func (in *installed) k3sConfig(host string) (k k3s, err error) {
	b, err := in.etc(host, "etc/rancher/k3s/config.yaml")
	if err == nil {
		err = yaml.UnmarshalWithOptions(b, &k, yaml.Strict())
	}
	return k, err
}

func (in *installed) k3sServer(ctx context.Context) error {
	k, err := in.k3sConfig("cp1")
	if err == nil && (k.FlannelBackend != "none" || !k.DisableNetworkPolicy) {
		err = errors.New("k3s' own network is not off")
	}
	if err == nil {
		err = in.raiseAt(ctx, k.AdvertiseAddress, k.TLSSAN, k.ClusterCIDR, k.ServiceCIDR)
	}
	if err == nil {
		err = in.node(ctx, "cp1", k.NodeIP)
	}
	return err
}

func (in *installed) k3sAgent(ctx context.Context) error {
	k, err := in.k3sConfig("home1")
	if err == nil {
		err = in.node(ctx, "home1", k.NodeIP)
	}
	return err
}

// tellAgent carries out how a host's agent is told of the apiserver.
func (in *installed) tellAgent(host string) {
	in.walk("Telling the agents of the apiserver", host, map[string]func(context.Context, string) error{
		// The hosts have no sshd.
		"scp ": func(_ context.Context, command string) error {
			words := strings.Fields(command)
			b, err := os.ReadFile(strings.Replace(words[1], "~", in.Machines["cp1"].Dir, 1))
			to, path, _ := strings.Cut(words[2], ":")
			if err == nil {
				err = in.Machines[to].WriteFile(strings.TrimPrefix(path, "/"), string(b))
			}
			return err
		},
		"systemctl restart skein": func(ctx context.Context, _ string) error {
			return errors.Join(in.end(host), in.startAgent(ctx, host))
		},
		"node:/etc/skein/skein.yaml": func(_ context.Context, text string) error { // what the document says of k3s' paths
			return in.Machines[host].WriteFile("etc/skein/skein.yaml", strings.NewReplacer(confDir, in.confDir, binDir,
				in.binDir).Replace(text))
		},
	})
}

// works: a pool, and a pod on the node behind the other NAT whose log the apiserver reads.
func (in *installed) works() {
	in.Helper()
	in.replace = nil
	in.walk("A pool, as a resource", "home1", nil)
	do := func(stdin string, args ...string) string {
		in.Helper()
		out, err := in.Cluster.Kubectl(in.Context(), []byte(stdin), args...)
		if err != nil {
			state, _ := in.run(in.Context(), "home1", "skein status; ls -l "+in.confDir)
			in.Fatalf("%v\n%s", err, state)
		}
		return out
	}
	do("", "wait", "--for=condition=Ready", "--timeout=90s", "node", "--all")
	do(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": {"nodeSelector": {"kubernetes.io/hostname": "home1"},
"automountServiceAccountToken": false, "containers": [{"name": "web", "image": "`+ToolsImage+`", "args": ["netexec", "--http-port=8080"]}]}}`,
		"apply", "-f", "-")
	do("", "wait", "--for=condition=Ready", "--timeout=60s", "pod/web")
	err := in.within(in.Context(), 20*time.Second, func() error { // the pod is ready before it says anything
		if log := do("", "logs", "web"); !strings.Contains(log, "8080") {
			return fmt.Errorf("the pod's log: %q", log)
		}
		return nil
	})
	if err != nil {
		in.Error(err)
	}
	if ip := do("", "get", "pod", "web", "-o",
		"jsonpath={.status.podIP}"); !netip.MustParsePrefix("10.100.0.0/16").Contains(netip.MustParseAddr(ip)) {
		in.Errorf("the pod has %s, and no address of the pool", ip)
	}
	for _, host := range []string{"cp1", "home1"} {
		want := in.overlay(host)[0].String()
		if has := do("", "get", "node", host, "-o",
			`jsonpath={.status.addresses[?(@.type=="InternalIP")].address}`); !strings.HasPrefix(has, want) {
			in.Errorf("Node %s is at %s, want %s", host, has, want)
		}
	}
}
