package kube

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/kube/resource"
)

// controller takes custom resources to the log, and shows the log in them. It runs on admin nodes, and works on one
// of them at a time: the first by ID that is alive and says that it is a Node. Two that work at once, in a split, do
// no harm: commands carry what they were decided for, and statuses say the same.
type controller struct {
	p     *Part
	wake  chan struct{}
	again chan struct{} // what has failed is to be tried at once

	pools, egresses, blocks, members *mirror[custom]
	services, slices                 *mirror[custom] // of skein's namespace

	gone      gone   // members without their Node
	homes     homes  // which Nodes members have been
	lost      losses // members without their agent
	tainting  retry  // of their Nodes
	labels    labeling
	toldNames map[string][2]string // members whose names status tells of
	proposed  proposed
	refused   refusedWishes        // what the log or the apiserver has refused of resources
	pace      map[string]time.Time // of MeshNodes, by name: when the next write is allowed
	shown     [3]retry             // of what shows the log: names, blocks and members
	failed    error                // of the writes that show one kind, the one that asks for the longest pause

	podNetworks podNetworks // of Nodes, where another CNI runs the pods
}

const (
	refusedEvery = 10 * time.Second // between two tries at what the log refuses
	memberEvery  = 10 * time.Second // between two writes of a MeshNode
	mostBlocks   = 5000             // that are mirrored
	manager      = "skein-controller"
)

func customResource(plural string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: resource.Group, Version: resource.Version, Resource: plural}
}

var (
	poolResource   = customResource("addresspools")
	egressResource = customResource("egresses")
	blockResource  = customResource("addressblocks")
	memberResource = customResource("meshnodes")

	definitionResource = schema.GroupVersionResource{
		Group:    "apiextensions.k8s.io",
		Version:  "v1",
		Resource: "customresourcedefinitions",
	}
)

// custom is a custom resource as the apiserver has it.
type custom struct{ *unstructured.Unstructured }

func (o custom) same(x custom) bool { return o.GetResourceVersion() == x.GetResourceVersion() }

// mayControl tells whether this node may do the controller's work, and whether it is the one that does.
func mayControl(s *part.Snapshot) (may, does bool) {
	if s == nil {
		return false, false
	}
	role := s.State.Role(s.Self.String())
	if role != events.RoleAdmin && role != events.RoleServer {
		return false, false
	}
	for id, e := range s.Records {
		role := s.State.Role(id.String())
		able := (role == events.RoleAdmin || role == events.RoleServer) && e.Record.GetKubernetesNode() != ""
		if able && s.Alive(id) && slices.Compare(id[:], s.Self[:]) < 0 {
			return true, false
		}
	}
	return true, true
}

// run works until ctx ends.
func (c *controller) run(ctx context.Context, a *apiserver) {
	c.proposed = proposed{}
	c.refused, c.pace, c.gone, c.lost = refusedWishes{}, map[string]time.Time{}, gone{}, losses{}
	c.homes = homes{}
	c.labels = labeling{map[identity.ID]time.Time{}, map[identity.ID]time.Time{}, map[string]bool{}}
	c.podNetworks = podNetworks{told: c.podNetworks.told}
	if !c.until(ctx, func() bool { may, _ := mayControl(c.p.snapshot.Load()); return may }) {
		return
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	for _, w := range []struct {
		to        **mirror[custom]
		kind      schema.GroupVersionResource
		namespace string
	}{
		{&c.pools, poolResource, ""}, {&c.egresses, egressResource, ""}, {&c.blocks, blockResource, ""},
		{&c.members, memberResource, ""}, {&c.services, serviceResource, a.namespace},
		{&c.slices, sliceResource, a.namespace},
	} {
		store := newMirror(func(o metav1.Object) custom { return custom{o.(*unstructured.Unstructured)} },
			c.p.metrics.heard.SetToCurrentTime)
		*w.to = store
		watching.Go(func() { a.watchWhole(ctx, w.kind, w.namespace, "", store, &c.p.health) })
	}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		case <-c.again:
			clear(c.refused)
			c.shown = [3]retry{}
			c.tainting.succeed()
		case <-c.pools.changed:
		case <-c.egresses.changed:
		case <-c.blocks.changed:
		case <-c.members.changed:
		case <-c.services.changed:
		case <-c.slices.changed:
		case <-timer.C:
		}
		if _, does := mayControl(c.p.snapshot.Load()); !does {
			continue
		}
		if again := c.pass(ctx, a); again > 0 {
			timer.Reset(again)
		}
	}
}

// until waits for a condition that snapshots decide; false: ctx has ended.
func (c *controller) until(ctx context.Context, ok func() bool) bool {
	for !ok() {
		select {
		case <-ctx.Done():
			return false
		case <-c.wake:
		}
	}
	return true
}

