package kube

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/kube/resource"
)

// show makes what shows the log as the log is. What fails is tried again, and holds up its own kind alone. It returns
// when it wants to be called again; 0: when something changes.
func (c *controller) show(ctx context.Context, a *apiserver, s *part.Snapshot,
	nodes map[string]*Node) (again time.Duration) {
	kinds := [][]schema.GroupVersionResource{{serviceResource, sliceResource}, {blockResource}, {memberResource}}
	for i, show := range []func() time.Duration{
		func() time.Duration { c.showNames(ctx, a, s, nodes); return 0 },
		func() time.Duration { c.mirrorBlocks(ctx, a, s); return 0 },
		func() time.Duration { return c.showMembers(ctx, a, s) },
	} {
		r := &c.shown[i]
		if wait := r.wait(time.Now()); wait > 0 {
			again = sooner(again, wait)
			continue
		}
		c.failed = nil
		again = sooner(again, show())
		if c.failed == nil {
			r.succeed()
			for _, kind := range kinds[i] { // what failed before may have become needless since
				c.p.health.result("", "patch", kind.Resource, nil)
				c.p.health.result("", "delete", kind.Resource, nil)
			}
			continue
		}
		r.fail(time.Now(), retryAfter(c.failed))
		again = sooner(again, r.wait(time.Now()))
	}
	return again
}

// refusesAll tells whether an error of one write speaks of all of them: the next ones would only be a burden.
func refusesAll(err error) bool {
	return err != nil && !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) && !apierrors.IsBadRequest(err) &&
		!vanished(err)
}

// mirrorBlocks makes the AddressBlocks as the log has the blocks.
func (c *controller) mirrorBlocks(ctx context.Context, a *apiserver, s *part.Snapshot) {
	have := c.blocks.snapshot()
	if have == nil {
		return
	}
	names := map[string]string{}
	for _, n := range s.State.Nodes() {
		names[n.GetId()] = n.GetName()
	}
	want := map[string]map[string]any{}
	for _, b := range s.State.Blocks() {
		if len(want) == mostBlocks {
			break
		}
		want[fmt.Sprintf("%s-%d", b.GetPool(), b.GetNumber())] = blockSpec(b, names)
	}
	for name := range have {
		if want[name] == nil && !refusesAll(c.failed) {
			c.write(ctx, "remove AddressBlock "+name, "delete", blockResource,
				a.dynamic.Resource(blockResource).Delete(ctx, name, metav1.DeleteOptions{}))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if refusesAll(c.failed) {
			return
		}
		if o, known := have[name]; known {
			if spec, _, _ := unstructured.NestedMap(o.Object, "spec"); sameJSON(spec, want[name]) {
				continue
			}
		}
		c.write(ctx, "write AddressBlock "+name, "patch", blockResource,
			a.apply(ctx, blockResource, "", name, body("AddressBlock", name, map[string]any{"spec": want[name]})))
	}
}

func blockSpec(b *skeinv1.Block, names map[string]string) map[string]any {
	spec := map[string]any{"pool": b.GetPool(), "number": int64(b.GetNumber())}
	for field, value := range map[string]string{
		"ipv4": b.GetIpv4(), "ipv6": b.GetIpv6(), "node": names[b.GetNodeId()], "reason": b.GetReason(),
	} {
		if value != "" {
			spec[field] = value
		}
	}
	return spec
}

func body(kind, name string, more map[string]any) map[string]any {
	o := map[string]any{
		"apiVersion": resource.Group + "/" + resource.Version,
		"kind":       kind,
		"metadata":   map[string]any{"name": name},
	}
	maps.Copy(o, more)
	return o
}

// write tells how a write went. One that failed is tried again after a while: see show.
func (c *controller) write(ctx context.Context, what, verb string, kind schema.GroupVersionResource, err error) {
	if ctx.Err() != nil || verb == "delete" && apierrors.IsNotFound(err) {
		return
	}
	c.p.metrics.wrote(kind.Resource, err)
	c.p.health.result(what, verb, kind.Resource, err)
	if err != nil && retryAfter(err) >= retryAfter(c.failed) {
		c.failed = err
	}
}

// showMembers makes the MeshNodes as log and records have the members. It returns when one may be written again; 0:
// none waits.
func (c *controller) showMembers(ctx context.Context, a *apiserver, s *part.Snapshot) (again time.Duration) {
	have := c.members.snapshot()
	if have == nil {
		return 0
	}
	want := map[string]*skeinv1.Node{}
	for _, n := range s.State.Nodes() {
		want[n.GetName()] = n
	}
	for name := range have {
		if want[name] == nil && !refusesAll(c.failed) {
			c.write(ctx, "remove MeshNode "+name, "delete", memberResource,
				a.dynamic.Resource(memberResource).Delete(ctx, name, metav1.DeleteOptions{}))
			delete(c.pace, name)
		}
	}
	now := time.Now()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if refusesAll(c.failed) {
			break
		}
		n := want[name]
		spec, status := memberSpec(n), memberStatus(s, n, c.homes)
		o, known := have[name]
		haveSpec, _, _ := unstructured.NestedMap(o.content(), "spec")
		haveStatus, _, _ := unstructured.NestedMap(o.content(), "status")
		if known && sameJSON(haveSpec, spec) && sameJSON(haveStatus, status) {
			continue
		}
		if wait := c.pace[name].Sub(now); wait > 0 {
			again = cmp.Or(min(cmp.Or(again, wait), wait), wait)
			continue
		}
		c.pace[name] = now.Add(memberEvery)
		var err error
		if !known || !sameJSON(haveSpec, spec) {
			err = a.apply(ctx, memberResource, "", name, body("MeshNode", name, map[string]any{"spec": spec}))
		}
		if err == nil {
			err = a.apply(ctx, memberResource, "", name, body("MeshNode", name, map[string]any{"status": status}),
				"status")
		}
		if c.write(ctx, "write MeshNode "+name, "patch", memberResource, err); err != nil {
			delete(c.pace, name) // the next try has a pace of its own
		}
	}
	return again
}

