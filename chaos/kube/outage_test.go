package kube

import (
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/internal/testenv"
)

// outageLab is the usual fleet with two gateways that are not servers, and a host outside of the mesh.
//
//go:embed outage.yaml
var outageLab string

// How the outage is judged.
const (
	statusWithin = 10 * time.Second      // from the apiserver's return until what it shows is true
	podsWithin   = 2 * time.Minute       // the same for kubelets, which wait by themselves
	loadEvery    = 40 * time.Millisecond // between two requests of each load
	pauseAtMost  = 20 * time.Second      // without an answer, for any of them: agents restart, gateways die
	leastLoad    = 0.8                   // of the requests that the rate asks for; less is not a test
	servePort    = 8080
	roundWithin  = 30 * time.Second // another round of failures is begun where so much of the outage is left
)

// outage is a cluster whose apiserver is away.
type outage struct {
	fleet
	client string // network namespace of the pod that asks
	victim Sandbox
	egress netip.AddrPort // outside of the mesh
}

// TestOutage: the apiserver and its etcd are killed under load, for a minute or as long as SKEIN_OUTAGE says. Meanwhile
// pods, agents, paths and a gateway fail and come back; after the return everything that is shown is true.
func TestOutage(t *testing.T) {
	testenv.NeedRoot(t)
	last := time.Minute
	if text := os.Getenv("SKEIN_OUTAGE"); text != "" {
		var err error
		if last, err = time.ParseDuration(text); err != nil {
			t.Fatal("SKEIN_OUTAGE:", err)
		}
	}
	o := outage{fleet: raiseFleet(t, FleetConfig{Name: "o", Lab: outageLab})}
	o.prepare()
	loads := o.loads()
	began := time.Now()
	if err := o.Cluster.Fail(); err != nil {
		t.Fatal(err)
	}
	o.during(began, last)
	o.apiserverReturns(began)
	for _, l := range loads {
		asked, answered, longest, text := l.report()
		t.Log(text)
		if want := leastLoad * float64(time.Since(began)/l.every); float64(asked) < want {
			t.Errorf("%s: only %d requests were made of at least %.0f: the machine is too slow for this test", l.name,
				asked, want)
		}
		if longest > pauseAtMost || answered < asked/2 {
			t.Errorf("%s; at most %s are allowed", text, pauseAtMost)
		}
	}
}

// prepare makes what the outage is to find.
func (o *outage) prepare() {
	for ns, more := range map[string]string{"load": "", "kept": "skein.dev/pool=special", "out": ""} {
		o.kubectl(nil, "create", "namespace", ns)
		if more != "" {
			o.kubectl(nil, "annotate", "namespace", ns, more)
		}
	}
	o.kubectl([]byte(`{"apiVersion":"skein.dev/v1alpha1","kind":"AddressPool","metadata":{"name":"special"},
		"spec":{"subnets":[{"ipv4":"10.100.128.0/24","ipv6":"fd00:100::8000/120"}],"blockSizeBits":3,"cooldownSeconds":5}}`),
		"apply", "-f", "-")
	o.kubectl([]byte(`{"apiVersion":"skein.dev/v1alpha1","kind":"Egress","metadata":{"namespace":"out","name":"nat"},
		"spec":{"destinations":["0.0.0.0/0"],"gateways":{"gateway":"yes"}}}`), "apply", "-f", "-")
	o.until(30*time.Second, "the pool and the egress are in the log", func() error {
		out := o.kubectl(nil, "get", "addresspools,egresses.skein.dev", "-A", "-o",
			`jsonpath={range .items[*]}{.status.conditions[0].reason} {end}`)
		if out != "Applied Applied" && out != "Applied Applied " {
			return errors.New(out)
		}
		return nil
	})
	uses := map[string]string{"skein.dev/egress.out": "nat"}
	for _, p := range []struct {
		node, ns, name string
		annotations    map[string]string
	}{{"home1", "load", "client", uses}, {"cloud1", "load", "far", nil}, {"cp1", "load", "near", nil},
		{"home1", "kept", "victim", uses}, {"cloud1", "load", "victim", nil}} {
		b, err := json.Marshal(server(p.node, p.ns, p.name, p.annotations))
		if err != nil {
			o.Fatal(err)
		}
		o.kubectl(b, "apply", "-f", "-")
	}
	o.kubectl(nil, "wait", "--for=condition=Ready", "--timeout=60s", "pod", "-n", "load", "--all")
	o.kubectl(nil, "wait", "--for=condition=Ready", "--timeout=60s", "pod", "-n", "kept", "--all")
	if err := o.Lab.Serve(lab.Serve{Nodes: []string{"world"}, Port: 80}); err != nil {
		o.Fatal(err)
	}
	at, ok := o.Lab.Network().Host("world")
	if !ok {
		o.Fatal("the lab has no host world")
	}
	o.egress = netip.AddrPortFrom(at.Addr, 80)
	for _, n := range []string{"cp1", "home1", "cloud1"} {
		o.until(statusWithin, "nothing is wrong on "+n, func() error { return o.problems(n) })
	}
}