// pass does what is to be done now, and returns when something more is due; 0: nothing.
func (c *controller) pass(ctx context.Context, a *apiserver) (again time.Duration) {
	s := c.p.snapshot.Load()
	if wait := c.proposed.wait(s.State.Index(), time.Now()); wait > 0 {
		return wait
	}
	later := func(d time.Duration) {
		if d > 0 && (again == 0 || d < again) {
			again = d
		}
	}
	nodes := c.p.nodes.snapshot()
	members := map[identity.ID]*Node{}
	if nodes != nil {
		c.p.nodes.holders.keep(nodes)
		members = proven(s, nodes, c.p.nodes.holders.of)
		c.homes.learn(members)
		c.homes.recall(c.members.snapshot())
		later(c.syncLabels(ctx, s, nodes, members))
	}
	for _, o := range sortedObjects(c.pools) {
		p := resource.AddressPool{Meta: metaOf(o), Observed: observedOf(o)}
		err := decodeSpec(o, &p.Spec)
		d := resource.Pool(s.State, p)
		later(c.act(ctx, a, poolResource, o, p.Meta, d, err, func() map[string]any {
			use := s.State.PoolUse(p.Name)
			resting := use.Resting(s.LeadersTime(time.Now()))
			const most = 1 << 62 // an IPv6 pool may have more, and JSON's integers end before
			return map[string]any{"nodes": int64(use.Nodes), "blocks": map[string]any{
				"total": int64(min(use.Blocks, most)), "owned": int64(use.Owned), "reserved": int64(use.Reserved),
				"resting": int64(resting), "free": int64(min(use.Free()-resting, most)),
			}}
		}))
	}
	for _, o := range sortedObjects(c.egresses) {
		e := resource.Egress{Meta: metaOf(o), Observed: observedOf(o)}
		err := decodeSpec(o, &e.Spec)
		d := resource.ForEgress(s.State, e)
		later(c.act(ctx, a, egressResource, o, e.Meta, d, err, func() map[string]any {
			owners, n := ownersOf(s.State, e.Namespace, e.Name)
			return map[string]any{"replicas": int64(n), "selector": "skein.dev/gateway-of=" + e.Name, "owners": owners}
		}))
	}
	later(c.show(ctx, a, s, nodes))
	later(c.taintLost(ctx, a, s, members))
	later(c.collect(ctx, a, s))
	if nodes != nil {
		later(c.syncPodNetworks(ctx, a, s, nodes, members))
	}
	return again
}

func sortedObjects(m *mirror[custom]) []custom {
	all := m.snapshot()
	var out []custom
	for _, key := range slices.Sorted(maps.Keys(all)) {
		out = append(out, all[key])
	}
	return out
}

func metaOf(o custom) resource.Meta {
	return resource.Meta{
		Namespace:  o.GetNamespace(),
		Name:       o.GetName(),
		UID:        string(o.GetUID()),
		Generation: o.GetGeneration(),
		Deleting:   o.GetDeletionTimestamp() != nil,
		Finalizers: o.GetFinalizers(),
	}
}

func observedOf(o custom) int64 {
	n, _, _ := unstructured.NestedInt64(o.Object, "status", "observedGeneration")
	return n
}

