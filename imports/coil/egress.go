package coil

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// MaxEgresses is how many a file may hold.
const MaxEgresses = 1024

// egress is an Egress with what is said of it beside.
type egress struct {
	out      *skeinv1.Egress
	selector string   // the nodeSelector of its pods
	without  []string // fields that have no counterpart
}

// noCounterpart are fields of an Egress that say how Coil runs its pods, and why nothing here corresponds to them.
var noCounterpart = map[string]string{
	"strategy":              "",
	"template":              "",
	"sessionAffinity":       "each client stays with one gateway by itself",
	"sessionAffinityConfig": "each client stays with one gateway by itself",
	"podDisruptionBudget":   "`skein node drain` moves the slots of a gateway first",
}

func (r *reading) addEgress(o *object) error {
	if err := o.only("", o.fields, "apiVersion", "kind", "metadata", "spec", "status"); err != nil {
		return err
	}
	if len(r.egresses) == MaxEgresses {
		return o.errorf("", "there are more than %d egresses", MaxEgresses)
	}
	if o.meta.namespace == "" {
		return o.errorf("metadata.namespace", "it is missing")
	}
	for _, e := range r.egresses {
		if e.out.GetNamespace() == o.meta.namespace && e.out.GetName() == o.name {
			return o.errorf("", "it is there twice")
		}
	}
	spec, err := o.mapping("spec", o.fields["spec"])
	if err != nil {
		return err
	}
	known := append(slices.Sorted(maps.Keys(noCounterpart)), "destinations", "replicas", "fouSourcePortAuto")
	if err := o.only("spec.", spec, known...); err != nil {
		return err
	}
	e := egress{out: &skeinv1.Egress{Namespace: o.meta.namespace, Name: o.name, Replicas: 1}}
	if e.out.Destinations, err = o.destinations(spec["destinations"]); err != nil {
		return err
	}
	if n := spec["replicas"]; !absent(n) {
		v, err := o.number("spec.replicas", n, 1<<20)
		if err != nil {
			return err
		}
		if e.out.Replicas = uint32(v); v == 0 {
			r.notes = append(r.notes, fmt.Sprintf("Egress %s/%s has no replica in Coil; it gets one slot.",
				o.meta.namespace, o.name))
			e.out.Replicas = 1
		}
	}
	if e.out.FouSourcePortAuto, err = o.flag("spec.fouSourcePortAuto", spec["fouSourcePortAuto"]); err != nil {
		return err
	}
	e.selector = nodeSelector(spec["template"])
	for _, name := range slices.Sorted(maps.Keys(noCounterpart)) {
		if !absent(spec[name]) {
			e.without = append(e.without, name)
		}
	}
	if o.meta.deleted {
		r.notes = append(r.notes, fmt.Sprintf("Egress %s/%s is being deleted in Coil and is left out.",
			o.meta.namespace, o.name))
		return nil
	}
	r.egresses = append(r.egresses, e)
	return nil
}

// destinations are CIDRs, of which Coil wants one at least.
func (o *object) destinations(n ast.Node) (out []string, err error) {
	list, err := o.list("spec.destinations", n)
	if err != nil {
		return nil, err
	}
	for i, one := range list {
		field := fmt.Sprintf("spec.destinations[%d]", i)
		s, err := o.text(field, one)
		if err != nil {
			return nil, err
		}
		p, err := netip.ParsePrefix(s)
		if err != nil || p.Addr().Is4In6() {
			return nil, o.errorf(field, "%.80q is not a prefix such as 192.168.10.0/24", s)
		}
		out = append(out, p.Masked().String())
	}
	if len(out) == 0 {
		return nil, o.errorf("spec.destinations", "there is no destination")
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// flag is true or false, false where there is none.
func (o *object) flag(field string, n ast.Node) (bool, error) {
	if absent(n) {
		return false, nil
	}
	b, ok := n.(*ast.BoolNode)
	if !ok {
		return false, o.errorf(field, "want true or false, have %s", kindOf(n))
	}
	return b.Value, nil
}

// nodeSelector reads which nodes the pods of a template run on, for a note; a template may hold anything.
func nodeSelector(template ast.Node) string {
	o := &object{}
	n := template
	for _, key := range []string{"spec", "nodeSelector"} {
		m, err := o.mapping("", n)
		if err != nil {
			return ""
		}
		n = m[key]
	}
	m, err := o.mapping("", n)
	if err != nil {
		return ""
	}
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if v, err := o.text("", m[k]); err == nil {
			out = append(out, k+"="+v)
		}
	}
	return strings.Join(out, ",")
}

// SetGateways says which nodes are gateways of the file's egresses, by their labels. Without, the egresses are left
// out, since in Coil any node could be one.
func (i *Import) SetGateways(labels map[string]string) {
	if len(i.Egresses) == 0 {
		return
	}
	if len(labels) == 0 {
		i.Notes = append(i.Notes, fmt.Sprintf("Egresses left out: %s. Here gateways are hosts, and not pods: say which "+
			"with --gateways KEY=VALUE, the labels of members.", some(i.egressNames())))
		i.Egresses = nil
		return
	}
	for _, e := range i.Egresses {
		e.Gateways = maps.Clone(labels)
	}
}

func (i *Import) egressNames() (out []string) {
	for _, e := range i.Egresses {
		out = append(out, e.GetNamespace()+"/"+e.GetName())
	}
	return out
}

// egressNotes say what of each egress has no counterpart.
func (r *reading) egressNotes() (out []string) {
	for _, e := range r.egresses {
		name := e.out.GetNamespace() + "/" + e.out.GetName()
		if e.selector != "" {
			out = append(out, fmt.Sprintf("Egress %s: its pods run on Nodes with %s; give the members on them labels that "+
				"--gateways names.", name, e.selector))
		}
		var why []string
		for _, f := range e.without {
			if text := noCounterpart[f]; text != "" && !slices.Contains(why, text) {
				why = append(why, text)
			}
		}
		if len(e.without) > 0 {
			text := fmt.Sprintf("Egress %s: without counterpart: %s", name, strings.Join(e.without, ", "))
			if len(why) > 0 {
				text += " (" + strings.Join(why, "; ") + ")"
			}
			out = append(out, text+".")
		}
		source := "addresses of its pods"
		if pool := r.namespaces[e.out.GetNamespace()]; pool != "" {
			source += ", of pool " + pool
		}
		out = append(out, fmt.Sprintf("Egress %s: packets left with %s; here they leave with the gateway's own unless "+
			"`skein egress update %s --address ADDRESS` gives each slot one.", name, source, name))
	}
	return out
}
