package kube

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/dnsname"
)

// Pods reach hosts that are not Nodes by name: each such member has a headless Service without a selector in skein's
// namespace, and an EndpointSlice for each family with its overlay address.

var (
	serviceResource = schema.GroupVersionResource{Version: "v1", Resource: "services"}
	sliceResource   = schema.GroupVersionResource{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"}
)

// Labels of what is written for a member. Objects without them are somebody else's and stay as they are.
const (
	managedByLabel = "app.kubernetes.io/managed-by"
	managedBy      = "skein"
	memberLabel    = Prefix + "member"
)

// isService tells what Kubernetes takes for a Service's name (RFC 1035). A member's name may begin with a digit.
func isService(name string) bool { return dnsname.IsLabel(name) && name[0] >= 'a' }

// nameWish says which names there are to be.
type nameWish struct {
	members map[string]*skeinv1.Node // by name
	unknown map[string]bool          // names of members of which no record has come: what there is of them stays
	bad     []string                 // names that cannot be names of Services
}

// namesOf are the names of members that say that they are not Nodes. Who is a Node has its names from Kubernetes. A
// name is the member's that the log has under it: whether a Node is called so as well makes no difference.
func namesOf(s *part.Snapshot) nameWish {
	w := nameWish{map[string]*skeinv1.Node{}, map[string]bool{}, nil}
	for _, n := range s.State.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil {
			continue
		}
		e, known := s.Records[id]
		switch {
		case !known:
			w.unknown[n.GetName()] = true
		case e.Record.GetKubernetesNode() != "":
		case !isService(n.GetName()):
			w.bad = append(w.bad, n.GetName())
		default:
			w.members[n.GetName()] = n
		}
	}
	slices.Sort(w.bad)
	return w
}

// wanted is an object that is to be there.
type wanted struct {
	kind   schema.GroupVersionResource
	name   string
	member string
	body   map[string]any
}

// objectsFor are the objects of a member.
func objectsFor(n *skeinv1.Node) (out []wanted) {
	name := n.GetName()
	labels := func(more ...string) map[string]any {
		l := map[string]any{managedByLabel: managedBy, memberLabel: name}
		for i := 0; i < len(more); i += 2 {
			l[more[i]] = more[i+1]
		}
		return l
	}
	out = append(out, wanted{serviceResource, name, name, map[string]any{
		"apiVersion": "v1", "kind": "Service", "metadata": map[string]any{"name": name, "labels": labels()},
		"spec": map[string]any{"type": "ClusterIP", "clusterIP": "None"},
	}})
	for _, text := range []string{n.GetIpv4(), n.GetIpv6()} {
		a, err := netip.ParseAddr(text)
		if err != nil {
			continue
		}
		family := map[bool]string{true: "IPv4", false: "IPv6"}[a.Is4()]
		slice := name + map[bool]string{true: "-v4", false: "-v6"}[a.Is4()]
		out = append(out, wanted{sliceResource, slice, name, map[string]any{
			"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
			"metadata": map[string]any{"name": slice, "labels": labels("kubernetes.io/service-name", name,
				"endpointslice.kubernetes.io/managed-by", "skein.dev")},
			"addressType": family, "ports": []any{},
			"endpoints": []any{map[string]any{"addresses": []any{a.String()}, "conditions": map[string]any{"ready": true}}},
		}})
	}
	return out
}

// oursFor is the member that an object was written for; empty: it is somebody else's.
func oursFor(o custom) string {
	if l := o.GetLabels(); l[managedByLabel] == managedBy {
		return l[memberLabel]
	}
	return ""
}

// in tells whether an object says what is to be written.
func (w wanted) in(o custom) bool {
	if oursFor(o) != w.member {
		return false
	}
	if w.kind == serviceResource {
		ip, _, _ := unstructured.NestedString(o.Object, "spec", "clusterIP")
		selector, _, _ := unstructured.NestedMap(o.Object, "spec", "selector")
		return ip == "None" && len(selector) == 0
	}
	endpoints, _, _ := unstructured.NestedSlice(o.Object, "endpoints")
	if len(endpoints) != 1 || o.GetLabels()["kubernetes.io/service-name"] != w.member {
		return false
	}
	e, _ := endpoints[0].(map[string]any)
	return sameJSON(e["addresses"], w.body["endpoints"].([]any)[0].(map[string]any)["addresses"])
}

