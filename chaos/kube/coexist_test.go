package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/internal/testenv"

	"github.com/vishvananda/netlink"
)

// coexistLab has no pool: pods' addresses are another CNI's.
const coexistLab = `name: coexist
sites:
  dc:     {nat: none}
  office: {nat: restricted-cone}
  home:   {nat: port-restricted-cone}
  cloud:  {nat: symmetric}
nodes:
  hub:    {site: dc, server: true, relay: true}
  cp1:    {site: office, admin: true, config: {kubernetes: {kubeconfig: DIR/cp1.kubeconfig, node: cp1}}}
  home1:  {site: home, config: {site: '', kubernetes: {kubeconfig: DIR/home1.kubeconfig, node: home1}}}
  cloud1: {site: cloud, config: {kubernetes: {kubeconfig: DIR/cloud1.kubeconfig, node: cloud1}}}
`

// TestCoexist: CNI's reference plugins bridge and host-local give pods their addresses, kube-proxy works with iptables,
// and skein carries what goes between hosts.
func TestCoexist(t *testing.T) {
	testenv.NeedRoot(t)
	f := raiseFleet(t, FleetConfig{Name: "x", Lab: coexistLab, OtherCNI: true, Proxy: "iptables",
		Pods: "10.244.0.0/16,fd00:244::/48"})
	for _, one := range []struct {
		name string
		run  func(fleet)
	}{
		{"AsTheDocumentSays", fleet.podRangesAsDocumented},
		{"PodsAcrossNATs", fleet.otherPodsAcrossNATs},
		{"HostsReachPods", fleet.hostsReachOtherPods},
		{"Services", fleet.otherServices},
		{"MTU", fleet.otherMTU},
		{"PodLinksAreNoCandidates", fleet.podLinksAreNoCandidates},
		{"WithoutRanges", fleet.withoutPodRanges},
		{"ComingFromKilo", fleet.comingFromKilo},
	} {
		t.Run(one.name, func(t *testing.T) {
			f := f
			f.T = t
			one.run(f)
		})
	}
}

// walk carries out a section of docs/kubernetes.md; commands without a host are an administrator's on the control
// plane's.
func (f fleet) walk(heading string, more map[string]Host) {
	f.Helper()
	text, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		f.Fatal(err)
	}
	root, err := filepath.Abs(f.Config.Root)
	if err != nil {
		f.Fatal(err)
	}
	hosts := map[string]Host{"admin": func(ctx context.Context, script string) (string, error) {
		return f.Commands(ctx, f.Config.Nodes[0], script)
	}}
	maps.Copy(hosts, more)
	w := Walk{Document: string(text), Heading: heading, Hosts: hosts, State: f.TempDir(), Root: root,
		Progress: func(s string) { f.Log(s) }}
	if err := w.Run(f.Context()); err != nil {
		f.Fatal(err)
	}
}

// await waits until check is content, and returns how long that took.
func (f fleet) await(d time.Duration, what string, check func() error) time.Duration {
	f.Helper()
	took, err := poll(f.Context(), d, tryEvery, check)
	if err != nil {
		f.Fatalf("%s: %v", what, err)
	}
	return took
}

// skeinOn runs a command of skein's on a node, and returns what it prints.
func (f fleet) skeinOn(node string, args ...string) string {
	f.Helper()
	out, exit, err := f.Lab.Exec(f.Context(), node, append([]string{"skein"}, args...)...)
	if err != nil || exit != 0 {
		f.Fatalf("on %s: skein %v: exit status %d, %v\n%s", node, args, exit, err, out)
	}
	return out
}

// podNetworks are the pod CIDRs that a host knows, by member.
func (f fleet) podNetworks(on string) map[string][]string {
	f.Helper()
	var nodes struct {
		Nodes []struct {
			Node struct {
				Name     string
				PodCidrs struct{ Cidrs []string }
			}
		}
	}
	if err := json.Unmarshal([]byte(f.skeinOn(on, "nodes", "-o", "json")), &nodes); err != nil {
		f.Fatal(err)
	}
	out := map[string][]string{}
	for _, n := range nodes.Nodes {
		if c := n.Node.PodCidrs.Cidrs; len(c) > 0 {
			out[n.Node.Name] = c
		}
	}
	return out
}