// server is a pod that answers over HTTP.
func server(node, ns, name string, annotations map[string]string) map[string]any {
	return map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"namespace": ns, "name": name, "annotations": annotations},
		"spec": map[string]any{
			"nodeName": node, "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
			"enableServiceLinks": false, "tolerations": []any{map[string]any{"operator": "Exists"}},
			"containers": []any{map[string]any{"name": "c", "image": ToolsImage, "imagePullPolicy": "Never",
				"args": []string{"netexec", fmt.Sprintf("--http-port=%d", servePort), "--udp-port=-1"}}},
		},
	}
}

// until waits until check holds, and tells how long that took.
func (o *outage) until(d time.Duration, what string, check func() error) time.Duration {
	o.Helper()
	took, err := poll(o.Context(), d, tryEvery, check)
	if err != nil {
		o.Fatalf("%s: %v", what, err)
	}
	return took
}

// problems is what a node's agent has to complain about.
func (o *outage) problems(node string) error {
	client, err := o.Lab.Client(node)
	if err != nil {
		return err
	}
	st, err := client.Status(o.Context(), &skeinv1.StatusRequest{})
	for _, p := range st.GetProblems() {
		err = errors.Join(err, fmt.Errorf("%s: %s", p.GetSubject(), p.GetMessage()))
	}
	return err
}

// sandbox finds a pod that runs.
func (o *outage) sandbox(node, ns, pod string) (Sandbox, error) {
	all, err := o.Workers[node].Sandboxes(o.Context())
	if err != nil {
		return Sandbox{}, err
	}
	for _, s := range all {
		if s.Namespace == ns && s.Pod == pod {
			return s, nil
		}
	}
	return Sandbox{}, fmt.Errorf("pod %s/%s does not run on %s", ns, pod, node)
}

func (o *outage) mustSandbox(node, ns, pod string) Sandbox {
	o.Helper()
	s, err := o.sandbox(node, ns, pod)
	if err != nil {
		o.Fatal(err)
	}
	return s
}

// loads begins the requests: from a pod behind one NAT to pods behind two others, and out by an egress.
func (o *outage) loads() []*load {
	o.client = o.mustSandbox("home1", "load", "client").Netns()
	var out []*load
	for _, l := range []struct{ name, node, pod string }{
		{"pod to pod across a symmetric NAT", "cloud1", "far"}, {"pod to pod by a direct path", "cp1", "near"},
	} {
		at := netip.AddrPortFrom(o.address(o.mustSandbox(l.node, "load", l.pod)), servePort)
		ask := func(ctx context.Context) error { _, err := fetch(ctx, o.client, at, "/hostname"); return err }
		o.until(20*time.Second, l.name, func() error { return ask(o.Context()) })
		out = append(out, startLoad(o.T, l.name, loadEvery, ask))
	}
	ask := func(ctx context.Context) error {
		text, err := fetch(ctx, o.client, o.egress, "/")
		var seen lab.Seen
		if err == nil {
			err = json.Unmarshal([]byte(text), &seen)
		}
		if err == nil && !slices.Contains(o.gatewayAddresses(), seen.Address) {
			err = fmt.Errorf("the outside saw %s, which is not a gateway's", seen.Address)
		}
		return err
	}
	o.until(20*time.Second, "egress", func() error { return ask(o.Context()) })
	return append(out, startLoad(o.T, "pod to the outside by an egress", loadEvery, ask))
}

func (o *outage) gatewayAddresses() (out []netip.Addr) {
	for _, n := range []string{"gw1", "gw2"} {
		h, _ := o.Lab.Network().Host(n)
		out = append(out, h.Addr)
	}
	return out
}

