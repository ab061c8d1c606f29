package egressclient

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
)

// fallbackMetric ranks an unreachable route behind a tunnel's route.
const fallbackMetric = 30000

// Kind is the effect of a route.
type Kind uint8

// The kinds of route.
const (
	Tunnel      Kind = iota // into a tunnel
	Unreachable             // rejects packets while there is no tunnel
	Throw                   // continues with the next rule
)

// Route is a route of this package in table 117 or 118, or in a table of flows by other slots. Other holds an
// unrecognised route; it is never wanted.
type Route struct {
	Table int
	Dst   netip.Prefix
	Kind  Kind
	Link  string     // of a Tunnel
	Src   netip.Addr // of a Tunnel on a host; invalid: the kernel's choice
	Other string
}

// String is the route in the syntax of ip.
func (r Route) String() string {
	dst := host(r.Dst)
	if r.Dst.Bits() == 0 {
		dst = "default"
	}
	switch {
	case r.Other != "":
		return r.Other
	case r.Kind == Unreachable:
		return fmt.Sprintf("unreachable %s proto %d metric %d", dst, dataplane.RouteProtocol, fallbackMetric)
	case r.Kind == Throw:
		return fmt.Sprintf("throw %s proto %d", dst, dataplane.RouteProtocol)
	}
	s := fmt.Sprintf("%s dev %s proto %d", dst, r.Link, dataplane.RouteProtocol)
	if r.Src.IsValid() {
		s += " src " + r.Src.String()
	}
	return s
}

// same reports whether the kernel cannot have both routes at once.
func (r Route) same(o Route) bool {
	return r.Table == o.Table && r.Dst == o.Dst && (r.Kind == Unreachable) == (o.Kind == Unreachable) &&
		r.Other == "" && o.Other == ""
}

// State is this package's state in the namespace, wanted or in the kernel.
type State struct {
	Rules  []Rule  // by family and priority
	Routes []Route // by table, family, destination
}

// Lines is the state in the syntax of ip, by family: rules, then tables.
func (s State) Lines() []string {
	var out []string
	for _, f := range []Family{IPv4, IPv6} {
		for _, r := range s.Rules {
			if r.Family == f {
				out = append(out, fmt.Sprintf("%s rule %s", f, r))
			}
		}
		for _, table := range s.tables() {
			for _, r := range s.Routes {
				if r.Table == table && dataplane.FamilyOf(r.Dst.Addr()) == f {
					out = append(out, fmt.Sprintf("%s table %d %s", f, table, r))
				}
			}
		}
	}
	return out
}

// tables are the tables of the routes, in order.
func (s State) tables() (out []int) {
	for _, r := range s.Routes {
		out = append(out, r.Table)
	}
	return set(out)
}

// flows are the slots of the rules for flows.
func (s State) flows() (out []int) {
	for _, r := range s.Rules {
		if slot, ok := dataplane.FlowSlot(r.Mark); ok && r.Mask == dataplane.FlowMask && flowTable(r.Table) {
			out = append(out, slot)
		}
	}
	return out
}

// flowTable reports whether a table is for flows by another slot than that of new flows.
func flowTable(n int) bool {
	for _, first := range []int{dataplane.ClientFlowNarrowTable, dataplane.ClientFlowWideTable} {
		if n >= first && n < first+dataplane.ClientFlowSlots {
			return true
		}
	}
	return false
}

// Want derives a client's state. Argument own are the host's addresses outside the mesh, needed only for a host's
// namespace; ready reports whether a tunnel's device works. Notes describe impossible parts of the spec.
func Want(s dataplane.ClientSpec, own []netip.Addr, ready func(remote netip.Addr) bool) (State, []string) {
	var out State
	var notes []string
	n := s.Numbers.Filled()
	note := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	names := map[string]netip.Addr{}
	has := map[netip.Addr]bool{}
	for _, t := range s.Tunnels {
		if other, taken := names[dataplane.FoULink(t.Remote)]; taken && other != t.Remote {
			note("the tunnels to %s and %s would have the same device %s: the second is not made", other, t.Remote,
				dataplane.FoULink(t.Remote))
			continue
		}
		names[dataplane.FoULink(t.Remote)] = t.Remote
		has[t.Remote] = self(s, t.Remote).IsValid()
	}
	leads := func(remote netip.Addr) bool { return has[remote] && ready(remote) }
	out.Routes = routes(s, s.Routes, n.ClientNarrowTable(), n.ClientWideTable(), leads, note)
	g := ground{numbers: n, host: s.Host, own: own, inside: s.Inside}
	for _, f := range s.Flows {
		if f.Slot < 0 || f.Slot >= dataplane.ClientFlowSlots {
			note("flows by slot %d move to the client's own slot: want a number below %d", f.Slot, dataplane.ClientFlowSlots)
			continue
		}
		g.flows = append(g.flows, f.Slot)
		out.Routes = append(out.Routes, routes(s, f.Routes, dataplane.ClientFlowNarrowTable+f.Slot,
			dataplane.ClientFlowWideTable+f.Slot, leads, func(string, ...any) {})...)
	}
	for _, a := range []netip.Addr{s.Addr4, s.Addr6} {
		if a.IsValid() {
			g.self = append(g.self, a)
		}
	}
	for _, f := range []Family{IPv4, IPv6} {
		if slices.ContainsFunc(out.Routes, func(r Route) bool { return dataplane.FamilyOf(r.Dst.Addr()) == f }) {
			out.Rules = append(out.Rules, rulesOf(f, g)...)
		}
	}
	out.sort()
	return out, notes
}

