package kube

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

// networkUnavailable is the condition by which a Node says that its pods have no network. Kubernetes taints a Node that
// has it set to True, as cloud providers do until somebody says otherwise.
const networkUnavailable = "NetworkUnavailable"

// sayNetworkIsUp has the own Node say that its network is there once pods can start, and again where somebody says
// otherwise. An agent that ends leaves it, since what its pods have goes on without it.
func (p *Part) sayNetworkIsUp(ctx context.Context) {
	own := p.nodes.get(p.cfg.Node)
	if own == nil || p.apiserver == nil || !p.serves() {
		return
	}
	now := time.Now()
	wait, due := p.network.next(own.UID, now)
	switch {
	case !due:
		return
	case wait > 0:
		p.look(wait)
		return
	}
	inner, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	wrote, err := p.apiserver.networkIsUp(inner, own)
	if ctx.Err() != nil {
		return
	}
	p.health.result("say on Node "+own.Name+" that its network is up", "patch", "nodes/status", err)
	if err != nil {
		p.metrics.wrote("condition", err)
		p.network.fail(now, retryAfter(err))
		wait, _ := p.network.next(own.UID, now)
		p.look(wait)
		return
	}
	if wrote {
		p.metrics.wrote("condition", nil)
	}
	p.network.wrote(own.UID, now)
}

func saysNetworkIsUp(node *unstructured.Unstructured) bool {
	conditions, _, _ := unstructured.NestedSlice(node.Object, "status", "conditions")
	return slices.ContainsFunc(conditions, func(c any) bool {
		m, _ := c.(map[string]any)
		return m["type"] == networkUnavailable && m["status"] == "False"
	})
}

// networkIsUp sets the condition where it is not set so already.
func (a *apiserver) networkIsUp(ctx context.Context, n *Node) (wrote bool, err error) {
	o, err := a.dynamic.Resource(nodeResource).Get(ctx, n.Name, metav1.GetOptions{})
	if err != nil {
		return false, err
	}
	if saysNetworkIsUp(o) {
		return false, nil
	}
	now := metav1.Now().UTC().Format(time.RFC3339)
	body, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": n.Name, "uid": n.UID},
		"status": map[string]any{"conditions": []any{map[string]any{
			"type": networkUnavailable, "status": "False", "reason": "SkeinIsUp", "message": "skein's data plane is up",
			"lastHeartbeatTime": now, "lastTransitionTime": now,
		}}},
	})
	if err != nil {
		return false, err
	}
	force := true
	_, err = a.metadata.Resource(nodeResource).Patch(ctx, n.Name, types.ApplyPatchType, body,
		metav1.PatchOptions{FieldManager: fieldManager, Force: &force}, "status")
	return err == nil, err
}
