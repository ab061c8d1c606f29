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
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/testenv"
)

// chartLab are hosts that reach each other and run no agent; the lab itself needs one node that does, elsewhere.
const chartLab = `name: chart
sites:
  dc:        {nat: none}
  elsewhere: {nat: none}
nodes:
  other: {site: elsewhere, server: true, relay: true}
  cp1: {site: dc, role: host}
  w1:  {site: dc, role: host}
  w2:  {site: dc, role: host}
  w3:  {site: dc, role: host}
`

// chartHosts are Nodes from the start; the last one comes later.
var chartHosts = []string{"cp1", "w1", "w2"}

const lateHost = "w3"

// chartImage is as the chart names it; v0.2.0 is what the document upgrades to.
var chartImage = []string{"skeinmesh/skein:devel", "skeinmesh/skein:v0.2.0"}

var tokenRE = regexp.MustCompile(`"id": *"([0-9a-f]{16})"`)

// charted is a cluster of hosts that know nothing of skein, for the chart.
type charted struct {
	*testing.T
	whole   *testing.T // at whose end everything is taken down
	lab     *lab.Lab
	cluster *Cluster
	workers map[string]*Worker
	root    string
	dir     string
	archive string // of images
}

// TestChart: the chart on hosts that reach each other, by the commands of the document.
func TestChart(t *testing.T) {
	testenv.NeedRoot(t)
	c := raiseCharted(t)
	for _, one := range []struct {
		name string
		run  func(charted)
	}{
		{"DryRun", charted.dryRun},
		{"Install", charted.install},
		{"PodsReachEachOther", charted.podsReachEachOther},
		{"Joining", charted.joining},
		{"ANodeThatComesLater", charted.aNodeThatComesLater},
		{"UpgradeUnderTraffic", charted.upgradeUnderTraffic},
		{"PodsRestart", charted.podsRestart},
		{"Uninstall", charted.uninstall},
	} {
		if !t.Run(one.name, func(t *testing.T) {
			c := c
			c.T = t
			one.run(c)
		}) {
			break // what follows stands on it
		}
	}
}

