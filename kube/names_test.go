package kube

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/kube/kubetest"
)

func TestWhoHasAName(t *testing.T) {
	l := kubetest.New(t)
	ids := l.Admit("vm", "node", "silent", "1st")
	s := &part.Snapshot{State: l.State, Records: map[identity.ID]gossip.Entry{
		ids[0]: {Record: &skeinv1.Record{KubernetesNode: "a"}}, ids[1]: {Record: &skeinv1.Record{}},
		ids[2]: {Record: &skeinv1.Record{KubernetesNode: "node"}}, ids[4]: {Record: &skeinv1.Record{}},
	}}
	w := namesOf(s)
	if names := slices.Collect(maps.Keys(w.members)); !slices.Equal(names, []string{"vm"}) || !w.unknown["silent"] ||
		len(w.unknown) != 1 || !slices.Equal(w.bad, []string{"1st"}) {
		t.Errorf("%v, unknown %v, bad %v", names, w.unknown, w.bad)
	}
}

// asThere is an object as an apiserver has it after it was written.
func asThere(o wanted) custom {
	labels := map[string]any{}
	maps.Copy(labels, o.body["metadata"].(map[string]any)["labels"].(map[string]any))
	body := maps.Clone(o.body)
	body["metadata"] = map[string]any{"name": o.name, "namespace": "ns", "labels": labels}
	if spec, ok := body["spec"].(map[string]any); ok {
		spec = maps.Clone(spec)
		spec["ipFamilies"] = []any{"IPv4"}
		body["spec"] = spec
	}
	return custom{&unstructured.Unstructured{Object: body}}
}

func TestNamesAreMadeAndGo(t *testing.T) {
	vm := &skeinv1.Node{Name: "vm", Ipv4: "10.4.0.7", Ipv6: "fd00::7"}
	moved := &skeinv1.Node{Name: "vm", Ipv4: "10.4.0.8", Ipv6: "fd00::7"}
	type all = map[schema.GroupVersionResource]map[string]custom
	there := func(change func(all)) all {
		have := all{serviceResource: {}, sliceResource: {}}
		for _, o := range objectsFor(vm) {
			have[o.kind]["ns/"+o.name] = asThere(o)
		}
		if change != nil {
			change(have)
		}
		return have
	}
	wish := func(n *skeinv1.Node) nameWish { return nameWish{members: map[string]*skeinv1.Node{"vm": n}} }
	for what, c := range map[string]struct {
		wish  nameWish
		have  all
		does  string
		taken bool
	}{
		"a new member":    {wish(vm), all{}, "+services/vm +endpointslices/vm-v4 +endpointslices/vm-v6", false},
		"nothing to do":   {wish(vm), there(nil), "", false},
		"another address": {wish(moved), there(nil), "+endpointslices/vm-v4", false},
		"it is gone":      {nameWish{}, there(nil), "-endpointslices/vm-v4 -endpointslices/vm-v6 -services/vm", false},
		"it is not known": {nameWish{unknown: map[string]bool{"vm": true}}, there(nil), "", false},
		"one is missing": {wish(vm), there(func(h all) { delete(h[sliceResource], "ns/vm-v6") }),
			"+endpointslices/vm-v6", false},
		"one has changed": {wish(vm), there(func(h all) {
			_ = unstructured.SetNestedField(h[serviceResource]["ns/vm"].Object, "x", "spec", "selector", "app")
		}), "+services/vm", false},
		"no IPv6":         {wish(&skeinv1.Node{Name: "vm", Ipv4: "10.4.0.7"}), there(nil), "-endpointslices/vm-v6", false},
		"somebody else's": {wish(vm), there(func(h all) { h[serviceResource]["ns/vm"].SetLabels(nil) }), "", true},
		"others' objects": {nameWish{}, there(func(h all) { h[serviceResource]["ns/vm"].SetLabels(nil) }),
			"-endpointslices/vm-v4 -endpointslices/vm-v6", false},
	} {
		changes := compareNames(c.wish, c.have, "ns")
		var does []string
		for _, o := range changes.remove {
			does = append(does, fmt.Sprintf("-%s/%s", o.kind.Resource, o.name))
		}
		for _, o := range changes.write {
			does = append(does, fmt.Sprintf("+%s/%s", o.kind.Resource, o.name))
		}
		if have := strings.Join(does, " "); have != c.does || (len(changes.taken) > 0) != c.taken {
			t.Errorf("%s: %s, taken %v; want %s", what, have, changes.taken, c.does)
		}
	}
}