func decodeSpec(o custom, into any) error {
	spec, _, err := unstructured.NestedMap(o.Object, "spec")
	if err != nil {
		return err
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(spec, into)
}

func ownersOf(st *events.State, ns, name string) (owners string, n int) {
	var names []string
	for _, slot := range st.Slots(ns, name) {
		if id, err := identity.ParseID(slot.GetNodeId()); err == nil {
			n++
			names = append(names, st.Node(id).GetName())
		}
	}
	return strings.Join(sortedUnique(names), ","), n
}

func sortedUnique(s []string) []string { return slices.Compact(slices.Sorted(slices.Values(s))) }

// act does what was decided about one resource. It returns when to look again; 0: when something changes.
func (c *controller) act(ctx context.Context, a *apiserver, kind schema.GroupVersionResource, o custom, m resource.Meta,
	d resource.Decision, bad error, more func() map[string]any) time.Duration {
	if wait := c.refused.wait(m, time.Now()); wait > 0 {
		return wait
	}
	var again time.Duration
	if m.Deleting {
		ending, err := a.ending(ctx, kind)
		if err != nil {
			c.p.health.result("see whether "+o.GetName()+" is deleted with its definition", "get",
				"customresourcedefinitions", err)
			return c.wait(m, retryAfter(err))
		}
		c.p.health.result("", "get", "customresourcedefinitions", nil)
		if ending {
			d = resource.Decision{Release: m.Finalized()}
		}
	}
	if d.Finalize || d.Release {
		if err := c.finalize(ctx, a, kind, o, d.Finalize); err != nil {
			return c.resourceFailed(m, "write the finalizer of "+o.GetName(), kind, err)
		}
	}
	if d.Release || m.Deleting && !m.Finalized() {
		c.p.health.result("", "patch", kind.Resource, nil)
		delete(c.refused, m.UID)
		return 0
	}
	switch {
	case bad != nil:
		d.Condition = resource.Refused(m, bad)
	case d.Command != nil:
		err := c.propose(ctx, d.Command)
		switch refusal := (*events.Error)(nil); {
		case err == nil:
			return 0 // the log's next snapshot shows it
		case errors.As(err, &refusal):
			d.Condition = resource.Refused(m, err)
		default:
			d.Condition.Message = "the log does not answer: " + err.Error()
		}
		again = c.wait(m, 0)
	}
	if err := c.status(ctx, a, kind, o, d, more()); err != nil {
		return c.resourceFailed(m, "write the status of "+o.GetName(), kind, err)
	}
	c.p.health.result("", "patch", kind.Resource, nil)
	return again
}

// vanished tells whether a write found that its object is gone, or another one now. The watch is about to say so.
func vanished(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsConflict(err) }

func (c *controller) resourceFailed(m resource.Meta, what string, kind schema.GroupVersionResource,
	err error) time.Duration {
	if vanished(err) {
		return c.wait(m, 0)
	}
	c.p.health.result(what, "patch", kind.Resource, err)
	return c.wait(m, retryAfter(err))
}

// wait has a resource looked at again after a while, so long at least.
func (c *controller) wait(m resource.Meta, least time.Duration) time.Duration {
	wait := max(refusedEvery, least)
	c.refused[m.UID] = refusedWish{m.Generation, time.Now().Add(wait)}
	return wait
}

// finalize puts our finalizer on, or takes it away: fields that a manager does not apply any more go.
func (c *controller) finalize(ctx context.Context, a *apiserver, kind schema.GroupVersionResource, o custom,
	on bool) error {
	meta := map[string]any{"name": o.GetName(), "uid": string(o.GetUID())}
	if on {
		meta["finalizers"] = []any{resource.Finalizer}
	}
	err := a.apply(ctx, kind, o.GetNamespace(), o.GetName(),
		map[string]any{"apiVersion": o.GetAPIVersion(), "kind": o.GetKind(), "metadata": meta})
	if !on && vanished(err) {
		return nil
	}
	c.p.metrics.wrote("finalizer", err)
	return err
}

// status writes what the resource says of itself, where that is not there yet.
func (c *controller) status(ctx context.Context, a *apiserver, kind schema.GroupVersionResource, o custom,
	d resource.Decision, more map[string]any) error {
	have, _, _ := unstructured.NestedMap(o.Object, "status")
	truth := map[bool]string{true: "True", false: "False"}[d.Condition.True]
	if d.Condition.Reason == resource.ReasonPending {
		truth = "Unknown"
	}
	condition := map[string]any{
		"type":               d.Condition.Type,
		"status":             truth,
		"reason":             d.Condition.Reason,
		"message":            d.Condition.Message,
		"observedGeneration": o.GetGeneration(),
		"lastTransitionTime": metav1.Now().UTC().Format(time.RFC3339),
	}
	if old, _, _ := unstructured.NestedSlice(have, "conditions"); len(old) == 1 {
		if was, ok := old[0].(map[string]any); ok && was["status"] == truth {
			condition["lastTransitionTime"] = was["lastTransitionTime"]
		}
	}
	want := map[string]any{"observedGeneration": d.Observed, "conditions": []any{condition}}
	maps.Copy(want, more)
	if sameJSON(have, want) {
		return nil
	}
	err := a.apply(ctx, kind, o.GetNamespace(), o.GetName(), map[string]any{
		"apiVersion": o.GetAPIVersion(), "kind": o.GetKind(),
		"metadata": map[string]any{"name": o.GetName(), "uid": string(o.GetUID())}, "status": want,
	}, "status")
	c.p.metrics.wrote("status", err)
	return err
}

func sameJSON(a, b any) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && string(x) == string(y)
}

// ending tells whether a kind's definition is being removed, or gone. Its objects then go as well, which nobody
// wished of any of them.
func (a *apiserver) ending(ctx context.Context, kind schema.GroupVersionResource) (bool, error) {
	d, err := a.metadata.Resource(definitionResource).Get(ctx, kind.Resource+"."+kind.Group, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, err
	}
	return d.GetDeletionTimestamp() != nil, nil
}

// apply is a server-side apply of the controller's; with uid in the metadata it makes no object.
func (a *apiserver) apply(ctx context.Context, kind schema.GroupVersionResource, ns, name string, o map[string]any,
	subresources ...string) error {
	body, err := json.Marshal(o)
	if err != nil {
		return err
	}
	force := true
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	_, err = a.metadata.Resource(kind).
		Namespace(ns).
		Patch(ctx, name, types.ApplyPatchType, body,
			metav1.PatchOptions{FieldManager: manager, Force: &force}, subresources...)
	return err
}