// routes derives the routes of a narrow and a wide table; leads reports whether a tunnel works.
func routes(s dataplane.ClientSpec, list []dataplane.ClientRoute, narrow, wide int, leads func(netip.Addr) bool,
	note func(string, ...any)) (out []Route) {
	taken := map[netip.Prefix]bool{}
	for _, r := range list {
		dst := r.Destination.Masked()
		if taken[dst] {
			continue
		}
		if in, inside := within(dst, s.Inside); inside {
			note("destination %s lies in %s, which is the mesh's own: no egress can lead there", dst, in)
			continue
		}
		taken[dst] = true
		route := Route{Table: wide, Dst: dst, Link: dataplane.FoULink(r.Remote)}
		if private(dst) { // otherwise the rules for private networks would match first
			route.Table = narrow
		}
		if s.Host {
			route.Src = self(s, r.Remote)
		}
		if dataplane.FamilyOf(dst.Addr()) != dataplane.FamilyOf(r.Remote) || !leads(r.Remote) {
			route = Route{Table: route.Table, Dst: dst, Kind: Unreachable}
		}
		out = append(out, route)
		if route.Table != narrow {
			continue
		}
		for _, p := range s.Inside {
			throw := Route{Table: route.Table, Dst: p, Kind: Throw}
			if p.Addr().Is4() == dst.Addr().Is4() && covers(dst, p) && !slices.Contains(out, throw) {
				out = append(out, throw)
			}
		}
	}
	return out
}

func (s *State) sort() {
	slices.SortStableFunc(s.Rules, func(a, b Rule) int {
		return cmp.Or(int(a.Family)-int(b.Family), a.Priority-b.Priority, cmp.Compare(a.Mark, b.Mark))
	})
	slices.SortStableFunc(s.Routes, func(a, b Route) int {
		return cmp.Or(a.Table-b.Table, a.Dst.Addr().Compare(b.Dst.Addr()), a.Dst.Bits()-b.Dst.Bits(), int(a.Kind)-int(b.Kind))
	})
}

// self is the client's address of remote's family; invalid: it has none.
func self(s dataplane.ClientSpec, remote netip.Addr) netip.Addr {
	return dataplane.Pick(remote, s.Addr4, s.Addr6)
}

func within(p netip.Prefix, of []netip.Prefix) (netip.Prefix, bool) {
	i := slices.IndexFunc(of, func(o netip.Prefix) bool { return covers(o, p) })
	if i < 0 {
		return netip.Prefix{}, false
	}
	return of[i], true
}

// Devices derives the spec for the tunnels' driver; mtu is the uplink's, in bytes. Notes name tunnels that are
// impossible.
func Devices(s dataplane.ClientSpec, mtu int) (out fou.Spec, notes []string) {
	const least6 = 1280 // RFC 8200
	seen := map[string]bool{}
	out.Ports = s.Ports
	for _, t := range s.Tunnels {
		local := self(s, t.Remote)
		if name := dataplane.FoULink(t.Remote); !local.IsValid() || seen[name] {
			continue
		} else {
			seen[name] = true
		}
		over := dataplane.FoUOverhead4
		if t.Remote.Is6() {
			over = dataplane.FoUOverhead6
			if mtu-over < least6 {
				notes = append(notes, fmt.Sprintf("the tunnel to %s is not made: %s carries %d bytes, and IPv6 in it needs %d: "+
					"raise its MTU", t.Remote, s.Uplink, mtu, least6+over))
				continue
			}
		}
		out.Tunnels = append(out.Tunnels, fou.Tunnel{Local: local, Remote: t.Remote, SourcePortAuto: t.SourcePortAuto,
			MTU: mtu - over})
		out.IPv4, out.IPv6 = out.IPv4 || t.Remote.Is4(), out.IPv6 || t.Remote.Is6()
	}
	slices.SortFunc(out.Tunnels, func(a, b fou.Tunnel) int { return a.Remote.Compare(b.Remote) })
	out.Any = len(out.Tunnels) > 0
	return out, notes
}
