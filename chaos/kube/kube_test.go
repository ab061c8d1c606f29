package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/gossip"
	annotationtier "github.com/skeinmesh/skein/gossip/kube"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/testenv"
)

const labFile = `name: kube
sites:
  dc:    {nat: none}
  home:  {nat: port-restricted-cone}
  cloud: {nat: symmetric}
nodes:
  dc1:    {site: dc, server: true, relay: true, labels: {gateway: 'yes'}, config: {site: "", kubernetes: {kubeconfig: DIR/dc1.kubeconfig, node: dc1, revokeAfterSeconds: 5}}}
  home1:  {site: home, config: {site: "", cni: {confDir: DIR/net.d, binDir: DIR/bin}, kubernetes: {kubeconfig: DIR/home1.kubeconfig, node: home1.example.com}}}
  gone1:  {site: dc, config: {site: "", kubernetes: {kubeconfig: DIR/gone1.kubeconfig, node: gone1}}}
  gone2:  {site: dc, config: {site: "", kubernetes: {kubeconfig: DIR/gone2.kubeconfig, node: gone2}}}
  cloud1: {site: cloud, config: {site: "", kubernetes: {kubeconfig: DIR/cloud1.kubeconfig, node: cloud1}}}
  vm1:    {site: dc, config: {site: ""}}
config: {emptyBlockSeconds: 2}
pools:
  default: {subnets: [{ipv4: 10.100.0.0/24, ipv6: 'fd00:100::/120'}], blockSizeBits: 3}
  special: {subnets: [{ipv4: 10.101.0.0/24, ipv6: 'fd00:101::/120'}], blockSizeBits: 3}
egresses:
  out/nat: {destinations: [0.0.0.0/0], gateways: {gateway: 'yes'}}
`

// theNodes are the Node objects of the lab's hosts; one's name is not the host's own.
var theNodes = map[string]string{"dc1": "dc1", "home1": "home1.example.com", "cloud1": "cloud1", "gone1": "gone1",
	"gone2": "gone2"}

// world is a lab with a control plane on dc1.
type world struct {
	*testing.T
	lab     *lab.Lab
	cluster *Cluster
	dir     string
	nodeOf  map[string]string // host → Node
}

// TestKubernetes: agents behind NATs and a real apiserver that they reach through the mesh. An agent whose host has no
// time collects garbage less often (cmd/skein/collect.go), and its memory with many Nodes has a bound.
func TestKubernetes(t *testing.T) {
	testenv.NeedRoot(t)
	w := raise(t, "k")
	for _, one := range []struct {
		name string
		run  func(world)
	}{
		{"RecordsAreOnTheNodes", world.recordsAreOnTheNodes},
		{"NetworkIsUp", world.networkIsUp},
		{"AnAgentWritesItsOwnNodeAlone", world.anAgentWritesItsOwnNodeAlone},
		{"AnnotationsAct", world.annotationsAct},
		{"OtherSystemsNames", world.otherSystemsNames},
		{"RubbishIsTold", world.rubbishIsTold},
		{"NothingIsWrittenAtRest", world.nothingIsWrittenAtRest},
		{"RecordsOfOthersAreRefused", world.recordsOfOthersAreRefused},
		{"GossipCut", world.gossipCut},
		{"PoolsByNamespace", world.poolsByNamespace},
		{"EgressesByAnnotation", world.egressesByAnnotation},
		{"MembersAreShown", world.membersAreShown},
		{"AddressPools", world.addressPools},
		{"Egresses", world.egresses},
		{"Readiness", world.readiness},
		{"LostAgent", world.lostAgent},
		{"TaintsAreGuarded", world.taintsAreGuarded},
		{"LabelsChooseGateways", world.labelsChooseGateways},
		{"KubeletsChooseNothing", world.kubeletsChooseNothing},
		{"NamesOfHosts", world.namesOfHosts},
		{"ApiserverAway", world.apiserverAway},
		{"NodesThatAreDeleted", world.nodesThatAreDeleted},
		{"MissingVerb", world.missingVerb},
		{"ThousandNodes", world.thousandNodes},
		{"DefinitionsRemoved", world.definitionsRemoved},
	} {
		t.Run(one.name, func(t *testing.T) {
			w := w
			w.T = t
			one.run(w)
		})
	}
}

