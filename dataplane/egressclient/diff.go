package egressclient

import (
	"slices"
)

// Verb is the kind of an Op.
type Verb uint8

// The kinds of Op.
const (
	AddRoute Verb = iota
	ReplaceRoute
	DelRoute
	AddRule
	DelRule
)

var verbs = []string{"add route", "replace route", "delete route", "add rule", "delete rule"}

// Op is one message to the kernel.
type Op struct {
	Verb  Verb
	Rule  Rule
	Route Route
}

// String describes the operation.
func (o Op) String() string {
	if o.Verb == AddRule || o.Verb == DelRule {
		return verbs[o.Verb] + " " + o.Rule.Family.String() + " " + o.Rule.String()
	}
	return verbs[o.Verb] + " table " + tableName(o.Route.Table) + " " + o.Route.String()
}

// Before lists the operations that precede the tunnels. A destination without a working tunnel, or whose device will
// be recreated, becomes unreachable. Then rules are added, lowest priority number first, so that the exceptions for
// private networks exist before the rule that redirects all other traffic. Argument shakes reports whether the driver
// will recreate a device.
func Before(want, actual State, shakes func(link string) bool) []Op {
	var ops []Op
	for _, r := range want.Routes {
		if r.Kind == Tunnel {
			if slices.Contains(actual.Routes, r) && !shakes(r.Link) {
				continue
			}
			r = Route{Table: r.Table, Dst: r.Dst, Kind: Unreachable}
		}
		ops = append(ops, place(r, actual)...)
	}
	for _, r := range want.Rules {
		if !slices.Contains(actual.Rules, r) {
			ops = append(ops, Op{Verb: AddRule, Rule: r})
		}
	}
	return ops
}

// After lists the operations that follow the tunnels: their routes, then removals. Rules are removed first, the
// highest priority number first.
func After(want, actual State) []Op {
	var ops []Op
	for _, r := range want.Routes {
		ops = append(ops, place(r, actual)...)
	}
	for _, r := range want.Rules {
		if !slices.Contains(actual.Rules, r) {
			ops = append(ops, Op{Verb: AddRule, Rule: r})
		}
	}
	for _, r := range slices.Backward(actual.Rules) {
		if !slices.Contains(want.Rules, r) {
			ops = append(ops, Op{Verb: DelRule, Rule: r})
		}
	}
	for _, r := range actual.Routes {
		if !slices.Contains(want.Routes, r) && !slices.ContainsFunc(want.Routes, r.same) {
			ops = append(ops, Op{Verb: DelRoute, Route: r})
		}
	}
	return ops
}

// early separates the operations that add routes and rules for flows by other slots, which come first. Flows use them
// only once the filter recalls these flows, and new flows change their slot only after that.
func early(ops []Op) (flows, rest []Op) {
	for _, o := range ops {
		switch {
		case o.Verb == AddRule && flowTable(o.Rule.Table), (o.Verb == AddRoute || o.Verb == ReplaceRoute) &&
			flowTable(o.Route.Table):
			flows = append(flows, o)
		default:
			rest = append(rest, o)
		}
	}
	return flows, rest
}

// place lists the operations that put a route into the kernel.
func place(r Route, actual State) []Op {
	if slices.Contains(actual.Routes, r) {
		return nil
	}
	if slices.ContainsFunc(actual.Routes, r.same) {
		return []Op{{Verb: ReplaceRoute, Route: r}}
	}
	return []Op{{Verb: AddRoute, Route: r}}
}