func (o custom) content() map[string]any {
	if o.Unstructured == nil {
		return nil
	}
	return o.Object
}

func memberSpec(n *skeinv1.Node) map[string]any { return map[string]any{"nodeID": n.GetId()} }

// memberStatus is what a MeshNode says of a member.
func memberStatus(s *part.Snapshot, n *skeinv1.Node, h homes) map[string]any {
	id, err := identity.ParseID(n.GetId())
	if err != nil {
		return map[string]any{}
	}
	r := s.Records[id].Record
	site, known := sites.Of(n, r)
	if !known && s.Elsewhere != nil {
		site, _ = s.Elsewhere(id)
	}
	leads := r.GetLeads() > 0
	if sites.Topology(s.State.Settings(), site) != sites.Site {
		leads = r.GetLeaderWish()
	}
	status := map[string]any{"alive": s.Alive(id), "leader": leads}
	for field, value := range map[string]string{
		"kubernetesNode": r.GetKubernetesNode(), "kubernetesNodeUID": h.of(id, r.GetKubernetesNode()),
		"nat": candidate.NATName(r.GetNatType()), "mode": r.GetTransportMode(),
		"site": site, "endpoint": endpointOf(r),
		"role": string(s.State.Role(n.GetId())), "ipv4": n.GetIpv4(), "ipv6": n.GetIpv6(), "version": r.GetVersion(),
	} {
		if value != "" {
			status[field] = value
		}
	}
	return status
}

// endpointOf is the best address at which others try a node: one that was asked for, then as the internet sees it,
// then its own.
func endpointOf(r *skeinv1.Record) string {
	if r.GetForcedEndpoint() != "" {
		return r.GetForcedEndpoint()
	}
	best, text := uint32(0), ""
	for _, c := range r.GetCandidates() {
		if c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX {
			return c.GetAddress()
		}
		if text == "" || c.GetPriority() > best {
			best, text = c.GetPriority(), c.GetAddress()
		}
	}
	return text
}