// raise has a control plane on dc1, in a lab that is called letter and this process.
func raise(t *testing.T, letter string) world {
	programs, err := Programs("../..")
	if err != nil {
		testenv.Missing(t, err.Error())
	}
	dir, err := os.MkdirTemp("", "skk") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	binary := filepath.Join(dir, "skein")
	build := exec.Command("go", "build", "-o", binary, "../../cmd/skein")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build skein: %v\n%s", err, out)
	}
	spec, err := lab.Parse("kube.yaml", []byte(strings.ReplaceAll(labFile, "DIR", dir)))
	if err != nil {
		t.Fatal(err)
	}
	spec.Name = fmt.Sprintf("%s%d", letter, os.Getpid())
	artifacts := os.Getenv("SKEIN_ARTIFACTS")
	l, err := lab.Up(
		t.Context(),
		spec,
		lab.Options{
			Dir:       filepath.Join(dir, "lab"),
			Binary:    binary,
			Progress:  func(s string) { t.Log(s) },
			Artifacts: artifacts,
		},
	)
	if err != nil {
		t.Fatal(err)
	}
	w := world{T: t, lab: l, dir: dir, nodeOf: maps.Clone(theNodes)}
	t.Cleanup(func() {
		if w.cluster != nil {
			if err := w.cluster.Close(); err != nil {
				t.Error(err)
			}
		}
		if t.Failed() && artifacts != "" {
			if kept, err := l.SaveArtifacts(context.Background(), artifacts); err == nil {
				t.Log("logs and states are in", kept)
			}
		}
		if err := l.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := l.WaitConverged(t.Context(), 30*time.Second); err != nil { // the mesh needs no Kubernetes to come up
		t.Fatal(err)
	}
	on, err := l.Node("dc1")
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	w.cluster, err = Raise(t.Context(), Config{On: on, Dir: filepath.Join(dir, "control-plane"), Programs: programs})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("etcd and apiserver are ready after %s", time.Since(began).Round(time.Millisecond))
	for _, file := range []string{"crds", "agent", "admin"} {
		manifest, err := filepath.Abs("../../deploy/kubernetes/" + file + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		w.kubectl(nil, "apply", "-f", manifest)
	}
	w.kubectl(nil, "wait", "--for=condition=Established", "--timeout=30s", "crd", "addresspools.skein.dev",
		"addressblocks.skein.dev", "egresses.skein.dev", "meshnodes.skein.dev")
	for host, node := range w.nodeOf {
		if err := w.cluster.AddNode(t.Context(), node); err != nil {
			t.Fatal(err)
		}
		w.giveKubeconfig(host)
	}
	return w
}

func (w world) giveKubeconfig(host string) {
	w.Helper()
	account := "skein-agent"
	if host == "dc1" { // a server
		account = "skein-admin"
	}
	token, err := w.cluster.Token(w.Context(), account, w.nodeOf[host])
	if err == nil {
		err = w.cluster.WriteKubeconfig(filepath.Join(w.dir, host+".kubeconfig"), token)
	}
	if err != nil {
		w.Fatal(err)
	}
}

func (w world) kubectl(stdin []byte, args ...string) string {
	w.Helper()
	out, err := w.cluster.Kubectl(w.Context(), stdin, args...)
	if err != nil {
		w.Fatal(err)
	}
	return out
}

// within waits until check holds, and tells how long that took.
func (w world) within(d time.Duration, what string, check func() error) time.Duration {
	w.Helper()
	took, err := poll(w.Context(), d, 20*time.Millisecond, check)
	if err != nil {
		w.Fatalf("%s: %v", what, err)
	}
	return took
}

// seen is a node's record as another host has it.
func (w world) seen(by, of string) (*skeinv1.Record, error) {
	client, err := w.lab.Client(by)
	if err != nil {
		return nil, err
	}
	r, err := client.Nodes(w.Context(), &skeinv1.NodesRequest{})
	if err != nil {
		return nil, err
	}
	for _, n := range r.GetNodes() {
		if n.GetNode().GetName() == of && n.GetRecord() != nil {
			return n.GetRecord(), nil
		}
	}
	return nil, fmt.Errorf("%s has no record of %s", by, of)
}

func (w world) problems(host string) (out []string) {
	w.Helper()
	client, err := w.lab.Client(host)
	if err != nil {
		w.Fatal(err)
	}
	st, err := client.Status(w.Context(), &skeinv1.StatusRequest{})
	if err != nil {
		return []string{err.Error()}
	}
	for _, p := range st.GetProblems() {
		if strings.HasPrefix(p.GetSubject(), "kubernetes") {
			out = append(out, p.GetSubject()+": "+p.GetMessage())
		}
	}
	return out
}

// annotation is the value of an annotation of a host's Node.
func (w world) annotation(host, name string) (string, error) {
	out, err := w.cluster.Kubectl(w.Context(), nil, "get", "node", w.nodeOf[host], "-o", "json")
	if err != nil {
		return "", err
	}
	var n struct {
		Metadata struct{ Annotations map[string]string }
	}
	if err := json.Unmarshal([]byte(out), &n); err != nil {
		return "", err
	}
	v, ok := n.Metadata.Annotations[name]
	if !ok {
		return "", fmt.Errorf("Node %s has no annotation %s", w.nodeOf[host], name)
	}
	return v, nil
}

func (w world) recordsAreOnTheNodes() {
	for host, node := range w.nodeOf {
		w.within(30*time.Second, "the record of "+host+" on its Node", func() error {
			v, err := w.annotation(host, annotationtier.Annotation)
			if err != nil {
				return err
			}
			s, err := annotationtier.Decode(v)
			if err != nil {
				return err
			}
			r := new(skeinv1.Record)
			if err := unmarshal(s, r); err != nil {
				return err
			}
			if have, err := w.seen("dc1", host); err != nil || r.GetNodeId() != have.GetNodeId() ||
				r.GetKubernetesNode() != node ||
				len(r.GetCandidates()) == 0 {
				return fmt.Errorf("%v, %v", r, err)
			}
			return nil
		})
		w.within(10*time.Second, "no problem on "+host, func() error { return none(w.problems(host)) })
	}
}

func none(problems []string) error {
	if len(problems) > 0 {
		return errors.New(strings.Join(problems, "; "))
	}
	return nil
}

// site waits until all hosts see a node in a site.
func (w world) site(of, want string, d time.Duration) time.Duration {
	w.Helper()
	return w.within(d, "site of "+of, func() error {
		for by := range w.nodeOf {
			if r, err := w.seen(by, of); err != nil || r.GetSite() != want {
				return fmt.Errorf("%s sees it in %q, want %q, %v", by, r.GetSite(), want, err)
			}
		}
		return nil
	})
}

func (w world) annotate(host string, more ...string) {
	w.Helper()
	w.kubectl(nil, append([]string{"annotate", "--overwrite", "node", w.nodeOf[host]}, more...)...)
}

func (w world) annotationsAct() {
	var took []time.Duration
	for i := range 5 {
		want := fmt.Sprintf("attic-%d", i)
		w.annotate("home1", "skein.dev/location="+want)
		took = append(took, w.site("home1", want, 10*time.Second))
	}
	slices.Sort(took)
	w.Logf("an annotation is in every agent's records %s to %s after kubectl has returned",
		took[0].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
	w.annotate("home1", "skein.dev/force-endpoint=192.0.2.7:4711", "skein.dev/leader=",
		"skein.dev/persistent-keepalive=7", "skein.dev/birthday-attack=enabled")
	w.within(10*time.Second, "annotations in the record", func() error {
		r, err := w.seen("cloud1", "home1")
		forced := slices.ContainsFunc(r.GetCandidates(), func(c *skeinv1.Candidate) bool {
			return c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_FORCED && c.GetAddress() == "192.0.2.7:4711"
		})
		if err != nil || !forced || !r.GetLeaderWish() || r.GetPersistentKeepalive() != 7 ||
			r.GetBirthdayAttack() != "enabled" {
			return fmt.Errorf("%v, %v", r, err)
		}
		return nil
	})
	w.annotate("home1", "skein.dev/location-", "skein.dev/force-endpoint-", "skein.dev/leader-",
		"skein.dev/persistent-keepalive-", "skein.dev/birthday-attack-")
	w.within(10*time.Second, "annotations that are gone", func() error {
		r, err := w.seen("cloud1", "home1")
		forced := slices.ContainsFunc(r.GetCandidates(), func(c *skeinv1.Candidate) bool {
			return c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_FORCED
		})
		if err != nil || forced || r.GetLeaderWish() || r.GetPersistentKeepalive() != 0 ||
			r.GetBirthdayAttack() != "" ||
			r.GetSite() != "" {
			return fmt.Errorf("%v, %v", r, err)
		}
		return nil
	})
}

func (w world) otherSystemsNames() {
	w.kubectl(nil, "label", "node", "cloud1", "topology.kubernetes.io/region=eu-1")
	w.site("cloud1", "eu-1", 10*time.Second)
	w.annotate("cloud1", "kilo.squat.ai/location=lab")
	w.site("cloud1", "lab", 10*time.Second)
	w.annotate("cloud1", "skein.dev/location=attic")
	w.site("cloud1", "attic", 10*time.Second)
	w.annotate("cloud1", "skein.dev/location-", "kilo.squat.ai/location-")
	w.site("cloud1", "eu-1", 10*time.Second)
	w.kubectl(nil, "label", "node", "cloud1", "topology.kubernetes.io/region-")
	w.site("cloud1", "", 10*time.Second)
}

func (w world) rubbishIsTold() {
	w.annotate("cloud1", "skein.dev/force-endpoint=nowhere", "skein.dev/location=attic")
	w.site("cloud1", "attic", 10*time.Second)
	w.within(10*time.Second, "an Event about it", func() error {
		out := w.kubectl(nil, "get", "events", "--field-selector", "involvedObject.name=cloud1", "-o",
			"jsonpath={.items[*].message}")
		if !strings.Contains(out, `skein.dev/force-endpoint is ignored: "nowhere": want host:port`) {
			return errors.New(out)
		}
		return nil
	})
	w.annotate("cloud1", "skein.dev/force-endpoint-", "skein.dev/location-")
	w.site("cloud1", "", 10*time.Second)
}

// nothingIsWrittenAtRest: an agent whose record does not change leaves its Node alone, also over its own restart.
func (w world) nothingIsWrittenAtRest() {
	version := func() string {
		return w.kubectl(nil, "get", "nodes", "-o", "jsonpath={.items[*].metadata.resourceVersion}")
	}
	// What earlier cases changed may still be on its way.
	var last string
	w.within(90*time.Second, "Nodes that rest", func() error {
		last = version()
		settled := time.Now().Add(5 * time.Second)
		for time.Now().Before(settled) {
			if now := version(); now != last {
				return fmt.Errorf("%s became %s", last, now)
			}
		}
		return nil
	})
	if err := w.lab.Stop(w.Context(), "home1"); err != nil {
		w.Fatal(err)
	}
	if err := w.lab.Start(w.Context(), "home1"); err != nil {
		w.Fatal(err)
	}
	w.within(30*time.Second, "the restarted agent hears the apiserver", func() error {
		out, _, err := w.lab.Exec(
			w.Context(),
			"home1",
			"busybox",
			"wget",
			"-q",
			"-O",
			"-",
			"http://127.0.0.1:9469/metrics",
		)
		if err != nil || !strings.Contains(out, fmt.Sprintf("\nskein_kubernetes_nodes %d\n", len(w.nodeOf))) {
			i := max(strings.Index(out, "skein_kubernetes"), 0)
			return fmt.Errorf("%.2000s, %v", out[i:], err)
		}
		return nil
	})
	if err := w.lab.WaitConverged(w.Context(), 30*time.Second); err != nil {
		w.Fatal(err)
	}
	if now := version(); now != last {
		w.Logf("the restart wrote its record: versions %s became %s", last,
			now) // its candidates may have come one by one
	}
}

func (w world) recordsOfOthersAreRefused() {
	own, err := w.annotation("home1", annotationtier.Annotation)
	if err != nil {
		w.Fatal(err)
	}
	// Forged: signed by a key that is not home1's.
	s, err := annotationtier.Decode(own)
	if err != nil {
		w.Fatal(err)
	}
	r := new(skeinv1.Record)
	if err := unmarshal(s, r); err != nil {
		w.Fatal(err)
	}
	r.Epoch, r.Site = r.GetEpoch()+1000, "forged"
	key, _, err := identity.LoadOrCreate(w.TempDir())
	if err != nil {
		w.Fatal(err)
	}
	forged, err := gossip.Sign(key, r)
	if err != nil {
		w.Fatal(err)
	}
	value, err := annotationtier.Encode(forged)
	if err != nil {
		w.Fatal(err)
	}
	bad := map[string]struct{ value, says string }{
		"forged": {value, "signature"},
		"copied": {mustAnnotation(w, "dc1"), "says it is"},
		"cut":    {own[:len(own)/2], annotationtier.Annotation},
		"huge":   {"1." + strings.Repeat("A", 100_000), "characters"},
	}
	for what, c := range bad {
		w.annotate("home1", annotationtier.Annotation+"="+c.value)
		took := w.within(20*time.Second, what+": home1's agent puts its own record back", func() error {
			v, err := w.annotation("home1", annotationtier.Annotation)
			if err == nil && v == c.value {
				err = errors.New("it is still there")
			}
			return err
		})
		w.Logf("%s: put back after %s", what, took.Round(time.Millisecond))
	}
	// While home1's agent is away nobody puts it back, and the others tell what they think of it.
	if err := w.lab.Stop(w.Context(), "home1"); err != nil {
		w.Fatal(err)
	}
	for what, c := range bad {
		w.annotate("home1", annotationtier.Annotation+"="+c.value)
		w.within(20*time.Second, what+": cloud1 tells of it", func() error {
			if p := strings.Join(w.problems("cloud1"), "; "); !strings.Contains(p, c.says) {
				return fmt.Errorf("problems: %q, want %q", p, c.says)
			}
			return nil
		})
		if r, err := w.seen("cloud1", "home1"); err != nil || r.GetSite() == "forged" {
			w.Errorf("%s: cloud1 believes it: %v, %v", what, r, err)
		}
	}
	if err := w.lab.Start(w.Context(), "home1"); err != nil {
		w.Fatal(err)
	}
	for by := range w.nodeOf {
		w.within(30*time.Second, "no problem is left on "+by, func() error { return none(w.problems(by)) })
	}
}

func mustAnnotation(w world, host string) string {
	w.Helper()
	v, err := w.annotation(host, annotationtier.Annotation)
	if err != nil {
		w.Fatal(err)
	}
	return v
}

func (w world) anAgentWritesItsOwnNodeAlone() {
	token, err := w.cluster.Token(w.Context(), "skein-agent", "cloud1")
	if err != nil {
		w.Fatal(err)
	}
	refused := func(says string, args ...string) {
		w.Helper()
		out, err := w.cluster.As(w.Context(), token, nil, args...)
		if err == nil || !strings.Contains(err.Error(), says) {
			w.Errorf("%v: %s, %v; want it refused: %s", args, out, err, says)
		}
	}
	patch := func(node, body string) []string { return []string{"patch", "node", node, "--type=merge", "-p", body} }
	refused("its own Node, cloud1, alone", patch("dc1", `{"metadata":{"annotations":{"skein.dev/record":"x"}}}`)...)
	refused(
		"no annotation but skein.dev/record",
		patch("cloud1", `{"metadata":{"annotations":{"skein.dev/location":"x"}}}`)...)
	refused("neither labels", patch("cloud1", `{"metadata":{"labels":{"a":"b"}}}`)...)
	refused("neither labels", patch("cloud1", `{"spec":{"unschedulable":true}}`)...)
	status := func(body string) []string {
		return []string{"patch", "node", "cloud1", "--subresource=status", "--type=merge", "-p", body}
	}
	refused("no status but the condition", status(`{"status":{"capacity":{"cpu":"64"}}}`)...)
	refused("no status but the condition",
		status(`{"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.1"}]}}`)...)
	refused("no status but the condition", status(`{"status":{"conditions":[{"type":"Ready","status":"True"}]}}`)...)
	refused("forbidden", "delete", "node", "cloud1")
	refused("forbidden", "get", "secrets", "-A")
	if out, err := w.cluster.As(w.Context(), token, []byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"x"}}`),
		"create", "-f", "-"); err == nil ||
		!strings.Contains(err.Error(), "forbidden") {
		w.Errorf("an agent makes a Node: %s, %v", out, err)
	}
	unbound := w.kubectl(nil, "-n", "skein-system", "create", "token", "skein-agent")
	if out, err := w.cluster.As(w.Context(), unbound, nil,
		patch("cloud1", `{"metadata":{"annotations":{"skein.dev/record":"x"}}}`)...); err == nil ||
		!strings.Contains(err.Error(), "bound to its Node") {
		w.Errorf("a token that is bound to no Node: %s, %v", out, err)
	}
}

// gossipCut: home1 is cut off from gossip and relays, and what changes with it is found by its annotation.
func (w world) gossipCut() {
	nft := func(rules string) {
		w.Helper()
		var out bytes.Buffer
		if exit, err := w.lab.ExecIO(w.Context(), "home1", []string{"nft", "-f", "-"}, lab.Stdio{In: strings.NewReader(rules),
			Out: &out, Err: &out}); err != nil ||
			exit != 0 {
			w.Fatalf("nft: %d, %v, %s", exit, err, out.String())
		}
	}
	nft(`table inet cut {
		chain in { type filter hook input priority -300; meta l4proto { tcp, udp } th sport { 7946, 7443 } drop; meta l4proto { tcp, udp } th dport 7946 drop; }
		chain out { type filter hook output priority -300; meta l4proto { tcp, udp } th dport { 7946, 7443 } drop; meta l4proto { tcp, udp } th sport 7946 drop; }
	}`)
	w.within(60*time.Second, "gossip misses home1", func() error {
		client, err := w.lab.Client("cloud1")
		if err != nil {
			return err
		}
		r, err := client.Nodes(w.Context(), &skeinv1.NodesRequest{})
		for _, n := range r.GetNodes() {
			if n.GetNode().GetName() == "home1" && !n.GetAlive() {
				return nil
			}
		}
		return fmt.Errorf("it is seen alive, %v", err)
	})
	w.annotate("home1", "skein.dev/location=cut-off", "skein.dev/force-endpoint=192.0.2.9:4711")
	took := w.within(60*time.Second, "the record by the annotation", func() error {
		r, err := w.seen("cloud1", "home1")
		if err != nil || r.GetSite() != "cut-off" ||
			!slices.ContainsFunc(r.GetCandidates(),
				func(c *skeinv1.Candidate) bool { return c.GetAddress() == "192.0.2.9:4711" }) {
			return fmt.Errorf("%v, %v", r, err)
		}
		return nil
	})
	w.Logf("without gossip, a change at home1 is known at cloud1 after %s", took.Round(time.Millisecond))
	w.annotate("cloud1", "skein.dev/location=elsewhere")
	w.within(60*time.Second, "the other way", func() error {
		if r, err := w.seen("home1", "cloud1"); err != nil || r.GetSite() != "elsewhere" {
			return fmt.Errorf("%v, %v", r, err)
		}
		return nil
	})
	nft("delete table inet cut")
	w.annotate("home1", "skein.dev/location-", "skein.dev/force-endpoint-")
	w.annotate("cloud1", "skein.dev/location-")
	w.site("cloud1", "", 60*time.Second)
	w.site("home1", "", 60*time.Second)
	if err := w.lab.WaitConverged(w.Context(), 60*time.Second); err != nil {
		w.Fatal(err)
	}
}

// apiserverAway: agents restart with what their Nodes said, gossip goes on, and what returns is heard soon.
func (w world) apiserverAway() {
	w.annotate("home1", "skein.dev/location=attic")
	w.site("home1", "attic", 10*time.Second)
	if err := w.cluster.KillAPIServer(); err != nil {
		w.Fatal(err)
	}
	w.within(60*time.Second, "its absence is told", func() error {
		if p := w.problems("home1"); len(p) == 0 || !strings.Contains(p[0], "kubernetes: ") {
			return fmt.Errorf("problems: %q", p)
		}
		return nil
	})
	before, err := w.seen("home1", "home1")
	if err != nil {
		w.Fatal(err)
	}
	w.startPod("web", "during") // what namespaces have chosen is known
	w.inPool("during", "10.101.0.0/24")
	if err := w.lab.Stop(w.Context(), "home1"); err != nil {
		w.Fatal(err)
	}
	if err := w.lab.Start(w.Context(), "home1"); err != nil {
		w.Fatal(err)
	}
	w.within(30*time.Second, "the restarted agent's record, by gossip", func() error {
		r, err := w.seen("cloud1", "home1")
		if err == nil && r.GetEpoch() > before.GetEpoch() && r.GetSite() != "attic" {
			w.Fatalf("the restarted agent has forgotten its site: %v", r)
		}
		if err != nil || r.GetEpoch() <= before.GetEpoch() {
			return fmt.Errorf("%v, %v", r, err)
		}
		return nil
	})
	w.startPod("web", "after") // by the copy on disk
	w.inPool("after", "10.101.0.0/24")
	w.uses("after", "out/nat", true)
	w.stopPods("during", "after")
	if err := w.cluster.StartAPIServer(w.Context()); err != nil {
		w.Fatal(err)
	}
	w.annotate("home1", "skein.dev/location=cellar")
	took := w.site("home1", "cellar", 30*time.Second)
	w.Logf("an annotation made right after the apiserver's return is known everywhere after %s",
		took.Round(time.Millisecond))
	for host := range w.nodeOf {
		w.within(30*time.Second, "no problem on "+host, func() error { return none(w.problems(host)) })
	}
	w.annotate("home1", "skein.dev/location-")
	w.site("home1", "", 10*time.Second)
}

func (w world) missingVerb() {
	role := w.kubectl(nil, "get", "clusterrole", "skein-agent", "-o", "json")
	w.kubectl(nil, "patch", "clusterrole", "skein-agent", "--type=json", "-p",
		`[{"op":"replace","path":"/rules/0/verbs","value":["list","watch"]}]`)
	w.annotate("home1", "skein.dev/location=unwritten")
	w.within(30*time.Second, "what is missing is told", func() error {
		for _, p := range w.problems("home1") {
			if strings.Contains(p, "may not patch nodes") && strings.Contains(p, "home1.example.com") {
				return nil
			}
		}
		return fmt.Errorf("problems: %q", w.problems("home1"))
	})
	w.site("home1", "unwritten", 10*time.Second) // by gossip
	w.kubectl([]byte(role), "replace", "--force", "-f", "-")
	w.within(60*time.Second, "it works again by itself", func() error { return none(w.problems("home1")) })
	w.annotate("home1", "skein.dev/location-")
}

// unmarshal reads a signed record without verifying it.
func unmarshal(s *skeinv1.SignedRecord, r *skeinv1.Record) error {
	return proto.Unmarshal(s.GetRecord(), r)
}

// addPod makes a Pod object on home1's Node.
func (w world) addPod(ns, name string, annotations map[string]string) {
	w.Helper()
	o, err := json.Marshal(
		map[string]any{
			"apiVersion": "v1",
			"kind":       "Pod",
			"metadata":   map[string]any{"namespace": ns, "name": name, "annotations": annotations},
			"spec": map[string]any{
				"nodeName":                     w.nodeOf["home1"],
				"automountServiceAccountToken": false,
				"containers":                   []any{map[string]any{"name": "c", "image": "none"}},
			},
		},
	)
	if err != nil {
		w.Fatal(err)
	}
	w.kubectl(o, "apply", "-f", "-")
}

// startPod has the plugin add a pod on home1, as a container runtime would.
func (w world) startPod(ns, name string) {
	w.Helper()
	if err := w.lab.StartPods(w.Context(), 20*time.Second, lab.StartPods{Nodes: []string{"home1"}, Pods: []string{name},
		Namespace: ns}); err != nil {
		w.Fatal(err)
	}
}

func (w world) stopPods(names ...string) {
	w.Helper()
	if err := w.lab.StopPods(w.Context(), lab.StopPods{Nodes: []string{"home1"}, Pods: names}); err != nil {
		w.Fatal(err)
	}
}

func (w world) inPool(name, prefix string) {
	w.Helper()
	pods, err := w.lab.Pods("home1")
	if err != nil {
		w.Fatal(err)
	}
	p := netip.MustParsePrefix(prefix)
	for _, pod := range pods {
		if pod.Name == name && !slices.ContainsFunc(pod.Addresses, p.Contains) {
			w.Errorf("pod %s/%s has %v, want an address of %s", pod.Namespace, name, pod.Addresses, p)
		}
	}
}

func (w world) poolsByNamespace() {
	for _, ns := range []string{"web", "coil", "plain", "lost"} {
		w.kubectl(nil, "create", "namespace", ns)
	}
	w.kubectl(nil, "annotate", "namespace", "web", "skein.dev/pool=special")
	w.kubectl(nil, "annotate", "namespace", "coil", "coil.cybozu.com/pool=special")
	w.kubectl(nil, "annotate", "namespace", "lost", "skein.dev/pool=nowhere")
	w.within(10*time.Second, "Namespaces on the copy at home1", func() error {
		info, err := w.lab.Node("home1")
		if err != nil {
			return err
		}
		b, err := os.ReadFile(filepath.Join(info.Dir, "state", "kubernetes.json"))
		if err == nil && !strings.Contains(string(b), `"lost":"nowhere"`) {
			err = fmt.Errorf("%s", b)
		}
		return err
	})
	for ns, prefix := range map[string]string{"web": "10.101.0.0/24", "coil": "10.101.0.0/24", "plain": "10.100.0.0/24"} {
		w.addPod(ns, "p-"+ns, nil)
		w.startPod(ns, "p-"+ns)
		w.inPool("p-"+ns, prefix)
	}
	refused := func(ns, says string) {
		w.Helper()
		err := w.lab.StartPods(w.Context(), 10*time.Second,
			lab.StartPods{Nodes: []string{"home1"}, Pods: []string{"x"}, Namespace: ns, Fails: true, Text: says})
		if err != nil {
			w.Error(err)
		}
	}
	refused("lost", "nowhere")
	refused("unheard-of", "the pool of namespace unheard-of is not known")
	w.kubectl(nil, "annotate", "namespace", "plain", "skein.dev/pool=special")
	w.within(10*time.Second, "a changed Namespace serves the next pod", func() error {
		w.startPod("plain", "later")
		defer w.stopPods("later")
		pods, err := w.lab.Pods("home1")
		for _, p := range pods {
			if p.Name == "later" && !slices.ContainsFunc(p.Addresses, netip.MustParsePrefix("10.101.0.0/24").Contains) {
				return fmt.Errorf("%v", p.Addresses)
			}
		}
		return err
	})
	w.stopPods("p-web", "p-coil", "p-plain")
}

// uses waits until a pod of home1 uses an egress, or does not.
func (w world) uses(name, egress string, want bool) time.Duration {
	w.Helper()
	return w.within(15*time.Second, fmt.Sprintf("pod %s uses %s: %v", name, egress, want), func() error {
		out, exit, err := w.lab.Exec(w.Context(), "home1/"+name, "ip", "-4", "route", "show", "table", "118")
		if err != nil || exit != 0 && want || strings.Contains(out, "default dev fou4_") != want {
			return fmt.Errorf("%q, %d, %v", out, exit, err)
		}
		return nil
	})
}

func (w world) egressesByAnnotation() {
	w.addPod("plain", "job", nil)
	w.addPod("plain", "born", map[string]string{"skein.dev/egress.out": "nat"})
	w.addPod("web", "during", nil)
	w.addPod("web", "after", map[string]string{"egress.coil.cybozu.com/out": "nat"})
	w.startPod("plain", "born")
	w.uses("born", "out/nat", true)
	w.startPod("plain", "job")
	w.uses("job", "out/nat", false)
	var took []time.Duration
	for range 3 {
		w.kubectl(nil, "-n", "plain", "annotate", "pod", "job", "skein.dev/egress.out=nat")
		took = append(took, w.uses("job", "out/nat", true))
		w.kubectl(nil, "-n", "plain", "annotate", "pod", "job", "skein.dev/egress.out-")
		took = append(took, w.uses("job", "out/nat", false))
	}
	slices.Sort(took)
	w.Logf("a running pod's annotation is in its kernel %s to %s after kubectl has returned",
		took[0].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
	w.stopPods("job", "born")
}

// get is a field of an object, as kubectl's jsonpath has it; empty: there is none.
func (w world) get(path string, args ...string) string {
	out, err := w.cluster.Kubectl(w.Context(), nil, append([]string{"get", "-o", "jsonpath=" + path}, args...)...)
	if err != nil {
		return ""
	}
	return out
}

const synced = `{.status.conditions[?(@.type=="Synced")].reason}`

// reason waits until a resource's condition has a reason, and a message with some words.
func (w world) reason(want, says string, object ...string) time.Duration {
	w.Helper()
	return w.within(20*time.Second, strings.Join(object, " ")+" is "+want, func() error {
		have, message := w.get(synced, object...), w.get(`{.status.conditions[?(@.type=="Synced")].message}`, object...)
		if have != want || !strings.Contains(message, says) {
			return fmt.Errorf("%s: %s", have, message)
		}
		return nil
	})
}

// skein runs a command on a host and returns what it prints.
func (w world) skein(host string, args ...string) string {
	w.Helper()
	out, exit, err := w.lab.Exec(w.Context(), host, append([]string{"skein"}, args...)...)
	if err != nil || exit != 0 {
		w.Fatalf("skein %s: %d, %v: %s", strings.Join(args, " "), exit, err, out)
	}
	return out
}

func (w world) membersAreShown() {
	w.within(20*time.Second, "MeshNodes", func() error {
		out := w.kubectl(
			nil,
			"get",
			"meshnodes",
			"-o",
			`jsonpath={range .items[*]}{.metadata.name} {.status.nat} {.status.role} {.status.kubernetesNode} {.status.alive}{"\n"}{end}`,
		)
		if out != "cloud1 symmetric agent cloud1 true\ndc1 none server dc1 true\ngone1 none agent gone1 true\ngone2 none "+
			"agent gone2 true\nhome1 port-restricted-cone agent home1.example.com true\nvm1 none agent  true" {
			return errors.New(out)
		}
		return nil
	})
	w.annotate("home1", "skein.dev/location=shown")
	w.within(20*time.Second, "a member's new site", func() error {
		if site := w.get("{.status.site}", "meshnode", "home1"); site != "shown" {
			return errors.New(site)
		}
		return nil
	})
	w.annotate("home1", "skein.dev/location-")
	w.kubectl(nil, "delete", "meshnode", "cloud1")
	w.within(20*time.Second, "one that was deleted is there again", func() error {
		if id := w.get("{.spec.nodeID}", "meshnode", "cloud1"); id == "" {
			return errors.New("it is not")
		}
		return nil
	})
}

func pool(name, spec string) []byte {
	return fmt.Appendf(nil, `{"apiVersion":"skein.dev/v1alpha1","kind":"AddressPool","metadata":{"name":%q},"spec":%s}`,
		name, spec)
}

func (w world) addressPools() {
	for what, c := range map[string]struct{ spec, says string }{
		"rubbish":          {`{"subnets":[{"ipv4":"10.300.0.0/16"}]}`, "spec.subnets[0].ipv4: Invalid value"},
		"host bits":        {`{"subnets":[{"ipv4":"10.102.0.1/16"}]}`, "want an IPv4 CIDR without host bits"},
		"the wrong family": {`{"subnets":[{"ipv4":"fd64::/112"}]}`, "spec.subnets[0].ipv4"},
		"unequal": {`{"subnets":[{"ipv4":"10.102.0.0/24","ipv6":"fd64::/112"}]}`, "both subnets must have as many " +
			"addresses each"},
		"no subnet": {`{"subnets":[]}`, "spec.subnets"},
		"two kinds": {`{"subnets":[{"ipv4":"10.102.0.0/24"},{"ipv6":"fd64::/112"}]}`,
			"all subnets must be of one kind"},
	} {
		if out, err := w.cluster.Kubectl(w.Context(), pool("bad", c.spec), "apply", "-f", "-"); err == nil ||
			!strings.Contains(err.Error(), c.says) {
			w.Errorf("%s: %s, %v; want it refused: %s", what, out, err, c.says)
		}
	}
	w.kubectl(
		pool("lan",
			`{"subnets":[{"ipv4":"10.102.0.0/24","ipv6":"fd00:102::/120"}],"blockSizeBits":3,"namespaces":["lan"]}`),
		"apply",
		"-f",
		"-",
	)
	took := w.reason("Applied", "", "addresspool", "lan")
	w.Logf("a pool is in the log, and its status says so, %s after kubectl has returned", took.Round(time.Millisecond))
	w.within(10*time.Second, "the pool at another node", func() error {
		if out := w.skein("cloud1", "pool", "list"); !strings.Contains(out, "10.102.0.0/24") {
			return errors.New(out)
		}
		return nil
	})
	w.kubectl(nil, "create", "namespace", "lan")
	w.addPod("lan", "p1", nil)
	w.startPod("lan", "p1")
	w.inPool("p1", "10.102.0.0/24")
	w.within(20*time.Second, "its block is mirrored", func() error {
		if out := w.kubectl(nil, "get", "addressblocks", "-o",
			`jsonpath={range .items[?(@.spec.pool=="lan")]}{.spec.node}{end}`); !strings.Contains(
			out,
			"home1",
		) {
			return errors.New(out)
		}
		return nil
	})
	w.kubectl(pool("overlay", `{"subnets":[{"ipv4":"10.4.0.0/24"}]}`), "apply", "-f", "-")
	w.reason("Refused", "10.4.0.0/", "addresspool", "overlay")
	w.kubectl(nil, "delete", "addresspool", "overlay", "--timeout=20s")
	w.skein("dc1", "pool", "set", "lan", "--cooldown", "1m", "--namespace", "other")
	w.reason("ChangedByCommand", "namespaces", "addresspool", "lan")
	w.kubectl(nil, "patch", "addresspool", "lan", "--type=merge", "-p", `{"spec":{"cooldownSeconds":30}}`)
	w.reason("Applied", "", "addresspool", "lan")
	if out := w.skein("dc1", "pool", "show", "lan"); !strings.Contains(out, "30s") {
		w.Errorf("%s", out)
	}
	if out, err := w.cluster.Kubectl(w.Context(), nil, "patch", "addresspool", "lan", "--type=merge", "-p",
		`{"spec":{"blockSizeBits":4}}`); err == nil ||
		!strings.Contains(err.Error(), "the size of blocks cannot be changed") {
		w.Errorf("%s, %v", out, err)
	}
	w.kubectl(nil, "delete", "addresspool", "lan", "--wait=false")
	w.reason("InUse", "", "addresspool", "lan")
	w.stopPods("p1")
	w.skein("dc1", "pool", "drain", "lan")
	w.within(40*time.Second, "the pool goes once nothing uses it", func() error {
		if out, err := w.cluster.Kubectl(w.Context(), nil, "get", "addresspools", "-o", "name"); err != nil ||
			out != "" {
			return fmt.Errorf("%s, %v", out, err)
		}
		return nil
	})
	if out := w.skein("dc1", "pool", "list"); strings.Contains(out, "10.102.0.0/24") {
		w.Errorf("%s", out)
	}
	w.within(10*time.Second, "nothing is wrong on dc1 after that", func() error { return none(w.problems("dc1")) })
}

func (w world) egresses() {
	w.kubectl([]byte(`{"apiVersion":"skein.dev/v1alpha1","kind":"Egress","metadata":{"namespace":"web","name":"way"},
		"spec":{"destinations":["203.0.113.0/24"],"gateways":{"gateway":"yes"}}}`), "apply", "-f", "-")
	w.reason("Applied", "", "-n", "web", "egress.skein.dev", "way")
	w.within(20*time.Second, "its slot has an owner", func() error {
		if out := w.get("{.status.replicas} {.status.owners}", "-n", "web", "egress.skein.dev", "way"); out != "1 dc1" {
			return errors.New(out)
		}
		return nil
	})
	w.kubectl(nil, "-n", "web", "scale", "egress.skein.dev/way", "--replicas=2")
	w.within(20*time.Second, "it is scaled", func() error {
		if out := w.skein("home1", "egress", "list", "-o", "json"); !strings.Contains(out, `"replicas": 2`) {
			return errors.New(out)
		}
		return nil
	})
	w.kubectl(nil, "-n", "web", "delete", "egress.skein.dev", "way", "--timeout=20s")
	if out := w.skein("dc1", "egress", "list"); strings.Contains(out, "web/way") {
		w.Errorf("%s", out)
	}
}

// definitionsRemoved: without its definitions a resource is gone, and what it wished for stays.
func (w world) definitionsRemoved() {
	w.kubectl(pool("kept", `{"subnets":[{"ipv4":"10.103.0.0/24"}],"blockSizeBits":3}`), "apply", "-f", "-")
	w.reason("Applied", "", "addresspool", "kept")
	w.kubectl(nil, "delete", "crd", "--timeout=20s", "addresspools.skein.dev", "addressblocks.skein.dev",
		"meshnodes.skein.dev", "egresses.skein.dev")
	if err := w.lab.WaitConverged(w.Context(), 30*time.Second); err != nil {
		w.Fatal(err)
	}
	if out := w.skein("cloud1", "pool", "list"); !strings.Contains(out, "10.103.0.0/24") ||
		!strings.Contains(out, "10.100.0.0/24") {
		w.Errorf("%s", out)
	}
}

// nodesThatAreDeleted: who works stays though his Node is gone, and who is silent as well is revoked. It ends gone1.
func (w world) nodesThatAreDeleted() {
	members := func() string { return w.skein("dc1", "nodes") }
	w.kubectl(nil, "delete", "node", "gone1")
	silent := time.Now().Add(12 * time.Second) // more than twice the grace
	w.within(20*time.Second, "a member that works stays", func() error {
		if !strings.Contains(members(), "gone1") {
			w.Fatal("it was revoked")
		}
		if time.Now().Before(silent) {
			return errors.New("it is too early to tell")
		}
		return nil
	})
	if err := w.lab.Kill(w.Context(), "gone1"); err != nil {
		w.Fatal(err)
	}
	took := w.within(60*time.Second, "a silent one is revoked", func() error {
		if out := members(); strings.Contains(out, "gone1") {
			return errors.New(out)
		}
		return nil
	})
	w.Logf("a member whose Node is deleted is revoked %s after it was killed, with a grace of 5s",
		took.Round(time.Millisecond))
	w.within(20*time.Second, "its MeshNode is gone", func() error {
		if out := w.kubectl(nil, "get", "meshnodes", "-o", "name"); strings.Contains(out, "gone1") {
			return errors.New(out)
		}
		return nil
	})
	delete(w.nodeOf, "gone1")

	// A Node that comes back under its name at once, as when a machine is set up anew: what was there before is gone.
	if err := w.lab.Kill(w.Context(), "gone2"); err != nil {
		w.Fatal(err)
	}
	before := w.get("{.metadata.uid}", "node", "gone2")
	w.kubectl(nil, "delete", "node", "gone2")
	w.kubectl([]byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"gone2"}}`), "create", "-f", "-")
	if after := w.get("{.metadata.uid}", "node", "gone2"); after == before || after == "" {
		w.Fatalf("the Node is %q again", after)
	}
	took = w.within(60*time.Second, "a member whose Node is another's is revoked", func() error {
		if out := members(); strings.Contains(out, "gone2") {
			return errors.New(out)
		}
		return nil
	})
	w.Logf("one whose Node came back as another is revoked %s after", took.Round(time.Millisecond))
	w.kubectl(nil, "delete", "node", "gone2")
	delete(w.nodeOf, "gone2")
}

