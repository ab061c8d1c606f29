package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// The stub of the plugin gives each pod of a node the next address of 10.77.N.0/24, N by the node's name, and makes the
// links and routes that the real one and its agent make. It writes down what it gave in the stub agent's state, where
// that finds it. A pod of the namespace "full" is refused.

func stubBlock(node string) string { return fmt.Sprintf("10.77.%d", node[0]-'a'+10*(node[1]-'0')) }

// stubScript is what the stub does with the kernel; $1 is the last byte of the address.
const stubScript = `set -e
link=v$1 ns=$(basename $CNI_NETNS)
if [ $CNI_COMMAND = DEL ]; then ip link del $link 2>/dev/null || true; exit; fi
echo 1 >/proc/sys/net/ipv4/ip_forward
ip rule add pref 2000 lookup 116 2>/dev/null || ip rule show | grep -q 'lookup 116'
ip route replace unreachable $BLOCK.0/24 table 116
ip route replace blackhole $BLOCK.0/24 table 119
ip link add $link type veth peer name $CNI_IFNAME netns $ns
echo 1 >/proc/sys/net/ipv4/conf/$link/proxy_arp
echo 0 >/proc/sys/net/ipv4/neigh/$link/proxy_delay # else answers wait for up to 0.8 s, at random
ip link set $link up
ip route add $BLOCK.$1/32 dev $link table 116
ip -n $ns addr add $BLOCK.$1/32 dev $CNI_IFNAME
ip -n $ns link set $CNI_IFNAME up
ip -n $ns route add 169.254.1.1 dev $CNI_IFNAME
ip -n $ns route add default via 169.254.1.1
`

