package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

// The taint keeps pods that do not tolerate it from Nodes whose agent is not there. Those that run stay.
const (
	taintKey    = Prefix + "agent-not-ready"
	taintEffect = "NoSchedule"
)

// wholeNode is what an agent uses of its own Node besides metadata.
type wholeNode struct {
	uid, version string
	tainted      bool // with ours
	networkIsUp  bool // it says so
}

func (n wholeNode) same(o wholeNode) bool { return n == o }

func slimWhole(o metav1.Object) wholeNode {
	n := wholeNode{uid: string(o.GetUID()), version: o.GetResourceVersion()}
	if u, ok := o.(*unstructured.Unstructured); ok {
		taints, _, _ := unstructured.NestedSlice(u.Object, "spec", "taints")
		_, without := withTaint(taints, false)
		n.tainted, n.networkIsUp = without, saysNetworkIsUp(u)
	}
	return n
}

// withTaint is a Node's taints with ours, or without. The others stay as they are.
func withTaint(taints []any, on bool) (next []any, changed bool) {
	has := false
	for _, t := range taints {
		m, _ := t.(map[string]any)
		if m["key"] != taintKey {
			next = append(next, t)
			continue
		}
		if !on || has || m["effect"] != taintEffect {
			changed = true
			continue
		}
		next, has = append(next, t), true
	}
	if on && !has {
		next, changed = append(next, map[string]any{"key": taintKey, "effect": taintEffect}), true
	}
	return next, changed
}

// wishTaint decides about the own Node: once pods can start the taint is off, and before that it is on where the host
// has started anew. An agent that only starts again leaves it: what was ready goes on.
func wishTaint(serves, freshBoot bool) (on, decided bool) { return !serves, serves || freshBoot }

func (p *Part) serves() bool {
	select {
	case <-p.host.Serves():
		return true
	default:
		return false
	}
}

// writeTaint sees to the taint of the own Node.
func (p *Part) writeTaint(ctx context.Context) {
	own, known := p.whole.get(p.cfg.Node)
	if !known || p.apiserver == nil {
		return
	}
	on, decided := wishTaint(p.serves(), p.host.FreshBoot())
	if !decided || own.tainted == on {
		return
	}
	now := time.Now()
	content := fmt.Sprint(own.uid, own.version, on) // another version may say again what was changed
	wait, due := p.taint.next(content, now)
	switch {
	case !due:
		return
	case wait > 0:
		p.look(wait)
		return
	}
	inner, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	wrote, err := p.apiserver.taint(inner, p.cfg.Node, own.uid, on)
	if ctx.Err() != nil {
		return
	}
	if !vanished(err) { // else the watch is about to show it
		p.health.result("change the taint "+taintKey+" of Node "+p.cfg.Node, "patch", "nodes", err)
	}
	if err != nil {
		p.metrics.wrote("taint", err)
		p.taint.fail(now, retryAfter(err))
		p.look(p.taint.retry.wait(now))
		return
	}
	if wrote {
		p.metrics.wrote("taint", nil)
		p.log.Info("the taint of this host's Node was changed", "taint", taintKey, "on", on)
	}
	p.taint.wrote(content, now)
}

// conflicts is how often a write is tried at once that somebody else was quicker than: kubelet and the node controller
// write to the same Node.
const conflicts = 5

// taint puts our taint on a Node, or takes it off. The list is one value to the apiserver: it is written only as long
// as it is the one that was read.
func (a *apiserver) taint(ctx context.Context, node, uid string, on bool) (wrote bool, err error) {
	for range conflicts {
		var o *unstructured.Unstructured
		if o, err = a.dynamic.Resource(nodeResource).Get(ctx, node, metav1.GetOptions{}); err != nil {
			return false, err
		}
		if string(o.GetUID()) != uid {
			return false, apierrors.NewConflict(nodeResource.GroupResource(), node,
				fmt.Errorf("its UID is %s", o.GetUID()))
		}
		taints, _, _ := unstructured.NestedSlice(o.Object, "spec", "taints")
		next, changed := withTaint(taints, on)
		if !changed {
			return false, nil
		}
		body, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": uid, "resourceVersion": o.GetResourceVersion()},
			"spec":     map[string]any{"taints": next},
		})
		if err != nil {
			return false, err
		}
		_, err = a.metadata.Resource(nodeResource).Patch(ctx, node, types.MergePatchType, body,
			metav1.PatchOptions{FieldManager: fieldManager})
		if !apierrors.IsConflict(err) {
			return err == nil, err
		}
	}
	return false, err
}