// address is a pod's IPv4 address by its own interface.
func (o *outage) address(s Sandbox) netip.Addr {
	o.Helper()
	all, err := fabric.Addresses(s.Netns())
	if err != nil || len(all) == 0 || !all[0].Is4() {
		o.Fatalf("pod %s/%s has %v, %v", s.Namespace, s.Pod, all, err)
	}
	return all[0]
}

// during does what shall be survived until the outage has lasted.
func (o *outage) during(began time.Time, last time.Duration) {
	o.containersRestart()
	o.sandboxesRestart()
	o.podsStart("one", "two", "three")
	for round := 0; ; round++ {
		o.gatewayDies()
		o.pathDies()
		o.agentsRestart()
		left := time.Until(began.Add(last))
		o.Logf("round %d is over, %s of the outage are left", round+1, max(left, 0).Round(time.Second))
		if left < min(last/3, roundWithin) {
			break
		}
	}
	out, exit, err := o.Lab.Exec(o.Context(), "hub", "skein", "pool", "set", "special", "--cooldown", "1m")
	if err != nil || exit != 0 {
		o.Fatalf("skein pool set: %d, %v: %s", exit, err, out)
	}
	select {
	case <-time.After(time.Until(began.Add(last))):
	case <-o.Context().Done():
	}
}

// containersRestart: kubelet starts again what has ended.
func (o *outage) containersRestart() {
	before := o.mustSandbox("cloud1", "load", "victim")
	if err := syscall.Kill(before.Containers["c"], syscall.SIGKILL); err != nil {
		o.Fatal(err)
	}
	took := o.until(30*time.Second, "a container that was killed runs again", func() error {
		now, err := o.sandbox("cloud1", "load", "victim")
		if err == nil && (now.Containers["c"] == 0 || now.Containers["c"] == before.Containers["c"]) {
			err = fmt.Errorf("its containers: %v", now.Containers)
		}
		return err
	})
	o.Logf("a container that was killed runs again after %s", took.Round(time.Millisecond))
}

// sandboxesRestart: a pod whose network namespace ends gets an address of the pool that its Namespace had chosen, and
// uses the egress that it had asked for, though nobody can be asked.
func (o *outage) sandboxesRestart() {
	before := o.mustSandbox("home1", "kept", "victim")
	if err := syscall.Kill(before.PID, syscall.SIGKILL); err != nil {
		o.Fatal(err)
	}
	took := o.until(60*time.Second, "a pod whose sandbox was killed runs again", func() error {
		now, err := o.sandbox("home1", "kept", "victim")
		if err == nil && (now.ID == before.ID || now.Containers["c"] == 0) {
			err = fmt.Errorf("%+v", now)
		}
		o.victim = now
		return err
	})
	o.Logf("a pod whose sandbox was killed runs again after %s", took.Round(time.Millisecond))
	if at := o.address(o.victim); !netip.MustParsePrefix("10.100.128.0/24").Contains(at) {
		o.Errorf("it has %s, which is not of its Namespace's pool", at)
	}
	o.until(20*time.Second, "it uses its egress", func() error {
		text, err := fetch(o.Context(), o.victim.Netns(), o.egress, "/")
		seen := func(a netip.Addr) bool { return strings.Contains(text, a.String()) }
		if err == nil && !slices.ContainsFunc(o.gatewayAddresses(), seen) {
			err = errors.New(text)
		}
		return err
	})
}

// podsStart: kubelet starts pods that it reads from files; their addresses need new blocks.
func (o *outage) podsStart(names ...string) {
	before := o.blocks()
	for _, name := range names {
		b, err := json.Marshal(server("home1", "load", name, nil))
		if err != nil {
			o.Fatal(err)
		}
		file := filepath.Join(o.Machines["home1"].Dir, staticPods, name+".json")
		if err := errors.Join(os.WriteFile(file+".new", b, 0o600), os.Rename(file+".new", file)); err != nil {
			o.Fatal(err)
		}
	}
	took := o.until(60*time.Second, "new pods run", func() error {
		for _, name := range names {
			if s, err := o.sandbox("home1", "load", name+"-home1"); err != nil || s.Containers["c"] == 0 {
				return fmt.Errorf("%s: %v, %v", name, s, err)
			}
		}
		return nil
	})
	after := o.blocks()
	o.Logf("%d new pods run after %s; blocks in the log: %d before, %d now", len(names), took.Round(time.Millisecond),
		before, after)
	if after <= before {
		o.Errorf("no block was taken for them")
	}
}