// problemsOf are those that a host's status tells of.
func (f fleet) problemsOf(on string) (out []string) {
	f.Helper()
	var s struct {
		Problems []struct{ Subject, Message, Advice string }
	}
	if err := json.Unmarshal([]byte(f.skeinOn(on, "status", "-o", "json")), &s); err != nil {
		f.Fatal(err)
	}
	for _, p := range s.Problems {
		out = append(out, p.Subject+": "+p.Message+" ("+p.Advice+")")
	}
	return out
}

func (f fleet) podRangesAsDocumented() {
	began := time.Now()
	f.walk("On top of another CNI", nil)
	for _, on := range []string{"hub", "cp1", "home1", "cloud1"} {
		f.await(20*time.Second, on+" knows all pod CIDRs", func() error {
			have := f.podNetworks(on)
			for _, n := range f.Config.Nodes {
				if len(have[n]) != 2 {
					return fmt.Errorf("it knows %v; problems %q", have, f.problemsOf("cp1"))
				}
			}
			return nil
		})
	}
	one := f.kubectl(nil, "get", "--raw", "/api/v1/nodes/home1")
	f.Logf("a whole Node has %d bytes; the controller asks for it once", len(one))
	f.kubectl(nil, "-n", "kube-system", "rollout", "status", "--timeout=60s", "deployment/coredns")
	f.Logf("all hosts knew all pod CIDRs %s after the command", time.Since(began).Round(10*time.Millisecond))
	for _, n := range f.Config.Nodes {
		want, err := f.Cluster.podCIDRs(f.Context(), n)
		if err != nil {
			f.Fatal(err)
		}
		slices.Sort(want)
		if have := f.podNetworks("hub")[n]; !slices.Equal(have, want) {
			f.Errorf("%s has %v, its Node %v", n, have, want)
		}
	}
	f.runPod("web-home", "home1")
	f.runPod("web-cloud", "cloud1")
	for _, a := range f.podAddresses("web-home") {
		if who := strings.Join(strings.Fields(f.skeinOn("cloud1", "ip", "who", a.String())), " "); !strings.Contains(who,
			"the pod CIDR of home1 (Kubernetes Node home1)") {
			f.Errorf("who has %s:\n%s", a, who)
		}
	}
}