func stubPlugin() int {
	refuse := func(code int, why string) int {
		fmt.Printf(`{"cniVersion": "1.1.0", "code": %d, "msg": %q, "details": "the stub"}`, code, why)
		return 1
	}
	leases := filepath.Join(os.Getenv("SKEIN_STATE_DIR"), "leases")
	if err := os.MkdirAll(leases, 0o700); err != nil {
		return refuse(5, err.Error())
	}
	if strings.Contains(os.Getenv("CNI_ARGS"), "K8S_POD_NAMESPACE=full") && os.Getenv("CNI_COMMAND") == "ADD" {
		return refuse(11, "nothing is free")
	}
	id := os.Getenv("CNI_CONTAINERID")
	for i := 1; i < 200; i++ {
		lease := filepath.Join(leases, fmt.Sprint(i))
		if os.Getenv("CNI_COMMAND") == "DEL" {
			if b, err := os.ReadFile(lease); err != nil || string(b) != id {
				continue
			}
			os.Remove(lease)
		} else {
			f, err := os.OpenFile(lease, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			if err != nil {
				continue
			}
			fmt.Fprint(f, id)
			f.Close()
		}
		cmd := exec.Command("/bin/sh", "-c", stubScript, "sh", fmt.Sprint(i))
		cmd.Env = append(os.Environ(), "BLOCK="+stubBlock(os.Getenv("SKEIN_NODE")))
		if out, err := cmd.CombinedOutput(); err != nil {
			return refuse(5, err.Error()+": "+string(out))
		}
		fmt.Printf(`{"cniVersion": "1.1.0", "ips": [{"address": "%s.%d/32"}]}`, stubBlock(os.Getenv("SKEIN_NODE")), i)
		return 0
	}
	return 0
}

func (s *stub) CreatePool(_ context.Context, r *skeinv1.CreatePoolRequest) (*skeinv1.PoolResponse, error) {
	b, err := json.Marshal(r.GetPool())
	if err == nil {
		err = os.WriteFile(filepath.Join(s.state, "pool-"+r.GetPool().GetName()), b, 0o600)
	}
	return &skeinv1.PoolResponse{Pool: r.GetPool()}, err
}

func (s *stub) Nodes(context.Context, *skeinv1.NodesRequest) (*skeinv1.NodesResponse, error) {
	r := &skeinv1.NodesResponse{}
	for _, n := range []string{"a1", "b1", "b2"} {
		r.Nodes = append(r.Nodes, &skeinv1.NodeView{Node: &skeinv1.Node{Id: "id-" + n, Name: n}})
	}
	return r, nil
}

func (s *stub) Statics(context.Context, *skeinv1.StaticsRequest) (*skeinv1.StaticsResponse, error) {
	return &skeinv1.StaticsResponse{}, nil
}

func (s *stub) Blocks(context.Context, *skeinv1.BlocksRequest) (*skeinv1.BlocksResponse, error) {
	r := &skeinv1.BlocksResponse{}
	for i, n := range []string{"a1", "b1", "b2"} {
		// A node of the stub has its block from its first pod on; the agents of all of them see each other's state.
		if _, err := os.Stat(filepath.Join(s.state, "../../"+n+"/state/leases")); err == nil {
			r.Blocks = append(r.Blocks, &skeinv1.BlockView{Local: n == s.name, Used: 1,
				Block: &skeinv1.Block{Pool: "default", Number: uint64(i), NodeId: "id-" + n, Ipv4: stubBlock(n) + ".0/24"}})
		}
	}
	return r, nil
}

func (s *stub) Pods(context.Context, *skeinv1.PodsRequest) (*skeinv1.PodsResponse, error) {
	r := &skeinv1.PodsResponse{}
	entries, _ := os.ReadDir(filepath.Join(s.state, "leases"))
	for _, e := range entries {
		id, err := os.ReadFile(filepath.Join(s.state, "leases", e.Name()))
		if err != nil {
			continue
		}
		r.Pods = append(r.Pods, &skeinv1.PodView{Holder: &skeinv1.Holder{ContainerId: string(id), Ipv4: stubBlock(s.name) +
			"." + e.Name(), State: "used"}})
	}
	return r, nil
}

func TestPodsInAScenario(t *testing.T) {
	spec, opts, out := stubLab(t, `
  - {expect: {addresses: agree}}
  - {pods: {node: a1, start: [p, q]}}
  - {pods: {node: all, start: 3, namespace: web, longest: 60s}}
  - {expect: {addresses: agree}}
  - {expect: {from: a1/all, to: [a1/all, a1], reach: true, count: 2}, within: 5s}
  - {expect: {from: a1, to: a1/all, reach: true}, within: 5s}
  - {expect: {from: a1/p, to: b1/pod1, reach: false}}
  - {ping: {from: a1, to: a1/p}}
  - {transfer: {from: a1/p, to: a1/q, bytes: 100000}}
  - {exec: {node: [a1/p, b1/pod2], command: 'ip -4 addr show eth0; echo $SKEIN_NODE', matches: 'inet 10\.77\.\d+\.\d+/32'}}
  - {exec: {node: a1/q, command: ip link, absent: skeinlab}}
  - {pods: {node: all, start: [no], namespace: full, code: 11, expect_error: nothing is free}}
  - {ping: {lost: 0}}
  - {pods: {node: a1, stop: [p, pod2]}}
  - {pods: {node: a1, start: [p]}}
  - {expect: {from: a1/p, to: a1/q, reach: true}, within: 5s}
  - {kill: b1}
  - {pods: {node: b1, stop: [pod1]}}
  - {start: b1}
  - {expect: {addresses: agree}}
  - {pods: {node: all, stop: all}}
  - {expect: {addresses: agree}}
`)
	spec.Pools = []*skeinv1.Pool{{Name: "default"}}
	res, err := Run(t.Context(), spec, opts)
	if err != nil || len(res.Steps) != len(spec.Steps) {
		t.Fatalf("%v, %d of %d steps", err, len(res.Steps), len(spec.Steps))
	}
	if !strings.Contains(out.String(), "9 pods in ") {
		t.Error("what starting pods took is not told")
	}
	nothingLeft(t, spec, opts.Dir)
}

func TestPodsThatFail(t *testing.T) {
	spec, opts, _ := stubLab(t, "  []\n")
	spec.Pools = []*skeinv1.Pool{{Name: "web", BlockSizeBits: 3}}
	l, err := Up(t.Context(), spec, opts.Options)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(l.Dir, "nodes/a1/state/pool-web")); err != nil {
		t.Errorf("the file's pool was not made: %v", err)
	}
	start := func(s StartPods) error { s.Nodes = []string{"a1"}; return l.StartPods(t.Context(), 0, s) }
	wrong := func(err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v; want %s", err, want)
		}
	}
	wrong(start(StartPods{Pods: []string{"p"}, Namespace: "full"}),
		"pod a1/p: CNI ADD: code 11: nothing is free: the stub")
	wrong(start(StartPods{Pods: []string{"p"}, Namespace: "full", Fails: true, Code: 7}), "pod a1/p was refused with "+
		"another code than 7: CNI ADD: code 11")
	wrong(start(StartPods{Pods: []string{"p"}, Namespace: "full", Fails: true, Text: "empty"}),
		`pod a1/p was refused, but not with "empty"`)
	wrong(start(StartPods{Pods: []string{"p"}, Fails: true, Code: 11}),
		"pod a1/p got 10.77.10.1, but should have been refused")
	wrong(start(StartPods{Pods: []string{"p"}, Longest: 1}), "allowed: 1ns")
	wrong(l.StopPods(t.Context(), StopPods{Nodes: []string{"a1"}, Pods: []string{"x"}}), `node a1 has no pod "x"; pods: `)
	if pods, err := fabric.Pods(spec.Name, "a1"); err != nil || len(pods) > 1 {
		t.Errorf("refused pods have left %v, %v", pods, err)
	}
}

