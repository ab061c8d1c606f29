package clients

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/skeinmesh/skein/cni"
)

// MaxEgresses is how many egresses one client may use.
const MaxEgresses = 64

// ParseAnnotations returns the egresses that a pod's annotations name, in order of precedence: by namespace, and
// within one as written. If both prefixes name a namespace, skein's comes first. The error lists what could not be
// parsed.
func ParseAnnotations(annotations map[string]string) ([]Ref, error) {
	type entry struct{ namespace, key string }
	var entries []entry
	var errs []error
	for key := range annotations {
		namespace, ok := strings.CutPrefix(key, cni.EgressAnnotation)
		if !ok {
			namespace, ok = strings.CutPrefix(key, cni.EgressAnnotationCoil)
		}
		if ok {
			entries = append(entries, entry{namespace, key})
		}
	}
	slices.SortFunc(entries, func(a, b entry) int {
		return cmp.Or(strings.Compare(a.namespace, b.namespace), -strings.Compare(a.key, b.key))
	})
	var out []Ref
	for i, e := range entries {
		value := annotations[e.key]
		if len(value) > cni.MaxEgressValue {
			errs = append(errs, fmt.Errorf("annotation %.100s is longer than %d bytes", e.key, cni.MaxEgressValue))
			continue
		}
		if i >= cni.MaxEgressAnnotations {
			errs = append(errs, fmt.Errorf("there are more than %d annotations about egresses: %.100s and those after it are "+
				"not used", cni.MaxEgressAnnotations, e.key))
			break
		}
		for _, name := range strings.Split(value, ",") {
			r := Ref{Namespace: e.namespace, Name: strings.TrimSpace(name)}
			switch {
			case r.Name == "":
			case !r.Valid():
				errs = append(errs, fmt.Errorf("annotation %.100s: %.100q is not a name of an egress: write names with commas "+
					"between", e.key, r.Name))
			case slices.Contains(out, r):
			case len(out) == MaxEgresses:
				return out, errors.Join(append(errs, fmt.Errorf("a pod may use %d egresses: %s and those after it are not used",
					MaxEgresses, r))...)
			default:
				out = append(out, r)
			}
		}
	}
	return out, errors.Join(errs...)
}