func raiseCharted(t *testing.T) charted {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	programs, err := Programs(root)
	if err != nil {
		testenv.Missing(t, err.Error())
	}
	if _, err := os.Stat(filepath.Join(root, ".cache/helm/helm")); err != nil {
		testenv.Missing(t, "Helm is missing: run .ci/helm-tools: "+err.Error())
	}
	dir, err := os.MkdirTemp("", "skc") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c := charted{T: t, whole: t, root: root, dir: dir, workers: map[string]*Worker{}}
	binary := filepath.Join(dir, "skein")
	build := exec.Command("go", "build", "-o", binary, "../../cmd/skein")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build skein: %v\n%s", err, out)
	}
	spec, err := lab.Parse("chart.yaml", []byte(chartLab))
	if err != nil {
		t.Fatal(err)
	}
	spec.Name = fmt.Sprintf("c%d", os.Getpid())
	c.lab, err = lab.Up(t.Context(), spec, lab.Options{Dir: filepath.Join(dir, "lab"), Binary: binary,
		Progress: func(s string) { t.Log(s) }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.lab.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	for _, name := range chartHosts {
		c.addHost(name, programs)
	}
	c.archive = c.images(binary, programs)
	for _, name := range chartHosts {
		c.giveImages(name)
	}
	c.kubectl(nil, "label", "node", "cp1", "node-role.kubernetes.io/control-plane=")
	return c
}

// addHost makes a host a Kubernetes node at its own addresses; the first one gets the control plane.
func (c *charted) addHost(name, programs string) {
	c.Helper()
	on, err := c.lab.Node(name)
	if err != nil {
		c.Fatal(err)
	}
	machine, err := NewMachine(c.whole.Context(), filepath.Join(c.dir, "machines", name), name)
	if err != nil {
		c.Fatal(err)
	}
	c.whole.Cleanup(func() {
		if err := machine.Close(); err != nil {
			c.whole.Error(err)
		}
	})
	addresses := []netip.Addr{on.Host.Addr, on.Host.Addr6}
	if c.cluster == nil {
		c.cluster, err = Raise(c.Context(), Config{On: on, Machine: machine, Dir: filepath.Join(c.dir, "control-plane"),
			Programs: programs, Addresses: addresses, Pods: "10.100.0.0/16,fd00:100::/112", Whole: true})
		if err != nil {
			c.Fatal(err)
		}
		cluster := c.cluster
		c.whole.Cleanup(func() {
			if err := cluster.Close(); err != nil {
				c.whole.Error(err)
			}
		})
	}
	w, err := c.cluster.AddWorker(c.Context(), WorkerConfig{On: on, Machine: machine, Addresses: addresses,
		Proxy: "nftables", Root: c.root})
	if err != nil {
		c.Fatal(err)
	}
	c.whole.Cleanup(func() {
		if err := w.Close(); err != nil {
			c.whole.Error(err)
		}
	})
	c.workers[name] = w
}

// giveImages imports the images on a host, and waits until its Node is there.
func (c charted) giveImages(name string) {
	c.Helper()
	if err := c.workers[name].Import(c.Context(), c.archive); err != nil {
		c.Fatal(err)
	}
	if err := c.cluster.WaitNode(c.Context(), name); err != nil {
		c.Fatalf("%v; the end of kubelet's log:\n%s", err, c.workers[name].Machine.tail("kubelet"))
	}
}

// images makes the archive of the images that the hosts get: skein's from the static program alone.
func (c charted) images(binary, programs string) string {
	c.Helper()
	shell, err := exec.LookPath("busybox")
	if err != nil {
		c.Fatal(err)
	}
	pause := busybox(shell, pauseImage)
	pause.Entrypoint = []string{"/bin/sleep", "2147483647"}
	tools := busybox(shell, ToolsImage)
	tools.Programs["agnhost"] = filepath.Join(programs, "agnhost")
	tools.Entrypoint, tools.Command = []string{"/agnhost"}, []string{"pause"}
	file, err := os.Create(filepath.Join(c.dir, "images.tar"))
	if err != nil {
		c.Fatal(err)
	}
	defer file.Close()
	if err := WriteArchive(file, pause, tools, Image{Names: chartImage, Programs: map[string]string{"skein": binary},
		Entrypoint: []string{"/skein"}}); err != nil {
		c.Fatal(err)
	}
	return file.Name()
}

// walk carries out a section of docs/kubernetes.md on the control plane's host.
func (c charted) walk(heading string) {
	c.Helper()
	text, err := os.ReadFile(filepath.Join(c.root, "docs/kubernetes.md"))
	if err != nil {
		c.Fatal(err)
	}
	w := Walk{Document: string(text), Heading: heading, Hosts: map[string]Host{"admin": c.sh}, State: c.dir, Root: c.root,
		Progress: func(s string) { c.Log(s) }}
	if err := w.Run(c.Context()); err != nil {
		c.Fatalf("%v\n%s", err, c.report())
	}
}

// sh runs a script on the control plane's host as an administrator has it.
func (c charted) sh(ctx context.Context, script string) (string, error) {
	kubeconfig := filepath.Join(c.dir, "admin.kubeconfig")
	if _, err := os.Stat(kubeconfig); err != nil {
		if err := c.cluster.KubeconfigFor(kubeconfig, "administrator", "system:masters"); err != nil {
			return "", err
		}
	}
	w := c.workers["cp1"]
	path := strings.Join([]string{c.cluster.Programs, filepath.Join(c.root, ".cache/helm"), os.Getenv("PATH")}, ":")
	return w.Machine.Run(ctx, w.On.Namespace, "env", "PATH="+path, "KUBECONFIG="+kubeconfig, "HOME="+c.dir, "sh", "-c",
		script)
}

// report is what there is to see when something does not become as it should.
func (c charted) report() string {
	var all strings.Builder
	for _, args := range [][]string{
		{"get", "nodes,pods", "-A", "-o", "wide"},
		{"-n", "skein-system", "describe", "pods"},
		{"-n", "skein-system", "logs", "--prefix", "--tail=40", "--all-containers", "-l", "app.kubernetes.io/name=skein"},
		{"-n", "skein-system", "get", "configmap", "skein-cluster", "-o", "yaml"},
	} {
		out, err := c.cluster.Kubectl(context.Background(), nil, args...)
		fmt.Fprintf(&all, "--- kubectl %s (%v)\n%s\n", strings.Join(args, " "), err, out)
	}
	return all.String()
}

func (c charted) kubectl(stdin []byte, args ...string) string {
	c.Helper()
	out, err := c.cluster.Kubectl(c.Context(), stdin, args...)
	if err != nil {
		c.Fatal(err)
	}
	return out
}

// on runs a command on a host.
func (c charted) on(host string, argv ...string) (string, error) {
	w := c.workers[host]
	return w.Machine.Run(c.Context(), w.On.Namespace, argv...)
}

// skein runs skein in the agent's pod of a host.
func (c charted) skein(host string, args ...string) (string, error) {
	pod, err := c.podOf(host)
	if err != nil {
		return "", err
	}
	return c.cluster.Kubectl(c.Context(), nil,
		append([]string{"-n", "skein-system", "exec", pod, "-c", "agent", "--", "/skein"}, args...)...)
}

// podOf is the agent's pod of a host.
func (c charted) podOf(host string) (string, error) {
	return c.cluster.Kubectl(c.Context(), nil, "-n", "skein-system", "get", "pods", "-l", "app.kubernetes.io/name=skein",
		"--field-selector", "status.phase=Running,spec.nodeName="+host, "-o", "jsonpath={.items[0].metadata.name}")
}

func (c charted) within(d time.Duration, what string, check func() error) {
	c.Helper()
	took, err := poll(c.Context(), d, tryEvery, check)
	if err != nil {
		c.Fatalf("%s: %v\n%s", what, err, c.report())
	}
	c.Logf("%s: after %s", what, took.Round(10*time.Millisecond))
}

// dryRun has the apiserver check every manifest, rights and policies included.
func (c charted) dryRun() {
	c.kubectl(nil, "create", "namespace", "skein-system")
	for _, file := range []string{"crds", "agent", "admin", "daemonset"} {
		manifest := filepath.Join(c.root, "deploy/kubernetes", file+".yaml")
		out := c.kubectl(nil, "apply", "--server-side", "--dry-run=server", "-f", manifest)
		if !strings.Contains(out, "server dry run") {
			c.Error(out)
		}
	}
	c.kubectl(nil, "delete", "namespace", "skein-system")
}

func (c charted) install() {
	began := time.Now()
	c.walk("Install with Helm")
	took := time.Since(began)
	c.Logf("helm install to all ready, and a pool: %s", took.Round(100*time.Millisecond))
	if took > 30*time.Second {
		c.Errorf("helm install took %s; want 30 s at most", took)
	}
	c.kubectl(nil, "wait", "--for=condition=Synced", "--timeout=30s", "addresspool/default")
	c.kubectl(nil, "wait", "--for=condition=Ready", "--timeout=60s", "node", "--all")
	c.oneMesh(chartHosts)
	// An agent that could not make /proc/sys writable says so.
	logs := c.kubectl(nil, "-n", "skein-system", "logs", "--tail=-1", "-l", "app.kubernetes.io/name=skein")
	if !strings.Contains(logs, "agent is up") || strings.Contains(logs, "read-only") {
		c.Errorf("the agents say:\n%s", logs)
	}
}

// oneMesh: all hosts are members of the one mesh, and cp1 is its server.
func (c charted) oneMesh(hosts []string) {
	c.Helper()
	id := c.kubectl(nil, "-n", "skein-system", "get", "configmap", "skein-cluster", "-o", "jsonpath={.data.cluster}")
	for _, host := range hosts {
		c.within(30*time.Second, "mesh of "+host, func() error {
			out, err := c.skein(host, "status", "-o", "json")
			if err != nil {
				return err
			}
			if id == "" || !strings.Contains(out, id) {
				return fmt.Errorf("it is not in mesh %q: %s", id, out)
			}
			out, err = c.skein(host, "nodes", "-o", "json")
			if n := strings.Count(out, `"identityKey"`); err != nil || n != len(hosts) {
				return fmt.Errorf("it knows %d members, want %d: %w\n%s", n, len(hosts), err, out)
			}
			return nil
		})
	}
}

// podOn is a pod of the tools' image on a node.
func podOn(name, node, command string) []byte {
	return []byte(fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: %s},
  spec: {nodeName: %s, terminationGracePeriodSeconds: 1, containers: [{name: c, image: %s, command: [sh, -c, %q]}]}}`,
		name, node, ToolsImage, command))
}

func (c charted) podIP(name string) string {
	c.Helper()
	_, err := c.cluster.Kubectl(c.Context(), nil, "wait", "--for=condition=Ready", "--timeout=60s", "pod", name)
	if err != nil {
		c.Fatalf("%v\n%s\n%s", err, c.kubectl(nil, "describe", "pod", name), c.report())
	}
	return c.kubectl(nil, "get", "pod", name, "-o", "jsonpath={.status.podIP}")
}

func (c charted) podsReachEachOther() {
	// The listener writes down when it hears something, in hundredths of a second since the boot.
	c.kubectl(podOn("ear", "w2", `tail -f /dev/null | nc -l -p 5000 |
		while read x; do read up rest </proc/uptime; echo $up; done >/tmp/heard 2>&1; sleep 3600`), "apply", "-f", "-")
	ip := c.podIP("ear")
	speak := `(while :; do echo x; sleep 0.1; done) | nc ` + ip + ` 5000; sleep 3600`
	c.kubectl(podOn("mouth", "w1", speak), "apply", "-f", "-")
	c.podIP("mouth")
	c.within(20*time.Second, "the stream between pods on two Nodes", func() error {
		if n := len(c.heard()); n < 10 {
			return fmt.Errorf("%d words were heard", n)
		}
		return nil
	})
}

// heard are the times at which the pod has heard something.
func (c charted) heard() (at []float64) {
	c.Helper()
	out, err := c.cluster.Kubectl(c.Context(), nil, "exec", "ear", "--", "cat", "/tmp/heard")
	if err != nil {
		c.Fatal(err)
	}
	for _, line := range strings.Fields(out) {
		v, err := strconv.ParseFloat(line, 64)
		if err != nil {
			c.Fatal(err)
		}
		at = append(at, v)
	}
	return at
}

// joining: what the tokens of pods may do, and what they may not.
func (c charted) joining() {
	token := func(account, host string) string {
		pod, err := c.podOf(host)
		if err != nil {
			c.Fatal(err)
		}
		return c.kubectl(nil, "-n", "skein-system", "create", "token", account, "--bound-object-kind", "Pod",
			"--bound-object-name", pod)
	}
	agent, server := token("skein-agent", "w1"), token("skein-admin", "cp1")
	if out, err := c.cluster.As(c.Context(), agent, nil, "auth", "whoami", "-o", "json"); err != nil ||
		!strings.Contains(out, "authentication.kubernetes.io/node-name") || !strings.Contains(out, `"w1"`) {
		c.Errorf("a pod's token does not name its Node: %v\n%s", err, out)
	}
	for _, one := range []struct {
		what string
		args string
		want string // of the refusal; empty: it is allowed
	}{
		{"reads its Secret", "-n skein-system get secret skein-join", ""},
		{"reads the servers' Secret", "-n skein-system get secret skein-join-server", "forbidden"},
		{"lists Secrets", "-n skein-system get secrets", "forbidden"},
		{"writes its Secret", `-n skein-system patch secret skein-join -p {"data":null}`, "forbidden"},
		{"claims the mesh", `-n skein-system patch configmap skein-cluster -p {"data":null}`, "forbidden"},
		{"marks its own Node", "annotate node w1 skein.dev/location=x", "no annotation but skein.dev/record"},
		{"writes another's record", "annotate --overwrite node w2 skein.dev/record=x", "its own Node, w1, alone"},
	} {
		_, err := c.cluster.As(c.Context(), agent, nil, strings.Fields(one.args)...)
		if one.want == "" && err != nil || one.want != "" && (err == nil || !strings.Contains(err.Error(), one.want)) {
			c.Errorf("an agent %s: %v, want %q", one.what, err, one.want)
		}
	}
	claim := `{apiVersion: v1, kind: ConfigMap, metadata: {name: skein-cluster, namespace: skein-system},
  data: {node: %s, cluster: '%s'}}`
	id := c.kubectl(nil, "-n", "skein-system", "get", "configmap", "skein-cluster", "-o", "jsonpath={.data.cluster}")
	for data, want := range map[string]string{
		fmt.Sprintf(claim, "cp1", strings.Repeat("0", 32)): "the mesh's ID stays",
		fmt.Sprintf(claim, "w1", id):                       "the mesh's ID stays",
	} {
		_, err := c.cluster.As(c.Context(), server, []byte(data), "replace", "-f", "-")
		if err == nil || !strings.Contains(err.Error(), want) {
			c.Errorf("a server replaces the claim: %v, want %q", err, want)
		}
	}
}

// aNodeThatComesLater finds a token, though those of the start are no good any more.
func (c charted) aNodeThatComesLater() {
	token := func() string {
		return c.kubectl(nil, "-n", "skein-system", "get", "secret", "skein-join", "-o", "jsonpath={.data.token}")
	}
	before := token()
	out, err := c.skein("cp1", "token", "list", "-o", "json")
	ids := tokenRE.FindAllStringSubmatch(out, -1)
	if err != nil || len(ids) < 2 {
		c.Fatalf("%d tokens, %v\n%s", len(ids), err, out)
	}
	for _, id := range ids {
		if out, err := c.skein("cp1", "token", "revoke", id[1]); err != nil {
			c.Fatal(err, out)
		}
	}
	began := time.Now()
	step := func(what string) { c.Logf("%s after %s", what, time.Since(began).Round(100*time.Millisecond)) }
	c.addHost(lateHost, c.cluster.Programs)
	step("its containerd and kubelet run")
	c.giveImages(lateHost)
	step("its Node is there, with the images")
	c.kubectl(nil, "-n", "skein-system", "rollout", "status", "--timeout=60s", "daemonset/skein-agent")
	step("its agent is a member and ready")
	c.kubectl(nil, "wait", "--for=condition=Ready", "--timeout=60s", "node", lateHost)
	step("it is ready for pods")
	if token() == before {
		c.Error("the Secret still has the token that was revoked")
	}
	c.oneMesh(append(slices.Clone(chartHosts), lateHost))
}

func (c charted) upgradeUnderTraffic() {
	before := len(c.heard())
	began := time.Now()
	c.walk("Upgrade with Helm")
	c.Logf("all agents are others after %s", time.Since(began).Round(100*time.Millisecond))
	images := c.kubectl(nil, "-n", "skein-system", "get", "pods", "-o", "jsonpath={.items[*].spec.containers[0].image}")
	if n := strings.Count(images, "v0.2.0"); n != 4 {
		c.Errorf("%d pods of the new version: %s", n, images)
	}
	have := len(c.heard())
	c.within(20*time.Second, "the same connection goes on", func() error {
		if n := len(c.heard()); n < have+20 {
			return fmt.Errorf("%d words were heard, of %d and %d before", n, before, have)
		}
		return nil
	})
	longest := 0.0
	at := c.heard()
	for i := max(before, 1); i < len(at); i++ {
		longest = max(longest, at[i]-at[i-1])
	}
	c.Logf("the longest pause of the stream: %.1f s", longest)
	if longest > 20 { // the agents' userspace tunnels are away twice, and TCP doubles its waits
		c.Errorf("the stream paused for %.1f s", longest)
	}
	c.oneMesh(append(slices.Clone(chartHosts), lateHost))
}

// podsRestart: agents that start in any order go on with the mesh that they are in, also without what they joined by.
func (c charted) podsRestart() {
	c.kubectl(nil, "-n", "skein-system", "delete", "configmap", "skein-cluster")
	c.kubectl(nil, "-n", "skein-system", "delete", "secret", "skein-join", "skein-join-server")
	for _, pods := range [][]string{{"-l", "app.kubernetes.io/name=skein"}, {"-l", "app.kubernetes.io/component=server"}} {
		c.kubectl(nil, append([]string{"-n", "skein-system", "delete", "pods", "--wait"}, pods...)...)
		for _, d := range []string{"skein-server", "skein-agent"} {
			c.kubectl(nil, "-n", "skein-system", "rollout", "status", "--timeout=60s", "daemonset/"+d)
		}
	}
	// The chart brings them back, empty, and the mesh that exists says which it is.
	again := "cd " + c.root + " && helm upgrade skein deploy/chart/skein --namespace skein-system --reuse-values --wait"
	if out, err := c.sh(c.Context(), again); err != nil {
		c.Fatal(err, out)
	}
	c.within(20*time.Second, "the mesh says which it is", func() error {
		if out := c.kubectl(nil, "-n", "skein-system", "get", "configmap", "skein-cluster", "-o",
			"jsonpath={.data.cluster}"); out == "" {
			return errors.New("nothing is said")
		}
		return nil
	})
	c.oneMesh(append(slices.Clone(chartHosts), lateHost))
}

func (c charted) uninstall() {
	c.kubectl(nil, "delete", "pod", "mouth", "ear", "--wait")
	c.walk("Uninstall with Helm")
	for _, host := range append(slices.Clone(chartHosts), lateHost) {
		for what, script := range map[string]string{
			"links":    `ip -o link | grep -e 'skein' -e ': sk' && exit 1 || exit 0`,
			"nftables": `nft list tables | grep -v skeinlab | grep skein && exit 1 || exit 0`,
			"rules":    `{ ip rule; ip -6 rule; } | grep -e 'lookup 180' -e 'lookup 11[56]' && exit 1 || exit 0`,
			"routes":   `{ ip route show table all; ip -6 route show table all; } | grep 'proto 30' && exit 1 || exit 0`,
			"files":    `ls -d /var/lib/skein/* /run/skein/* /opt/cni/bin/skein-cni /etc/cni/net.d/*skein* 2>/dev/null && exit 1 || exit 0`,
		} {
			if out, err := c.on(host, "sh", "-c", script); err != nil {
				c.Errorf("%s: %s are left: %s", host, what, out)
			}
		}
	}
	if out := c.kubectl(nil, "get", "nodes", "-o", "jsonpath={.items[*].spec.taints}"); strings.Contains(out, "skein") {
		c.Errorf("Nodes are still tainted: %s", out)
	}
	if out := c.kubectl(nil, "get", "clusterrole,clusterrolebinding,crd,validatingadmissionpolicy", "-o",
		"name"); strings.Contains(out, "skein") {
		c.Errorf("the apiserver still has %s", out)
	}
}
