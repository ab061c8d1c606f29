package kube

import (
	"crypto/sha256"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	annotationtier "github.com/skeinmesh/skein/gossip/kube"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/kube/kubetest"
)

// podWorld is a log with members, and what the apiserver says.
type podWorld struct {
	t     *testing.T
	log   *kubetest.Log
	ids   map[string]identity.ID
	nodes map[string]*Node
	n     podNetworks
	now   time.Time
	named map[string]string // the Node that a member's record names
	held  map[string]string // by Node: the member whose record it holds
}

func newPodWorld(t *testing.T) *podWorld {
	w := &podWorld{t: t, log: kubetest.New(t), ids: map[string]identity.ID{}, nodes: map[string]*Node{},
		named: map[string]string{}, held: map[string]string{}, now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		n: podNetworks{read: map[string]*podRead{}, gone: map[string]time.Time{}, retry: map[identity.ID]time.Time{}}}
	for i, id := range w.log.Admit("b", "c") {
		w.ids[string(rune('a'+i))] = id
	}
	w.ranges("10.244.0.0/16", "fd44::/48")
	return w
}

func (w *podWorld) ranges(r ...string) {
	w.t.Helper()
	if err := w.log.Give(&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
		Settings: &skeinv1.Settings{PodRanges: r}, Fields: []string{"pod_ranges"}}}}); err != nil {
		w.t.Fatal(err)
	}
}

// node makes a Node that holds a member's record.
func (w *podWorld) node(name, uid, holder string) {
	w.nodes[name] = &Node{Name: name, UID: uid, hasRecord: true}
	w.held[name] = holder
}

// read is what the apiserver answers when it is asked for a Node.
func (w *podWorld) read(uid, holder string, cidrs ...string) {
	r := &podRead{cidrs: cidrs, next: w.now.Add(podReadAgain), wait: podReadAgain}
	if holder != "" {
		r.holder = w.ids[holder].String()
	}
	w.n.read[uid] = r
}

// plan is what is to be done, in words, and then done.
func (w *podWorld) plan() string {
	w.t.Helper()
	s := &part.Snapshot{State: w.log.State, Records: map[identity.ID]gossip.Entry{},
		Alive: func(identity.ID) bool { return true }}
	for name, node := range w.named {
		s.Records[w.ids[name]] = gossip.Entry{Record: &skeinv1.Record{KubernetesNode: node}}
	}
	members := proven(s, w.nodes, func(n *Node) (identity.ID, bool) { id, ok := w.ids[w.held[n.Name]]; return id, ok })
	p := w.n.plan(s, w.nodes, members, w.now)
	var out []string
	for _, n := range p.ask {
		out = append(out, "ask "+n.Name)
	}
	for name, id := range w.ids {
		if c, ok := p.set[id]; ok {
			out = append(out, "set "+name+" "+strings.Join(c.GetCidrs(), ","))
			if err := w.log.Give(&skeinv1.Command{Body: &skeinv1.Command_SetPodCidrs{SetPodCidrs: &skeinv1.SetPodCidrs{
				NodeId: id.String(), PodCidrs: c}}}); err != nil {
				out = append(out, err.Error())
			}
		}
		if node, ok := p.gone[id]; ok {
			out = append(out, "see whether "+node+" of "+name+" is gone")
		}
	}
	for node, why := range p.bad {
		out = append(out, node+": "+why)
	}
	slices.Sort(out)
	if p.next > 0 {
		out = append(out, "next in "+p.next.String())
	}
	return strings.Join(out, "; ")
}

// A member gets the networks of the Node that it names and that holds its record; a mere claim, and a record on a Node
// that the member does not name, give nothing.
func TestPodNetworksNeedTwoProofs(t *testing.T) {
	w := newPodWorld(t)
	w.node("n1", "u1", "a")
	w.node("n2", "u2", "b")
	w.named["a"], w.named["b"] = "n1", "n2"
	w.named["c"] = "n1" // it claims another's Node
	for _, step := range []struct {
		what string
		do   func()
		want string
	}{
		{"nothing is known", func() {}, "ask n1; ask n2"},
		{"one has answered", func() { w.read("u1", "a", "10.244.1.0/24", "fd44:0:0:1::/64") },
			"ask n2; set a 10.244.1.0/24,fd44:0:0:1::/64"},
		{"all is as it is", func() { w.read("u2", "b", "10.244.2.0/24") }, "set b 10.244.2.0/24"},
		{"nothing is new", func() {}, ""},
		{"c's record is on n2, which it does not name", func() { w.node("n2", "u2", "c") }, ""},
		{"c names n2, and no signed record of it is there", func() { w.named["c"] = "n2" }, "next in 2s"},
		{"the apiserver is asked again", func() { w.now = w.now.Add(podReadAgain) }, "ask n2"},
		{"c has joined in place of b", func() { w.read("u2", "c", "10.244.2.0/24") }, "set c 10.244.2.0/24"},
		{"a range is narrower", func() { w.ranges("10.244.0.0/23") },
			"n1: its pod CIDR fd44:0:0:1::/64 lies outside of the pod ranges (10.244.0.0/23) and is not routed through the " +
				"mesh; n2: its pod CIDR 10.244.2.0/24 lies outside of the pod ranges (10.244.0.0/23) and is not routed " +
				"through the mesh"},
	} {
		step.do()
		if have := w.plan(); have != step.want {
			t.Errorf("%s: %q, want %q", step.what, have, step.want)
		}
	}
}