// An address that nobody has any more is found: the agent keeps it, and the kernel has no route for it.
func TestLeakedAddressIsFound(t *testing.T) {
	spec, opts, _ := stubLab(t, `
  - {pods: {node: a1, start: [p, q]}}
  - {exec: {node: a1, command: 'echo lost >$SKEIN_STATE_DIR/leases/99'}}
  - {expect: {addresses: agree}, within: 200ms}
`)
	_, err := Run(t.Context(), spec, opts)
	if err == nil || !strings.Contains(err.Error(),
		`a1: its agent keeps 10.77.10.99 for container "lost\n", which is gone`) {
		t.Error(err)
	}
}

// A lab that was attached to knows the pods that another process has started.
func TestPodsOfAnAttachedLab(t *testing.T) {
	spec, opts, _ := stubLab(t, "  []\n")
	l, err := Up(t.Context(), spec, opts.Options)
	if err == nil {
		err = l.StartPods(t.Context(), 0, StartPods{Nodes: []string{"b1"}, Pods: []string{"p"}})
	}
	if err == nil {
		l, err = Attach(spec.Name, Options{Dir: opts.Dir})
	}
	if err != nil {
		t.Fatal(err)
	}
	pods, err := l.Pods("b1")
	if err != nil || len(pods) != 1 || pods[0].Place() != "b1/p" || pods[0].Namespace != "default" ||
		list(pods[0].Addresses) != "10.77.11.1" {
		t.Fatalf("%+v, %v", pods, err)
	}
	out, exit, err := l.Exec(t.Context(), "b1/p", "ip", "-4", "addr")
	if err != nil || exit != 0 || !strings.Contains(out, "10.77.11.1/32") {
		t.Errorf("exec in the pod: %v, exit status %d: %s", err, exit, out)
	}
	if _, _, err := l.Exec(t.Context(), "b1/x", "true"); err == nil || !strings.Contains(err.Error(),
		`node b1 has no pod "x"; pods: p`) {
		t.Errorf("exec in no pod: %v", err)
	}
}
