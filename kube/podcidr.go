package kube

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	annotationtier "github.com/skeinmesh/skein/gossip/kube"
	"github.com/skeinmesh/skein/identity"
)

// Nodes are watched as metadata, where their pods' networks are not. A Node's are given once and stay: so the
// controller, and nobody else, asks for each Node whose networks matter once.
const (
	podReadsAtOnce  = 50              // Nodes that one pass asks for
	podReadAgain    = 2 * time.Second // a Node that has no network yet is asked for again, ever later
	podReadAgainMax = 10 * time.Minute
	podNodeGone     = 30 * time.Second // how long a Node must be absent until its member's networks end
)

// podNetworks takes the pods' networks of Nodes to the log. Two proofs make a member the Node's: its record names the
// Node, which is its own word, and the Node holds a record that it has signed, which a stranger cannot put there. The
// answer that brings the networks brings that record, too.
type podNetworks struct {
	read    map[string]*podRead  // by the Node's UID
	gone    map[string]time.Time // absent since, by the Node's name
	retry   map[identity.ID]time.Time
	told    map[string]bool // subjects of problems that status has
	nothing bool            // there are no ranges, and all is let go of
}

// podRead is what the apiserver said of one Node.
type podRead struct {
	holder string // ID of the member whose signed record the Node holds; empty: none's
	cidrs  []string
	next   time.Time // when to ask again, if something was missing
	wait   time.Duration
}

// whole reports whether nothing is missing for a member.
func (r *podRead) whole(id string) bool { return r != nil && r.holder == id && len(r.cidrs) > 0 }

// podPlan is what is to be done now.
type podPlan struct {
	ask  []*Node                           // whose networks are not known yet
	set  map[identity.ID]*skeinv1.PodCidrs // what members get; nil: nothing any more
	gone map[identity.ID]string            // members whose Node is to be asked for: it seems to be gone
	bad  map[string]string                 // problems, by the Node's name
	next time.Duration                     // until something is due; 0: nothing is
}

func (p *podPlan) later(d time.Duration) {
	if d > 0 && (p.next == 0 || d < p.next) {
		p.next = d
	}
}

// plan decides from what the log, the records and the Nodes say. members are those that are Nodes, by both proofs.
func (n *podNetworks) plan(s *part.Snapshot, nodes map[string]*Node, members map[identity.ID]*Node,
	now time.Time) podPlan {
	p := podPlan{
		set: map[identity.ID]*skeinv1.PodCidrs{}, gone: map[identity.ID]string{}, bad: map[string]string{},
	}
	ranges := s.State.Settings().GetPodRanges()
	absent := map[string]bool{}
	for _, m := range s.State.Nodes() {
		id, err := identity.ParseID(m.GetId())
		if err != nil {
			continue
		}
		node := members[id]
		if node == nil {
			if former := m.GetPodCidrs().GetKubernetesNode(); former != "" && nodes[former] == nil {
				absent[former] = true
				n.seemsGone(&p, id, former, now)
			}
			continue
		}
		read := n.read[node.UID]
		switch {
		case read.whole(m.GetId()):
		case read == nil || !now.Before(read.next):
			if len(p.ask) < podReadsAtOnce {
				p.ask = append(p.ask, node)
			}
		default:
			p.later(read.next.Sub(now))
		}
		if read == nil || read.holder != m.GetId() {
			continue // what it has stays until the apiserver has told
		}
		want, outside := within(node.Name, read.cidrs, ranges)
		if len(outside) > 0 {
			p.bad[node.Name] = fmt.Sprintf("its pod CIDR %s lies outside of the pod ranges (%s) and is not routed through "+
				"the mesh", strings.Join(outside, ", "), strings.Join(ranges, ", "))
		}
		if !samePodCIDRs(want, m.GetPodCidrs()) {
			p.set[id] = want
		}
	}
	for name := range n.gone {
		if !absent[name] {
			delete(n.gone, name)
		}
	}
	return p
}

// seemsGone notes a Node that is absent, and has it asked for once it has been so for long enough.
func (n *podNetworks) seemsGone(p *podPlan, id identity.ID, node string, now time.Time) {
	since, known := n.gone[node]
	if !known {
		n.gone[node], since = now, now
	}
	if wait := podNodeGone - now.Sub(since); wait > 0 {
		p.later(wait)
		return
	}
	p.gone[id] = node
}

// within are a Node's networks that lie in the ranges, in the log's form, and those that do not; nil: none does.
func within(node string, cidrs, ranges []string) (in *skeinv1.PodCidrs, outside []string) {
	out := &skeinv1.PodCidrs{KubernetesNode: node}
	for _, c := range cidrs {
		if events.Covered(c, ranges) {
			out.Cidrs = append(out.Cidrs, c)
		} else {
			outside = append(outside, c)
		}
	}
	if len(out.Cidrs) == 0 {
		return nil, outside
	}
	slices.Sort(out.Cidrs)
	out.Cidrs = slices.Compact(out.Cidrs)
	return out, outside
}

func samePodCIDRs(a, b *skeinv1.PodCidrs) bool {
	return (a == nil) == (b == nil) && a.GetKubernetesNode() == b.GetKubernetesNode() &&
		slices.Equal(a.GetCidrs(), b.GetCidrs())
}

