package kube

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/internal/testenv"
)

// takeoverLab is a mesh that serves no pods yet; Coil does.
const takeoverLab = `name: takeover
sites:
  dc:    {nat: none}
  home:  {nat: port-restricted-cone}
  cloud: {nat: symmetric}
nodes:
  hub:    {site: dc, server: true, relay: true, labels: {egress: 'yes'}}
  cp1:    {site: dc, admin: true, config: {kubernetes: {kubeconfig: DIR/cp1.kubeconfig, node: cp1}}}
  home1:  {site: home, config: {kubernetes: {kubeconfig: DIR/home1.kubeconfig, node: home1}}}
  cloud1: {site: cloud, config: {kubernetes: {kubeconfig: DIR/cloud1.kubeconfig, node: cloud1}}}
`

// coilBlocks are the blocks that the stand-in of Coil has given.
var coilBlocks = map[string]string{"cp1": "10.100.0.0/27", "home1": "10.100.0.32/27", "cloud1": "10.100.0.64/27"}

// coilReserved is the block that Coil has reserved, as its converter from the first version does. Pods named old-… of
// home1 have their addresses in it.
const coilReserved = "10.100.0.96/27"

// coilPlugin leaves in the kernel what Coil v2 does: a pair of links, one address, the gateway 169.254.1.1 at the
// host's end, the alias, a route in table 116 with protocol 30, and the rule 2000. BLOCK is the start of the node's
// block.
const coilPlugin = `#!/bin/sh
set -eu
case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["0.4.0", "1.0.0"]}'; exit ;;
DEL) exit ;;
CHECK) exit ;;
esac
n=$(cat /run/coil-next 2>/dev/null || echo 0)
echo $((n + 1)) >/run/coil-next
case ${CNI_ARGS:-} in
*K8S_POD_NAME=old-*) address=PREFIX.$((FIRST + 64 + n)) ;; # on home1: in the block that Coil has reserved
*) address=PREFIX.$((FIRST + n)) ;;
esac
short=$(echo "$CNI_CONTAINERID" | cut -c1-8)
ns=$(basename "$CNI_NETNS") # containerd has them where iproute2 looks
ip link add "veth$short" type veth peer name "$CNI_IFNAME" netns "$ns"
ip link set "veth$short" alias "COIL:default:$CNI_CONTAINERID:$CNI_IFNAME"
ip address add 169.254.1.1/32 dev "veth$short" scope link
ip link set "veth$short" up
ip -n "$ns" address add "$address/32" dev "$CNI_IFNAME"
ip -n "$ns" link set "$CNI_IFNAME" up
ip -n "$ns" route add 169.254.1.1/32 dev "$CNI_IFNAME" scope link
ip -n "$ns" route add default via 169.254.1.1 dev "$CNI_IFNAME"
ip rule show pref 2000 | grep -q 116 || ip rule add pref 2000 table 116
ip route add "$address/32" dev "veth$short" table 116 proto 30
echo "{\"cniVersion\": \"1.0.0\", \"interfaces\": [{\"name\": \"$CNI_IFNAME\", \"sandbox\": \"$CNI_NETNS\"}], \"ips\": [{\"address\": \"$address/32\", \"interface\": 0}]}"
`

// useCoil gives a node the stand-in of Coil as its CNI.
func useCoil(_ context.Context, w *Worker) error {
	first := netip.MustParsePrefix(coilBlocks[w.On.Name]).Addr().As4()
	script := strings.NewReplacer("PREFIX", fmt.Sprintf("%d.%d.%d", first[0], first[1], first[2]), "FIRST",
		fmt.Sprint(first[3])).Replace(coilPlugin)
	return errors.Join(
		os.WriteFile(filepath.Join(w.Machine.Dir, binDir, "coil"), []byte(script), 0o755),
		os.WriteFile(filepath.Join(w.Machine.Dir, confDir, "10-coil.conflist"),
			[]byte(`{"cniVersion": "1.0.0", "name": "k8s-pod-network", "plugins": [{"type": "coil"}]}`), 0o644))
}