func (o *outage) blocks() int {
	o.Helper()
	client, err := o.Lab.Client("hub")
	if err != nil {
		o.Fatal(err)
	}
	r, err := client.Blocks(o.Context(), &skeinv1.BlocksRequest{})
	if err != nil {
		o.Fatal(err)
	}
	return len(r.GetBlocks())
}

// owner is the gateway that has the egress's slot.
func (o *outage) owner() (string, error) {
	e, err := o.Lab.Egress(o.Context(), lab.Ref{Namespace: "out", Name: "nat"})
	if err != nil {
		return "", err
	}
	for _, s := range e.GetSlots() {
		if s.GetOwner() != "" {
			return s.GetOwner(), nil
		}
	}
	return "", errors.New("nobody owns its slot")
}

// gatewayDies: the other one takes over. The one that died before comes back first, and nobody minds.
func (o *outage) gatewayDies() {
	for _, n := range []string{"gw1", "gw2"} {
		if !slices.Contains(o.Lab.Running(), n) {
			if err := o.Lab.Start(o.Context(), n); err != nil {
				o.Fatal(err)
			}
		}
	}
	if err := o.Lab.WaitConverged(o.Context(), 30*time.Second); err != nil {
		o.Fatal(err)
	}
	var was string
	o.until(20*time.Second, "the slot has an owner", func() (err error) { was, err = o.owner(); return err })
	if err := o.Lab.Kill(o.Context(), was); err != nil {
		o.Fatal(err)
	}
	took := o.until(30*time.Second, "the other gateway takes over", func() error {
		now, err := o.owner()
		if err == nil && now == was {
			err = fmt.Errorf("it is still %s", now)
		}
		return err
	})
	o.Logf("gateway %s is killed, the other one owns the slot after %s", was, took.Round(time.Millisecond))
}

// pathDies: the direct way between two sites ends, their traffic goes by a relay, and comes back.
func (o *outage) pathDies() {
	o.path("direct", 30*time.Second)
	if err := o.Lab.Block(lab.Block{From: []string{"home1"}, To: []string{"cp1"}, Proto: "udp"}); err != nil {
		o.Fatal(err)
	}
	away := o.path("relay", 30*time.Second)
	if err := o.Lab.Heal(o.Context(), "home1"); err != nil {
		o.Fatal(err)
	}
	back := o.path("direct", 60*time.Second)
	o.Logf("a direct path dies: by a relay after %s; it heals: direct again after %s", away.Round(time.Millisecond),
		back.Round(time.Millisecond))
}

func (o *outage) path(want string, d time.Duration) time.Duration {
	o.Helper()
	return o.until(d, "home1 reaches cp1: "+want, func() error {
		p, err := o.Lab.Path(o.Context(), "home1", "cp1")
		if err == nil && p.GetPath() != want {
			err = fmt.Errorf("by %s: %s", p.GetPath(), p.GetReason())
		}
		return err
	})
}

// agentsRestart kills and starts every agent that runs, one after the other.
func (o *outage) agentsRestart() {
	for _, n := range o.Lab.Running() {
		if err := o.Lab.Kill(o.Context(), n); err != nil {
			o.Fatal(err)
		}
		if err := o.Lab.Start(o.Context(), n); err != nil {
			o.Fatal(err)
		}
	}
	if err := o.Lab.WaitConverged(o.Context(), 60*time.Second); err != nil {
		o.Fatal(err)
	}
	o.Logf("agents were killed and started: %s", strings.Join(o.Lab.Running(), ", "))
}

// apiserverReturns brings the apiserver back and sees to it that what it shows is true.
func (o *outage) apiserverReturns(began time.Time) {
	o.Logf("the apiserver returns after %s", time.Since(began).Round(time.Second))
	if err := o.Cluster.Return(o.Context()); err != nil {
		o.Fatal(err)
	}
	back := time.Now()
	since := func() time.Duration { return time.Since(back).Round(100 * time.Millisecond) }
	left := func() time.Duration { return max(statusWithin-time.Since(back), 0) }
	o.until(left(), "MeshNodes are true", o.membersAreTrue)
	o.Logf("MeshNodes are true %s after the apiserver is ready", since())
	o.until(left(), "resources are true", o.resourcesAreTrue)
	o.Logf("resources are true after %s", since())
	o.until(left(), "no problem is left", func() error {
		var err error
		for _, n := range o.Lab.Running() {
			if perr := o.problems(n); perr != nil {
				err = errors.Join(err, fmt.Errorf("%s: %w", n, perr))
			}
		}
		return err
	})
	o.Logf("no problem is left in any agent's status after %s", since())
	o.until(podsWithin, "kubelets' word of pods is true", o.podsAreTrue)
	o.Logf("kubelets have told of their pods after %s", since())
	o.nothingLeaked()
}

