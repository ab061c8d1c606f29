package hopnet

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/inet"
)

// State is what the kernel has for hops, or shall have. The zero value is nothing.
type State struct {
	Self     netip.Addr // the link's own address; invalid: there is no link
	Up       bool
	MTU      int
	RPFilter int // -1: links have no such setting
	Forward4 bool
	Forward6 bool
	Rules    []Rule  // sorted
	Routes   []Route // sorted
	Guards   Guards
}

// Rule leads to one of the tables.
type Rule struct {
	Family int // 4 or 6
	Last   bool
}

// Route leads to a destination by way of a node.
type Route struct {
	Prefix netip.Prefix
	Last   bool
	Via    netip.Addr
	Source netip.Addr // of what this host itself sends
	MTU    int        // 0: the link's
	Plain  bool       // it leads nowhere: what this host itself sends there goes as if there were no hops
	Other  string     // what else it has; none of ours
}

// Guards are the rules and sets that say who may bring what.
type Guards struct {
	Self    netip.Addr // invalid: there is no table
	Self6   netip.Addr // the overlay IPv6 address, if there is one
	Sources []Source   // sorted
}

// Source is a range of sources whose packets a node may bring.
type Source struct{ From, First, Last netip.Addr }

// Host is what limits the wish on this host.
type Host struct {
	IPv6        bool // links may use it
	RPFilterAll int  // net.ipv4.conf.all.rp_filter; -1: there is none
	ForwardAll6 bool // all links forward IPv6
}

// Want is what these hops need.
func Want(s dataplane.Spec, h Host) (w State, notes []string) {
	w.RPFilter = -1
	switch {
	case !s.Hops.Self.IsValid():
		return w, nil
	case !s.Hops.Self.Is4():
		return w, []string{fmt.Sprintf("hops: own address %s is not an IPv4 address: packets for other sites are lost",
			s.Hops.Self)}
	}
	const off, loose = 0, 2
	w.Self, w.Up, w.MTU = s.Hops.Self, true, s.Link.MTU-dataplane.HopOverhead
	if w.RPFilter = h.RPFilterAll; h.RPFilterAll > off {
		w.RPFilter = loose // the way back need not lead by the link; the guards have checked the source
	}
	w.Forward4 = s.Pods.Forward || len(s.Pods.Blocks)+len(s.Pods.Routes) > 0
	w.Forward6 = h.IPv6 && (s.Pods.Forward || s.Pods.Has6()) // an older kernel has a switch for the whole host only
	var own [2]netip.Addr
	for _, a := range s.Link.Addresses {
		own[family(a.Addr())] = a.Addr()
	}
	narrow := map[netip.Prefix]int{}
	for _, n := range slices.Concat(s.Link.Narrow, s.Pods.Remote) {
		if n.MTU > 0 && n.MTU < w.MTU {
			narrow[n.Prefix.Masked()] = n.MTU
		}
	}
	for _, r := range s.Hops.Routes {
		if !r.Via.Is4() || !r.Prefix.IsValid() {
			notes = append(notes,
				fmt.Sprintf("hops: %s via %s: the next node needs an IPv4 address of the overlay", r.Prefix, r.Via))
			continue
		}
		p := r.Prefix.Masked()
		if p.Addr().Is6() && !h.IPv6 {
			continue
		}
		route := Route{Prefix: p, Last: r.Last, Via: r.Via, MTU: narrow[p]}
		if !r.Last {
			route.Source = own[family(p.Addr())]
		}
		w.Routes = append(w.Routes, route)
	}
	w.Routes = append(w.Routes, plain(w.Routes)...)
	w.Rules = []Rule{{4, false}, {4, true}}
	if h.IPv6 {
		w.Rules = append(w.Rules, Rule{6, false}, Rule{6, true})
	}
	w.Guards.Self, w.Guards.Self6 = w.Self, own[1]
	for _, g := range s.Hops.Guards {
		if !g.From.Is4() {
			notes = append(notes, fmt.Sprintf("hops: from %s: the node needs an IPv4 address of the overlay", g.From))
			continue
		}
		w.Guards.Sources = append(w.Guards.Sources, sources(g)...)
	}
	slices.SortFunc(w.Routes, compareRoutes)
	slices.SortFunc(w.Guards.Sources, compareSources)
	return w, notes
}

// plain are routes for what has one for others' packets within a wider one by another node: this host's own packets
// go straight there.
func plain(routes []Route) (out []Route) {
	all := slices.Clone(routes)
	slices.SortFunc(all, func(a, b Route) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), a.Prefix.Bits()-b.Prefix.Bits(),
			dataplane.Bit(a.Last)-dataplane.Bit(b.Last))
	})
	var around []netip.Prefix
	for _, r := range all {
		for len(around) > 0 && !around[len(around)-1].Contains(r.Prefix.Addr()) {
			around = around[:len(around)-1]
		}
		switch n := len(around); {
		case !r.Last:
			around = append(around, r.Prefix)
		case n > 0 && around[n-1] != r.Prefix:
			out = append(out, Route{Prefix: r.Prefix, Plain: true})
		}
	}
	return out
}