// coilObjects are what Coil has in the cluster.
func coilObjects() string {
	var out strings.Builder
	for _, d := range []struct{ kind, plural, scope string }{
		{"AddressPool", "addresspools", "Cluster"}, {"AddressBlock", "addressblocks", "Cluster"},
		{"Egress", "egresses", "Namespaced"},
	} {
		fmt.Fprintf(&out, `---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %[2]s.coil.cybozu.com}
spec:
  group: coil.cybozu.com
  scope: %[3]s
  names: {kind: %[1]s, plural: %[2]s, singular: %[4]s}
  versions:
    - {name: v2, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`, d.kind, d.plural, d.scope, strings.ToLower(d.kind))
	}
	return out.String()
}

func coilResources() string {
	var out strings.Builder
	out.WriteString(`---
apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata: {name: default}
spec: {blockSizeBits: 5, subnets: [{ipv4: 10.100.0.0/16}]}
---
apiVersion: v1
kind: Namespace
metadata: {name: internet}
---
apiVersion: coil.cybozu.com/v2
kind: Egress
metadata: {name: nat, namespace: internet}
spec: {destinations: [198.51.100.0/24], replicas: 1, sessionAffinity: ClientIP, template: {metadata: {labels: {name: coil-egress}}}}
`)
	for i, node := range []string{"cp1", "home1", "cloud1"} {
		fmt.Fprintf(&out, `---
apiVersion: coil.cybozu.com/v2
kind: AddressBlock
metadata: {name: default-%d, labels: {coil.cybozu.com/pool: default, coil.cybozu.com/node: %s}}
index: %d
ipv4: %s
`, i, node, i, coilBlocks[node])
	}
	fmt.Fprintf(&out, `---
apiVersion: coil.cybozu.com/v2
kind: AddressBlock
metadata: {name: default-3, labels: {coil.cybozu.com/pool: default, coil.cybozu.com/reserved: "true"}}
index: 3
ipv4: %s
`, coilReserved)
	return out.String()
}

// TestTakeOver: pods that run under Coil go on under skein without a restart. Coil's own programs are not to be had
// here: a plugin that leaves the same state in the kernel, and objects of the same kinds, stand in for them.
func TestTakeOver(t *testing.T) {
	testenv.NeedRoot(t)
	f := raiseFleet(t, FleetConfig{Name: "t", Lab: takeoverLab, UseCNI: useCoil,
		Nodes: []string{"cp1", "home1", "cloud1"}})
	f.kubectl([]byte(coilObjects()), "apply", "-f", "-")
	f.kubectl(nil, "wait", "--for=condition=Established", "--timeout=30s", "crd/addresspools.coil.cybozu.com",
		"crd/addressblocks.coil.cybozu.com", "crd/egresses.coil.cybozu.com")
	f.kubectl([]byte(coilResources()), "apply", "-f", "-")
	f.kubectl([]byte(coilPrograms), "apply", "-f", "-")
	f.runPod("web-home", "home1")
	f.runPod("web-cloud", "cloud1")
	f.kubectl([]byte(fmt.Sprintf(oldDeployment, ToolsImage)), "apply", "-f", "-")
	f.kubectl(nil, "rollout", "status", "deployment/old", "--timeout=60s")
	before := map[string]string{"web-home": f.container("web-home"), "web-cloud": f.container("web-cloud")}
	home, cloud := f.podAddresses("web-home")[0], f.podAddresses("web-cloud")[0]
	if !netip.MustParsePrefix(coilBlocks["home1"]).Contains(home) {
		t.Fatalf("the stand-in of Coil gave %s", home)
	}

	f.walk("Coming from Coil", map[string]Host{"node": func(ctx context.Context, script string) (string, error) {
		var all strings.Builder
		for _, n := range f.Config.Nodes {
			out, err := f.Commands(ctx, n, ofNode(script, n))
			fmt.Fprintf(&all, "%s:\n%s\n", n, out)
			if err != nil {
				return all.String(), err
			}
		}
		return all.String(), nil
	}})

	f.await(20*time.Second, "Coil's pods reach each other across NATs", func() error {
		got, err := f.fromPod("web-home", cloud, 8080, "hostname")
		if err == nil && got != "web-cloud" {
			err = errors.New(got)
		}
		return err
	})
	for pod, id := range before {
		if now := f.container(pod); now != id {
			t.Errorf("%s was restarted: %s, before %s", pod, now, id)
		}
	}
	f.await(5*time.Second, "the pod of Coil is known", func() error {
		if list := f.skeinOn("home1", "ip", "list"); !strings.Contains(list, home.String()) ||
			!strings.Contains(list, "adopted") {
			return errors.New(list)
		}
		return nil
	})
	if list := f.skeinOn("cp1", "egress", "list"); !strings.Contains(list, "internet/nat") {
		t.Errorf("the egress is not there:\n%s", list)
	}
	f.runPod("web-new", "home1")
	if a := f.podAddresses("web-new")[0]; !netip.MustParsePrefix(coilBlocks["home1"]).Contains(a) || a == home {
		t.Errorf("a new pod got %s, beside Coil's %s", a, home)
	}
	f.await(10*time.Second, "a new pod reaches one of Coil's", func() error {
		_, err := f.fromPod("web-new", cloud, 8080, "hostname")
		return err
	})
	f.replaceOld()
	f.kubectl(nil, "delete", "pod", "web-home", "--wait=true")
	f.await(90*time.Second, "the ended pod's address is let go of", func() error {
		if list := f.skeinOn("home1", "ip", "list"); strings.Contains(list, home.String()+" ") {
			return errors.New(list)
		}
		return nil
	})
	f.kubectl(nil, "delete", "crd", "addresspools.coil.cybozu.com", "addressblocks.coil.cybozu.com",
		"egresses.coil.cybozu.com")
	if _, err := f.fromPod("web-new", cloud, 8080, "hostname"); err != nil {
		t.Errorf("after Coil's definitions are gone: %v", err)
	}
}

