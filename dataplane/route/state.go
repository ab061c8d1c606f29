package route

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane"
)

// Family is an address family, 4 or 6.
type Family = dataplane.Family

// The two families.
const (
	IPv4 = dataplane.IPv4
	IPv6 = dataplane.IPv6
)

// fallbackMetric puts the unreachable route behind every other.
const fallbackMetric = 30000

// State is what the kernel has, or shall have, of ours.
type State struct {
	Link      Link
	Addresses []netip.Prefix // of our link, sorted, without link-local ones
	Rules     []Rule         // ours by protocol, priority and table
	Routes    []Route        // ours by protocol and table, and in ToPods by kind and metric too
	// Last is how many of Routes, at the end, are added after all else: wanted, never read.
	Last     int
	RPFilter int // of our link; -1: the host has no such setting
	// Forward4 and Forward6 are whether the link forwards: 0 or 1. Wanted only as 1; 0 leaves it as it is.
	Forward4, Forward6 int
	// Hosts are the host routes of ToPods, sorted by address: wanted ones, or whatever is there, then without a link.
	Hosts []dataplane.PodRoute
	// Ready are those that are wanted and missing and whose link is there: read, never wanted.
	Ready []dataplane.PodRoute
	// HadPods says that this process has wanted pods before, and so the rule to PodTable is ours: known, never wanted.
	HadPods bool
}

// Link is the link's own state. Index is 0 when there is none; it is read, never wanted.
type Link struct {
	Name  string
	Index int
	Up    bool
	MTU   int
}

// Way is one of our three tables, by what it is for; Numbers say which numbers they have.
type Way uint8

// The three.
const (
	ToTunnel Way = iota // of what is marked to enter the tunnel (Numbers.RouteTable)
	ToPods              // asked for every packet (Numbers.PodTable)
	Exported            // that no rule leads to (Numbers.ExportTable)
)

func (w Way) table(n dataplane.Numbers) int {
	switch w {
	case ToPods:
		return n.PodTable()
	case Exported:
		return n.ExportTable()
	}
	return n.RouteTable
}

// Rule is a policy rule at one of our two priorities. Other is whatever else it selects by: never ours.
type Rule struct {
	Family Family
	Pods   bool // to the table of pods, without a mark
	Mark   uint32
	Mask   uint32
	Other  string
}

// Route is a route of ours. In ToTunnel: the default one through our link, the unreachable one behind it, or one that
// says how large packets to a destination may be. In ToPods and Exported: a block, unreachable. In ToPods:
// another host's block, through our link; a pool's subnet, unreachable; and what of it is not the mesh's, thrown to the
// next rule.
type Route struct {
	Table       Way
	Family      Family
	Unreachable bool
	Throw       bool
	Dst         netip.Prefix // not valid: everything
	MTU         int          // with Dst
	Other       string       // set for a route of ours that is none of these
}

// replaces reports whether adding a route takes the other's place.
func (r Route) replaces(o Route) bool {
	return r != o && r.Table == o.Table && r.Family == o.Family && r.behind() == o.behind() && r.Dst == o.Dst &&
		r.Other == "" && o.Other == ""
}

// behind reports whether the route has the metric that puts it behind those through a link.
func (r Route) behind() bool { return r.Unreachable || r.Throw }

// Host is what limits the wish on this host.
type Host struct {
	Numbers     dataplane.Numbers // the zero value: the default ones
	IPv6        bool              // the kernel has it
	IPv6OnLink  bool              // and our link may use it
	RPFilterAll int               // net.ipv4.conf.all.rp_filter
	HasRPFilter bool
	HasForward4 bool // links have a setting for IPv4 forwarding
	HasForward6 bool // and one for IPv6, as of Linux 6.17
	ForwardAll6 bool // all links forward IPv6
}

