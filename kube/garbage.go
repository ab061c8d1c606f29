package kube

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// gone are members whose Node is not there, and since when that and their silence have been seen without a break.
type gone map[identity.ID]time.Time

// homes are the Nodes that members have proven to be, as objects: one that was deleted and made again under its name is
// another one, and whoever registered it is another host, or the same with nothing left.
type homes map[identity.ID]home

type home struct{ node, uid string }

// learn takes in who proves to be which Node now.
func (h homes) learn(members map[identity.ID]*Node) {
	for id, n := range members {
		h[id] = home{n.Name, n.UID}
	}
}

// recall takes in what MeshNodes say of members that have proven nothing since this controller's start.
func (h homes) recall(meshNodes map[string]custom) {
	for _, o := range meshNodes {
		text, _, _ := unstructured.NestedString(o.Object, "spec", "nodeID")
		id, err := identity.ParseID(text)
		if _, known := h[id]; known || err != nil {
			continue
		}
		node, _, _ := unstructured.NestedString(o.Object, "status", "kubernetesNode")
		if uid, _, _ := unstructured.NestedString(o.Object, "status", "kubernetesNodeUID"); uid != "" {
			h[id] = home{node, uid}
		}
	}
}

// of is the UID of the Node that a member was, if that is the one that it names.
func (h homes) of(id identity.ID, node string) string {
	if was := h[id]; was.node == node {
		return was.uid
	}
	return ""
}

// another tells whether the Node of this name is surely not the one that a member was.
func (h homes) another(id identity.ID, node, uid string) bool {
	was := h[id]
	return was.uid != "" && was.node == node && was.uid != uid
}

// look takes in what is seen now. It returns the members that have been gone and silent for the grace, and when the
// next one will have been; 0: none is on the way. A member that gossip sees is never among them: its Node may come
// back, and whoever works is not thrown out because an apiserver says so.
func (g gone) look(s *part.Snapshot, nodes map[string]*Node, h homes, grace time.Duration,
	now time.Time) (over []identity.ID, next time.Duration) {
	if nodes == nil || grace <= 0 {
		clear(g)
		return nil, 0
	}
	seen := map[identity.ID]bool{}
	for id, e := range s.Records {
		node := e.Record.GetKubernetesNode()
		n := nodes[node]
		there := n != nil && !h.another(id, node, n.UID)
		if id == s.Self || node == "" || there || s.Alive(id) || s.State.Node(id) == nil {
			continue
		}
		seen[id] = true
		since, known := g[id]
		if !known {
			g[id], since = now, now
		}
		wait := grace - now.Sub(since)
		switch {
		case wait <= 0:
			over = append(over, id)
		case next == 0 || wait < next:
			next = wait
		}
	}
	for id := range g {
		if !seen[id] {
			delete(g, id)
		}
	}
	return over, next
}

// collect revokes members whose Node was deleted, and who have been silent since. Before it does, it asks the
// apiserver for that one Node: a list that was wrong for a moment is found out so.
func (c *controller) collect(ctx context.Context, a *apiserver, s *part.Snapshot) time.Duration {
	over, next := c.gone.look(s, c.p.nodes.snapshot(), c.homes, s.RevokeAfter, time.Now())
	for _, id := range over {
		node := s.Records[id].Record.GetKubernetesNode()
		inner, cancel := context.WithTimeout(ctx, writeTimeout)
		o, err := a.metadata.Resource(nodeResource).Get(inner, node, metav1.GetOptions{})
		cancel()
		c.gone[id] = time.Now() // whatever comes of it, the next look is a grace away
		if !apierrors.IsNotFound(err) && (err != nil || !c.homes.another(id, node, string(o.GetUID()))) {
			c.p.health.result("see whether Node "+node+" is gone", "get", "nodes", err)
			continue
		}
		name := s.State.Node(id).GetName()
		c.p.log.Info("a member is revoked: its Node was deleted, and it has been silent since", "member", name, "node",
			node)
		err = c.propose(
			ctx,
			&skeinv1.Command{RequestId: fmt.Sprintf("kube-gone-%s-%d", id, s.Records[id].Record.GetEpoch()),
				Body: &skeinv1.Command_RevokeNode{
					RevokeNode: &skeinv1.RevokeNode{
						NodeId: id.String(),
						Reason: "Node " + node + " was deleted from the Kubernetes cluster",
					},
				}},
		)
		message := ""
		if err != nil {
			message = fmt.Sprintf("its Node %s was deleted, and it is not revoked: %v", node, err)
		}
		c.p.host.Report("kubernetes: member "+name, part.Warns, message,
			"revoke it by hand with `skein node revoke`, or make the Node again")
	}
	return next
}