// runPod starts a pod that serves HTTP at port 8080, and waits until it runs.
func (f fleet) runPod(name, node string) {
	f.Helper()
	f.kubectl([]byte(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {app: %s}}
spec:
  nodeName: %s
  tolerations: [{operator: Exists}]
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 0
  containers:
    - {name: web, image: %s, imagePullPolicy: Never, args: [netexec, --http-port=8080, --udp-port=-1]}
`, name, strings.SplitN(name, "-", 2)[0], node, ToolsImage)), "apply", "-f", "-")
	f.kubectl(nil, "wait", "--for=condition=Ready", "--timeout=60s", "pod/"+name)
}

func (f fleet) podAddresses(name string) (out []netip.Addr) {
	f.Helper()
	for _, text := range strings.Fields(f.kubectl(nil, "get", "pod", name, "-o", "jsonpath={.status.podIPs[*].ip}")) {
		out = append(out, netip.MustParseAddr(text))
	}
	if len(out) == 0 {
		f.Fatalf("pod %s has no address", name)
	}
	return out
}

// fromPod has a pod ask another one's server, and returns the answer. The apiserver tells the pod to.
func (f fleet) fromPod(pod string, to netip.Addr, port uint16, path string) (string, error) {
	query := url.Values{"protocol": {"http"}, "host": {to.String()}, "port": {strconv.Itoa(int(port))},
		"request": {path}, "tries": {"1"}}
	out, err := f.Cluster.Kubectl(f.Context(), nil, "get", "--raw", "/api/v1/namespaces/default/pods/"+pod+
		":8080/proxy/dial?"+query.Encode())
	if err != nil {
		return "", err
	}
	var answer struct{ Responses, Errors []string }
	if err := json.Unmarshal([]byte(out), &answer); err != nil || len(answer.Responses) != 1 {
		return "", fmt.Errorf("%s says %s: %w", pod, out, err)
	}
	return answer.Responses[0], nil
}

func (f fleet) otherPodsAcrossNATs() {
	for _, pair := range [][2]string{{"web-home", "web-cloud"}, {"web-cloud", "web-home"}} {
		own := f.podAddresses(pair[0])
		for i, to := range f.podAddresses(pair[1]) {
			var got string
			took := f.await(20*time.Second, fmt.Sprintf("%s reaches %s at %s", pair[0], pair[1], to), func() (err error) {
				got, err = f.fromPod(pair[0], to, 8080, "clientip")
				return err
			})
			from, err := netip.ParseAddrPort(strings.TrimSpace(got))
			if err != nil || from.Addr() != own[i] {
				f.Errorf("%s is seen by %s as %s, its address is %s", pair[0], pair[1], got, own[i])
			}
			f.Logf("%s → %s at %s within %s", pair[0], pair[1], to, took.Round(10*time.Millisecond))
		}
	}
}

func (f fleet) hostsReachOtherPods() {
	for _, on := range []string{"hub", "cp1", "home1", "cloud1"} {
		for _, pod := range []string{"web-home", "web-cloud"} {
			for _, to := range f.podAddresses(pod) {
				f.await(10*time.Second, fmt.Sprintf("host %s reaches %s at %s", on, pod, to), func() error {
					return f.hostAsks(on, to, 8080)
				})
			}
		}
	}
}

// hostAsks asks a server from a host.
func (f fleet) hostAsks(on string, to netip.Addr, port uint16) error {
	at, err := f.Lab.Node(on)
	if err != nil {
		return err
	}
	return fabric.In(at.Namespace, func() error {
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(to, port).String(), 5*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := io.WriteString(c, "GET /hostname HTTP/1.0\r\n\r\n"); err != nil {
			return err
		}
		if b, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(b), "HTTP/1.0 200") {
			return fmt.Errorf("%.100q, %w", b, err)
		}
		return nil
	})
}

func (f fleet) otherServices() {
	f.kubectl([]byte(`
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ipFamilyPolicy: RequireDualStack
  ports: [{port: 80, targetPort: 8080}]
`), "apply", "-f", "-")
	var ips []netip.Addr
	for _, text := range strings.Fields(f.kubectl(nil, "get", "service", "web", "-o", "jsonpath={.spec.clusterIPs[*]}")) {
		ips = append(ips, netip.MustParseAddr(text))
	}
	for _, ip := range ips {
		for _, pod := range []string{"web-home", "web-cloud"} {
			seen := map[string]bool{}
			f.await(30*time.Second, fmt.Sprintf("%s gets answers of both pods at %s", pod, ip), func() error {
				got, err := f.fromPod(pod, ip, 80, "hostname")
				seen[strings.TrimSpace(got)] = err == nil
				if err != nil || !seen["web-home"] || !seen["web-cloud"] {
					return errors.Join(fmt.Errorf("answers of %v", seen), err)
				}
				return nil
			})
		}
		if ip.Is4() {
			f.await(10*time.Second, fmt.Sprintf("host cp1 reaches %s", ip), func() error { return f.hostAsks("cp1", ip, 80) })
		}
	}
	out, exit, err := f.Lab.Exec(f.Context(), "home1", "iptables-save", "-t", "nat")
	if err != nil || exit != 0 || !strings.Contains(out, "KUBE-SVC-") || !strings.Contains(out, "0x4000") {
		f.Errorf("kube-proxy does not work with iptables: exit status %d, %v\n%s", exit, err, out)
	}
}

// setMTU sets that of a host's link.
func (f fleet) setMTU(on, link string, mtu int) {
	f.Helper()
	w := f.Workers[on]
	if err := fabric.In(w.On.Namespace, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(l, mtu)
	}); err != nil {
		f.Fatal(err)
	}
}

func (f fleet) otherMTU() {
	told := func() string {
		for _, p := range f.problemsOf("home1") {
			if strings.HasPrefix(p, "another CNI's link cni0") {
				return p
			}
		}
		return ""
	}
	if p := told(); p != "" {
		f.Errorf("a bridge that fits: %s", p)
	}
	f.setMTU("home1", "cni0", 1500)
	f.await(10*time.Second, "a bridge that does not fit is told of", func() error {
		if p := told(); !strings.Contains(p, "1500") || !strings.Contains(p, "set the MTU of that CNI to 1420") {
			return fmt.Errorf("%q", p)
		}
		return nil
	})
	f.setMTU("home1", "cni0", 1372)
	f.await(10*time.Second, "it is told of no more", func() error {
		if p := told(); p != "" {
			return errors.New(p)
		}
		return nil
	})
	if err := fabric.In(f.Workers["home1"].On.Namespace, func() error {
		l, err := netlink.LinkByName("skein0")
		if err == nil && l.Attrs().MTU != 1420 {
			err = fmt.Errorf("it is %d", l.Attrs().MTU)
		}
		return err
	}); err != nil {
		f.Errorf("the tunnel's MTU beside a bridge with 1372: %v", err)
	}
	f.setMTU("home1", "cni0", 1420)
}

// A bridge's address is no way to a host.
func (f fleet) podLinksAreNoCandidates() {
	out := f.skeinOn("hub", "nodes", "-o", "json")
	var nodes struct {
		Nodes []struct {
			Node   struct{ Name string }
			Record struct{ Candidates []struct{ Address string } }
		}
	}
	if err := json.Unmarshal([]byte(out), &nodes); err != nil {
		f.Fatal(err)
	}
	seen := 0
	for _, n := range nodes.Nodes {
		for _, c := range n.Record.Candidates {
			seen++
			if strings.HasPrefix(c.Address, "10.244.") || strings.HasPrefix(c.Address, "[fd00:244:") {
				f.Errorf("%s says that it is reached at %s", n.Node.Name, c.Address)
			}
		}
	}
	if seen == 0 {
		f.Error("no candidate was seen")
	}
}

// Without ranges the mesh lets go of all pods' networks.
func (f fleet) withoutPodRanges() {
	f.skeinOn("cp1", "settings", "--pod-ranges", "")
	for _, on := range []string{"hub", "home1"} {
		f.await(10*time.Second, on+" knows no pod CIDR", func() error {
			if have := f.podNetworks(on); len(have) > 0 {
				return fmt.Errorf("%v", have)
			}
			return nil
		})
	}
	out, exit, err := f.Lab.Exec(f.Context(), "hub", "ip", "route", "show", "table", "116")
	if err != nil || exit != 0 && !strings.Contains(out, "does not exist") || strings.Contains(out, "10.244.") {
		f.Errorf("routes are left: exit status %d, %v\n%s", exit, err, out)
	}
}

// kiloObjects stand in for what Kilo has in a cluster; its programs never run.
const kiloObjects = `---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: peers.kilo.squat.ai}
spec:
  group: kilo.squat.ai
  scope: Cluster
  names: {kind: Peer, plural: peers, singular: peer}
  versions:
    - {name: v1alpha1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kilo, namespace: kube-system}
spec: {selector: {matchLabels: {a: kilo}}, template: {metadata: {labels: {a: kilo}}, spec: {nodeSelector: {no: such}, containers: [{name: c, image: none}]}}}
`

// comingFromKilo moves a cluster whose Nodes have Kilo's annotations, and whose hosts have a link called as Kilo's.
func (f fleet) comingFromKilo() {
	f.kubectl([]byte(kiloObjects), "apply", "-f", "-")
	f.kubectl(nil, "wait", "--for=condition=Established", "--timeout=30s", "crd/peers.kilo.squat.ai")
	f.kubectl([]byte(`{"apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "laptop"},
		"spec": {"allowedIPs": ["10.5.0.1/32"], "publicKey": "a", "presharedKey": "secret"}}`), "apply", "-f", "-")
	f.kubectl(nil, "annotate", "node", "home1", "kilo.squat.ai/location=lab", "kilo.squat.ai/key=x",
		"kilo.squat.ai/leader=")
	for _, n := range f.Config.Nodes {
		if out, exit, err := f.Lab.Exec(f.Context(), n, "ip", "link", "add", "kilo0", "type",
			"bridge"); err != nil || exit != 0 {
			f.Fatalf("%s: exit status %d, %v: %s", n, exit, err, out)
		}
	}
	f.walk("Coming from Kilo", map[string]Host{"node": func(ctx context.Context, script string) (string, error) {
		for _, n := range f.Config.Nodes {
			if out, err := f.Commands(ctx, n, ofNode(script, n)); err != nil {
				return out, err
			}
		}
		return "", nil
	}})
	f.await(20*time.Second, "pods reach each other", func() error {
		_, err := f.fromPod("web-home", f.podAddresses("web-cloud")[0], 8080, "hostname")
		return err
	})
	f.await(10*time.Second, "the site is what Kilo's annotation says", func() error {
		if out := f.skeinOn("hub", "nodes"); !strings.Contains(out, "\nlab ") {
			return errors.New(out)
		}
		return nil
	})
	if left := f.kubectl(nil, "get", "node", "home1", "-o", "jsonpath={.metadata.annotations}"); strings.Contains(left,
		"squat.ai/key") || !strings.Contains(left, "squat.ai/location") {
		f.Errorf("the annotations are %s", left)
	}
}
