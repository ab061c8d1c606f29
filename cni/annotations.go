package cni

import (
	"maps"
	"slices"
	"strings"
)

// A pod names the egresses that it uses by annotations with one of these prefixes, which the egresses' namespace
// follows; the value lists their names.
const (
	EgressAnnotation     = "skein.dev/egress."
	EgressAnnotationCoil = "egress.coil.cybozu.com/"
)

// PodAnnotations is the capability by which containerd passes a pod's annotations to plugins that declare it.
const PodAnnotations = "io.kubernetes.cri.pod-annotations"

// Bounds of what a pod's annotations may say of egresses. What is beyond them is not used, and the agent tells so.
const (
	MaxEgressAnnotations = 64   // keys
	MaxEgressValue       = 4096 // bytes of a value, and of a key
)

// EgressAnnotations are those of a pod's annotations that are about egresses, cut down to a little more than the
// bounds: so much that the agent sees what is beyond them.
func EgressAnnotations(all map[string]string) map[string]string {
	var out map[string]string
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if !strings.HasPrefix(key, EgressAnnotation) && !strings.HasPrefix(key, EgressAnnotationCoil) {
			continue
		}
		if len(key) > MaxEgressValue {
			continue
		}
		if len(out) == MaxEgressAnnotations+1 { // one too many stays one too many
			break
		}
		if out == nil {
			out = map[string]string{}
		}
		const more = 8 // bytes: one that is too long stays too long
		value := all[key]
		out[strings.ToValidUTF8(key, "?")] = strings.ToValidUTF8(value[:min(len(value), MaxEgressValue+more)], "?")
	}
	return out
}