// oldDeployment has a pod with an address of the block that Coil has reserved.
const oldDeployment = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: old}
spec:
  replicas: 1
  selector: {matchLabels: {app: old}}
  template:
    metadata: {labels: {app: old}}
    spec:
      nodeName: home1
      tolerations: [{operator: Exists}]
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 0
      containers:
        - {name: web, image: %s, imagePullPolicy: Never, args: [netexec, --http-port=8080, --udp-port=-1]}
`

// replaceOld: the pod in the block that Coil had reserved is replaced by one that skein starts, and the block released.
func (f fleet) replaceOld() {
	f.Helper()
	address := func() netip.Addr {
		f.Helper()
		a, err := netip.ParseAddr(f.kubectl(nil, "get", "pod", "-l", "app=old", "-o", "jsonpath={.items[*].status.podIP}"))
		if err != nil {
			f.Fatal(err)
		}
		return a
	}
	reserved := netip.MustParsePrefix(coilReserved)
	if a := address(); !reserved.Contains(a) {
		f.Fatalf("the stand-in of Coil gave %s", a)
	}
	file := filepath.Join(f.Config.Dir, "admin.kubeconfig")
	if err := f.Cluster.KubeconfigFor(file, "administrator", "system:masters"); err != nil {
		f.Fatal(err)
	}
	replace := []string{"import", "coil", "--replace", "--kubeconfig", file}
	f.Log(f.skeinOn("cp1", replace...))
	if a := address(); reserved.Contains(a) {
		f.Errorf("the next pod has %s, of the reserved block", a)
	}
	if list := f.skeinOn("cp1", "block", "list", "--reserved"); strings.Contains(list, coilReserved) {
		f.Errorf("the block is reserved still:\n%s", list)
	}
	if again := f.skeinOn("cp1", replace...); !strings.Contains(again, "nothing to replace") {
		f.Errorf("a second time:\n%s", again)
	}
}

// coilPrograms are called as Coil's are; they never run.
const coilPrograms = `---
apiVersion: apps/v1
kind: Deployment
metadata: {name: coil-controller, namespace: kube-system}
spec: {replicas: 0, selector: {matchLabels: {a: coil}}, template: {metadata: {labels: {a: coil}}, spec: {containers: [{name: c, image: none}]}}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: coild, namespace: kube-system}
spec: {selector: {matchLabels: {a: coild}}, template: {metadata: {labels: {a: coild}}, spec: {nodeSelector: {no: such}, containers: [{name: c, image: none}]}}}
`

// ofNode is a step of a walk-through for one of several nodes that are one host there: each has variables of its own.
func ofNode(script, node string) string {
	return strings.ReplaceAll(script, "walk-node.sh", "walk-"+node+".sh")
}

// container is the ID of a pod's container, and how often it was started.
func (f fleet) container(pod string) string {
	f.Helper()
	return f.kubectl(nil, "get", "pod", pod, "-o", "jsonpath={.status.containerStatuses[0].containerID} "+
		"{.status.containerStatuses[0].restartCount}")
}
