package route

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane"
)

// Verb says what an Op does.
type Verb uint8

// The things that can happen.
const (
	SetRPFilter Verb = iota
	SetMTU
	AddRoute
	AddRule
	SetUp
	AddAddress
	DelAddress
	DelRule
	DelRoute
	AddHost
	SetForward
)

// Op is one change, one message to the kernel (or one write to a sysctl).
type Op struct {
	Verb    Verb
	Number  int    // MTU or rp_filter
	Family  Family // of SetForward
	Address netip.Prefix
	Rule    Rule
	Route   Route
	Host    dataplane.PodRoute
}

// ErrNoLink says that the link is not there (yet): the driver makes it.
var ErrNoLink = errors.New("link is not there")

// Diff returns what turns actual into want. What refuses packets comes before what sends them, but what refuses a whole
// pool comes after what sends to its blocks: packets for them may be on their way. Removals come last, only with prune.
func Diff(want, actual State, prune bool) []Op {
	var ops []Op
	link := actual.Link.Index != 0
	have := setOf(actual.Routes)
	first, last := want.Routes[:len(want.Routes)-want.Last], want.Routes[len(want.Routes)-want.Last:]
	for _, r := range first {
		if r.Unreachable && !have[r] {
			ops = append(ops, Op{Verb: AddRoute, Route: r})
		}
	}
	for _, r := range want.Rules {
		if !slices.Contains(actual.Rules, r) {
			ops = append(ops, Op{Verb: AddRule, Rule: r})
		}
	}
	if link {
		ops = append(ops, diffLink(want, actual, have, prune)...)
	}
	ops = append(ops, diffHosts(want, actual)...)
	for _, r := range last {
		if !have[r] {
			ops = append(ops, Op{Verb: AddRoute, Route: r})
		}
	}
	if !prune {
		return ops
	}
	left := slices.Clone(want.Rules)
	for _, r := range actual.Rules {
		if i := slices.Index(left, r); i >= 0 { // a second copy of ours is one too many
			left = slices.Delete(left, i, i+1)
			continue
		}
		if keepsRule(r, actual) {
			continue
		}
		ops = append(ops, Op{Verb: DelRule, Rule: r})
	}
	wanted := setOf(want.Routes)
	for _, r := range announcedFirst(actual.Routes) {
		if !wanted[r] && !slices.ContainsFunc(want.Routes, func(w Route) bool { return w.replaces(r) }) {
			ops = append(ops, Op{Verb: DelRoute, Route: r})
		}
	}
	return ops
}

// setOf makes many routes quick to compare with many others: a node has two for each peer.
func setOf(routes []Route) map[Route]bool {
	set := make(map[Route]bool, len(routes))
	for _, r := range routes {
		set[r] = true
	}
	return set
}

func diffLink(want, actual State, have map[Route]bool, prune bool) []Op {
	var ops []Op
	if want.RPFilter >= 0 && want.RPFilter != actual.RPFilter {
		ops = append(ops, Op{Verb: SetRPFilter, Number: want.RPFilter})
	}
	if want.Link.MTU != actual.Link.MTU {
		ops = append(ops, Op{Verb: SetMTU, Number: want.Link.MTU})
	}
	if want.Forward4 > actual.Forward4 {
		ops = append(ops, Op{Verb: SetForward, Family: IPv4, Number: 1})
	}
	if want.Forward6 > actual.Forward6 {
		ops = append(ops, Op{Verb: SetForward, Family: IPv6, Number: 1})
	}
	if !actual.Link.Up {
		ops = append(ops, Op{Verb: SetUp})
	}
	for _, a := range want.Addresses {
		if !slices.Contains(actual.Addresses, a) {
			ops = append(ops, Op{Verb: AddAddress, Address: a})
		}
	}
	for _, r := range want.Routes {
		if !r.behind() && !have[r] {
			ops = append(ops, Op{Verb: AddRoute, Route: r})
		}
	}
	for _, a := range actual.Addresses {
		if prune && !slices.Contains(want.Addresses, a) {
			ops = append(ops, Op{Verb: DelAddress, Address: a})
		}
	}
	return ops
}

// Apply is what the kernel does with the operations, as a pure function.
func (s State) Apply(ops []Op) State {
	s.Addresses, s.Rules, s.Routes = slices.Clone(s.Addresses), slices.Clone(s.Rules), slices.Clone(s.Routes)
	for _, o := range ops {
		switch o.Verb {
		case SetRPFilter:
			s.RPFilter = o.Number
		case SetForward:
			if o.Family == IPv4 {
				s.Forward4 = o.Number
			} else {
				s.Forward6 = o.Number
			}
		case SetMTU:
			s.Link.MTU = o.Number
		case SetUp:
			s.Link.Up = true
		case AddAddress:
			s.Addresses = append(s.Addresses, o.Address)
			slices.SortFunc(s.Addresses, comparePrefix)
		case DelAddress:
			s.Addresses = remove(s.Addresses, o.Address)
		case AddRule:
			s.Rules = append(s.Rules, o.Rule)
		case DelRule:
			s.Rules = remove(s.Rules, o.Rule)
		case AddRoute:
			s.Routes = append(slices.DeleteFunc(s.Routes, o.Route.replaces), o.Route)
		case DelRoute:
			s.Routes = remove(s.Routes, o.Route)
		case AddHost:
			s.Hosts = append(slices.Clip(s.Hosts), dataplane.PodRoute{Addr: o.Host.Addr})
			slices.SortFunc(s.Hosts, compareHosts)
		}
	}
	return s
}

// remove takes the first x away.
func remove[T comparable](s []T, x T) []T {
	if i := slices.Index(s, x); i >= 0 {
		return slices.Delete(s, i, i+1)
	}
	return s
}

// String tells the operation in one line, with the default numbers.
func (o Op) String() string { return o.text(dataplane.DefaultNumbers()) }

func (o Op) text(n dataplane.Numbers) string {
	switch o.Verb {
	case SetRPFilter:
		return fmt.Sprintf("set rp_filter of the link to %d", o.Number)
	case SetForward:
		return fmt.Sprintf("set %s forwarding of the link to %d", o.Family, o.Number)
	case AddHost:
		return fmt.Sprintf("add route %s %s through %s table %d proto %d", dataplane.FamilyOf(o.Host.Addr), o.Host.Addr,
			o.Host.Link, n.PodTable(), dataplane.RouteProtocol)
	case SetMTU:
		return fmt.Sprintf("set MTU %d", o.Number)
	case SetUp:
		return "set link up"
	case AddAddress:
		return "add address " + o.Address.String()
	case DelAddress:
		return "delete address " + o.Address.String()
	case AddRule:
		return "add rule " + o.Rule.text(n)
	case DelRule:
		return "delete rule " + o.Rule.text(n)
	case AddRoute:
		return "add route " + o.Route.text(n)
	case DelRoute:
		return "delete route " + o.Route.text(n)
	}
	return "unknown operation"
}
