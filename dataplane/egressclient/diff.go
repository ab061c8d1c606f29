package egressclient

import (
	"slices"
)

// Verb says what an Op does.
type Verb uint8

// The things that can happen.
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

// String is the operation in words.
func (o Op) String() string {
	if o.Verb == AddRule || o.Verb == DelRule {
		return verbs[o.Verb] + " " + o.Rule.Family.String() + " " + o.Rule.String()
	}
	return verbs[o.Verb] + " table " + tableName(o.Route.Table) + " " + o.Route.String()
}

// Before is what comes before the tunnels are touched. What is not led into a tunnel yet, or whose device shakes (it
// will be made anew), becomes unreachable; then come rules, lowest priority number first, so that the ones that keep
// private networks as they are stand before the one that leads everything away.
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

// After is what remains to be done when the tunnels stand as well as they can: their routes, then removals, rules first
// and the highest priority number first.
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

// early splits steps: those that make the ways of flows by other slots come first. Such flows are led there only when
// the filter recalls them, and new flows are led elsewhere only after that.
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

// place is what it takes to have a route.
func place(r Route, actual State) []Op {
	if slices.Contains(actual.Routes, r) {
		return nil
	}
	if slices.ContainsFunc(actual.Routes, r.same) {
		return []Op{{Verb: ReplaceRoute, Route: r}}
	}
	return []Op{{Verb: AddRoute, Route: r}}
}