// Want is the state for this link and these pods on this host.
func Want(l dataplane.Link, p dataplane.Pods, h Host) (State, []string) {
	numbers := h.Numbers.Filled()
	s := State{Link: Link{Name: l.Name, Up: true, MTU: l.MTU}, RPFilter: -1}
	var notes []string
	if h.HasRPFilter {
		s.RPFilter = wantRPFilter(h.RPFilterAll)
	}
	families := []Family{IPv4}
	if h.IPv6 {
		families = append(families, IPv6)
	}
	if !h.IPv6OnLink {
		notes = append(notes, "IPv6 is disabled on this host: the tunnel carries IPv4 only (sysctl "+
			"net.ipv6.conf.*.disable_ipv6, or the kernel's ipv6.disable)")
	}
	for _, a := range l.Addresses {
		if a.Addr().Is4() || h.IPv6OnLink {
			s.Addresses = append(s.Addresses, a)
		}
	}
	slices.SortFunc(s.Addresses, comparePrefix)
	s.Addresses = slices.Compact(s.Addresses)
	for _, f := range families {
		s.Rules = append(s.Rules, Rule{Family: f, Mark: numbers.MarkRoute, Mask: numbers.MarkMask})
		if f == IPv4 || h.IPv6OnLink {
			s.Routes = append(s.Routes, Route{Table: ToTunnel, Family: f})
		}
		s.Routes = append(s.Routes, Route{Table: ToTunnel, Family: f, Unreachable: true})
	}
	for _, n := range l.Narrow {
		f := dataplane.FamilyOf(n.Prefix.Addr())
		needed := n.MTU > 0 && n.MTU < l.MTU || n.MTU == l.MTU && within(n, l.Narrow)
		if needed && (f == IPv4 || h.IPv6 && h.IPv6OnLink) {
			s.Routes = append(s.Routes, Route{Table: ToTunnel, Family: f, Dst: n.Prefix.Masked(), MTU: n.MTU})
		}
	}
	s.wantPods(p, h)
	return s, notes
}

// within reports whether a destination lies within one whose way carries smaller packets only, and so needs a route of
// its own.
func within(n dataplane.Narrow, all []dataplane.Narrow) bool {
	return slices.ContainsFunc(all, func(o dataplane.Narrow) bool {
		return o.MTU > 0 && o.MTU < n.MTU && o.Prefix.Bits() <= n.Prefix.Bits() && o.Prefix.Contains(n.Prefix.Addr())
	})
}

// wantRPFilter is the link's setting for which strict reverse path filtering does not drop what comes
// out of the tunnel: the main table need not lead back there. The kernel uses the greater of this and
// conf.all, and WireGuard has checked the source already.
func wantRPFilter(all int) int {
	const off, loose = 0, 2
	if all == off {
		return off
	}
	return loose
}

func comparePrefix(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits())
}

// String is the rule in ip's words, with the default numbers.
func (r Rule) String() string { return r.text(dataplane.DefaultNumbers()) }

func (r Rule) text(n dataplane.Numbers) string {
	s := fmt.Sprintf("%s %d: lookup %d proto %d", r.Family, n.PodRule(), n.PodTable(), dataplane.RouteProtocol)
	if !r.Pods {
		s = fmt.Sprintf("%s %d: fwmark %#x/%#x lookup %d proto %d", r.Family, n.RulePriority, r.Mark, r.Mask, n.RouteTable,
			dataplane.RouteProtocol)
	}
	if r.Other != "" {
		s += " " + r.Other
	}
	return s
}

// String is the route in ip's words, with the default numbers.
func (r Route) String() string { return r.text(dataplane.DefaultNumbers()) }

func (r Route) text(n dataplane.Numbers) string {
	table := r.Table.table(n)
	if r.Other != "" {
		return r.Family.String() + " " + r.Other
	}
	if r.Throw {
		return fmt.Sprintf("%s throw %s table %d proto %d metric %d", r.Family, r.Dst, table, dataplane.RouteProtocol,
			fallbackMetric)
	}
	if r.Table == ToPods && !r.Unreachable {
		s := fmt.Sprintf("%s %s through the link table %d proto %d", r.Family, r.Dst, table, dataplane.RouteProtocol)
		if r.MTU > 0 {
			s += fmt.Sprintf(" mtu %d", r.MTU)
		}
		return s
	}
	if r.Table != ToTunnel {
		s := fmt.Sprintf("%s unreachable %s table %d proto %d", r.Family, r.Dst, table, dataplane.RouteProtocol)
		if r.Table == ToPods {
			s += fmt.Sprintf(" metric %d", fallbackMetric)
		}
		return s
	}
	if r.Unreachable {
		return fmt.Sprintf("%s unreachable default table %d metric %d proto %d", r.Family, table, fallbackMetric,
			dataplane.RouteProtocol)
	}
	if r.Dst.IsValid() {
		return fmt.Sprintf("%s %s through the link mtu %d table %d proto %d", r.Family, r.Dst, r.MTU, table,
			dataplane.RouteProtocol)
	}
	return fmt.Sprintf("%s default through the link table %d proto %d", r.Family, table, dataplane.RouteProtocol)
}