// nameChanges is what is to be done so that there are the names that are wished for.
type nameChanges struct {
	remove []wanted // their kind and name
	write  []wanted
	taken  map[string]string // members whose name is somebody else's object, and which
}

// compareNames holds what there is against what is wished for.
func compareNames(w nameWish, have map[schema.GroupVersionResource]map[string]custom, ns string) nameChanges {
	c := nameChanges{taken: map[string]string{}}
	want := map[schema.GroupVersionResource]map[string]bool{serviceResource: {}, sliceResource: {}}
	for _, name := range slices.Sorted(maps.Keys(w.members)) {
		objects := objectsFor(w.members[name])
		for _, o := range objects {
			if there, known := have[o.kind][ns+"/"+o.name]; known && oursFor(there) == "" {
				c.taken[name] = fmt.Sprintf("%s %s/%s", o.kind.Resource, ns, o.name)
			}
		}
		for _, o := range objects {
			want[o.kind][o.name] = true
			there, known := have[o.kind][ns+"/"+o.name]
			if c.taken[name] == "" && (!known || !o.in(there)) {
				c.write = append(c.write, o)
			}
		}
	}
	for _, kind := range []schema.GroupVersionResource{sliceResource, serviceResource} {
		for _, key := range slices.Sorted(maps.Keys(have[kind])) {
			o := have[kind][key]
			if member := oursFor(o); member != "" && !want[kind][o.GetName()] && !w.unknown[member] {
				c.remove = append(c.remove, wanted{kind: kind, name: o.GetName()})
			}
		}
	}
	return c
}

// showNames makes the names of hosts that are not Nodes.
func (c *controller) showNames(ctx context.Context, a *apiserver, s *part.Snapshot, nodes map[string]*Node) {
	have := map[schema.GroupVersionResource]map[string]custom{
		serviceResource: c.services.snapshot(), sliceResource: c.slices.snapshot()}
	if have[serviceResource] == nil || have[sliceResource] == nil {
		return
	}
	wish := namesOf(s)
	changes := compareNames(wish, have, a.namespace)
	c.reportNames(wish, changes.taken, nodes, a.namespace)
	for _, o := range changes.remove {
		if refusesAll(c.failed) {
			return
		}
		c.write(ctx, "remove "+o.kind.Resource+" "+o.name, "delete", o.kind,
			a.dynamic.Resource(o.kind).Namespace(a.namespace).Delete(ctx, o.name, metav1.DeleteOptions{}))
	}
	for _, o := range changes.write {
		if refusesAll(c.failed) {
			return
		}
		c.write(ctx, "write "+o.kind.Resource+" "+o.name, "patch", o.kind, a.apply(ctx, o.kind, a.namespace, o.name, o.body))
	}
}

// reportNames shows what is wrong with members' names.
func (c *controller) reportNames(w nameWish, taken map[string]string, nodes map[string]*Node, ns string) {
	now := map[string][2]string{}
	for name, by := range taken {
		now[name] = [2]string{fmt.Sprintf("pods cannot reach it by name: %s exists and was not created by skein", by),
			"remove that object, or give the host another name"}
	}
	for _, name := range w.bad {
		now[name] = [2]string{"pods cannot reach it by name: a Service's name begins with a letter",
			"give the host another name"}
	}
	for name := range w.members {
		if _, known := now[name]; !known && nodes[name] != nil {
			now[name] = [2]string{
				fmt.Sprintf("a Node has the name of this member, which is not in Kubernetes; %s.%s leads to the member",
					name, ns),
				"if they are one host, set kubernetes.kubeconfig on it; else give one of them another name"}
		}
	}
	for name, p := range now {
		c.p.host.Report("kubernetes: name "+name, part.Warns, p[0], p[1])
	}
	for name := range c.toldNames {
		if _, still := now[name]; !still {
			c.p.host.Report("kubernetes: name "+name, "", "", "")
		}
	}
	c.toldNames = now
}