// syncPodNetworks does what is to be done now, and returns when something more is due; 0: nothing.
func (c *controller) syncPodNetworks(ctx context.Context, a *apiserver, s *part.Snapshot, nodes map[string]*Node,
	members map[identity.ID]*Node) time.Duration {
	n := &c.podNetworks
	if len(s.State.Settings().GetPodRanges()) == 0 {
		if !n.nothing { // the log has let go of all of them with the ranges
			c.reportPodNetworks(nil)
			*n = podNetworks{nothing: true}
		}
		return 0
	}
	if n.read == nil {
		*n = podNetworks{read: map[string]*podRead{}, gone: map[string]time.Time{},
			retry: map[identity.ID]time.Time{}, told: n.told}
	}
	now := time.Now()
	p := n.plan(s, nodes, members, now)
	if len(p.ask) > 0 {
		for _, node := range p.ask {
			c.readPodCIDRs(ctx, a, node, s.State, now)
		}
		n.forget(nodes)
		next := p.next
		p = n.plan(s, nodes, members, now)
		p.later(next)
		if len(p.ask) > 0 {
			p.later(time.Second)
		}
	}
	for id, node := range p.gone {
		c.endPodCIDRs(ctx, a, id, node, &p)
	}
	for id, want := range p.set {
		if wait := n.retry[id].Sub(now); wait > 0 {
			p.later(wait)
			continue
		}
		delete(n.retry, id)
		member, node := s.State.Node(id), want.GetKubernetesNode()
		if node == "" {
			node = member.GetPodCidrs().GetKubernetesNode()
		}
		err := c.propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_SetPodCidrs{SetPodCidrs: &skeinv1.SetPodCidrs{
			NodeId: id.String(), PodCidrs: want}}})
		if err == nil {
			continue
		}
		n.retry[id] = now.Add(refusedEvery)
		p.later(refusedEvery)
		if refusal := (*events.Error)(nil); errors.As(err, &refusal) {
			p.bad[node] = err.Error()
		}
	}
	if ctx.Err() == nil {
		c.reportPodNetworks(p.bad)
	}
	return p.next
}

// readPodCIDRs asks for one Node's networks.
func (c *controller) readPodCIDRs(ctx context.Context, a *apiserver, node *Node, st *events.State, now time.Time) {
	inner, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	o, err := a.dynamic.Resource(nodeResource).Get(inner, node.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		err = nil // the watch is about to say so
	} else if ctx.Err() == nil {
		c.p.health.result("read the pod CIDR of Node "+node.Name, "get", "nodes", err)
	}
	read := c.podNetworks.read[node.UID]
	if read == nil {
		read = &podRead{wait: podReadAgain}
		c.podNetworks.read[node.UID] = read
	}
	if err == nil && o != nil && string(o.GetUID()) == node.UID {
		next := podRead{holder: holderOf(o, st), cidrs: podCIDRsOf(o), wait: read.wait}
		if next.holder != read.holder {
			next.wait = podReadAgain
		}
		*read = next
	}
	read.next, read.wait = now.Add(read.wait), min(2*read.wait, podReadAgainMax)
}

// holderOf is the member whose record a Node holds, with that member's signature, and which says that it is that Node;
// empty: there is no such record.
func holderOf(o *unstructured.Unstructured, st *events.State) string {
	signed, err := annotationtier.Decode(o.GetAnnotations()[annotationtier.Annotation])
	if err != nil {
		return ""
	}
	r, err := gossip.Verify(signed, roster{st})
	if err != nil || r.GetKubernetesNode() != o.GetName() {
		return ""
	}
	return r.GetNodeId()
}

// roster is the members as the log has them.
type roster struct{ state *events.State }

func (r roster) Key(id identity.ID) (ed25519.PublicKey, bool) {
	n := r.state.Node(id)
	return n.GetIdentityKey(), n != nil
}

func (r roster) Members() []identity.ID { return nil } // nobody asks for it here

// podCIDRsOf reads a Node's networks.
func podCIDRsOf(o *unstructured.Unstructured) []string {
	if all, _, _ := unstructured.NestedStringSlice(o.Object, "spec", "podCIDRs"); len(all) > 0 {
		return all
	}
	if one, _, _ := unstructured.NestedString(o.Object, "spec", "podCIDR"); one != "" {
		return []string{one}
	}
	return nil
}

// forget lets go of what was read of Nodes that are gone.
func (n *podNetworks) forget(nodes map[string]*Node) {
	have := map[string]bool{}
	for _, node := range nodes {
		have[node.UID] = true
	}
	for uid := range n.read {
		if !have[uid] {
			delete(n.read, uid)
		}
	}
}

// endPodCIDRs has a member's networks end whose Node is gone, if the apiserver says so when it is asked for that Node.
func (c *controller) endPodCIDRs(ctx context.Context, a *apiserver, id identity.ID, node string, p *podPlan) {
	inner, cancel := context.WithTimeout(ctx, writeTimeout)
	_, err := a.metadata.Resource(nodeResource).Get(inner, node, metav1.GetOptions{})
	cancel()
	c.podNetworks.gone[node] = time.Now() // whatever comes of it, the next look is a grace away
	if apierrors.IsNotFound(err) {
		p.set[id] = nil
		return
	}
	p.later(podNodeGone)
	if ctx.Err() == nil {
		c.p.health.result("see whether Node "+node+" is gone", "get", "nodes", err)
	}
}

// reportPodNetworks shows problems in the agent's status, by the Node's name, and takes those away that are over.
func (c *controller) reportPodNetworks(bad map[string]string) {
	n := &c.podNetworks
	now := map[string]bool{}
	for node, message := range bad {
		subject := "kubernetes: pod CIDR of Node " + node
		now[subject] = true
		c.p.host.Report(subject, part.Warns, message,
			"its pods are not reached through the mesh; `skein settings --pod-ranges` changes the ranges, `skein nodes` "+
				"shows each node's pod CIDRs")
	}
	for subject := range n.told {
		if !now[subject] {
			c.p.host.Report(subject, "", "", "")
		}
	}
	n.told = now
}