// membersAreTrue: each member is shown alive or dead, as it is.
func (o *outage) membersAreTrue() error {
	out := o.kubectl(nil, "get", "meshnodes", "-o", `jsonpath={range .items[*]}{.metadata.name}={.status.alive} {end}`)
	for _, n := range o.Lab.Spec.NodeNames() {
		if want := fmt.Sprintf("%s=%v", n, slices.Contains(o.Lab.Running(), n)); !slices.Contains(strings.Fields(out), want) {
			return fmt.Errorf("%s, want %s", out, want)
		}
	}
	return nil
}

// resourcesAreTrue: they show who owns the slot, what a command has changed, and as many blocks as there are.
func (o *outage) resourcesAreTrue() error {
	owner, err := o.owner()
	if err != nil {
		return err
	}
	shown := o.kubectl(nil, "-n", "out", "get", "egress.skein.dev", "nat", "-o", "jsonpath={.status.owners}")
	if shown != owner {
		return fmt.Errorf("the egress shows %q as its owner, want %q", shown, owner)
	}
	reason := o.kubectl(nil, "get", "addresspool", "special", "-o", "jsonpath={.status.conditions[0].reason}")
	if reason != "ChangedByCommand" {
		return fmt.Errorf("the pool that a command has changed says %q", reason)
	}
	if out := len(strings.Fields(o.kubectl(nil, "get", "addressblocks", "-o", "name"))); out != o.blocks() {
		return fmt.Errorf("%d AddressBlocks, want %d", out, o.blocks())
	}
	return nil
}

// podsAreTrue: Pods have the addresses that they have.
func (o *outage) podsAreTrue() error {
	var list struct {
		Items []struct {
			Metadata struct{ Namespace, Name string }
			Status   struct{ PodIP, Phase string }
		}
	}
	if err := json.Unmarshal([]byte(o.kubectl(nil, "get", "pods", "-A", "-o", "json")), &list); err != nil {
		return err
	}
	said := map[string]string{}
	for _, p := range list.Items {
		said[p.Metadata.Namespace+"/"+p.Metadata.Name] = p.Status.PodIP + " " + p.Status.Phase
	}
	all, err := o.sandboxes()
	if err != nil {
		return err
	}
	for _, s := range all {
		at, err := fabric.Addresses(s.Netns())
		if err != nil || len(at) == 0 {
			return fmt.Errorf("pod %s: %v, %w", s.Pod, at, cmp.Or(err, errors.New("no address")))
		}
		if want := at[0].String() + " Running"; said[s.Namespace+"/"+s.Pod] != want {
			return fmt.Errorf("pod %s/%s is told of as %q, want %q", s.Namespace, s.Pod, said[s.Namespace+"/"+s.Pod], want)
		}
		delete(said, s.Namespace+"/"+s.Pod)
	}
	if len(said) > 0 {
		return fmt.Errorf("Pods that do not run: %v", said)
	}
	return nil
}

// sandboxes are all pods that run.
func (o *outage) sandboxes() (out []Sandbox, err error) {
	for _, w := range o.Workers {
		all, err := w.Sandboxes(o.Context())
		if err != nil {
			return nil, err
		}
		out = append(out, all...)
	}
	return out, nil
}

// nothingLeaked: no address is given twice, none is kept for nobody, and kernels, agents and log agree.
func (o *outage) nothingLeaked() {
	all, err := o.sandboxes()
	if err != nil {
		o.Fatal(err)
	}
	var pods []lab.Pod
	for _, s := range all {
		pods = append(pods, s.Account())
	}
	if err := o.Lab.Start(o.Context(), slices.DeleteFunc(o.Lab.Spec.NodeNames(), func(n string) bool {
		return slices.Contains(o.Lab.Running(), n)
	})...); err != nil {
		o.Fatal(err)
	}
	if err := o.Lab.AddressesAgree(o.Context(), 30*time.Second, pods...); err != nil {
		o.Error(err)
	}
	o.Logf("%d pods: no address is given twice, none is left over", len(pods))
}