func (w world) networkIsUp() {
	for _, node := range w.nodeOf {
		w.within(20*time.Second, "Node "+node+" says that its network is up", func() error {
			out := w.get(`{.status.conditions[?(@.type=="NetworkUnavailable")].status}`, "node", node)
			if out != "False" {
				return fmt.Errorf("NetworkUnavailable is %q", out)
			}
			return nil
		})
	}
}

// resident is what an agent has in memory, in MiB, and how many Nodes it knows.
func (w world) resident(host string) (mib float64, nodes int, err error) {
	out, _, err := w.lab.Exec(w.Context(), host, "busybox", "wget", "-q", "-O", "-", "http://127.0.0.1:9469/metrics")
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(out) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, _ := strconv.ParseFloat(value, 64)
		switch name {
		case "process_resident_memory_bytes":
			mib = n / (1 << 20)
		case "skein_kubernetes_nodes":
			nodes = int(n)
		}
	}
	return mib, nodes, nil
}

// thousandNodes: a cluster of a thousand Nodes that are not members, each with a record as long as real ones, is small
// to an agent, and what happens to its own Node is heard as soon as before.
func (w world) thousandNodes() {
	const many = 1000
	before, had, err := w.resident("home1")
	if err != nil {
		w.Fatal(err)
	}
	key, _, err := identity.LoadOrCreate(w.TempDir())
	if err != nil {
		w.Fatal(err)
	}
	own, err := w.seen("home1", "home1")
	if err != nil {
		w.Fatal(err)
	}
	items, err := DataNodes(0, many, own, key)
	if err != nil {
		w.Fatal(err)
	}
	list, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
	if err != nil {
		w.Fatal(err)
	}
	began := time.Now()
	w.kubectl(list, "create", "-f", "-", "-o", "name")
	w.Logf("%d Nodes are made after %s", many, time.Since(began).Round(time.Second))
	w.within(30*time.Second, "the agent knows them all", func() error {
		if _, n, err := w.resident("home1"); err != nil || n != had+many {
			return fmt.Errorf("%d, want %d, %v", n, had+many, err)
		}
		return nil
	})
	w.annotate("home1", "skein.dev/location=among-many")
	took := w.site("home1", "among-many", 10*time.Second)
	after, _, err := w.resident("home1")
	if err != nil {
		w.Fatal(err)
	}
	w.Logf("an agent has %.1f MiB with %d Nodes and %.1f MiB with %d; an annotation is known everywhere after %s", before,
		had, after, had+many, took.Round(time.Millisecond))
	if after > 80 {
		w.Errorf("%.1f MiB, at most 80 are promised", after)
	}
	w.annotate("home1", "skein.dev/location-")
	w.kubectl(nil, "delete", "nodes", "-l", "topology.kubernetes.io/region=r", "--wait=false")
}