// sources are the ranges of a guard, without overlaps, which the kernel's sets refuse.
func sources(g dataplane.HopGuard) (out []Source) {
	prefixes := slices.Clone(g.Sources)
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	for _, p := range prefixes {
		p = p.Masked()
		if n := len(out); p.IsValid() && (n == 0 || out[n-1].Last.Less(p.Addr())) {
			out = append(out, Source{From: g.From, First: p.Addr(), Last: inet.Last(p)})
		}
	}
	return out
}

func family(a netip.Addr) int { return dataplane.Bit(a.Is6()) }

func compareRoutes(a, b Route) int {
	return cmp.Or(a.Prefix.Compare(b.Prefix), dataplane.Bit(a.Last)-dataplane.Bit(b.Last),
		dataplane.Bit(a.Plain)-dataplane.Bit(b.Plain), a.Via.Compare(b.Via), cmp.Compare(a.Other, b.Other))
}

func compareRules(a, b Rule) int {
	return cmp.Or(a.Family-b.Family, dataplane.Bit(a.Last)-dataplane.Bit(b.Last))
}

func compareSources(a, b Source) int {
	return cmp.Or(a.From.Compare(b.From), a.First.Compare(b.First), a.Last.Compare(b.Last))
}

// Verb is what an Op does.
type Verb int

// The verbs. SetGuards writes all of the table at once.
const (
	SetGuards Verb = iota
	AddLink
	SetMTU
	SetUp
	SetRPFilter
	SetForward4
	SetForward6
	AddRoute
	AddRule
	DelRule
	DelRoute
	DelLink
	DelGuards
)

// Op is one change.
type Op struct {
	Verb   Verb
	Number int
	Self   netip.Addr
	Guards Guards
	Rule   Rule
	Route  Route
}

// Diff returns what turns actual into want: guards before the link that they are for, routes before the rules that
// lead to them, and removals last, with prune only, the other way round.
func Diff(want, actual State, prune bool) (ops []Op) {
	if !want.Self.IsValid() && !prune {
		return nil
	}
	guards := want.Guards
	if !prune && guards.Self == actual.Guards.Self {
		guards.Sources = union(guards.Sources, actual.Guards.Sources)
	}
	if guards.Self.IsValid() && !guards.equal(actual.Guards) {
		ops = append(ops, Op{Verb: SetGuards, Guards: guards})
	}
	had := actual.Self.IsValid()
	if had && want.Self.IsValid() && actual.Self != want.Self { // its routes go with it
		ops = append(ops, Op{Verb: DelLink})
		actual = actual.Apply(ops[len(ops)-1:])
	}
	if want.Self.IsValid() {
		if actual.Self != want.Self {
			ops = append(ops, Op{Verb: AddLink, Self: want.Self, Number: want.MTU})
			actual.MTU = want.MTU
		}
		if actual.MTU != want.MTU {
			ops = append(ops, Op{Verb: SetMTU, Number: want.MTU})
		}
		if want.RPFilter >= 0 && actual.RPFilter != want.RPFilter {
			ops = append(ops, Op{Verb: SetRPFilter, Number: want.RPFilter})
		}
		if want.Forward4 && !actual.Forward4 {
			ops = append(ops, Op{Verb: SetForward4})
		}
		if want.Forward6 && !actual.Forward6 {
			ops = append(ops, Op{Verb: SetForward6})
		}
		if !actual.Up {
			ops = append(ops, Op{Verb: SetUp})
		}
	}
	for _, r := range want.Routes {
		if !slices.Contains(actual.Routes, r) {
			ops = append(ops, Op{Verb: AddRoute, Route: r})
		}
	}
	for _, r := range want.Rules {
		if !slices.Contains(actual.Rules, r) {
			ops = append(ops, Op{Verb: AddRule, Rule: r})
		}
	}
	if !prune {
		return ops
	}
	left := slices.Clone(want.Rules)
	for _, r := range actual.Rules {
		if i := slices.Index(left, r); i >= 0 { // a second copy is one too many
			left = slices.Delete(left, i, i+1)
			continue
		}
		ops = append(ops, Op{Verb: DelRule, Rule: r})
	}
	for _, r := range actual.Routes {
		replaced := func(w Route) bool { return w.Prefix == r.Prefix && w.Last == r.Last && r.Other == "" }
		if !slices.Contains(want.Routes, r) && !slices.ContainsFunc(want.Routes, replaced) {
			ops = append(ops, Op{Verb: DelRoute, Route: r})
		}
	}
	if had && !want.Self.IsValid() {
		ops = append(ops, Op{Verb: DelLink})
	}
	if actual.Guards.Self.IsValid() && !guards.Self.IsValid() {
		ops = append(ops, Op{Verb: DelGuards})
	}
	return ops
}