// Networks end with the Node, once it has been absent for a while; one that was away for a moment changes nothing.
func TestPodNetworksEndWithTheNode(t *testing.T) {
	w := newPodWorld(t)
	w.node("n1", "u1", "a")
	w.named["a"] = "n1"
	w.read("u1", "a", "10.244.1.0/24")
	n1 := w.nodes["n1"]
	for _, step := range []struct {
		what string
		do   func()
		want string
	}{
		{"it is there", func() {}, "set a 10.244.1.0/24"},
		{"it is gone", func() { delete(w.nodes, "n1") }, "next in 30s"},
		{"for a while", func() { w.now = w.now.Add(29 * time.Second) }, "next in 1s"},
		{"it is back", func() { w.nodes["n1"] = n1 }, ""},
		{"it is gone again", func() { delete(w.nodes, "n1") }, "next in 30s"},
		{"for as long as it takes", func() { w.now = w.now.Add(podNodeGone) }, "see whether n1 of a is gone"},
		{"a Node of that name is made anew", func() { w.node("n1", "u1b", "a") }, "ask n1"},
		{"it has no network yet", func() { w.read("u1b", "a") }, "set a ; next in 2s"},
		{"it has another one", func() { w.read("u1b", "a", "10.244.7.0/24") }, "set a 10.244.7.0/24"},
	} {
		step.do()
		if have := w.plan(); have != step.want {
			t.Errorf("%s: %q, want %q", step.what, have, step.want)
		}
	}
}

// What the apiserver gives two Nodes alike is refused for the second, and said.
func TestPodNetworksThatOverlap(t *testing.T) {
	w := newPodWorld(t)
	w.node("n1", "u1", "a")
	w.node("n2", "u2", "b")
	w.named["a"], w.named["b"] = "n1", "n2"
	w.read("u1", "a", "10.244.1.0/24")
	w.plan()
	w.read("u2", "b", "10.244.0.0/20")
	if have := w.plan(); !strings.Contains(have, "pod CIDR 10.244.0.0/20 of b overlaps 10.244.1.0/24 of a") {
		t.Errorf("%q", have)
	}
}

// Whose record a Node holds is told by the signature, whatever the record says.
func TestWhoseRecordANodeHolds(t *testing.T) {
	l := kubetest.New(t)
	seed := sha256.Sum256([]byte("member"))
	key := identity.KeyFromSeed(seed[:])
	wg := sha256.Sum256(seed[:])
	id := l.AdmitKey("m", key.Public(), wg[:])
	other := l.Admit("x")[0]
	object := func(name string, signer *identity.Key, r *skeinv1.Record) *unstructured.Unstructured {
		signed, err := gossip.Sign(signer, r)
		if err != nil {
			t.Fatal(err)
		}
		value, err := annotationtier.Encode(signed)
		if err != nil {
			t.Fatal(err)
		}
		o := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"podCIDR": "10.244.1.0/24",
			"podCIDRs": []any{"10.244.1.0/24", "fd44::/64"}}}}
		o.SetName(name)
		o.SetAnnotations(map[string]string{annotationtier.Annotation: value})
		return o
	}
	record := func(id identity.ID, node string) *skeinv1.Record {
		return &skeinv1.Record{NodeId: id.String(), Epoch: 1, Seq: 1, Time: 1, WireguardKey: wg[:], KubernetesNode: node}
	}
	strange := sha256.Sum256([]byte("stranger"))
	for what, c := range map[string]struct {
		o    *unstructured.Unstructured
		want string
	}{
		"its own":                     {object("n1", key, record(id, "n1")), id.String()},
		"copied to another Node":      {object("n2", key, record(id, "n1")), ""},
		"of a member, another's hand": {object("n1", key, record(other, "n1")), ""},
		"of the member, forged":       {object("n1", identity.KeyFromSeed(strange[:]), record(id, "n1")), ""},
		"of somebody who is not a member": {object("n1", identity.KeyFromSeed(strange[:]),
			record(identity.KeyFromSeed(strange[:]).ID(), "n1")), ""},
		"none": {&unstructured.Unstructured{Object: map[string]any{}}, ""},
	} {
		if have := holderOf(c.o, l.State); have != c.want {
			t.Errorf("%s: %q, want %q", what, have, c.want)
		}
	}
	if have := podCIDRsOf(object("n1", key, record(id, "n1"))); !slices.Equal(have,
		[]string{"10.244.1.0/24", "fd44::/64"}) {
		t.Errorf("the networks are %q", have)
	}
}