// Apply is what the kernel does with the operations, as a pure function.
func (s State) Apply(ops []Op) State {
	s.Rules, s.Routes = slices.Clone(s.Rules), slices.Clone(s.Routes)
	for _, o := range ops {
		switch o.Verb {
		case SetGuards:
			s.Guards = o.Guards
		case DelGuards:
			s.Guards = Guards{}
		case AddLink:
			s.Self, s.MTU, s.RPFilter = o.Self, o.Number, 0
		case DelLink:
			s.Self, s.Up, s.MTU, s.RPFilter, s.Forward4, s.Forward6 = netip.Addr{}, false, 0, -1, false, false
			s.Routes = slices.DeleteFunc(s.Routes, func(r Route) bool { return !r.Plain }) // those are on no link
		case SetMTU:
			s.MTU = o.Number
		case SetUp:
			s.Up = true
		case SetRPFilter:
			s.RPFilter = o.Number
		case SetForward4:
			s.Forward4 = true
		case SetForward6:
			s.Forward6 = true
		case AddRule:
			s.Rules = append(s.Rules, o.Rule)
		case DelRule:
			i := slices.Index(s.Rules, o.Rule)
			s.Rules = slices.Delete(s.Rules, i, i+1)
		case AddRoute:
			same := func(r Route) bool { return r.Prefix == o.Route.Prefix && r.Last == o.Route.Last }
			s.Routes = slices.DeleteFunc(s.Routes, same)
			s.Routes = append(s.Routes, o.Route)
		case DelRoute:
			s.Routes = slices.DeleteFunc(s.Routes, func(r Route) bool { return r == o.Route })
		}
	}
	slices.SortFunc(s.Rules, compareRules)
	slices.SortFunc(s.Routes, compareRoutes)
	return s
}

func (g Guards) equal(o Guards) bool {
	return g.Self == o.Self && g.Self6 == o.Self6 && slices.Equal(g.Sources, o.Sources)
}

// union is all of a, and what of b overlaps nothing of it.
func union(a, b []Source) []Source {
	out := slices.Clone(a)
	for _, s := range b {
		overlaps := func(x Source) bool { return x.From == s.From && !x.Last.Less(s.First) && !s.Last.Less(x.First) }
		if !slices.ContainsFunc(a, overlaps) {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, compareSources)
	return out
}

// String tells the operation in one line, with the default numbers.
func (o Op) String() string { return o.text(dataplane.DefaultNumbers()) }

func (o Op) text(n dataplane.Numbers) string {
	switch o.Verb {
	case SetGuards:
		return fmt.Sprintf("set table inet %s: %d sources to %s", n.HopNftTable, len(o.Guards.Sources), o.Guards.Self)
	case AddLink:
		return fmt.Sprintf("add link %s local %s mtu %d", n.HopLink, o.Self, o.Number)
	case SetMTU:
		return fmt.Sprintf("set link %s mtu %d", n.HopLink, o.Number)
	case SetUp:
		return fmt.Sprintf("set link %s up", n.HopLink)
	case SetRPFilter:
		return fmt.Sprintf("set rp_filter of %s to %d", n.HopLink, o.Number)
	case SetForward4:
		return fmt.Sprintf("set ipv4 forwarding of %s", n.HopLink)
	case SetForward6:
		return fmt.Sprintf("set ipv6 forwarding of %s", n.HopLink)
	case AddRoute:
		return "add route " + o.Route.text(n)
	case AddRule:
		return "add rule " + o.Rule.text(n)
	case DelRule:
		return "delete rule " + o.Rule.text(n)
	case DelRoute:
		return "delete route " + o.Route.text(n)
	case DelLink:
		return "delete link " + n.HopLink
	case DelGuards:
		return "delete table inet " + n.HopNftTable
	}
	return "?"
}

// String is the rule in ip's words, with the default numbers.
func (r Rule) String() string { return r.text(dataplane.DefaultNumbers()) }

func (r Rule) text(n dataplane.Numbers) string {
	if r.Last {
		return fmt.Sprintf("ipv%d %d: iif %s lookup %d", r.Family, n.HopLastRule(), n.HopLink,
			n.HopLastTable())
	}
	return fmt.Sprintf("ipv%d %d: not fwmark %#x/%#x lookup %d", r.Family, n.HopRule(), n.MarkWG,
		n.MarkMask, n.HopTable())
}

func (r Route) table(n dataplane.Numbers) int {
	if r.Last {
		return n.HopLastTable()
	}
	return n.HopTable()
}

// String is the route in ip's words, with the default numbers.
func (r Route) String() string { return r.text(dataplane.DefaultNumbers()) }

func (r Route) text(n dataplane.Numbers) string {
	if r.Plain && r.Other == "" {
		return fmt.Sprintf("throw %s table %d", r.Prefix, r.table(n))
	}
	s := fmt.Sprintf("%s via %s dev %s table %d", r.Prefix, r.Via, n.HopLink, r.table(n))
	if r.Source.IsValid() {
		s += fmt.Sprintf(" src %s", r.Source)
	}
	if r.MTU > 0 {
		s += fmt.Sprintf(" mtu %d", r.MTU)
	}
	return s + r.Other
}
